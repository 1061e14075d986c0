"""conductor: near the cache, by distance and queue (Mooncake Conductor; three arms as a parameter).

Prefill: no prefix, or hit ratio below `min_hit_ratio` → least loaded, no cache use; else a node near the
cache (near_cache.py), and if that one does not hold the prefix, `should_migrate` says whether it is copied
there; if not, it is recomputed. Decode: the same rule over the decode endpoints, near where the prefill
wrote; where no endpoint is for prefill alone, the prefilling endpoint decodes.

Queue length = requests whose prefill has not ended, for decode: requests in flight.
"""

from collections.abc import Collection, Sequence
from random import Random

from perilune_api.pool import ConductorArm, PolicyParams, Role
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    Phase,
    Reason,
    Refusal,
    RefuseReason,
    RequestView,
    Verdict,
)
from perilune_gateway.policy.cost import held_tokens, is_split, least_pending, lowest, with_role
from perilune_gateway.policy.near_cache import mean_distance, near_score, select_near_cache, should_migrate


def conductor(
    request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
) -> Verdict:
    """Prefill schedule, then decode schedule."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    holders = {location.address for location in request.prefix.locations if _whole(location.tokens, request)}
    costs = tuple(_cost(c, holders) for c in candidates)
    prefillers = with_role(candidates, Role.PREFILL)
    if params.conductor_arm is ConductorArm.NO_SCHEDULING:
        target, reason, cached, source = rng.choice(prefillers), Reason.RANDOM, 0, ""
    else:
        target, reason, cached, source = _prefill(request, prefillers, holders, params, rng)
    estimated_s = _estimated_s(target, request, cached, source)
    decoder = target
    if is_split(candidates):
        session = request.session.session_id if request.session else request.request_id
        scheduled = schedule_decode(session, {target.address}, request, candidates, params, rng)
        if isinstance(scheduled, Refusal):
            return scheduled
        decoder = scheduled
    return Decision(
        decoder.address,
        reason,
        costs,
        prefill="" if decoder is target else target.address,
        replicate_from=source,
        cached_tokens=cached,
        estimated_ttft_s=estimated_s,
    )


def _prefill(
    request: RequestView,
    nodes: Sequence[Candidate],
    holders: Collection[str],
    params: PolicyParams,
    rng: Random,
) -> tuple[Candidate, Reason, int, str]:
    """The node, why, the prefix tokens it uses, whom they are copied from."""
    prefix = request.prefix
    if not prefix.tokens or prefix.tokens / request.prompt_tokens < params.min_hit_ratio:
        return least_pending(nodes, rng), Reason.NO_CACHE, 0, ""
    found = select_near_cache(request, nodes, holders, params, _waiting, rng)
    if found is None:
        return least_pending(nodes, rng), Reason.NO_CACHE, 0, ""
    node, reason = found
    held = held_tokens(node)
    may_copy = params.conductor_arm is ConductorArm.CACHE_AWARE_MIGRATION and prefix.pullable
    if not _whole(held, request) and may_copy and should_migrate(request, node, params).migrate:
        return node, reason, prefix.tokens, prefix.locations[0].address
    return node, reason, held, ""


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
        "queue_length": float(_waiting(candidate)),
        "cached_tokens": float(held_tokens(candidate)),
    }
    return Cost(candidate.address, near_score(candidate, holders, _waiting(candidate)), terms)


def _estimated_s(target: Candidate, request: RequestView, cached: int, source: str) -> float:
    """Queue wait + KV load + model compute."""
    engine, device = target.engine, target.overlap.device_tokens
    missing = cached - device
    load_s = engine.host_s(missing)
    if source:
        load_s = engine.transfer_s(missing, target.links[source].bandwidth_bytes_per_s)
    compute_s = engine.prefill_s(request.prompt_tokens - cached, cached)
    return target.load.pending_prefill_s + load_s + compute_s


def _whole(tokens: int, request: RequestView) -> bool:
    return tokens >= request.prefix.tokens


def _waiting(candidate: Candidate) -> int:
    return candidate.load.prefilling


def _in_flight(candidate: Candidate) -> int:
    return candidate.load.in_flight
