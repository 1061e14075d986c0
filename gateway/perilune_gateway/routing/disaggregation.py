"""Prefill and decode on separate endpoints: whether a prompt is split, and between which two.

1. The pool's policy has chosen from the endpoints that decode; a session stays on the one that it has.
2. That endpoint prefills as well if all but `local_tokens` of the prompt are cached there.
3. Of the prefill endpoints that have less than `queue` prompts, the one with the lowest time to the first
   token is the best:

       queue + store reading + prefill(prompt, own prefix) + transfer(prompt − what the decoding endpoint has)

4. It prefills if that is not more than what the same costs on the decoding endpoint,

       queue + fetch + prefill + delay of the requests in flight and of `coming_requests` more

   and if it would be over within `max_seconds`. Otherwise the decoding endpoint prefills (`Unsplit`). If the
   request has an SLO for its first token that one of the two meets and the other does not, that one
   prefills.
5. A request without a bound session whose prompt is split gets the decoding endpoint with the lowest

       transfer over the link from the prefill endpoint + queue + slower decoding

Sources: NVIDIA Dynamo's conditional disaggregation (steps 2 and 3; its defaults are 1,000 tokens and a queue
of 2, which it counts for the whole pool); Mooncake, Algorithm 1, over the prefill endpoints only (step 3);
Perilune (step 4; docs/evaluation/notes.md says what it is worth). An endpoint prefills with its own prefix,
because connectors hand whole prompts over.

Prefer `ear` or `perilune` as the policy of such a pool: they keep sessions where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from msgspec.structs import replace

from perilune_api.policies import PeriluneParams
from perilune_api.pool import Disaggregation, Role
from perilune_api.topology import Link
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    NeedBody,
    Phase,
    Reason,
    RequestView,
    Unsplit,
)
from perilune_gateway.model.forecast import PrefillForecast
from perilune_gateway.policy.cost import Seconds, cheapest, host_of, seconds, slower_decode_s, target_of
from perilune_gateway.routing.prefill_forecast import forecast_alone


def decoders(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the endpoints that get clients' requests."""
    return [c for c in candidates if c.endpoint.role is not Role.PREFILL]


def split(
    request: RequestView,
    decision: Decision,
    candidates: Sequence[Candidate],
    pool: Disaggregation,
    params: PeriluneParams,
    rng: Random,
) -> Decision | NeedBody:
    """Return the decision with the endpoint that prefills, or with the reason why the target does. The
    candidates are all endpoints, those that prefill included."""
    givers = [c for c in candidates if c.endpoint.role is Role.PREFILL]
    target = target_of(decision, candidates)
    if request.prompt_tokens - target.overlap.device_tokens <= pool.local_tokens:
        return replace(decision, unsplit=Unsplit.SHORT)
    if request.unsplit:
        return replace(decision, unsplit=request.unsplit)
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    reachable = [c for c in givers if c.address in target.links]
    if not reachable:
        return replace(decision, unsplit=Unsplit.NO_GIVER)
    free = [c for c in reachable if c.load.prefilling < pool.queue]
    if not free:
        return replace(decision, unsplit=Unsplit.QUEUES_FULL)
    work = {c.address: prefill_work(decision, c, request) for c in free}
    there = [_cost_there(c, work[c.address], target, request) for c in free]
    here = _here(target, request, pool, params)
    decision = replace(decision, prefill_costs=(_cost_here(target, here), *there))
    giver = cheapest(free, there, rng)
    if why := _belongs_here(here, min(cost.total for cost in there), request.slo_ttft_s):
        return replace(decision, unsplit=why)
    if ready_s(giver, work[giver.address]) > pool.max_seconds:
        return replace(decision, unsplit=Unsplit.SLOW)
    if host_of(request, candidates) is None:
        target = _decoder(giver, request, candidates, params, rng)
    fetch_s = transfer_s(target.links[giver.address], target, request)
    return replace(
        decision,
        target=target.address,
        reason=Reason.SPLIT,
        prefill=giver.address,
        replicate_from="",
        cached_tokens=target.overlap.device_tokens,
        estimated_ttft_s=ready_s(giver, work[giver.address]) + fetch_s,
    )


def _here(target: Candidate, request: RequestView, pool: Disaggregation, params: PeriluneParams) -> Seconds:
    """Step 4: return what the request takes on the decoding endpoint, coming requests counted."""
    if pool.coming_requests:
        load = target.load._replace(in_flight=target.load.in_flight + pool.coming_requests)
        target = replace(target, load=load)
    return seconds(target, request, params)


def _cost_here(target: Candidate, here: Seconds) -> Cost:
    """Return what the prefill costs there."""
    terms = {
        "queue_s": here.queue_s,
        "fetch_s": here.fetch_s,
        "prefill_s": here.prefill_s,
        "interference_s": here.interference_s,
    }
    return Cost(target.address, here.total_s - here.decode_s, terms)


def _belongs_here(here: Seconds, there_s: float, slo_s: float) -> Unsplit | None:
    """Step 4: return why the decoding endpoint prefills, where the best prefill endpoint takes `there_s`;
    None if that one does."""
    if slo_s and (here.ttft_s <= slo_s) != (there_s <= slo_s):
        return Unsplit.SLO if here.ttft_s <= slo_s else None
    return Unsplit.CHEAPER if here.total_s - here.decode_s < there_s else None


def prefill_work(decision: Decision, giver: Candidate, request: RequestView) -> PrefillForecast:
    """Return what the endpoint has to do if it prefills the prompt."""
    return forecast_alone(decision, giver, request.prompt_tokens, giver.engine)


def ready_s(giver: Candidate, work: PrefillForecast) -> float:
    """Return the predicted seconds until the prefill endpoint has computed the prompt."""
    return giver.load.pending_prefill_s + work.engine_s


def transfer_s(link: Link, target: Candidate, request: RequestView) -> float:
    """Return the predicted seconds of fetching what the decoding endpoint does not cache."""
    missing = request.prompt_tokens - target.overlap.device_tokens
    return target.engine.transfer_s(missing, link.bandwidth_bytes_per_s) * link.slowdown


def _cost_there(giver: Candidate, work: PrefillForecast, target: Candidate, request: RequestView) -> Cost:
    """Step 3: return what the prefill costs on a prefill endpoint."""
    terms: Mapping[str, float] = {
        "queue_s": giver.load.pending_prefill_s,
        "store_s": work.store_s,
        "prefill_s": work.calibrated_s,
        "transfer_s": transfer_s(target.links[giver.address], target, request),
    }
    return Cost(giver.address, sum(terms.values()), terms)


def _decoder(
    giver: Candidate,
    request: RequestView,
    candidates: Sequence[Candidate],
    params: PeriluneParams,
    rng: Random,
) -> Candidate:
    """Step 5."""
    able = [c for c in decoders(candidates) if giver.address in c.links]
    costs = [
        Cost(
            c.address,
            transfer_s(c.links[giver.address], c, request)
            + c.load.pending_prefill_s
            + slower_decode_s(c, request, params),
        )
        for c in able
    ]
    return cheapest(able, costs, rng)
