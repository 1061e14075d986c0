"""dynamo_v1: cached share of the prompt, minus KV usage, minus waiting requests.

    cost = KV usage + waiting / max(waiting) − overlap_weight × overlap_blocks × block_size / prompt_tokens

The lowest cost wins, and equal costs are decided randomly. The term for waiting requests is 0 if no request
waits anywhere. KV usage and waiting requests come from engine metrics, so they are some seconds old; an
endpoint that has not reported counts as empty.

Source: the first published cost of NVIDIA Dynamo's KV router. Prefer it only to compare with that version.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.policies import DynamoV1Params
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    NeedBody,
    Phase,
    RequestView,
)
from perilune_gateway.policy.cost import lowest_cost


def dynamo_v1(
    request: RequestView, candidates: Sequence[Candidate], params: DynamoV1Params, rng: Random
) -> Decision | NeedBody:
    """Choose by overlap, KV usage and waiting requests."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    most_waiting = max(c.load.waiting for c in candidates)
    costs = tuple(_cost(c, request, params, most_waiting) for c in candidates)
    return lowest_cost(candidates, costs, rng)


def _cost(candidate: Candidate, request: RequestView, params: DynamoV1Params, most_waiting: int) -> Cost:
    overlap_blocks, load = candidate.overlap.device_tokens // request.block_size, candidate.load
    terms = {
        "overlap": overlap_blocks * request.block_size / max(request.prompt_tokens, 1),
        "kv_usage": load.kv_usage,
        "waiting": load.waiting / most_waiting if most_waiting else 0.0,
    }
    logit = params.overlap_weight * terms["overlap"] - terms["kv_usage"] - terms["waiting"]
    return Cost(candidate.address, -logit, terms)
