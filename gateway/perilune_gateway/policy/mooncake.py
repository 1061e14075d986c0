"""mooncake: KVCache-centric scheduling (Mooncake, FAST '25, Algorithm 1).

For each prefilling endpoint, the predicted time to the first token:

    best prefix > its own × threshold  →  transfer(best − own) + queue + prefill(prompt, best)
    else                               →                         queue + prefill(prompt, own)

The smallest wins. Then the decoding endpoint, by predicted time per token when decode would begin; with
prefill and decode on one endpoint, that one. TTFT or TBT above the SLO: refused, before any GPU work. If the
winner's own prefix is that much shorter than the best one, the best holder's KV is transferred to it.

The test is a ratio (`kvcache_balancing_threshold`) as published, so a cost jumps where an endpoint's own
prefix crosses best / threshold: a longer own prefix may then cost more. Transfer = bytes / bandwidth of the
link: no congestion, nothing learned. Where endpoints cannot pull from each other only the second line is
left. Without an SLO nothing is refused; an SLO that even an idle endpoint misses is refused there too, which
admission (admission.py) would not.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.pool import PolicyParams, Role
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
from perilune_gateway.policy.cost import cheapest, held_tokens, is_split, lowest, tpot_s, with_role


def mooncake(
    request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
) -> Verdict:
    """Algorithm 1."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    best = request.prefix
    costs = tuple(_cost(c, request, params) for c in candidates)
    by_address = {cost.address: cost for cost in costs}
    prefiller = cheapest(with_role(candidates, Role.PREFILL), costs, rng)
    ttft_s = by_address[prefiller.address].total
    decoder = select_decode(candidates, request, ttft_s, rng) if is_split(candidates) else prefiller
    tbt_s = tpot_s(decoder, request, ttft_s)
    if request.slo_ttft_s and ttft_s > request.slo_ttft_s:
        return _refused(f"First token predicted after {ttft_s:.2f} s", ttft_s - request.slo_ttft_s)
    if request.slo_tpot_s and tbt_s > request.slo_tpot_s:
        return _refused(f"{tbt_s * 1000:.0f} ms per token predicted", decoder.decode_s)
    balancing = balances(prefiller, request, params)
    return Decision(
        decoder.address,
        Reason.CACHE_BALANCING if balancing else Reason.CACHE_AWARE,
        costs,
        prefill="" if decoder is prefiller else prefiller.address,
        replicate_from=best.locations[0].address if balancing else "",
        cached_tokens=best.tokens if balancing else held_tokens(prefiller),
        estimated_ttft_s=ttft_s,
        estimated_tpot_s=tbt_s,
    )


def balances(candidate: Candidate, request: RequestView, params: PolicyParams) -> bool:
    """Whether the best prefix is more than `threshold` times this endpoint's own (0 counts as infinitely) and
    can be pulled."""
    best = request.prefix
    ratio = best.tokens > held_tokens(candidate) * params.kvcache_balancing_threshold
    return ratio and best.pullable and best.locations[0].address in candidate.links


def select_decode(
    candidates: Sequence[Candidate], request: RequestView, at_s: float, rng: Random
) -> Candidate:
    """Of the decode endpoints with KV room (of all, if none has), the lowest predicted time per token."""
    decoders = with_role(candidates, Role.DECODE)
    roomy = [c for c in decoders if c.load.kv_free_tokens >= request.prompt_tokens]
    return lowest(roomy or decoders, lambda c: tpot_s(c, request, at_s), rng)


def _cost(candidate: Candidate, request: RequestView, params: PolicyParams) -> Cost:
    engine, own, transfer_s = candidate.engine, held_tokens(candidate), 0.0
    cached = own
    if balances(candidate, request, params):
        cached = request.prefix.tokens
        link = candidate.links[request.prefix.locations[0].address]
        transfer_s = engine.transfer_s(cached - own, link.bandwidth_bytes_per_s)
    terms = {
        "transfer_s": transfer_s,
        "queue_s": candidate.load.pending_prefill_s,
        "prefill_s": engine.prefill_s(request.prompt_tokens - cached, cached),
    }
    return Cost(candidate.address, sum(terms.values()), terms | {"cached_tokens": float(cached)})


def _refused(what: str, retry_after_s: float) -> Refusal:
    return Refusal(RefuseReason.OVERLOADED, f"{what}: later than asked for", max(1.0, retry_after_s))
