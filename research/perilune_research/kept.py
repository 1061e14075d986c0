"""Computes results in parallel processes and keeps them, so that interrupted work can go on.

    Kept(path, jobs).results(items, batches, compute, kind, what) → {item: result}

Results are the lines of one JSONL file, by the key of their item. A line that an interruption or a full disk
cut short is ignored. Two processes may share a file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from rich.console import Console

from perilune_lab.terminal.processes import mapped

EVERY_S = 10.0
"""Seconds between two lines of progress."""


class Item(Hashable, Protocol):
    """What is computed."""

    @property
    def key(self) -> str:
        """Text of everything that the result depends on."""
        ...


T = TypeVar("T", bound=msgspec.Struct)
I = TypeVar("I", bound=Item)  # noqa: E741


class _Line(msgspec.Struct, frozen=True):
    key: str
    value: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one call of `results`."""

    done: int
    total: int
    """Number of results to compute."""
    what: str
    kept: int = 0
    """Number of further results that an earlier call has kept."""

    @property
    def first(self) -> bool:
        """Whether nothing has been computed yet."""
        return self.done == 0


class Kept:
    """The results in one file. All methods raise OSError if it cannot be read or written."""

    def __init__(
        self,
        path: Path,
        jobs: int,
        show: Callable[[Progress], None] = lambda p: None,
        until: float = inf,
    ) -> None:
        """`until`: no batch is begun after this time, of `time.monotonic`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._jobs = jobs
        self._show = show
        self._until = until
        self._known: dict[str, msgspec.Raw] = {}
        self.computed = 0
        """Number of results that this object has computed, since the file did not have them."""
        if path.exists():
            self._read()

    def __contains__(self, item: Item) -> bool:
        return item.key in self._known

    def results(
        self,
        items: Iterable[I],
        batches: Callable[[Sequence[I]], Sequence[Sequence[I]]],
        compute: Callable[[Sequence[I]], list[tuple[I, T]]],
        kind: type[T],
        what: str,
    ) -> dict[I, T]:
        """Return the result of each item for which there was time. `compute` is given one of the batches of
        items that are missing. `what` names the work in reports of progress."""
        wanted = list(dict.fromkeys(items))
        missing = [item for item in wanted if item.key not in self._known]
        self._do(compute, batches(missing), what, len(wanted) - len(missing))
        there = ((item, self._known.get(item.key)) for item in wanted)
        return {item: msgspec.json.decode(raw, type=kind) for item, raw in there if raw is not None}

    def _do(
        self,
        compute: Callable[[Sequence[I]], list[tuple[I, T]]],
        work: Sequence[Sequence[I]],
        what: str,
        kept: int,
    ) -> None:
        if not work:
            return
        total, done = sum(len(batch) for batch in work), 0
        self._show(Progress(0, total, what, kept))
        timely = partial(_timely, compute, self._until)
        with self.path.open("ab") as file, mapped(timely, work, self._jobs, ordered=False) as answers:
            for answer in answers:
                for item, value in answer:
                    raw = msgspec.Raw(msgspec.json.encode(value))
                    file.write(msgspec.json.encode(_Line(item.key, raw)) + b"\n")
                    self._known[item.key] = raw
                file.flush()
                if answer:
                    done += len(answer)
                    self.computed += len(answer)
                    self._show(Progress(done, total, what, kept))

    def _read(self) -> None:
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            with self.path.open("ab") as file:
                file.write(b"\n")
        for row in content.splitlines():
            try:
                line = msgspec.json.decode(row, type=_Line)
            except msgspec.DecodeError:
                continue
            self._known[line.key] = line.value


def _timely(
    compute: Callable[[Sequence[I]], list[tuple[I, T]]], until: float, batch: Sequence[I]
) -> list[tuple[I, T]]:
    """Compute a batch, or nothing if it is too late."""
    return compute(batch) if time.monotonic() < until else []


def default_folder(study: str) -> Path:
    """Return the folder in the user's cache that keeps a study's results by default."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "perilune" / study


def printed(err: Console) -> Callable[[Progress], None]:
    """Return a function that prints progress and the time left, every few seconds at most."""
    began: dict[str, float] = {}
    shown: dict[str, float] = {}

    def show(p: Progress) -> None:
        now = time.perf_counter()
        if p.first:
            began[p.what] = shown[p.what] = now
            kept = f", {p.kept} kept from before" if p.kept else ""
            err.print(f"{p.what}: 0/{p.total}{kept}", highlight=False)
            return
        if now - shown[p.what] < EVERY_S and p.done < p.total:
            return
        shown[p.what] = now
        left_s = (now - began[p.what]) / p.done * (p.total - p.done)
        err.print(f"{p.what}: {p.done}/{p.total}, {left_s / 60:.1f} min left", highlight=False)

    return show
