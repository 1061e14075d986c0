"""conductor: an endpoint near the cached prefix, by distance and queue.

    cost = 0.7 × mean distance to the endpoints with the prefix + 0.3 × queue length

1. If the cached prefix covers a smaller share of the prompt than `min_hit_ratio`: the least loaded endpoint.
2. Of the endpoints with the whole prefix, KV room and queue length <= `max_queue_length`: the shortest queue.
3. Otherwise the lowest cost among the endpoints with KV room (near_cache.py), or the least loaded endpoint.
   A hot prefix is copied to it where engines hand KV over to each other (`can_pull`).

The arm `no_scheduling` chooses randomly and ignores caches. Source: Mooncake Conductor's published rules.
Prefer it where the network is slow, so that distance matters more than load.
"""

from collections.abc import Collection, Sequence
from random import Random

from perilune_api.policies import ConductorArm, ConductorParams
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    NeedBody,
    Phase,
    Reason,
    RequestView,
)
from perilune_gateway.policy.cost import can_pull, held_tokens, least_pending
from perilune_gateway.policy.others.near_cache import (
    mean_distance,
    near_score,
    select_near_cache,
    should_migrate,
)


def conductor(
    request: RequestView, candidates: Sequence[Candidate], params: ConductorParams, rng: Random
) -> Decision | NeedBody:
    """Choose an endpoint by Conductor's prefill schedule."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    prefix = request.prefix
    holders = {location.address for location in prefix.locations if location.tokens >= prefix.tokens}
    costs = tuple(_cost(c, holders) for c in candidates)

    def decision(node: Candidate, reason: Reason, cached_tokens: int = 0, source: str = "") -> Decision:
        ttft_s = _ttft_s(request, node, cached_tokens, source)
        return Decision(
            node.address,
            reason,
            costs,
            replicate_from=source,
            cached_tokens=cached_tokens,
            estimated_ttft_s=ttft_s,
        )

    if params.arm is ConductorArm.NO_SCHEDULING:
        return decision(rng.choice(candidates), Reason.RANDOM)
    if not prefix.tokens or prefix.tokens / request.prompt_tokens < params.min_hit_ratio:
        return decision(least_pending(candidates, rng), Reason.NO_CACHE)
    found = select_near_cache(request, candidates, holders, params.max_queue_length, rng)
    if found is None:
        return decision(least_pending(candidates, rng), Reason.NO_CACHE)
    node, reason = found
    held = held_tokens(node)
    longest = prefix.locations[0].address
    if held < prefix.tokens and can_pull(node, request, longest) and should_migrate(request, node):
        return decision(node, reason, prefix.tokens, longest)
    return decision(node, reason, held)


def _ttft_s(request: RequestView, node: Candidate, cached_tokens: int, source: str) -> float:
    """Return the predicted TTFT in seconds; `source` is where the prefix is copied from, or empty."""
    engine, missing = node.engine, cached_tokens - node.overlap.device_tokens
    load_s = engine.host_s(missing)
    if source:
        load_s = engine.transfer_s(missing, node.links[source].bandwidth_bytes_per_s)
    compute_s = engine.prefill_s(request.prompt_tokens - cached_tokens, cached_tokens)
    return node.load.pending_prefill_s + load_s + compute_s


def _cost(candidate: Candidate, holders: Collection[str]) -> Cost:
    terms = {
        "mean_distance": mean_distance(candidate, holders),
        "queue_length": float(candidate.load.prefilling),
        "cached_tokens": float(held_tokens(candidate)),
    }
    return Cost(candidate.address, near_score(candidate, holders), terms)
