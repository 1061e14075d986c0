"""Computes cells and searches in parallel processes, and keeps the results (`kept.py`), so that an
interrupted evaluation can go on.

    Work(folder, jobs).results(cells) → {cell: result}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from perilune_research import sources
from perilune_research.evaluate.cells import Cell, Result, batches, compute
from perilune_research.evaluate.search import Found, Search, find
from perilune_research.kept import Kept, Progress

COMPUTES = ("perilune_research.evaluate.cells", "perilune_research.evaluate.search")
"""Modules whose functions compute the results."""


class Work:
    """Computes cells and searches, and keeps the results in a file whose name contains a fingerprint of the
    code that computed them, so changed code begins a new file. All methods raise OSError if the folder cannot
    be read or written."""

    def __init__(self, folder: Path, jobs: int, show: Callable[[Progress], None] = lambda p: None) -> None:
        self._kept = Kept(folder / f"cells-{fingerprint()}.jsonl", jobs, show)

    @property
    def path(self) -> Path:
        return self._kept.path

    @property
    def computed(self) -> int:
        """Number of results that this object has computed, since the file did not have them."""
        return self._kept.computed

    def results(self, cells: Iterable[Cell], what: str = "cells") -> dict[Cell, Result]:
        """Return the result of each cell. `what` names the work in reports of progress."""
        return self._kept.results(cells, batches, compute, Result, what)

    def found(self, searches: Iterable[Search], what: str = "capacities") -> dict[Search, Found]:
        """Return the result of each search. `what` names the work in reports of progress."""
        return self._kept.results(searches, lambda each: [(search,) for search in each], find, Found, what)


@cache
def fingerprint() -> str:
    """Return a fingerprint of the code that computes results: policies and what they read, simulator, traces,
    measurement."""
    return sources.fingerprint(COMPUTES)
