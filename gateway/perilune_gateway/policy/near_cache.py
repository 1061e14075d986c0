"""Conductor's two rules: which node is near the cache, and whether a hot prefix is worth copying.

*Select a node near the cache*, of the nodes of one role with KV room for the prompt:
1. a holder of the prefix whose queue is at most `max_queue_length`: the one with the shortest queue;
2. else the lowest 0.7 × mean distance to the holders + 0.3 × queue length (same node 0, rack 1, spine 2,
   beyond 3).

*Should migrate* is as published: its benefit is the cost times the requests of the next minute, so it
collapses to frequency_score × 60 > 1.5, whatever the link.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random

from perilune_api.pool import PolicyParams
from perilune_api.topology import Level
from perilune_gateway.model import Candidate, Reason, RequestView
from perilune_gateway.policy.cost import has_kv_room, lowest

DISTANCE_WEIGHT, QUEUE_WEIGHT = 0.7, 0.3
WORTH = 1.5
OVERHEAD_MS = 5.0
"""CPU time of one migration."""


def select_near_cache(
    request: RequestView,
    nodes: Sequence[Candidate],
    holders: Collection[str],
    params: PolicyParams,
    queue: Callable[[Candidate], int],
    rng: Random,
) -> tuple[Candidate, Reason] | None:
    """None: no node has room."""
    fitting = [c for c in nodes if has_kv_room(c, request)]
    near = [c for c in fitting if c.address in holders and queue(c) <= params.max_queue_length]
    if near:
        return lowest(near, queue, rng), Reason.CACHE_NODE
    if fitting:
        return lowest(fitting, lambda c: near_score(c, holders, queue(c)), rng), Reason.NEAR_CACHE
    return None


def near_score(candidate: Candidate, holders: Collection[str], queue: int) -> float:
    """Step 2; lowest is best."""
    return DISTANCE_WEIGHT * mean_distance(candidate, holders) + QUEUE_WEIGHT * queue


def mean_distance(candidate: Candidate, holders: Collection[str]) -> float:
    """0 without holders; a holder without a link is beyond."""
    levels = [
        Level.NODE
        if address == candidate.address
        else link.distance
        if (link := candidate.links.get(address))
        else Level.FABRIC
        for address in holders
    ]
    return sum(levels) / len(levels) if levels else 0.0


@dataclass(frozen=True, slots=True)
class MigrationCheck:
    """Whether a hot prefix is copied, and by which numbers."""

    cost_ms: float
    benefit_ms: float
    hot: bool

    @property
    def migrate(self) -> bool:
        return self.hot and self.benefit_ms > WORTH * self.cost_ms


def should_migrate(request: RequestView, target: Candidate, params: PolicyParams) -> MigrationCheck:
    """Source is the first location."""
    prefix = request.prefix
    link = target.links.get(prefix.locations[0].address)
    if link is None:
        return MigrationCheck(0.0, 0.0, False)
    cost_ms = target.engine.kv_bytes(prefix.tokens) / link.bandwidth_bytes_per_s * 1000.0 + OVERHEAD_MS
    requests_next_minute = prefix.frequency_score * 60.0
    hot = prefix.frequency_score >= params.hot_cache_threshold
    return MigrationCheck(cost_ms, requests_next_minute * cost_ms, hot)
