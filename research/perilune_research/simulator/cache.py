"""One engine's KV cache as runs: how much of each run is cached, by how many requests it is used, and what
is evicted first.

The rules are vLLM's, applied to runs instead of blocks. A sequence pins what it uses. When its last user
leaves, a path is released from its end to its beginning and joins the end of the LRU queue, so a run is
always evicted after those that continue it. Room is taken from the front of the queue, a run's last tokens
first. Depths count from the beginning of a prompt (see `runs`).

Cost: O(runs of a path) per call, two to five; eviction O(1) amortised. Not modelled: equal
blocks that two sequences compute at the same time and that vLLM then keeps twice; the unused rest of a
sequence's last block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from perilune_research.simulator.runs import ROOT, Runs

OnChange = Callable[[int, int], None]
"""(run, depth that is held now; the run's start: nothing)"""


class RunCache:
    """A cache of `capacity_tokens`. `used_tokens` may exceed it until `trim` is called."""

    def __init__(self, runs: Runs, capacity_tokens: int, on_change: OnChange | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        self.idle_tokens = 0
        """Tokens that are cached and unused, and may be evicted."""
        self.held: dict[int, int] = {}
        """Cached depth per run."""
        self._runs = runs
        self._users: dict[int, int] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._on_change = on_change

    def match(self, run: int, depth: int) -> int:
        """Leading tokens of the prompt (run, depth) that are cached."""
        held, end = self.held, self._runs.end
        matched = 0
        for r in self._runs.chain[run]:
            d = held.get(r)
            if d is None:
                break
            matched = d
            if d < end[r]:
                break
        return matched if matched < depth else depth

    def idle_on(self, run: int) -> int:
        """Tokens on the path to `run` that count as idle now and would not once it is pinned."""
        start, held = self._runs.start, self.held
        return sum(held[r] - start[r] for r in self._runs.chain[run] if r in self._lru)

    def pin(self, run: int) -> None:
        """Counts a user of the path to `run`."""
        users = self._users
        for r in self._runs.chain[run]:
            n = users.get(r, 0)
            users[r] = n + 1
            if not n and r in self._lru:
                del self._lru[r]
                self.idle_tokens -= self.held[r] - self._runs.start[r]

    def unpin(self, run: int) -> None:
        """Removes a user of the path. Raises KeyError if there is none."""
        users, held = self._users, self.held
        for r in reversed(self._runs.chain[run]):
            n = users[r] - 1
            if n:
                users[r] = n
                continue
            del users[r]
            if r in held:
                self._lru[r] = None
                self.idle_tokens += held[r] - self._runs.start[r]

    def grow(self, run: int, depth: int) -> None:
        """Caches the pinned prompt (run, depth)."""
        runs, held = self._runs, self.held
        start, end, parent = runs.start, runs.end, runs.parent
        while run != ROOT:
            begin = start[run]
            have = held.get(run, begin)
            top = depth if depth < end[run] else end[run]
            if top > have:
                held[run] = top
                self.used_tokens += top - have
                if self._on_change:
                    self._on_change(run, top)
            if have > begin:
                return  # what is above it was there before
            depth = begin
            run = parent[run]

    def trim(self, limit_tokens: int) -> None:
        """Evicts idle tokens until at most `limit_tokens` are cached, or none is idle."""
        start, held = self._runs.start, self.held
        while self.used_tokens > limit_tokens and self._lru:
            run = next(iter(self._lru))
            size = held[run] - start[run]
            gone = min(size, self.used_tokens - limit_tokens)
            self.used_tokens -= gone
            self.idle_tokens -= gone
            if gone == size:
                del held[run], self._lru[run]
                left = start[run]
            else:
                left = held[run] = held[run] - gone
            if self._on_change:
                self._on_change(run, left)

    def release(self, runs: Sequence[int]) -> None:
        """Frees these runs, leaf first, unless they are in use."""
        for run in runs:
            if run not in self._lru:
                continue
            size = self.held.pop(run) - self._runs.start[run]
            del self._lru[run]
            self.used_tokens -= size
            self.idle_tokens -= size
            if self._on_change:
                self._on_change(run, self._runs.start[run])

    def clear(self) -> None:
        """Loses everything, including users."""
        self.held.clear()
        self._users.clear()
        self._lru.clear()
        self.used_tokens = self.idle_tokens = 0
