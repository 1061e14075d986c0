"""mooncake: KVCache-centric scheduling (Mooncake, FAST '25, Algorithm 1).

Each prefilling endpoint's predicted time to the first token; the smallest wins:

    best prefix > its own × threshold  →  transfer(best − own) + queue + prefill(prompt, best)
    else                               →                         queue + prefill(prompt, own)

Then the decoding endpoint: of those with KV room (of all, if none has), the lowest time per token that is
predicted for when decode would begin; with prefill and decode on one endpoint, that one. TTFT or TBT above
the SLO: refused, before any GPU work. In the first case the best holder's KV is transferred to the winner.

As published: the test is a ratio, so a cost jumps where an endpoint's own prefix crosses best / threshold;
transfer is bytes / bandwidth, without congestion or learning; an SLO that even an idle endpoint misses is
refused, which admission.py would not. Where engines cannot pull from each other the second line is left.
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
    costs = {c.address: _cost(c, request, params) for c in candidates}
    prefiller = cheapest(with_role(candidates, Role.PREFILL), tuple(costs.values()), rng)
    ttft_s, terms = costs[prefiller.address].total, costs[prefiller.address].terms
    decoder = prefiller
    if is_split(candidates):
        decoders = with_role(candidates, Role.DECODE)
        roomy = [c for c in decoders if c.load.kv_free_tokens >= request.prompt_tokens]
        decoder = lowest(roomy or decoders, lambda c: tpot_s(c, request, ttft_s), rng)
    tbt_s = tpot_s(decoder, request, ttft_s)
    if request.slo_ttft_s and ttft_s > request.slo_ttft_s:
        return _refused(f"First token predicted after {ttft_s:.2f} s", ttft_s - request.slo_ttft_s)
    if request.slo_tpot_s and tbt_s > request.slo_tpot_s:
        return _refused(f"{tbt_s * 1000:.0f} ms per token predicted", decoder.decode_s)
    balancing = _balances(prefiller, request, params)
    return Decision(
        decoder.address,
        Reason.CACHE_BALANCING if balancing else Reason.CACHE_AWARE,
        tuple(costs.values()),
        prefill="" if decoder is prefiller else prefiller.address,
        replicate_from=request.prefix.locations[0].address if balancing else "",
        cached_tokens=int(terms["cached_tokens"]),
        estimated_ttft_s=ttft_s,
        estimated_tpot_s=tbt_s,
    )


def _balances(candidate: Candidate, request: RequestView, params: PolicyParams) -> bool:
    """The best prefix is that much longer than its own (0 counts as infinitely), and can be pulled."""
    best = request.prefix
    longer = best.tokens > held_tokens(candidate) * params.kvcache_balancing_threshold
    return longer and best.pullable and best.locations[0].address in candidate.links


def _cost(candidate: Candidate, request: RequestView, params: PolicyParams) -> Cost:
    engine, cached, transfer_s = candidate.engine, held_tokens(candidate), 0.0
    if _balances(candidate, request, params):
        link, own = candidate.links[request.prefix.locations[0].address], cached
        cached = request.prefix.tokens
        transfer_s = engine.transfer_s(cached - own, link.bandwidth_bytes_per_s)
    queue_s = candidate.load.pending_prefill_s
    prefill_s = engine.prefill_s(request.prompt_tokens - cached, cached)
    terms = {"transfer_s": transfer_s, "queue_s": queue_s, "prefill_s": prefill_s}
    return Cost(candidate.address, sum(terms.values()), terms | {"cached_tokens": float(cached)})


def _refused(what: str, retry_after_s: float) -> Refusal:
    return Refusal(RefuseReason.OVERLOADED, f"{what}: later than asked for", max(1.0, retry_after_s))
