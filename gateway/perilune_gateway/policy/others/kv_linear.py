"""kv_linear: weighted load minus weighted hit ratio.

    cost = load_weight × load − hit_weight × hit ratio
    load = requests in flight / the largest number in flight at any candidate (0 if there are none)

Source: the linear score that many routers use. Prefer it only where its weights are tuned for the traffic:
weights that suit one traffic are usually wrong for another.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.policies import KvLinearParams
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


def kv_linear(
    request: RequestView, candidates: Sequence[Candidate], params: KvLinearParams, rng: Random
) -> Decision | NeedBody:
    """Choose by weighted load and hit ratio."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    most = max(c.load.in_flight for c in candidates)
    costs = tuple(_cost(c, request, params, most) for c in candidates)
    return lowest_cost(candidates, costs, rng)


def _cost(candidate: Candidate, request: RequestView, params: KvLinearParams, most: int) -> Cost:
    terms = {
        "hit_ratio": candidate.overlap.device_tokens / max(request.prompt_tokens, 1),
        "load": candidate.load.in_flight / most if most else 0.0,
    }
    score = params.hit_weight * terms["hit_ratio"] - params.load_weight * terms["load"]
    return Cost(candidate.address, -score, terms)
