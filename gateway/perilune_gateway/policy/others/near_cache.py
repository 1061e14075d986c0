"""Conductor's two rules: which endpoint is near the cached prefix, and whether to copy a hot prefix.

`select_near_cache` chooses among the endpoints with KV room for the prompt:
1. the shortest queue of the endpoints that cache the prefix, if that queue is at most `max_queue_length`;
2. otherwise the lowest 0.7 × mean distance to those endpoints + 0.3 × queue length, where the distance is 0
   for the same node, 1 for the rack, 2 for the spine and 3 beyond.

`should_migrate` is as published: the cost of a copy is its transfer time plus OVERHEAD_MS, its benefit is
that cost times the number of requests in the next minute, and the benefit must be WORTH times the cost. The
transfer time therefore cancels out: the rule is frequency_score × 60 > 1.5, for scores of at least HOT_SCORE.
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
    """Return the chosen endpoint and why, or None if no endpoint has KV room."""
    fitting = [c for c in nodes if has_kv_room(c, request)]
    near = [c for c in fitting if c.address in holders and c.load.prefilling <= max_queue_length]
    if near:
        return lowest(near, lambda c: c.load.prefilling, rng), Reason.CACHE_NODE
    if fitting:
        return lowest(fitting, lambda c: near_score(c, holders), rng), Reason.NEAR_CACHE
    return None


def near_score(candidate: Candidate, holders: Collection[str]) -> float:
    """Return the score of step 2; lower is better."""
    return DISTANCE_WEIGHT * mean_distance(candidate, holders) + QUEUE_WEIGHT * candidate.load.prefilling


def mean_distance(candidate: Candidate, holders: Collection[str]) -> float:
    """Return the mean distance to the endpoints `holders`, 0 without any. An endpoint without a link is 3."""
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
    """Return whether the prefix is copied from its first location to `target`."""
    prefix = request.prefix
    link = target.links.get(prefix.locations[0].address)
    if link is None or prefix.frequency_score < HOT_SCORE:
        return False
    cost_ms = target.engine.kv_bytes(prefix.tokens) / link.bandwidth_bytes_per_s * 1000.0 + OVERHEAD_MS
    requests_next_minute = prefix.frequency_score * 60.0
    return requests_next_minute * cost_ms > WORTH * cost_ms
