"""Conductor's two rules: which endpoint is near the cache, and whether a hot prefix is worth copying.

*Select an endpoint near the cache*, of those with KV room for the prompt:
1. a holder of the prefix whose queue is at most `max_queue_length`: the one with the shortest queue;
2. else the lowest 0.7 × mean distance to the holders + 0.3 × queue length (same node 0, rack 1, spine 2,
   beyond 3).

*Should migrate* is as published: a copy costs its transfer and OVERHEAD, its benefit is that cost times the
requests of the next minute, and the benefit must be WORTH times the cost. So it collapses to
frequency_score × 60 > 1.5, whatever the link, for a prefix whose score is at least HOT_SCORE.
"""

from collections.abc import Collection, Sequence
from random import Random

from perilune_api.topology import Level
from perilune_gateway.model import Candidate, Reason, RequestView
from perilune_gateway.policy.cost import has_kv_room, lowest

DISTANCE_WEIGHT, QUEUE_WEIGHT = 0.7, 0.3
WORTH = 1.5
OVERHEAD_MS = 5.0
"""CPU time of one migration."""
HOT_SCORE = 0.3
"""Frequency score from which a prefix is hot; published as migration_threshold."""


def select_near_cache(
    request: RequestView,
    nodes: Sequence[Candidate],
    holders: Collection[str],
    max_queue_length: int,
    rng: Random,
) -> tuple[Candidate, Reason] | None:
    """Returns None where no endpoint has room."""
    fitting = [c for c in nodes if has_kv_room(c, request)]
    near = [c for c in fitting if c.address in holders and c.load.prefilling <= max_queue_length]
    if near:
        return lowest(near, lambda c: c.load.prefilling, rng), Reason.CACHE_NODE
    if fitting:
        return lowest(fitting, lambda c: near_score(c, holders), rng), Reason.NEAR_CACHE
    return None


def near_score(candidate: Candidate, holders: Collection[str]) -> float:
    """The score of step 2; lowest is best."""
    return DISTANCE_WEIGHT * mean_distance(candidate, holders) + QUEUE_WEIGHT * candidate.load.prefilling


def mean_distance(candidate: Candidate, holders: Collection[str]) -> float:
    """0 without holders; a holder without a link counts as beyond."""
    levels = [
        Level.NODE
        if address == candidate.address
        else link.distance
        if (link := candidate.links.get(address))
        else Level.FABRIC
        for address in holders
    ]
    return sum(levels) / len(levels) if levels else 0.0


def should_migrate(request: RequestView, target: Candidate) -> bool:
    """Whether the prefix is copied from its first location to `target`."""
    prefix = request.prefix
    link = target.links.get(prefix.locations[0].address)
    if link is None or prefix.frequency_score < HOT_SCORE:
        return False
    cost_ms = target.engine.kv_bytes(prefix.tokens) / link.bandwidth_bytes_per_s * 1000.0 + OVERHEAD_MS
    requests_next_minute = prefix.frequency_score * 60.0
    return requests_next_minute * cost_ms > WORTH * cost_ms
