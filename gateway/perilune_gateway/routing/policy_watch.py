"""Watches the policies of packages, so that a bad one costs a request nothing but a little time.

    standing(asked) ─▶ the policy that decides ─▶ run, timed ─▶ Verdict
                                                    └─ PolicyError ─▶ failed ─▶ the policy in its place

- A policy that raises or answers nonsense does not decide that request: the pool's own does, or Perilune's
  default if that is the pool's or cannot decide either. Both have the pool's parameters. The canary's policy
  is watched for itself, also where it is the pool's with other parameters.
- A policy whose last WATCHED calls had too many faults of one kind (SWITCHED_OFF) is switched off, until the
  pool's policy or parameters change or the gateway restarts. So is one that the pool names and nobody
  brings, or whose parameters are wrong.
- Time can be measured only after a policy has returned. One that never returns stops the whole gateway; its
  liveness probe then ends it.

Perilune's own policies run as they are. Costs a reading of the clock twice for each decision by a package.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from perilune_api.policies import PolicyChoice, PolicyParams
from perilune_gateway.model import Candidate, RequestView, Verdict
from perilune_gateway.policy import FALLBACK, OURS, FaultKind, Policies, PolicyError
from perilune_gateway.policy.registry import AT_CANARY, AT_POOL
from perilune_gateway.state.facts import PolicyFailed, Tell

log = logging.getLogger(__name__)

BOUND_S = 0.005
"""Seconds that a policy may take for one decision."""
WATCHED = 100
"""How many of a policy's last calls count."""
SWITCHED_OFF: Mapping[FaultKind, int] = {FaultKind.RAISED: 5, FaultKind.NONSENSE: 5, FaultKind.SLOW: 50}
"""Faults among them with which a policy is switched off. A single pause of the machine makes one call slow,
and is no fault of the policy's."""


class Asked(NamedTuple):
    """A policy that may decide, and whose parameters it gets."""

    policy: str
    by_canary: bool = False
    """Whether it gets the canary's parameters; else the pool's."""

    def __str__(self) -> str:
        return f"{self.policy} of the canary" if self.by_canary else self.policy


DEFAULT = Asked(FALLBACK.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """How a policy of a package does, for health."""

    name: str
    """With whose parameters, if that is the canary."""
    off: str
    """Why it is switched off; empty if it decides."""
    in_place: str
    """The policy that decides in its place where it does not."""
    faults: Mapping[FaultKind, int]
    """Faults by kind since the pool's policy changed or the gateway started."""
    last: str
    """What was wrong with its last call that failed; empty if none did."""


@dataclass(slots=True)
class _Watched:
    """What is known of one policy."""

    recent: deque[FaultKind | None] = field(default_factory=lambda: deque(maxlen=WATCHED))
    faults: Counter[FaultKind] = field(default_factory=Counter)
    last: str = ""
    off: str = ""


class PolicyWatch:
    """The policies of one pool, as the router runs them."""

    def __init__(self, policies: Policies, stopwatch: Callable[[], float], tell: Tell) -> None:
        self._policies = policies
        self._stopwatch = stopwatch
        self._tell = tell
        self._choices: tuple[PolicyChoice, ...] = ()
        self._own = DEFAULT
        self._watched: dict[Asked, _Watched] = {}

    def configure(self, own: PolicyChoice, canary: PolicyChoice | None = None) -> None:
        """Take over the policies and parameters that decide, the pool's own and the canary's. If they
        changed, all policies are on again, except those that cannot run."""
        choices = (own, canary) if canary else (own,)
        if choices == self._choices:
            return
        self._choices, self._own, self._watched = choices, Asked(own.name), {}
        for at, by_canary, choice in zip((AT_POOL, AT_CANARY), (False, True), choices, strict=False):
            for name, wrong in self._policies.wrong(choice, at).items():
                asked = Asked(name, by_canary)
                self._of(asked).off = wrong
                log.error("policy not used policy=%s error=%s", asked, wrong)

    def standing(self, asked: Asked) -> Asked:
        """Return the policy that decides where one is asked for: another one if that is off."""
        watched = self._watched.get(asked)
        return self.in_place(asked) if watched and watched.off else asked

    def in_place(self, asked: Asked) -> Asked:
        """Return the policy that decides where another one does not: the pool's own if it can, else the
        default, which runs always."""
        return DEFAULT if asked == self._own else self.standing(self._own)

    def run(
        self,
        by_canary: bool,
        name: str,
        request: RequestView,
        candidates: Sequence[Candidate],
        params: PolicyParams,
        rng: Random,
    ) -> Verdict:
        """Return the policy's verdict, with the parameters of the canary or the pool's. Raises PolicyError
        for one of a package."""
        policy = self._policies[name]
        if name in OURS:
            return policy(request, candidates, params, rng)
        began = self._stopwatch()
        verdict = policy(request, candidates, params, rng)
        took_s, asked = self._stopwatch() - began, Asked(name, by_canary)
        if took_s > BOUND_S:
            self._fault(asked, FaultKind.SLOW, f"it took more than {BOUND_S * 1000:g} ms")
        else:
            self._of(asked).recent.append(None)
        return verdict

    def failed(self, asked: Asked, fault: PolicyError) -> None:
        """Record that a policy gave no answer that counts."""
        self._fault(asked, fault.kind, str(fault), fault.__cause__)

    def states(self) -> Sequence[PolicyState]:
        """Return how the policies do that are off or had faults."""
        return [
            PolicyState(
                name=str(asked),
                off=watched.off,
                in_place=self.in_place(asked).policy,
                faults=dict(watched.faults),
                last=watched.last,
            )
            for asked, watched in self._watched.items()
            if watched.off or watched.faults
        ]

    def _fault(self, asked: Asked, kind: FaultKind, what: str, cause: BaseException | None = None) -> None:
        watched = self._of(asked)
        watched.recent.append(kind)
        watched.faults[kind] += 1
        watched.last = what
        if watched.faults[kind] == 1:
            log.warning("policy failed policy=%s kind=%s error=%s", asked, kind, what, exc_info=cause)
        found = watched.recent.count(kind)
        if not watched.off and found >= SWITCHED_OFF[kind]:
            watched.off = f"{found} of its last {len(watched.recent)} decisions were bad ({kind}: {what})"
            log.error(
                "policy switched off policy=%s cause=%s in_place=%s",
                asked,
                watched.off,
                self.in_place(asked).policy,
            )
        self._tell(PolicyFailed(asked.policy, kind))

    def _of(self, asked: Asked) -> _Watched:
        return self._watched.setdefault(asked, _Watched())
