"""Computes cells and searches in parallel processes, and keeps the results, so that an interrupted evaluation
can go on.

    Work(folder, jobs).results(cells) → {cell: result}

The results are the lines of one JSONL file in the folder. Its name contains a fingerprint of the code that
computed them (`sources.py` finds that code), so changed code begins a new file. A line that an interruption
or a full disk cut short is ignored. Two evaluations may share a folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from perilune_lab.terminal.processes import mapped
from perilune_research.evaluate.cells import Cell, Result, batches, compute
from perilune_research.evaluate.search import Found, Search, find
from perilune_research.evaluate.sources import dependencies

T = TypeVar("T", bound=msgspec.Struct)
J = TypeVar("J", Cell, Search)

COMPUTES = ("perilune_research.evaluate.cells", "perilune_research.evaluate.search")
"""Modules whose functions compute the results."""


class _Line(msgspec.Struct, frozen=True):
    key: str
    value: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one call of `results` or `found`."""

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


class Work:
    """Computes cells and searches, and keeps the results. All methods raise OSError if the folder cannot be
    read or written."""

    def __init__(self, folder: Path, jobs: int, show: Callable[[Progress], None] = lambda p: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"cells-{fingerprint()}.jsonl"
        self._jobs = jobs
        self._show = show
        self._known: dict[str, msgspec.Raw] = {}
        self.computed = 0
        """Number of results that this object has computed, since the file did not have them."""
        if self.path.exists():
            self._read()

    def results(self, cells: Iterable[Cell], what: str = "cells") -> dict[Cell, Result]:
        """Return the result of each cell. `what` names the work in reports of progress."""
        wanted = list(dict.fromkeys(cells))
        missing = [cell for cell in wanted if cell.key not in self._known]
        self._do(compute, batches(missing), what, len(wanted) - len(missing))
        return {cell: self._value(cell.key, Result) for cell in wanted}

    def found(self, searches: Iterable[Search], what: str = "capacities") -> dict[Search, Found]:
        """Return the result of each search. `what` names the work in reports of progress."""
        wanted = list(dict.fromkeys(searches))
        missing = [(search,) for search in wanted if search.key not in self._known]
        self._do(find, missing, what, len(wanted) - len(missing))
        return {search: self._value(search.key, Found) for search in wanted}

    def _value(self, key: str, kind: type[T]) -> T:
        return msgspec.json.decode(self._known[key], type=kind)

    def _do(
        self,
        function: Callable[[Sequence[J]], list[tuple[J, T]]],
        work: Sequence[Sequence[J]],
        what: str,
        kept: int,
    ) -> None:
        if not work:
            return
        total, done = sum(len(batch) for batch in work), 0
        self._show(Progress(0, total, what, kept))
        with self.path.open("ab") as file, mapped(function, work, self._jobs, ordered=False) as answers:
            for answer in answers:
                for job, value in answer:
                    raw = msgspec.Raw(msgspec.json.encode(value))
                    file.write(msgspec.json.encode(_Line(job.key, raw)) + b"\n")
                    self._known[job.key] = raw
                file.flush()
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


def default_folder() -> Path:
    """Return the folder in the user's cache that keeps results by default."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "perilune" / "evaluate"


@cache
def fingerprint() -> str:
    """Return a fingerprint of the code that computes results: policies and what they read, simulator, traces,
    measurement."""
    digest = hashlib.sha256()
    for name, content in dependencies(COMPUTES).items():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:12]
