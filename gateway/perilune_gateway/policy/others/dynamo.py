"""dynamo: prefill blocks to do + decode blocks held, in KV blocks (NVIDIA Dynamo's KV router, at present).

    cost   = prefill_load_scale × max(active_prefill + prompt − credit, 0) + decode
    credit = c × device + 0.75 × what only the host holds + 0.25 × what only the store holds

Decode blocks: those of the requests in flight there and this prompt's. Temperature 0: the lowest cost, a draw
among equals; above: softmax over −cost, the costs normalised to 0 … 1. Overlaps are whole blocks, lengths are
not rounded. An endpoint of which nothing is known counts as empty.
Source: Dynamo, `lib/kv-router/src/scheduling/selector`, "Routing Concepts"; defaults as there.
"""

from collections.abc import Sequence
from math import exp
from random import Random

from perilune_api.policies import DynamoCredits, DynamoParams
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
from perilune_gateway.policy.cost import blocks, cheapest, held_tokens


def dynamo(
    request: RequestView, candidates: Sequence[Candidate], params: DynamoParams, rng: Random
) -> Decision | NeedBody:
    """The sum of both loads."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    costs = tuple(cost(c, request, params) for c in candidates)
    return decide(candidates, costs, params, rng)


def cost(candidate: Candidate, request: RequestView, params: DynamoParams) -> Cost:
    terms = block_terms(candidate, request, params)
    total = params.prefill_load_scale * terms["prefill_blocks"] + terms["decode_blocks"]
    return Cost(candidate.address, total, terms)


def block_terms(candidate: Candidate, request: RequestView, params: DynamoCredits) -> dict[str, float]:
    """Prefill blocks after credit, decode blocks, and the credit."""
    overlap, size = candidate.overlap, request.block_size
    device = overlap.device_tokens // size
    host = held_tokens(candidate) // size - device
    disk = max(0, overlap.store_tokens // size - device - host)
    credit = params.device_credit * device + params.host_credit * host + params.disk_credit * disk
    prefill = blocks(candidate.load.pending_prefill_tokens + request.prompt_tokens, request)
    return {
        "prefill_blocks": max(prefill - credit, 0.0),
        "decode_blocks": blocks(candidate.load.active_kv_tokens + request.prompt_tokens, request),
        "credit_blocks": credit,
    }


def decide(
    candidates: Sequence[Candidate], costs: tuple[Cost, ...], params: DynamoCredits, rng: Random
) -> Decision:
    """Lowest cost, or a draw by softmax."""
    if params.temperature > 0:
        weights = softmax([c.total for c in costs], params.temperature)
        (chosen,) = rng.choices(candidates, weights)
        reason = Reason.SAMPLED
    else:
        chosen, reason = cheapest(candidates, costs, rng), Reason.LOWEST_COST
    return Decision(chosen.address, reason, costs, cached_tokens=chosen.overlap.device_tokens)


def softmax(costs: Sequence[float], temperature: float) -> list[float]:
    """Weights of the lower costs are the higher: the costs are normalised to 0 … 1 first, so the lowest
    weighs 1 and the highest exp(−1 / temperature); equal costs weigh the same."""
    low, high = min(costs), max(costs)
    if low == high:
        return [1.0] * len(costs)
    return [exp((low - cost) / ((high - low) * temperature)) for cost in costs]
