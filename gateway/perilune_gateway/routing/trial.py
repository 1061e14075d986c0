"""The canary of one pool: which sessions it decides for, and how their requests end.

    session ─hash─▶ `place`: arm and bucket ─▶ decided by the arm's policy ─▶ counts in the bucket's tally

The hash is of the tenant, the session and the pool, so every replica of the gateway puts a session into the
same arm, and another share moves only the sessions whose numbers lie between the two shares. A session is
bound to its endpoint whatever its arm: another policy finds it there, and decides from there.

perilune_api/trial.py says how the arms are compared. On Kubernetes the operator does that with the sums of
all gateways, and takes the canary out of the pool document when it is over. Elsewhere each gateway does it
for itself (`decides`), at every `tick`, until it ends.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from perilune_api.pool import Pool
from perilune_api.trial import BUCKETS, Arm, State, Sums, Tally, Verdict, judge, trial_of
from perilune_gateway.model import Identity, Outcome
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.request_facts import Decided, Ended, FirstToken, Recorded

log = logging.getLogger(__name__)

JUDGED_EVERY_S = 1.0
FAILED = 500
SEPARATOR = "\0"


class Place(NamedTuple):
    """Where a session's requests count."""

    arm: Arm
    tally: Tally


def arm_and_bucket(pool: str, name: str, share: float) -> tuple[Arm, int]:
    """Return the arm and the bucket of a session, by independent parts of one hash."""
    number = xxh3_64_intdigest(f"{pool}{SEPARATOR}{name}".encode(errors="surrogatepass"))
    arm = Arm.CANARY if (number >> 11) / 2**53 < share else Arm.POOL
    return arm, number % BUCKETS


class Trial:
    """The trial of one pool's canary, and a listener of its requests."""

    def __init__(self, *, decides: bool = False) -> None:
        """`decides`: whether this gateway alone promotes the canary or rolls it back."""
        self.sums = Sums.begin("")
        self._decides = decides
        self._ended: Verdict | None = None
        self._judged_at = 0.0

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document. Another comparison begins without any sums."""
        routing = pool.spec.routing
        self._pool = f"{pool.metadata.namespace}/{pool.metadata.name}"
        self.canary = routing.canary
        if (trial := trial_of(routing)) != self.sums.trial:
            self.sums, self._ended = Sums.begin(trial), None

    # -- which policy ------------------------------------------------------------------------------

    def place(self, identity: Identity, seed: int) -> Place | None:
        """Return where the request counts. None without a canary, or when its trial is over. `seed`: a number
        that stands for the session of a request without one."""
        if self.canary is None or self._ended:
            return None
        name = f"{identity.tenant}{SEPARATOR}{identity.session_id}" if identity.session_id else f"{seed}"
        arm, bucket = arm_and_bucket(self._pool, name, self.canary.share)
        return Place(arm, self.sums.arms[arm][bucket])

    def by_canary(self, place: Place | None) -> bool:
        """Return whether the canary's policy decides for a request with that place."""
        if place is None:
            return self._ended is not None and self._ended.state is State.PROMOTED
        return place.arm is Arm.CANARY

    # -- how it goes -------------------------------------------------------------------------------

    @property
    def verdict(self) -> Verdict | None:
        """What is known of the canary here; None without one."""
        return None if self.canary is None else self._ended or judge(self.sums, self.canary)

    def tick(self, now: float) -> None:
        """Judge, if this gateway does."""
        if not self._decides or self.canary is None or self._ended or now - self._judged_at < JUDGED_EVERY_S:
            return
        self._judged_at, verdict = now, judge(self.sums, self.canary)
        if verdict.state is not State.RUNNING:
            self._ended = verdict
            name = self.canary.policy.name
            log.warning("canary over policy=%s state=%s reason=%s", name, verdict.state, verdict.reason)

    def on_recorded(self, fact: Recorded) -> None:
        """Count a refusal after a policy was asked."""
        if fact.tally:
            fact.tally.ended(failed=True)

    def on_decided(self, fact: Decided) -> None:
        request = fact.request
        if request.tally and (request.session is None or request.session.turns == 1):
            request.tally.sessions += 1

    def on_first_token(self, fact: FirstToken) -> None:
        if fact.request and fact.request.tally:
            fact.request.tally.first_token(fact.seconds)

    def on_ended(self, fact: Ended) -> None:
        request, tally = fact.request, fact.request.tally
        if tally is None:
            return
        failed = fact.ending.outcome is Outcome.FAILED or request.status >= FAILED or request.fell_back
        tally.ended(failed=failed)
        if not fact.answered:
            return
        cached = request.cached_tokens
        tally.prompt(request.prompt_tokens, request.forecast.held_tokens if cached is None else cached)
        if (per_token_s := _per_token_s(request, fact.now)) is not None:
            tally.output(per_token_s)


def _per_token_s(request: InFlight, now: float) -> float | None:
    """Return the seconds of each output token after the first; None if they are not known."""
    if not request.first_token_at or request.output_tokens < 2:
        return None
    return (now - request.first_token_at) / (request.output_tokens - 1)
