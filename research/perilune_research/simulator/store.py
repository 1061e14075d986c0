"""KV tiers below the device: the store that all engines share, and an engine's host memory."""

from __future__ import annotations

from perilune_lab.simulate.runs import Runs
from perilune_research.simulator.cache import RunCache


class SimulatedStore:
    """The shared store of a pool, or the host memory of one engine. It keeps KV as runs (see `runs`) and
    evicts the least recently used first."""

    def __init__(self, runs: Runs, capacity_tokens: int) -> None:
        self._cache = RunCache(runs, capacity_tokens)

    def match(self, run: int, depth: int) -> int:
        """Return how many leading tokens of the prompt (run, depth) are stored."""
        return self._cache.match(run, depth)

    def put(self, run: int, depth: int) -> None:
        """Store the prompt (run, depth), or marks it as used now if it is stored already."""
        self._cache.pin(run)
        self._cache.grow(run, depth)
        self._cache.unpin(run)
        self._cache.trim(self._cache.capacity_tokens)
