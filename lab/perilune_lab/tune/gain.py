"""Plays a half of the sessions with some parameters, and compares two such plays session by session.

The sessions of a half come at twice the recorded speed, gaps within sessions as recorded, so that the pool is
as busy as it was. Comparisons are paired: the same session with both parameters. Intervals are of 95 %, by
bootstrap over sessions, because turns of one session are not independent of each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random

from perilune_api.pool import Routing, SpecError
from perilune_lab.quantiles import mean, quantile
from perilune_lab.simulate.deployment import Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import prepare
from perilune_lab.terminal.policy_arguments import changed
from perilune_lab.terminal.policy_parameters import block_of
from perilune_lab.traces.model import Mode, Trace
from perilune_lab.tune.search import Point

LOST_S = 60.0
"""Seconds that count for a turn that failed or was refused."""
RESAMPLES = 400
SPEED = 2.0


class Objective(StrEnum):
    """What is to become less."""

    TTFT = "ttft"
    """The mean time to the first token."""
    E2E = "e2e"
    """The mean time to the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is played."""

    deployment: Deployment
    routing: Routing
    """The pool's routing, as the log has it."""
    policy: str
    seeds: tuple[int, ...]
    objective: Objective = Objective.TTFT

    def with_point(self, point: Point) -> Routing:
        """Return the pool's routing with these parameters. Raises SpecError."""
        block = self.policy if block_of(self.policy).startswith("outside.") else block_of(self.policy)
        return changed(
            self.routing, {f"{block}.{name}": _text(v) for name, v in point.items()}, "--parameters"
        )


@dataclass(frozen=True, slots=True)
class Waits:
    """The seconds of each turn that a play has, by session, all seeds together."""

    ttft_s: Mapping[int, Sequence[float]]
    e2e_s: Mapping[int, Sequence[float]]
    lost: int = 0
    faults: int = 0
    """Decisions that a policy of a package got wrong."""

    def of(self, objective: Objective) -> Mapping[int, Sequence[float]]:
        return self.ttft_s if objective is Objective.TTFT else self.e2e_s


def play(study: Study, trace: Trace, point: Point) -> Waits:
    """Play a half once for each seed."""
    routing, hardware = study.with_point(point), study.deployment.hardware
    workload = prepare(trace, hardware.engine, Mode.THINKTIME, SPEED)
    faults = Faults(engine_belief=hardware.engine.scale)
    ttft: dict[int, list[float]] = defaultdict(list)
    e2e: dict[int, list[float]] = defaultdict(list)
    lost = failed = 0
    for seed in study.seeds:
        outcome = simulate(workload, study.deployment, study.policy, routing, faults, seed)
        failed += sum(outcome.policy_faults.values())
        for turn in outcome.requests:
            lost += not turn.succeeded
            ttft[turn.task.session].append(turn.ttft_s if turn.succeeded else LOST_S)
            e2e[turn.task.session].append(turn.e2e_s if turn.succeeded else LOST_S)
    return Waits(dict(ttft), dict(e2e), lost, failed)


def score(study: Study, trace: Trace, point: Point) -> float:
    """Return the mean that is to become less, in seconds; inf for parameters that the policy refuses."""
    try:
        waits = play(study, trace, point).of(study.objective)
    except SpecError:
        return inf
    return mean([value for values in waits.values() for value in values])


@dataclass(frozen=True, slots=True)
class Change:
    """A figure before and after, and the change's interval, as shares: −0.1 is a tenth less."""

    before: float
    after: float
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.after / self.before - 1 if self.before else 0.0


def changes(before: Waits, after: Waits) -> Mapping[str, Change]:
    """Return how the means and the TTFT p90 change, paired by session."""
    return {
        "TTFT mean": change(before.ttft_s, after.ttft_s, mean),
        "TTFT p90": change(before.ttft_s, after.ttft_s, _p90),
        "E2E mean": change(before.e2e_s, after.e2e_s, mean),
    }


def change(
    before: Mapping[int, Sequence[float]],
    after: Mapping[int, Sequence[float]],
    figure: Callable[[Sequence[float]], float],
) -> Change:
    """Return how a figure over all turns changes."""
    sessions = sorted(before.keys() & after.keys())

    def both(drawn: Sequence[int]) -> tuple[float, float]:
        return figure(_pooled(before, drawn)), figure(_pooled(after, drawn))

    rng = Random(len(sessions))
    drawn = [both(rng.choices(sessions, k=len(sessions))) for _ in range(RESAMPLES)]
    shares = sorted(b / a - 1 if a else inf for a, b in drawn)
    return Change(*both(sessions), quantile(shares, 0.025), quantile(shares, 0.975))


def _pooled(waits: Mapping[int, Sequence[float]], sessions: Sequence[int]) -> list[float]:
    return [value for session in sessions for value in waits[session]]


def _p90(values: Sequence[float]) -> float:
    return quantile(sorted(values), 0.9)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
