"""One engine's KV cache, as runs instead of blocks (see `runs`).

The cache knows how much of each run is cached, how many requests use it, and which run to evict next, by
vLLM's rules:

- A sequence pins the path of runs that it uses.
- When the last user of a path leaves, its runs join the end of the LRU queue from the leaf to the root, so a
  run is always evicted after the runs that continue it.
- Eviction takes the run at the front of the queue, its last tokens first.

Cost: a call takes time proportional to the runs of a path, which are two to five; eviction is amortised O(1).
Not modelled: equal blocks that two sequences compute at the same time, which vLLM keeps twice; the unused
rest of a sequence's last block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from perilune_lab.simulate.runs import ROOT, Runs

OnChange = Callable[[int, int], None]
"""Called with (run, depth down to which it is cached now). A depth at the run's start means that nothing of
the run is cached."""


class RunCache:
    """A cache of `capacity_tokens`. `used_tokens` may exceed it until `trim` is called."""

    def __init__(self, runs: Runs, capacity_tokens: int, on_change: OnChange | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        self.idle_tokens = 0
        """Cached tokens that no request uses, which may be evicted."""
        self.held: dict[int, int] = {}
        """Cached depth per run."""
        self._runs = runs
        self._users: dict[int, int] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._on_change = on_change

    def match(self, run: int, depth: int) -> int:
        """Return how many leading tokens of the prompt (run, depth) are cached."""
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
        """Return the idle tokens on the path to `run`, which pinning it would take from `idle_tokens`."""
        start, held = self._runs.start, self.held
        return sum(held[r] - start[r] for r in self._runs.chain[run] if r in self._lru)

    def pin(self, run: int) -> None:
        """Add a user to the path to `run`."""
        users = self._users
        for r in self._runs.chain[run]:
            n = users.get(r, 0)
            users[r] = n + 1
            if not n and r in self._lru:
                del self._lru[r]
                self.idle_tokens -= self.held[r] - self._runs.start[r]

    def unpin(self, run: int) -> None:
        """Remove a user from the path to `run`. Raise KeyError if it has none."""
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
        """Cache the prompt (run, depth), whose path must be pinned."""
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
                return  # the runs above it are cached already
            depth = begin
            run = parent[run]

    def trim(self, limit_tokens: int) -> None:
        """Evicts idle tokens until at most `limit_tokens` are cached, or no idle tokens are left."""
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
        """Frees those of these runs, given leaf first, that no request uses."""
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
        """Forgets all cached tokens and all users."""
        self.held.clear()
        self._users.clear()
        self._lru.clear()
        self.used_tokens = self.idle_tokens = 0
