"""Chooses the endpoints of a large fleet that a policy looks at, so that it decides as it would among all.

The shortlist consists of:

1. Every holder of the prefix, and the session's host.
2. The `LEAST_LOADED` endpoints by what policies call load: pending prefill tokens, requests in flight,
   sessions.
3. The `CHEAPEST` endpoints for a prompt that no endpoint holds: by the time to its first token, and by its
   whole cost in seconds (policy/cost.py) at three lengths, since observed speed, decodes and sessions weigh
   differently in each. Endpoints whose speed was observed are ranked apart from those that are believed to be
   like the pool, since one observation changes the estimates of all the latter.
4. The cheapest endpoints without sessions and those with one session, because policies choose the endpoint
   with the fewest sessions when costs are nearly equal.
5. For a prefix with too many holders to look at each of them: the least loaded and the cheapest holders.
6. The least loaded and the cheapest endpoints in the spine of the deepest holder, and the cheapest in the
   racks of the deepest holders, since they pull KV from these holders faster than others do.

Rankings stay sorted: an endpoint is placed again after each change, three or four times a request. Cost:
about 70 µs per placement and 50 µs per shortlist, which has some 42 of 1,000 endpoints; 1 KB of memory per
endpoint. Limits: changes of engine metrics alone do not place an endpoint again, and a policy that ranks by
other facts may decide differently (mooncake, which considers neither decodes nor sessions, agrees in 80 to
95 %).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from perilune_api.policies import PeriluneParams
from perilune_gateway.model import Candidate, Overlap, RequestView
from perilune_gateway.policy.cost import seconds
from perilune_gateway.routing.candidates import MAX_LOCATIONS
from perilune_research.simulator.beliefs import Beliefs

LEAST_LOADED = 16
CHEAPEST = 4
_SESSIONS = range(2)
_PROMPTS = tuple(
    RequestView(request_id="", ordinal=0, prompt_tokens=tokens) for tokens in (1_000, 8_000, 40_000)
)
_MIDDLE = 1
"""Index of the middle length in `_PROMPTS`."""
_COLD = Overlap()

Key = tuple[float, ...]


class Ranking:
    """Endpoint numbers, ordered by a key."""

    def __init__(self) -> None:
        self._order: list[Key] = []
        """Keys in ascending order, each with its endpoint's number as the last element."""
        self._key: dict[int, Key] = {}

    def place(self, number: int, key: Key) -> None:
        """Set the key of an endpoint, and so its place in the order."""
        entry = (*key, number)
        before = self._key.get(number)
        if before != entry:
            if before is not None:
                del self._order[bisect_left(self._order, before)]
            self._key[number] = entry
            insort(self._order, entry)

    def remove(self, number: int) -> None:
        before = self._key.pop(number, None)
        if before is not None:
            del self._order[bisect_left(self._order, before)]

    def first_of(self, some: Collection[int], count: int) -> Iterable[int]:
        """Return the first `count` of the given endpoints in this ranking's order."""
        return islice((int(entry[-1]) for entry in self._order if entry[-1] in some), count) if some else ()

    def first(self, count: int, behind: Key = ()) -> Iterable[int]:
        """Return the first `count` endpoints whose key is not less than `behind`."""
        at = bisect_left(self._order, behind)
        return [int(entry[-1]) for entry in self._order[at : at + count]]


class _Costs:
    """Endpoints ranked by one cost, in two groups: those whose speed was observed, and the others."""

    def __init__(self) -> None:
        self.seen, self.unseen = Ranking(), Ranking()

    def place(self, e: int, key: Key, *, seen: bool) -> None:
        mine, other = (self.seen, self.unseen) if seen else (self.unseen, self.seen)
        other.remove(e)
        mine.place(e, key)

    def remove(self, e: int) -> None:
        self.seen.remove(e)
        self.unseen.remove(e)

    def cheapest(self, behind: Key = ()) -> list[int]:
        return [*self.seen.first(CHEAPEST, behind), *self.unseen.first(CHEAPEST, behind)]


class Shortlist:
    """The rankings of all ready endpoints, and the choice from them."""

    def __init__(self, beliefs: Beliefs, params: PeriluneParams) -> None:
        self._beliefs = beliefs
        self._params = params
        self._load = Ranking()
        self._costs = [_Costs() for _ in range(1 + len(_PROMPTS))]
        """One ranking by time to the first token, then one by whole cost for each length of `_PROMPTS`."""
        self._by_sessions = _Costs()
        """Ordered by number of sessions, then by whole cost at the middle length."""
        spines = {e.place.spine for e in beliefs.endpoints}
        self._beside = {e.place.rack: Ranking() for e in beliefs.endpoints}
        """Rack → its endpoints by whole cost at the middle length."""
        self._near = {spine: (Ranking(), _Costs()) for spine in spines}
        """Spine → its endpoints by load, and by whole cost at the middle length."""

    def of(
        self, overlaps: Mapping[int, int], others: Iterable[int], common: Collection[int], now: float
    ) -> list[int]:
        """Return the endpoints to look at, in ascending order of their numbers. They include all holders in
        `overlaps`, which has each one's cached tokens, and all `others`, but only some of `common`, the
        holders of a prefix that too many endpoints hold."""
        self._catch_up(now)
        chosen = {*overlaps, *others, *self._load.first(LEAST_LOADED)}
        for costs in self._costs:
            chosen.update(costs.cheapest())
        for sessions in _SESSIONS:
            chosen.update(self._by_sessions.cheapest((sessions,)))
        for ranking in (self._load, self._costs[1 + _MIDDLE].seen, self._by_sessions.seen):
            chosen.update(ranking.first_of(common, CHEAPEST))
        if overlaps:
            deepest = sorted(overlaps, key=overlaps.__getitem__, reverse=True)[:MAX_LOCATIONS]
            places = [self._beliefs.endpoints[e].place for e in deepest]
            for rack in {place.rack for place in places}:
                chosen.update(self._beside[rack].first(CHEAPEST - 1))
            by_load, by_cost = self._near[places[0].spine]
            chosen.update(by_load.first(CHEAPEST), by_cost.cheapest())
        return sorted(chosen)

    def _catch_up(self, now: float) -> None:
        b = self._beliefs
        for e in b.changed:
            endpoint = b.endpoints[e]
            near_load, near_cost = self._near[endpoint.place.spine]
            if not b.ready[e]:
                self._load.remove(e)
                near_load.remove(e)
                self._beside[endpoint.place.rack].remove(e)
                for costs in (*self._costs, self._by_sessions, near_cost):
                    costs.remove(e)
                continue
            load, seen = b.load(e, now), e not in b.unseen
            key = (load.pending_prefill_tokens, load.in_flight, load.sessions)
            self._load.place(e, key)
            near_load.place(e, key)
            candidate = Candidate(
                endpoint=endpoint, load=load, overlap=_COLD, engine=b.models[e] if seen else b.uncorrected
            )
            found = [seconds(candidate, prompt, self._params) for prompt in _PROMPTS]
            totals = [cost.total_s for cost in found]
            for costs, cost_s in zip(self._costs, (found[_MIDDLE].ttft_s, *totals), strict=True):
                costs.place(e, (cost_s, *key), seen=seen)
            middle = (totals[_MIDDLE], *key)
            near_cost.place(e, middle, seen=seen)
            self._by_sessions.place(e, (load.sessions, *middle), seen=seen)
            self._beside[endpoint.place.rack].place(e, middle)
        b.changed.clear()
