"""The decision as a pure function: the policy chooses, then admission may still refuse. A session whose KV is
being handed over stays on its host whatever the policy chooses (`stay`): it would leave the KV behind. Where
endpoints only prefill, both know the others, and `split` says whether one of those prefills the prompt.

    request, candidates, policy, routing, rng ─▶ Decision | Refusal | NeedBody

The router calls it with live values, `perilune whatif` with recorded ones. Both get PolicyError from a policy
of a package that fails.
"""

from collections.abc import Callable, Sequence
from random import Random

from perilune_api.policies import PolicyParams
from perilune_api.pool import Routing
from perilune_gateway.model import NEED_BODY, Candidate, Decision, Phase, Reason, RequestView, Verdict
from perilune_gateway.policy import POLICIES
from perilune_gateway.policy.cost import cheapest_fetch, host_of
from perilune_gateway.routing import admission
from perilune_gateway.routing.disaggregation import decoders, split
from perilune_gateway.routing.pull import pull

Run = Callable[[str, RequestView, Sequence[Candidate], PolicyParams, Random], Verdict]
"""Runs the policy of a name."""


def run_policy(
    name: str, request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
) -> Verdict:
    """Return a policy's verdict as it is. Raises PolicyError."""
    return POLICIES[name](request, candidates, params, rng)


def decide(
    request: RequestView,
    candidates: Sequence[Candidate],
    policy: str,
    routing: Routing,
    rng: Random,
    run: Run = run_policy,
) -> Verdict:
    """Return the verdict of `policy`, a name in POLICIES that may differ from the one in `routing`. Raises
    PolicyError."""
    able = decoders(candidates)
    verdict = run(policy, request, able, routing.policy, rng)
    if not isinstance(verdict, Decision):
        return verdict
    verdict = stay(request, verdict, able)
    if refusal := admission.not_overloaded(able, routing.limits, request.level):
        return refusal
    late = admission.meets_slo(request, able)
    if late and request.phase is Phase.HEADERS:
        return NEED_BODY  # another endpoint's cached prefix may change the prediction
    if request.unsplit or len(able) < len(candidates):
        made = split(request, verdict, candidates, routing.disaggregation, routing.policy.perilune, rng)
        if not isinstance(made, Decision):
            return made
        verdict = made
    if late and not admission.split_meets_slo(request, verdict, able):
        return late
    return pull(request, verdict, candidates, routing.pull)


def stay(request: RequestView, decision: Decision, candidates: Sequence[Candidate]) -> Decision:
    """Return the decision for the session's host if its KV is being handed over and the host can serve it,
    else the decision as it is."""
    host = host_of(request, candidates) if request.session and request.session.awaits_kv else None
    if host is None or decision.target == host.address:
        return decision
    _, peer, cached, fetch_s, prefill_s = cheapest_fetch(host, request)
    return Decision(
        host.address,
        Reason.AWAITS_KV,
        decision.costs,
        replicate_from=peer,
        cached_tokens=cached,
        estimated_ttft_s=host.load.pending_prefill_s + fetch_s + prefill_s,
    )
