"""What becomes of a pool's canary, by the sums of all of its gateways.

    spec.routing.canary, gateways' sums, stored verdict ─▶ routing in force ─▶ the gateways' pool document
                                                        └▶ status.canary, condition CanaryPromoted

While it runs, the pool document has the canary as the spec says. Once it is promoted, the document has its
policy as the pool's, and once it is rolled back, the pool's policy alone; in both cases no canary. The spec
stays as it is, so a tool that applies it again and again finds nothing to change. The verdict is remembered
in the status, by the name of the comparison: another policy, other parameters or another share begin a new
one. A canary under which gateways die again and again is rolled back, too: its sums die with them. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from perilune_api.conditions import Reason
from perilune_api.inference_pool.status import CanaryStatus
from perilune_api.pool import Routing
from perilune_api.trial import Difference, Measure, State, Verdict, added, judge, trial_of
from perilune_operator.observe.facts import Observed

WORDS: Mapping[Measure, str] = {
    Measure.TTFT: "first tokens come",
    Measure.TPOT: "output tokens come",
    Measure.FAILURES: "requests fail",
}
UNKNOWN_SPEED = (
    " The speed of output tokens was not known and is not compared: for that, answers have to pass through"
    " the gateway (full duplex) and say how many tokens they have."
)
MOST_RESTARTS = 3
"""Restarts of gateways with which a canary is rolled back. One may have any cause."""


@dataclass(frozen=True, slots=True)
class Trying:
    """A canary, and what follows from it."""

    routing: Routing
    """The routing in force."""
    status: CanaryStatus
    reason: Reason
    message: str


def trying(routing: Routing, observed: Observed) -> Trying | None:
    """Return what becomes of the canary; None without one."""
    canary = routing.canary
    if canary is None:
        return None
    trial = trial_of(routing)
    before, restarts = _stored(observed), _restarts(observed)
    if before is not None and before.trial != trial:
        before = None
    at_first = min(before.restarts, restarts) if before else restarts
    state: State
    if before is not None and before.state is not State.RUNNING:
        state, reason, message = before.state, Reason(before.reason), before.message
    elif restarts - at_first >= MOST_RESTARTS:
        state, reason = State.ROLLED_BACK, Reason.GATEWAYS_RESTARTED
        message = (
            f"{canary.policy.name} decides no more. Under it gateways were restarted"
            f" {restarts - at_first} times: a policy that never returns is ended so."
        )
    else:
        sums = added(observed.gateway.canaries if observed.gateway else (), trial)
        verdict = judge(sums, canary)
        state, reason = verdict.state, verdict.reason
        message = _message(routing, verdict)
    if state is State.PROMOTED:
        in_force = msgspec.structs.replace(routing, policy=canary.policy, canary=None)
    elif state is State.ROLLED_BACK:
        in_force = msgspec.structs.replace(routing, canary=None)
    else:
        in_force = routing
    status = CanaryStatus(
        policy=canary.policy.name,
        state=state,
        policy_in_force=in_force.policy.name,
        trial=trial,
        reason=reason,
        message=message,
        restarts=at_first,
    )
    return Trying(in_force, status, reason, message)


def _restarts(observed: Observed) -> int:
    return sum(pod.restarts for pod in observed.pods if pod.component == "gateway")


def _stored(observed: Observed) -> CanaryStatus | None:
    """Return what the status says of the canary; None for a status without one that can be read."""
    try:
        return msgspec.convert(observed.status.get("canary"), CanaryStatus | None)
    except msgspec.ValidationError:
        return None


def _message(routing: Routing, verdict: Verdict) -> str:
    assert routing.canary is not None, "there is a canary"
    name, share = routing.canary.policy.name, routing.canary.share
    if verdict.state is State.RUNNING:
        few = " Too few sessions are known yet." if verdict.reason is Reason.TOO_FEW_SESSIONS else ""
        return f"{name} decides for {share:.3g} of the sessions, {routing.policy.name} for the others.{few}"
    told = "; ".join(_told(measure, found) for measure, found in verdict.differences.items())
    if verdict.state is State.ROLLED_BACK:
        return f"{name} decides no more. Under it {told}."
    unknown = "" if Measure.TPOT in verdict.differences else UNKNOWN_SPEED
    return f"{name} decides for all sessions. Under it {told}.{unknown}"


def _told(measure: Measure, found: Difference) -> str:
    if measure is Measure.FAILURES:
        about, low, high = (f"{100 * x:+.1f}" for x in (found.value, found.low, found.high))
        return f"{WORDS[measure]} {about} points more often ({low} to {high})"
    about, low, high = (f"{100 * (x - 1):+.0f} %" for x in found.ratios())
    return f"{WORDS[measure]} {about} later ({low} to {high})"
