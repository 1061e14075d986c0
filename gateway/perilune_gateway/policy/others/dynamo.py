"""dynamo: the fewest KV blocks to prefill and to decode.

    cost   = prefill_load_scale × max(pending prefill + prompt − credit, 0) + decode       (in KV blocks)
    credit = device_credit × blocks on the device + host_credit × blocks only in host memory
             + disk_credit × blocks only in the store
    decode = blocks of the requests in flight + blocks of this prompt

With temperature 0 the lowest cost wins, and equal costs are decided randomly. Above 0 the choice is random,
weighted by softmax over the negative costs, normalised to 0 … 1. Overlaps count whole blocks, lengths are
fractional.

Source: NVIDIA Dynamo's KV router, `lib/kv-router/src/scheduling/selector` and "Routing Concepts", with its
defaults. Prefer it to compare with Dynamo, or where its tuned weights are known.
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
    """Choose by the sum of prefill and decode blocks."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    costs = tuple(cost(c, request, params) for c in candidates)
    return decide(candidates, costs, params, rng)


def cost(candidate: Candidate, request: RequestView, params: DynamoParams) -> Cost:
    terms = block_terms(candidate, request, params)
    total = params.prefill_load_scale * terms["prefill_blocks"] + terms["decode_blocks"]
    return Cost(candidate.address, total, terms)


def block_terms(candidate: Candidate, request: RequestView, params: DynamoCredits) -> dict[str, float]:
    """Return the prefill blocks after credit, the decode blocks, and the credit."""
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
    """Choose the lowest cost, or randomly by softmax if the temperature is above 0."""
    if params.temperature > 0:
        weights = softmax([c.total for c in costs], params.temperature)
        (chosen,) = rng.choices(candidates, weights)
        reason = Reason.SAMPLED
    else:
        chosen, reason = cheapest(candidates, costs, rng), Reason.LOWEST_COST
    return Decision(chosen.address, reason, costs, cached_tokens=chosen.overlap.device_tokens)


def softmax(costs: Sequence[float], temperature: float) -> list[float]:
    """Return the weight of each cost: 1 for the lowest, exp(−1 / temperature) for the highest."""
    low, high = min(costs), max(costs)
    if low == high:
        return [1.0] * len(costs)
    return [exp((low - cost) / ((high - low) * temperature)) for cost in costs]
