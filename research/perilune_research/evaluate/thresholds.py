"""Chooses T_hot, T_cool and least gain from sweeps at R: the default unless another is clearly better.

Clearly means: the mean is more than 5 % better, over at least 8 seeds, and the interval of the paired ratio
excludes 1. The best of six values on few seeds is mostly chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from perilune_api.policies import EarParams, PeriluneParams
from perilune_lab.formats import as_number, as_seconds
from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Arm
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import Point
from perilune_research.evaluate.table import Table

_CLOSE = 1.05
_ENOUGH_SEEDS = 8


class Choice(NamedTuple):
    """The swept values of a parameter with TTFT p90, and the value to use."""

    name: str
    values: Sequence[tuple[float, Estimate]]
    default: float
    flat: Sequence[float]
    """Values whose mean is within 5 % of the best."""
    best: float
    seeds: int
    worse: Estimate
    """Ratio of TTFT p90 with the default to that with the best value, paired by seed."""

    @property
    def chosen(self) -> float:
        sure = self.seeds >= _ENOUGH_SEEDS and self.worse.low > 1.0
        return self.best if sure and self.default not in self.flat else self.default

    @property
    def reason(self) -> str:
        if self.default in self.flat:
            span = f"{as_number(min(self.flat))}–{as_number(max(self.flat))}"
            return f"within 5 % of the best, like every tried value in {span}; the default stays"
        if self.chosen == self.default:
            best = f"the best ({as_number(self.best)})"
            return f"not distinguishable from {best} with {self.seeds} seeds; the default stays"
        return f"the best of the tried values; the default {as_number(self.default)} is more than 5 % worse"


def choices(f: Findings) -> list[Choice]:
    f, scenario = f.side, plan.scenario(f.at_r)
    sweeps: list[tuple[str, float, Sequence[float], Callable[[float], Arm]]] = [
        (
            "ear: T_hot, tokens",
            EarParams().hot_pending_tokens,
            plan.T_HOT_TOKENS,
            lambda tokens: plan.t_hot_arm(int(tokens)),
        ),
        ("ear: T_cool, s", EarParams().cooldown_seconds, plan.T_COOL_S, plan.t_cool_arm),
        (
            "perilune: least gain, s",
            PeriluneParams().least_gain_seconds,
            plan.LEAST_GAIN_S,
            plan.least_gain_arm,
        ),
    ]
    found = []
    for name, default, values, arm in sweeps:
        swept = [(value, f.estimate(Point(scenario, arm(value)), "ttft_s.p90")) for value in values]
        best, lowest = min(swept, key=lambda row: row[1].value)
        flat = [value for value, e in swept if e.value <= _CLOSE * lowest.value]
        points = Point(scenario, arm(default)), Point(scenario, arm(best))
        seeds = len(f.values(points[0], "ttft_s.p90"))
        worse = f.ratio(*points, "ttft_s.p90")
        found.append(Choice(name, swept, default, flat, best, seeds, worse))
    return found


def thresholds(f: Findings) -> Table:
    rows = []
    for choice in choices(f):
        swept = ", ".join(f"{as_number(v)}: {as_seconds(e.value)}" for v, e in choice.values)
        rows.append((choice.name, as_number(choice.chosen), choice.reason, swept))
    return Table(
        "T_hot, T_cool and least gain",
        ("parameter", "chosen", "reason", "TTFT p90 at R"),
        rows,
        "Everywhere else on this page ear uses its published T_hot and T_cool, and perilune its default.",
    )
