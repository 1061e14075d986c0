"""kv_linear: a × hit ratio − b × load, the linear blend that most routers ship.

Load = requests in flight / the most in flight at any candidate (0 where nobody has any). Cost = b × load − a
× hit. The weights are tuned for one traffic and wrong for the next, which is the usual complaint.
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
    Reason,
    RequestView,
)
from perilune_gateway.policy.cost import cheapest


def kv_linear(
    request: RequestView, candidates: Sequence[Candidate], params: KvLinearParams, rng: Random
) -> Decision | NeedBody:
    """The highest a × hit ratio − b × load."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    most = max(c.load.in_flight for c in candidates)
    costs = tuple(_cost(c, request, params, most) for c in candidates)
    chosen = cheapest(candidates, costs, rng)
    return Decision(chosen.address, Reason.LOWEST_COST, costs, cached_tokens=chosen.overlap.device_tokens)


def _cost(candidate: Candidate, request: RequestView, params: KvLinearParams, most: int) -> Cost:
    terms = {
        "hit_ratio": candidate.overlap.device_tokens / max(request.prompt_tokens, 1),
        "load": candidate.load.in_flight / most if most else 0.0,
    }
    score = params.hit_weight * terms["hit_ratio"] - params.load_weight * terms["load"]
    return Cost(candidate.address, -score, terms)
