"""mooncake: the lowest predicted time to the first token.

    cost = transfer(best − own) + queue + prefill(prompt, best)    if best > own × BALANCING_THRESHOLD
    cost = queue + prefill(prompt, own)                            otherwise

`own` is the prefix that the endpoint caches, `best` the longest prefix that any endpoint caches. In the first
case the winner pulls the prefix from the endpoint that caches it. The policy refuses a request whose
predicted TTFT, or predicted time between tokens when decode begins, is above the SLO.

Source: Mooncake (FAST '25), Algorithm 1. As published, the cost jumps where `own` crosses best / threshold,
transfer time is bytes / bandwidth without congestion, and a request is refused even if an idle endpoint would
miss the SLO. Unlike the paper, prefill and decode share an endpoint. The first line applies only where
engines hand KV over to each other (`can_pull`). Prefer it to compare with the paper.
"""

from collections.abc import Sequence
from random import Random

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
from perilune_gateway.policy.cost import can_pull, cheapest, held_tokens, tpot_s

BALANCING_THRESHOLD = 2.0
"""best / own above which the prefix is transferred. The paper tunes it by hand and publishes no value."""


def mooncake(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Verdict:
    """Choose by Algorithm 1, or refuse if the choice misses an SLO."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    costs = {c.address: _cost(c, request) for c in candidates}
    chosen = cheapest(candidates, tuple(costs.values()), rng)
    ttft_s, terms = costs[chosen.address].total, costs[chosen.address].terms
    tbt_s = tpot_s(chosen, request, ttft_s)
    if request.slo_ttft_s and ttft_s > request.slo_ttft_s:
        late_s = ttft_s - request.slo_ttft_s
        return _refused(f"The predicted time to the first token is {ttft_s:.2f} s", late_s)
    if request.slo_tpot_s and tbt_s > request.slo_tpot_s:
        return _refused(f"The predicted time per token is {tbt_s * 1000:.0f} ms", chosen.decode_s)
    balancing = _balances(chosen, request)
    return Decision(
        chosen.address,
        Reason.CACHE_BALANCING if balancing else Reason.CACHE_AWARE,
        tuple(costs.values()),
        replicate_from=request.prefix.locations[0].address if balancing else "",
        cached_tokens=int(terms["cached_tokens"]),
        estimated_ttft_s=ttft_s,
        estimated_tpot_s=tbt_s,
    )


def _balances(candidate: Candidate, request: RequestView) -> bool:
    """Return whether the best prefix is long enough to be pulled, and can be pulled."""
    best = request.prefix
    longer = best.tokens > held_tokens(candidate) * BALANCING_THRESHOLD
    return longer and can_pull(candidate, request, best.locations[0].address)


def _cost(candidate: Candidate, request: RequestView) -> Cost:
    engine, cached, transfer_s = candidate.engine, held_tokens(candidate), 0.0
    if _balances(candidate, request):
        link, own = candidate.links[request.prefix.locations[0].address], cached
        cached = request.prefix.tokens
        transfer_s = engine.transfer_s(cached - own, link.bandwidth_bytes_per_s)
    queue_s = candidate.load.pending_prefill_s
    prefill_s = engine.prefill_s(request.prompt_tokens - cached, cached)
    terms = {"transfer_s": transfer_s, "queue_s": queue_s, "prefill_s": prefill_s}
    return Cost(candidate.address, sum(terms.values()), terms | {"cached_tokens": float(cached)})


def _refused(what: str, retry_after_s: float) -> Refusal:
    message = f"{what}, which is more than the request's SLO allows"
    return Refusal(RefuseReason.OVERLOADED, message, max(1.0, retry_after_s))
