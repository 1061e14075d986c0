"""conductor: near the cache, by distance and queue (Mooncake Conductor's prefill schedule).

1. No cached prefix, or one that covers less of the prompt than `min_hit_ratio`: the least loaded.
2. A holder of the whole prefix with KV room and at most `max_queue_length` waiting: the shortest queue.
3. Else the endpoint with KV room and the lowest 0.7 × mean distance to the holders + 0.3 × queue length
   (near_cache.py); the least loaded where none has room. A hot prefix is copied there if engines can pull
   from each other, which no gateway makes them do yet; else the rest is recomputed.

The arm `no_scheduling` draws and counts on no cache. Queue length: requests whose prefill has not ended.
Estimated TTFT = queue wait + KV load + compute. Decode follows on the same endpoint. Source: Mooncake
Conductor's published rules. Prefer it where the fabric is slow and distance matters more than load.
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
from perilune_gateway.policy.cost import held_tokens, least_pending
from perilune_gateway.policy.others.near_cache import (
    mean_distance,
    near_score,
    select_near_cache,
    should_migrate,
)


def conductor(
    request: RequestView, candidates: Sequence[Candidate], params: ConductorParams, rng: Random
) -> Decision | NeedBody:
    """The prefill schedule."""
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
    if held < prefix.tokens and prefix.pullable and should_migrate(request, node):
        return decision(node, reason, prefix.tokens, prefix.locations[0].address)
    return decision(node, reason, held)


def _ttft_s(request: RequestView, node: Candidate, cached_tokens: int, source: str) -> float:
    """`source`: the endpoint that the prefix is copied from; empty: none."""
    engine, missing = node.engine, cached_tokens - node.overlap.device_tokens
    load_s = (
        engine.transfer_s(missing, node.links[source].bandwidth_bytes_per_s)
        if source
        else engine.host_s(missing)
    )
    compute_s = engine.prefill_s(request.prompt_tokens - cached_tokens, cached_tokens)
    return node.load.pending_prefill_s + load_s + compute_s


def _cost(candidate: Candidate, holders: Collection[str]) -> Cost:
    terms = {
        "mean_distance": mean_distance(candidate, holders),
        "queue_length": float(candidate.load.prefilling),
        "cached_tokens": float(held_tokens(candidate)),
    }
    return Cost(candidate.address, near_score(candidate, holders), terms)
