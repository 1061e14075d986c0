"""dynamo_product: the two loads of `dynamo`, multiplied.

    cost = prefill blocks × (decode blocks + 1)

Terms and temperature are those of `dynamo`. The cost is 0 where the whole prompt is cached and nothing is
queued, whatever the decode load.

Source: the selection policy proposed to NVIDIA Dynamo after arXiv 2603.15202 (`router_selection_policy`). It
counts blocks where that paper counts tokens and requests (`lmetric`). Prefer it to `dynamo` where no tuned
weights are known: a product needs none.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.policies import DynamoProductParams
from perilune_gateway.model import NEED_BODY, Candidate, Cost, Decision, NeedBody, Phase, RequestView
from perilune_gateway.policy.others.dynamo import block_terms, decide


def dynamo_product(
    request: RequestView, candidates: Sequence[Candidate], params: DynamoProductParams, rng: Random
) -> Decision | NeedBody:
    """Choose by the product of prefill and decode blocks."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    return decide(candidates, tuple(_cost(c, request, params) for c in candidates), params, rng)


def _cost(candidate: Candidate, request: RequestView, params: DynamoProductParams) -> Cost:
    terms = block_terms(candidate, request, params)
    return Cost(candidate.address, terms["prefill_blocks"] * (terms["decode_blocks"] + 1.0), terms)
