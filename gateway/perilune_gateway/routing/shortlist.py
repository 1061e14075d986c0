"""Chooses the endpoints of a large pool at which a decision looks closely, so that it decides as among all.

    every endpoint ─▶ its cost in seconds, without candidates ─▶ the cheapest, the deepest holders, the host

1. Above `ABOVE` endpoints each one's cost is computed as the policy perilune does (policy/cost.py), from its
   load and what its device caches, but without making a candidate of it.
2. The `CHEAPEST` stay, and of those that cost nearly as little the ones with the fewest sessions, because
   that is how equal costs are decided.
3. The `DEEPEST` holders stay, from which KV may be fetched or which may fetch the least, and what is named:
   the session's host, and where planned moves lead.

What a fetch saves is not in the costs of step 1, so of holders in host memory only the deepest are looked at.
What is kept of a decision does not grow with the pool. Only for policies that choose by cost in seconds:
another one might choose an endpoint that is not here.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import nlargest, nsmallest

from perilune_api.policies import PeriluneParams, PolicyName
from perilune_gateway.model import EngineModel, Overlap
from perilune_gateway.policy.cost import delay_s, nearly
from perilune_gateway.state.fleet import EndpointView

ABOVE = 128
"""With so many endpoints or fewer, a decision looks at all."""
CHEAPEST, DEEPEST = 32, 16
BY_COST = frozenset({PolicyName.PERILUNE})
"""Policies that choose by cost in seconds."""


def shortlist(
    eligible: Sequence[EndpointView],
    *,
    tokens: int,
    output_tokens: int,
    overlaps: Mapping[str, Overlap],
    named: Collection[str],
    engine_of: Callable[[str], EngineModel],
    params: PeriluneParams,
) -> Sequence[EndpointView]:
    """Return the endpoints to look at, in the pool's order. `eligible`: at least one. `tokens`: those of the
    prompt. `overlaps`: what each endpoint caches of it; those without any are absent. `named`: addresses that
    stay, whatever they cost."""
    output = min(output_tokens or params.expected_output_tokens, params.expected_output_tokens)
    weight, none = params.interference_weight, Overlap()
    prefills: dict[tuple[int, int], tuple[float, float]] = {}
    alone: dict[int, tuple[EngineModel, float]] = {}  # with the engine, so that no other one gets its id
    costs: list[float] = []
    for view in eligible:
        address, load = view.endpoint.address, view.load
        engine = engine_of(address)
        device = overlaps.get(address, none).device_tokens
        prefill = prefills.get(key := (id(engine), device))
        if prefill is None:
            prefill_s = engine.prefill_s(tokens - device, device)
            prefill = prefills[key] = prefill_s, weight * delay_s(prefill_s, device, tokens)
            alone[id(engine)] = engine, engine.decode_step_s(1, tokens)
        cost_s = load.pending_prefill_s + prefill[0]
        if load.in_flight:
            together_s = engine.decode_step_s(load.in_flight + 1, load.active_kv_tokens + tokens)
            cost_s += load.in_flight * prefill[1] + output * (together_s - alone[id(engine)][1])
        costs.append(cost_s)
    cheapest = nsmallest(CHEAPEST, range(len(costs)), costs.__getitem__)
    limit_s = nearly(costs[cheapest[0]])
    equal = (at for at, cost_s in enumerate(costs) if cost_s <= limit_s)
    fewest = nsmallest(CHEAPEST, equal, lambda at: eligible[at].load.sessions)
    deepest = nlargest(DEEPEST, overlaps, lambda address: max(overlaps[address][:2]))
    places, addresses = {*cheapest, *fewest}, {*deepest, *named}
    return [view for at, view in enumerate(eligible) if at in places or view.endpoint.address in addresses]
