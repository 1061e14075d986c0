"""dynamo_product: the two loads of `dynamo` multiplied: prefill blocks × (decode blocks + 1).

A backlog then weighs more where much is decoded already, without a weight to tune. Where the whole prompt is
credited and nothing is queued the cost is 0, whatever is decoded there. Source: the selection policy proposed
to Dynamo after arXiv 2603.15202 (`router_selection_policy`), in blocks where that paper counts tokens and
requests (`lmetric`). Temperature as in `dynamo`; the prefill scale does not matter.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.policies import DynamoProductParams
from perilune_gateway.model import NEED_BODY, Candidate, Cost, Decision, NeedBody, Phase, RequestView
from perilune_gateway.policy.others.dynamo import block_terms, decide


def dynamo_product(
    request: RequestView, candidates: Sequence[Candidate], params: DynamoProductParams, rng: Random
) -> Decision | NeedBody:
    """The product of both loads."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    return decide(candidates, tuple(_cost(c, request, params) for c in candidates), params, rng)


def _cost(candidate: Candidate, request: RequestView, params: DynamoProductParams) -> Cost:
    terms = block_terms(candidate, request, params)
    return Cost(candidate.address, terms["prefill_blocks"] * (terms["decode_blocks"] + 1.0), terms)
