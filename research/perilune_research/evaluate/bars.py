"""The bars: goals that our own policy and the simulator have to reach.

    findings ──judge──▶ Bar: checks (value, interval, limit) ──▶ met | missed

A bar is met if the value of every check is on the right side of its limit. It is clear if the whole intervals
that decide it are on one side. Values are not rounded before they are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from enum import StrEnum
from itertools import product
from math import inf
from typing import NamedTuple

import msgspec

from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Profile
from perilune_research.evaluate.findings import Estimate, Findings, estimate
from perilune_research.evaluate.plan import BAR_LOADS, OURS, STAY, Point
from perilune_research.simulator.points import MEASURED


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One value with its 95 % interval and its limit."""

    what: str
    value: float
    low: float
    high: float
    limit: float
    at_most: bool
    """Whether the limit is the highest allowed value, not the lowest."""
    unit: str = ""
    """Unit of value and limit as text, such as % or ×; empty for none."""
    detail: str = ""

    @property
    def met(self) -> bool:
        """Whether the value is on the right side of the limit."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def clear(self) -> bool:
        """Whether the whole interval lies on the same side of the limit as the value."""
        worst, best = (self.high, self.low) if self.at_most else (self.low, self.high)
        edge = worst if self.met else best
        return (edge <= self.limit if self.at_most else edge >= self.limit) == self.met


class Bar(msgspec.Struct, frozen=True):
    """One goal and its checks."""

    name: str
    goal: str
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Verdict:
        return Verdict.MET if all(check.met for check in self.checks) else Verdict.MISSED

    @property
    def clear(self) -> bool:
        """Whether the verdict is clear: at least one check is clearly missed, or all are clearly met."""
        if self.verdict is Verdict.MISSED:
            return any(check.clear for check in self.checks if not check.met)
        return all(check.clear for check in self.checks)


def judge(findings: Findings, names: Container[str] | None = None) -> tuple[Bar, ...]:
    """Judge all bars, or those in `names`. Raises KeyError if a study that they need was not simulated."""
    return tuple(
        Bar(name, goal, tuple(checks(findings)))
        for name, (goal, checks) in {
            "P1": ("TTFT p90 at R over its floor: ≤ 1.25 with a shared store, ≤ 1.6 without", _regret),
            "P2": (
                "against the best other policy at R/2, R and 1.25 R: no metric more than 2 % worse, at least"
                " 7 of 10 strictly better",
                _dominance,
            ),
            "P3": (
                "SLO capacity: ≥ 1.10 × lmetric_plus_one, 1.5 × dynamo, 1.7 × sticky, 10 × round_robin",
                _capacity,
            ),
            "P4": (
                "with wrong beliefs about links, TTFT p90 ≤ 1.05 × the same policy without migration",
                _links,
            ),
            "P5": ("APC over the intra-session ceiling: ≥ 0.97 at R/2, 0.95 at R, 0.90 at 1.25 R", _apc),
            "P6": ("wall-clock factor at R: ≤ 1.05, and ≥ 1.4 for lmetric", _coupling),
            "P7": ("migrations: no thrash, accuracy ≥ 80 %, at most 3 % of turns move", _migrations),
            "P8": (
                "simulator: ≤ 10 % off every measured H20 point, ≥ 2,000 × real time per core at 8 endpoints",
                _simulator,
            ),
            "door": (
                "session admission, against the same policy without it: output tokens per second ≥ 1.1 × at"
                " 1.25 R and 1.3 × at 1.6 R, TTFT p90 of later turns ≤ 2 × that at R without it, completion"
                " of sessions from their arrival p90 better and p99 at most 10 % worse; at R/2 and R TTFT p90"
                " at most 2 % worse with any seed",
                _door,
            ),
        }.items()
        if names is None or name in names
    )


def _check(
    what: str, found: Estimate, limit: float, *, at_most: bool, unit: str = "", detail: str = ""
) -> Check:
    return Check(what=what, **found._asdict(), limit=limit, at_most=at_most, unit=unit, detail=detail)


def _regret(f: Findings) -> Iterable[Check]:
    what, limit = ("with a store", 1.25) if f.deployment.reach.stores else ("without a store", 1.6)
    found = f.estimate(Point(plan.scenario(f.at_r), OURS), "regret")
    yield _check(f"regret {what}", found, limit, at_most=True, unit="×")


class Metric(NamedTuple):
    """A metric in which policies are compared. `path`: see `findings`."""

    name: str
    path: str
    higher_is_better: bool = False


METRICS = (
    Metric("TTFT p50", "ttft_s.p50"),
    Metric("TTFT p90", "ttft_s.p90"),
    Metric("TTFT p99", "ttft_s.p99"),
    Metric("TPOT p90", "tpot_s.p90"),
    Metric("TPOT p99", "tpot_s.p99"),
    Metric("E2E p90", "e2e_s.p90"),
    Metric("APC", "apc", higher_is_better=True),
    Metric("worst endpoint", "hotspot.ttft_p90_max_s"),
    Metric("wall-clock factor", "wall_clock_factor"),
    Metric("stretch p50", "stretch.p50"),
)


class Rival(NamedTuple):
    """Our policy and the best of the others in one metric."""

    metric: Metric
    best: str
    """Name of the best other policy."""
    ours: Estimate
    theirs: Estimate
    worse: Estimate
    """Share by which our policy is worse; negative if it is better."""


def rivals(f: Findings, load: str) -> list[Rival]:
    """Compare our policy with the best of the others in each of `METRICS`, at one load."""
    scenario = plan.scenario(f.at_r, load)
    found = []
    for metric in METRICS:
        others = [
            profile for profile in plan.every(f.at_r) if profile != OURS and not _excepted(metric, profile)
        ]
        points = [Point(scenario, profile) for profile in others]
        means = {p.profile: f.estimate(p, metric.path) for p in points if f.has(p, metric.path)}
        pick: Callable[..., Profile] = max if metric.higher_is_better else min
        best = pick(means, key=lambda profile: means[profile].value)
        value, low, high = f.ratio(Point(scenario, OURS), Point(scenario, best), metric.path)
        worse = (
            Estimate(1 - value, 1 - high, 1 - low)
            if metric.higher_is_better
            else Estimate(value - 1, low - 1, high - 1)
        )
        ours = f.estimate(Point(scenario, OURS), metric.path)
        found.append(Rival(metric, best.policy, ours, means[best], worse))
    return found


def _excepted(metric: Metric, profile: Profile) -> bool:
    """Return whether a policy is left out of a metric. The endpoints of static_pd that decode never prefill,
    so its TPOT has no interference to compare."""
    return profile.policy == "static_pd" and metric.name.startswith("TPOT")


def _dominance(f: Findings) -> Iterable[Check]:
    for load in BAR_LOADS:
        rows = rivals(f, load)
        worst = max(rows, key=lambda row: row.worse.value)
        yield _check(
            f"worst of {len(rows)} metrics at {load}",
            Estimate(*(100 * x for x in worst.worse)),
            2.0,
            at_most=True,
            unit="% worse",
            detail=f"{worst.metric.name}, against {worst.best}",
        )
        better = Estimate(
            sum(row.worse.value < 0 for row in rows),
            sum(row.worse.high < 0 for row in rows),
            sum(row.worse.low < 0 for row in rows),
        )
        yield _check(f"strictly better at {load}", better, 7, at_most=False, unit=f"of {len(rows)}")


def _capacity(f: Findings) -> Iterable[Check]:
    for ours, theirs, limit in (
        ("perilune", "lmetric_plus_one", 1.10),
        ("perilune", "dynamo", 1.5),
        ("perilune", "sticky", 1.7),
        ("perilune", "round_robin", 10.0),
    ):
        found = f.capacity_ratio(ours, theirs)
        yield _check(f"{ours} / {theirs}", found, limit, at_most=False, unit="×")


def _links(f: Findings) -> Iterable[Check]:
    f = f.side
    for factor, share in product(plan.LINK_FACTORS, plan.OUTLIER_SHARES):
        scenario = plan.link_scenario(f.at_r, factor, share)
        found = f.ratio(Point(scenario, OURS), Point(scenario, STAY), "ttft_s.p90")
        what = f"links × {factor:g}" + (f", {share:.0%} outliers × 20" if share else "")
        yield _check(what, found, 1.05, at_most=True, unit="×")


def _apc(f: Findings) -> Iterable[Check]:
    for load, limit in zip(BAR_LOADS, (0.97, 0.95, 0.90), strict=True):
        point = Point(plan.scenario(f.at_r, load), OURS)
        found = f.ratio(point, point, "apc", "apc_ceiling.intra_session")
        yield _check(f"APC / ceiling at {load}", found, limit, at_most=False)


def _coupling(f: Findings) -> Iterable[Check]:
    for profile, limit, at_most in ((OURS, 1.05, True), (Profile("lmetric"), 1.4, False)):
        found = f.estimate(Point(plan.scenario(f.at_r), profile), "wall_clock_factor")
        yield _check(f"wall-clock factor of {profile}", found, limit, at_most=at_most)


def _migrations(f: Findings) -> Iterable[Check]:
    for load in BAR_LOADS:
        point = Point(plan.scenario(f.at_r, load), OURS)
        for what, path, limit, at_most in (
            ("thrash", "migrations.thrash_rate", 0.0, True),
            ("accuracy", "migrations.accuracy", 80.0, False),
            ("moved turns", "migrations.per_request", 3.0, True),
        ):
            if f.has(point, path):
                found = Estimate(*(100 * x for x in f.estimate(point, path)))
                yield _check(f"{what} at {load}", found, limit, at_most=at_most, unit="%")


def _simulator(f: Findings) -> Iterable[Check]:
    off = {name: abs(model / measured - 1) * 100 for name, (measured, model) in MEASURED.items()}
    worst = max(off, key=off.__getitem__)
    value = off[worst]
    yield _check(
        f"worst of {len(off)} H20 points",
        Estimate(value, value, value),
        10.0,
        at_most=True,
        unit="% off",
        detail=worst,
    )
    speeds = [_speed(f, profile) for profile in plan.every(f.at_r)]
    found = estimate([s for by_policy in speeds for s in by_policy])
    yield _check(
        "simulated seconds per CPU second at R, all policies", found, 2000.0, at_most=False, unit="×"
    )


def _door(f: Findings) -> Iterable[Check]:
    calm = Point(plan.admission_scenario(f.at_r, "R", False), OURS)
    for load, limit in (("1.25 R", 1.1), (plan.OVERLOAD, 1.3)):
        on, off = (Point(plan.admission_scenario(f.at_r, load, on), OURS) for on in (True, False))
        found = f.ratio(on, off, "output_tokens_per_s")
        yield _check(f"output tokens per second at {load}", found, limit, at_most=False, unit="×")
        found = f.ratio(on, calm, "sessions.later_ttft_s.p90")
        yield _check(f"TTFT p90 of later turns at {load}", found, 2.0, at_most=True, unit="×")
        for q, most in (("p90", 1.0), ("p99", 1.1)):
            for what, path in (
                ("of those that ended", f"sessions.completion_s.{q}"),
                ("a lost one never ends", f"extra.completion_{q}_s"),
            ):
                known = len(f.values(on, path)) if f.has(on, path) else 0
                found = f.ratio(on, off, path) if known == len(f.size.seeds) else Estimate(inf, inf, inf)
                yield _check(f"completion {q} at {load}, {what}", found, most, at_most=True, unit="×")
    for load in ("R/2", "R"):
        on, off = (Point(plan.admission_scenario(f.at_r, load, on), OURS) for on in (True, False))
        with_admission, without = f.values(on, "ttft_s.p90"), f.values(off, "ttft_s.p90")
        changes = {seed: 100 * (with_admission[seed] / without[seed] - 1) for seed in with_admission}
        worst = max(changes, key=changes.__getitem__)
        mean = Estimate(*(100 * (x - 1) for x in f.ratio(on, off, "ttft_s.p90")))
        yield _check(f"TTFT p90 at {load}, mean", mean, 2.0, at_most=True, unit="% worse")
        over = sum(change > 2.0 for change in changes.values())
        yield _check(
            f"TTFT p90 at {load}, worst seed",
            Estimate(changes[worst], changes[worst], changes[worst]),
            2.0,
            at_most=True,
            unit="% worse",
            detail=f"seed {worst}; above 2 % with {over} of {len(changes)} seeds",
        )


def _speed(f: Findings, profile: Profile) -> list[float]:
    results = f.results(Point(plan.scenario(f.at_r), profile)).values()
    return [r.simulated_s / r.wall_s for r in results if r.wall_s]
