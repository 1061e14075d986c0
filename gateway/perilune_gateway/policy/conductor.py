"""conductor: near the cache, by distance and queue (Mooncake Conductor; three arms as a parameter).

1. Prefill: a node near the cached prefix, or the least loaded (conductor_prefill.py).
2. Decode: near where the prefill wrote, by the same rule over the decode endpoints (near_cache.py), their
   queue being the requests in flight; where no endpoint is for prefill alone, the prefilling one decodes.
"""

from collections.abc import Collection, Sequence
from random import Random

from perilune_api.pool import PolicyParams, Role
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    Phase,
    Refusal,
    RefuseReason,
    RequestView,
    Verdict,
)
from perilune_gateway.policy.conductor_prefill import schedule_prefill, waiting
from perilune_gateway.policy.cost import held_tokens, is_split, lowest, with_role
from perilune_gateway.policy.near_cache import mean_distance, near_score, select_near_cache


def conductor(
    request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
) -> Verdict:
    """Prefill schedule, then decode schedule."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    prefix = request.prefix
    holders = {location.address for location in prefix.locations if location.tokens >= prefix.tokens}
    prefill = schedule_prefill(request, with_role(candidates, Role.PREFILL), holders, params, rng)
    decoder = prefill.node
    if is_split(candidates):
        session = request.session.session_id if request.session else request.request_id
        scheduled = schedule_decode(session, {decoder.address}, request, candidates, params, rng)
        if isinstance(scheduled, Refusal):
            return scheduled
        decoder = scheduled
    return Decision(
        decoder.address,
        prefill.reason,
        tuple(_cost(c, holders) for c in candidates),
        prefill="" if decoder is prefill.node else prefill.node.address,
        replicate_from=prefill.source,
        cached_tokens=prefill.cached_tokens,
        estimated_ttft_s=prefill.estimated_s(request),
    )


def schedule_decode(
    session: str,
    kv_at: Collection[str],
    request: RequestView,
    candidates: Sequence[Candidate],
    params: PolicyParams,
    rng: Random,
) -> Candidate | Refusal:
    """A decode node near the session's KV. `kv_at` empty: nobody has prefilled it, which is an error."""
    if not kv_at:
        return Refusal(RefuseReason.BAD_REQUEST, f"Session {session!r} has no KV cache to decode from")
    nodes = with_role(candidates, Role.DECODE)
    found = select_near_cache(request, nodes, kv_at, params, _in_flight, rng)
    return found[0] if found else lowest(nodes, _in_flight, rng)


def _cost(candidate: Candidate, holders: Collection[str]) -> Cost:
    terms = {
        "mean_distance": mean_distance(candidate, holders),
        "queue_length": float(waiting(candidate)),
        "cached_tokens": float(held_tokens(candidate)),
    }
    return Cost(candidate.address, near_score(candidate, holders, waiting(candidate)), terms)


def _in_flight(candidate: Candidate) -> int:
    return candidate.load.in_flight
