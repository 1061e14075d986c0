"""The decision as a pure function: the policy chooses, then admission may still refuse.

    request, candidates, policy, routing, rng ─▶ Decision | Refusal | NeedBody

The router calls it with live values, `perilune whatif` with recorded ones.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.pool import Routing
from perilune_gateway.model import NEED_BODY, Candidate, Decision, Phase, RequestView, Verdict
from perilune_gateway.policy import POLICIES
from perilune_gateway.routing import admission


def decide(
    request: RequestView, candidates: Sequence[Candidate], policy: str, routing: Routing, rng: Random
) -> Verdict:
    """Return the verdict of `policy`, a name in POLICIES that may differ from the one in `routing`."""
    verdict = POLICIES[policy](request, candidates, routing.policy, rng)
    if not isinstance(verdict, Decision):
        return verdict
    if refusal := admission.not_overloaded(candidates, routing.limits, request.level):
        return refusal
    late = admission.meets_slo(request, candidates)
    if late and request.phase is Phase.HEADERS:
        return NEED_BODY  # another endpoint's cached prefix may change the prediction
    return late or verdict
