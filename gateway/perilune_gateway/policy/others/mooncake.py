"""mooncake: KVCache-centric scheduling (Mooncake, FAST '25, Algorithm 1).

Each endpoint's predicted time to the first token; the smallest wins:

    best prefix > its own × threshold  →  transfer(best − own) + queue + prefill(prompt, best)
    else                               →                         queue + prefill(prompt, own)

In the first case the best holder's KV is transferred to the winner. A predicted TTFT, or time between tokens
when decode would begin, above the SLO: refused, before any GPU work. Prefer it to compare with the paper.

As published: the test is a ratio, so a cost jumps where an endpoint's own prefix crosses best / threshold;
transfer is bytes / bandwidth, without congestion or learning; an SLO that even an idle endpoint misses is
refused, which admission.py would not. Not as published: prefill and decode share an endpoint here. Where
engines cannot pull from each other, which no gateway makes them do yet, the first line never applies.
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
from perilune_gateway.policy.cost import cheapest, held_tokens, tpot_s

BALANCING_THRESHOLD = 2.0
"""Best holder's prefix / an endpoint's own, above which the prefix is transferred. The paper tunes it by hand
and publishes no value."""


def mooncake(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Verdict:
    """Algorithm 1."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    costs = {c.address: _cost(c, request) for c in candidates}
    chosen = cheapest(candidates, tuple(costs.values()), rng)
    ttft_s, terms = costs[chosen.address].total, costs[chosen.address].terms
    tbt_s = tpot_s(chosen, request, ttft_s)
    if request.slo_ttft_s and ttft_s > request.slo_ttft_s:
        return _refused(f"First token predicted after {ttft_s:.2f} s", ttft_s - request.slo_ttft_s)
    if request.slo_tpot_s and tbt_s > request.slo_tpot_s:
        return _refused(f"{tbt_s * 1000:.0f} ms per token predicted", chosen.decode_s)
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
    """The best prefix is that much longer than its own (0 counts as infinitely), and can be pulled."""
    best = request.prefix
    longer = best.tokens > held_tokens(candidate) * BALANCING_THRESHOLD
    return longer and best.pullable and best.locations[0].address in candidate.links


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
    return Refusal(RefuseReason.OVERLOADED, f"{what}: later than asked for", max(1.0, retry_after_s))
