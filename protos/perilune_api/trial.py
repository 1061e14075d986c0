"""The comparison of a canary policy with the pool's, judged as often as one likes while requests come in.

    each request's end ─▶ the `Tally` of its session's bucket ─▶ `added` over gateways ─▶ `judge` ─▶ Verdict

1. A hash puts every session into one arm and into one of BUCKETS buckets, at every gateway alike. All that is
   kept are sums for each arm and bucket, so gateways' sums may be added, and a session counts in one bucket
   wherever its requests went.
2. A measure is a ratio of two sums, such as failed requests / requests. How much it varies is estimated from
   bucket to bucket, since requests of one session are alike and sessions are not.
3. The difference of the arms has a confidence sequence: with the probability 1 − ALPHA the true difference
   is within the bounds at all times, so one may look after every request and stop when one likes. It is the
   mixture sequential probability ratio test (Robbins 1970; Johari, Pekelis and Walsh, "Always valid
   inference", 2015) with one-sided normal mixtures and the closed bound of Howard, Ramdas, McAuliffe and
   Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", 2021. It holds for means of many
   sessions (Waudby-Smith et al., "Time-uniform central limit theory", 2021), so nothing is judged before
   LEAST_BUCKETS buckets of both arms have requests. tests/api/test_trial.py counts the false alarms.
4. A canary is promoted when every measure is shown to be worse by less than its tolerance, and rolled back
   when one is shown to be worse. The three tests of a roll-back share ALPHA.

Times count as logarithms, so their difference is a ratio of typical (geometric mean) times, and a few very
long ones do not decide alone. The arms share endpoints: what one does to queues, the other feels, so a
canary's difference is smaller than that of two pools.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, log, sqrt
from typing import NamedTuple

import msgspec

from perilune_api.conditions import Reason
from perilune_api.pool import Canary, Routing

BUCKETS = 64
LEAST_BUCKETS = 48
"""Buckets with requests, of each arm, before anything is judged: those of about 90 sessions."""
ALPHA = 0.05
"""Probability with which a canary that is as good as the pool's policy is ever rolled back."""
LEAST_S = 1e-4
"""Shorter times count as this long."""


class Arm(StrEnum):
    """By which policy a session is decided."""

    POOL = "pool"
    CANARY = "canary"


class Tally(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """Sums over the ended requests of one bucket."""

    sessions: int = 0
    """Number of sessions that began."""
    requests: int = 0
    failed: int = 0
    """Number of those that got no whole answer for a reason that clients cannot cause, were refused, or were
    decided by another policy because this one failed."""
    first_tokens: int = 0
    ttft_log: float = 0.0
    """Sum of the logarithms of their seconds to the first token."""
    streams: int = 0
    """Number of answers whose length is known and that have more than one token."""
    tpot_log: float = 0.0
    """Sum of the logarithms of their seconds per output token."""
    prompt_tokens: int = 0
    """Prompt tokens of the requests whose cached tokens are known."""
    cached_tokens: int = 0

    def ended(self, *, failed: bool) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.failed += failed

    def first_token(self, seconds: float) -> None:
        self.first_tokens += 1
        self.ttft_log += log(max(seconds, LEAST_S))

    def output(self, seconds_per_token: float) -> None:
        self.streams += 1
        self.tpot_log += log(max(seconds_per_token, LEAST_S))

    def prompt(self, tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens += tokens
        self.cached_tokens += min(tokens, cached_tokens)


Arms = dict[Arm, list[Tally]]
"""The tallies of each arm, by bucket."""


class Sums(msgspec.Struct):
    """All that one gateway, or several, know of one trial."""

    trial: str
    """Which comparison it is, see `trial_of`."""
    arms: Arms

    @classmethod
    def begin(cls, trial: str) -> Sums:
        return cls(trial, {arm: [Tally() for _ in range(BUCKETS)] for arm in Arm})

    def whole(self, arm: Arm) -> Tally:
        """Return the sums over all buckets."""
        return _added(self.arms[arm])

    @property
    def is_sound(self) -> bool:
        """Whether another program's sums have the shape of ours."""
        return set(self.arms) == set(Arm) and all(len(tallies) == BUCKETS for tallies in self.arms.values())


def added(each: Iterable[Sums], trial: str) -> Sums:
    """Return the sums of several gateways of one trial; those of another trial do not count."""
    made = Sums.begin(trial)
    for sums in each:
        if sums.trial == trial and sums.is_sound:
            for arm in Arm:
                made.arms[arm] = [_added(pair) for pair in zip(made.arms[arm], sums.arms[arm], strict=True)]
    return made


def _added(tallies: Iterable[Tally]) -> Tally:
    columns = zip(*(msgspec.structs.astuple(tally) for tally in tallies), strict=True)
    return Tally(**dict(zip(Tally.__struct_fields__, map(sum, columns), strict=True)))


def trial_of(routing: Routing) -> str:
    """Return the name of the comparison that the pool document asks for: another one when a policy, a
    parameter of it or the share is another. Other policies' blocks do not count. Empty without a canary."""
    if (canary := routing.canary) is None:
        return ""
    choices = (routing.policy, canary.policy)
    what = [canary.share, *((choice.name, choice.parameters) for choice in choices)]
    return hashlib.sha256(msgspec.json.encode(what, order="deterministic")).hexdigest()[:12]


# -- measures ------------------------------------------------------------------------------------------


class Measure(StrEnum):
    """What the arms are compared by. Lower is better."""

    TTFT = "ttft"
    TPOT = "tpot"
    FAILURES = "failures"


class _How(NamedTuple):
    """How a measure is taken from sums."""

    part: Callable[[Tally], float]
    whole: Callable[[Tally], int]
    usual: float
    """The size of the differences that are found soonest."""
    tolerance: Callable[[Canary], float]
    worse: Reason
    unseen: float = 0.0
    """Added to the variance of each arm's sum, for what has not happened yet."""


HOW: Mapping[Measure, _How] = {
    Measure.TTFT: _How(
        part=lambda t: t.ttft_log,
        whole=lambda t: t.first_tokens,
        usual=0.1,
        tolerance=lambda canary: log(1 + canary.tolerance),
        worse=Reason.SLOWER_FIRST_TOKENS,
    ),
    Measure.TPOT: _How(
        part=lambda t: t.tpot_log,
        whole=lambda t: t.streams,
        usual=0.1,
        tolerance=lambda canary: log(1 + canary.tolerance),
        worse=Reason.SLOWER_OUTPUT,
    ),
    Measure.FAILURES: _How(
        part=lambda t: t.failed,
        whole=lambda t: t.requests,
        usual=0.02,
        tolerance=lambda canary: canary.tolerance / 10,
        worse=Reason.MORE_FAILURES,
        unseen=1.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The canary's measure minus the pool's policy's: of times as logarithms, of failures as shares."""

    value: float
    low: float
    high: float

    def ratios(self) -> tuple[float, float, float]:
        """Return how many times as long the canary takes: about, at least, at most."""
        return exp(self.value), exp(self.low), exp(self.high)


def difference(sums: Sums, measure: Measure, alpha: float = ALPHA / len(Measure)) -> Difference | None:
    """Return the difference with its bounds, of which each is wrong, ever, with the probability `alpha`. None
    while too few sessions are known."""
    how = HOW[measure]
    canary, pool = (_mean(sums.arms[arm], how) for arm in (Arm.CANARY, Arm.POOL))
    if canary is None or pool is None:
        return None
    value, variance = canary[0] - pool[0], canary[1] + pool[1]
    spread = variance + how.usual**2
    # The one-sided normal mixture of Howard et al.; 1 / variance is the information that has come in.
    reach = sqrt(2 * variance * spread / how.usual**2 * log(1 + sqrt(spread / variance) / (2 * alpha)))
    return Difference(value, value - reach, value + reach)


def _mean(tallies: Sequence[Tally], how: _How) -> tuple[float, float] | None:
    """Return an arm's ratio of sums and its variance, by the differences between buckets; None while too few
    have requests."""
    rows = [(how.part(tally), how.whole(tally)) for tally in tallies]
    if sum(whole > 0 for _, whole in rows) < LEAST_BUCKETS:
        return None
    whole = sum(n for _, n in rows)
    mean = sum(part for part, _ in rows) / whole
    scattered = sum((part - mean * n) ** 2 for part, n in rows) * BUCKETS / (BUCKETS - 1)
    return mean, max(scattered + how.unseen, 1e-12) / whole**2


# -- the verdict ---------------------------------------------------------------------------------------


class State(StrEnum):
    """What has become of a canary."""

    RUNNING = "Running"
    PROMOTED = "Promoted"
    """It decides for all sessions."""
    ROLLED_BACK = "RolledBack"
    """The pool's policy decides for all sessions."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the sums say of a canary."""

    state: State
    reason: Reason
    differences: Mapping[Measure, Difference] = field(default_factory=dict)
    """Of the measures of which enough is known."""


def judge(sums: Sums, canary: Canary) -> Verdict:
    """Return whether the canary may be promoted or has to be rolled back. Output tokens count only where
    engines report how many there are."""
    found = {m: made for m in Measure if (made := difference(sums, m)) is not None}
    if Measure.FAILURES not in found:
        return Verdict(State.RUNNING, Reason.TOO_FEW_SESSIONS, found)
    worst = [m for m, made in found.items() if made.high >= HOW[m].tolerance(canary)]
    if not worst and Measure.TTFT in found:
        return Verdict(State.PROMOTED, Reason.NO_WORSE, found)
    for measure in worst:
        if found[measure].low > 0:
            return Verdict(State.ROLLED_BACK, HOW[measure].worse, found)
    return Verdict(State.RUNNING, Reason.COMPARING, found)
