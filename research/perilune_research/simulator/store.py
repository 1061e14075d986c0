"""A tier below the device, as runs."""

from __future__ import annotations

from perilune_research.simulator.cache import RunCache
from perilune_research.simulator.runs import Runs


class SimulatedStore:
    """The store that all engines of a pool share, or one engine's host memory; evicts the least recently
    used."""

    def __init__(self, runs: Runs, capacity_tokens: int) -> None:
        self._cache = RunCache(runs, capacity_tokens)

    def match(self, run: int, depth: int) -> int:
        return self._cache.match(run, depth)

    def put(self, run: int, depth: int) -> None:
        """Puts the prompt (run, depth), which was computed or read again."""
        self._cache.pin(run)
        self._cache.grow(run, depth)
        self._cache.unpin(run)
        self._cache.trim(self._cache.capacity_tokens)
