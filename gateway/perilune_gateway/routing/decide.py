"""The decision itself, a pure function: the policy chooses, then admission may still refuse.

    request, candidates, policy, routing, dice ─▶ Decision | Refusal | NeedBody

The router calls it on live values, `perilune whatif` on recorded ones: one code for both.
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
    """`policy`: a name in POLICIES, not always the one that `routing` names."""
    verdict = POLICIES[policy](request, candidates, routing.policy, rng)
    if not isinstance(verdict, Decision):
        return verdict
    if refusal := admission.not_overloaded(candidates, routing.limits, request.level):
        return refusal
    late = admission.meets_slo(request, candidates)
    if late and request.phase is Phase.HEADERS:
        return NEED_BODY  # what others hold of the prompt may tell otherwise
    return late or verdict
