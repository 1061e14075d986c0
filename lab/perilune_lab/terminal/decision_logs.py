"""Reads the decision logs that a command line names: plain or gzip, also from a pipe, one after the other."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

from perilune_api.pool import SpecError
from perilune_gateway.observe.decision_log import Cut, Ended, Logged, read
from perilune_lab.terminal.console import Console

PROGRESS_EVERY_S = 5.0
_GZIP_MAGIC = b"\x1f\x8b"


def entries(
    paths: Sequence[Path], err: Console, progress: Callable[[], str]
) -> Iterator[tuple[Path, Logged | Ended | Cut]]:
    """Yield every entry with its file. Print now and then which share is read, and the words of `progress`.
    Raises SpecError with file and line."""
    total, before, printed_at = sum(map(size, paths)), 0, time.monotonic()
    for path in paths:
        try:
            with path.open("rb") as raw:
                packed = raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
                lines = cast(Iterable[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
                for entry in read(lines, str(path)):
                    yield path, entry
                    if time.monotonic() - printed_at >= PROGRESS_EVERY_S:
                        printed_at = time.monotonic()
                        share = f"{(before + raw.tell()) / total:.0%}: " if total and raw.seekable() else ""
                        err.print(f"{share}{progress()}", highlight=False)
        except (OSError, EOFError) as error:
            cause = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise SpecError(f"{path}: {cause}") from None
        before += size(path)


def size(path: Path) -> int:
    """Return the bytes of a log. Raises SpecError."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
