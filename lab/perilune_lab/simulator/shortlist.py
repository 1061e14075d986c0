"""Which endpoints of a large fleet a policy looks at, so that it chooses as it would among all.

1. Every holder of the prefix, and the session's host.
2. The `LEAST_LOADED` by what policies call load: pending prefill tokens, requests in flight, sessions.
3. The `CHEAPEST` for a prompt that nobody holds: by the time to its first token, and by its whole cost in
   seconds (policy/cost.py) at three lengths, since learned speed, decodes and sessions weigh differently in
   each; of those whose speed was observed, and of those that are believed to be like the pool: whatever is
   learned of it moves these together.
4. The least loaded of those that hold what is held too widely to look at every holder.
5. The first of 2 and 3 among the neighbours (one spine) of the deepest holder, who pull its KV faster than
   others.

Orders are kept sorted: an endpoint is placed again when something about it changed, three or four a request.
Cost: about 60 µs per endpoint placed again, 30 µs to answer; 60 candidates of 1,000. Memory: about 1 KB per
endpoint. Not seen: engine metrics between two changes; a policy that ranks by something else altogether
(mooncake, which minds neither decodes nor sessions, chooses as from all in some 94 % only).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from perilune_api.pool import PolicyParams
from perilune_gateway.model import Candidate, Overlap, RequestView
from perilune_gateway.policy.cost import seconds
from perilune_lab.simulator.beliefs import Beliefs

LEAST_LOADED = 32
CHEAPEST = 4
_PROMPTS = tuple(RequestView("", 0, tokens) for tokens in (1_000, 8_000, 40_000))
_COLD = Overlap()

Key = tuple[float, ...]


class Ranking:
    """Numbers in the order of their keys."""

    def __init__(self) -> None:
        self._order: list[tuple[Key, int]] = []
        self._key: dict[int, Key] = {}

    def place(self, number: int, key: Key) -> None:
        """Its key is this now."""
        before = self._key.get(number)
        if before == key:
            return
        self.remove(number)
        self._key[number] = key
        insort(self._order, (key, number))

    def remove(self, number: int) -> None:
        before = self._key.pop(number, None)
        if before is not None:
            del self._order[bisect_left(self._order, (before, number))]

    def first_of(self, some: Collection[int], count: int) -> Iterable[int]:
        """Of these."""
        if 2 * len(some) < len(self._order):
            return heapq.nsmallest(count, (e for e in some if e in self._key), key=self._key.__getitem__)
        return islice((number for _, number in self._order if number in some), count)

    def first(self, count: int) -> Iterable[int]:
        return (number for _, number in islice(self._order, count))


class _Orders:
    """Of some endpoints: one ranking by load, one per cost and kind of belief."""

    def __init__(self) -> None:
        self.load = Ranking()
        self.seen = [Ranking() for _ in range(1 + len(_PROMPTS))]
        self.unseen = [Ranking() for _ in range(1 + len(_PROMPTS))]

    def place(self, e: int, load: Key, costs: Iterable[float], *, seen: bool) -> None:
        self.load.place(e, load)
        mine, others = (self.seen, self.unseen) if seen else (self.unseen, self.seen)
        for ranking, other, cost in zip(mine, others, costs, strict=True):
            other.remove(e)
            ranking.place(e, (cost, *load))

    def remove(self, e: int) -> None:
        for ranking in (self.load, *self.seen, *self.unseen):
            ranking.remove(e)

    def cheapest(self) -> set[int]:
        return {e for ranking in (*self.seen, *self.unseen) for e in ranking.first(CHEAPEST)}


class Shortlist:
    def __init__(self, beliefs: Beliefs, params: PolicyParams) -> None:
        self._beliefs = beliefs
        self._params = params
        self._all = _Orders()
        self._by_spine: dict[str, _Orders] = {e.place.spine: _Orders() for e in beliefs.endpoints}

    def of(
        self, overlaps: Mapping[int, int], others: Iterable[int], common: Collection[int], now: float
    ) -> list[int]:
        """Endpoints to look at, ascending. `overlaps`: tokens held by endpoint; `others`: these too;
        `common`: holders of what is held widely."""
        self._catch_up(now)
        chosen = {*overlaps, *others, *self._all.load.first(LEAST_LOADED)}
        chosen |= self._all.cheapest()
        chosen.update(self._all.load.first_of(common, CHEAPEST))
        if overlaps:
            deepest = max(overlaps, key=overlaps.__getitem__)
            near = self._by_spine[self._beliefs.endpoints[deepest].place.spine]
            chosen.update(near.load.first(CHEAPEST))
            chosen |= near.cheapest()
        return sorted(chosen)

    def _catch_up(self, now: float) -> None:
        b = self._beliefs
        for e in b.changed:
            endpoint = b.endpoints[e]
            near = self._by_spine[endpoint.place.spine]
            if not b.ready[e]:
                self._all.remove(e)
                near.remove(e)
                continue
            load = b.load(e, now)
            seen = e not in b.unseen
            candidate = Candidate(endpoint, load, _COLD, engine=b.models[e] if seen else b.uncorrected)
            found = [seconds(candidate, prompt, self._params) for prompt in _PROMPTS]
            costs = [found[1].ttft_s, *(cost.total_s for cost in found)]
            key = (load.pending_prefill_tokens, load.in_flight, load.sessions)
            self._all.place(e, key, costs, seen=seen)
            near.place(e, key, costs, seen=seen)
        b.changed.clear()
