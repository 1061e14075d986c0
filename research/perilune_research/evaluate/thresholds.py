"""Chooses T_hot, T_cool and least gain from sweeps at R: the default, unless another value is clearly better.

A value is clearly better if TTFT p90 of the default is more than 5 % above it, over at least 8 seeds, and the
interval of the ratio, paired by seed, excludes 1. With fewer seeds, the best of six values is mostly chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from perilune_api.policies import EarParams, PeriluneParams
from perilune_lab.terminal.formats import as_number, as_seconds
from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Profile
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import Point
from perilune_research.table import Table

_CLOSE = 1.05
_ENOUGH_SEEDS = 8


class Choice(NamedTuple):
    """The sweep of one parameter, and the value to use."""

    name: str
    values: Sequence[tuple[float, Estimate]]
    """Each tried value with its TTFT p90, in seconds."""
    default: float
    flat: Sequence[float]
    """Values whose mean is within 5 % of the best."""
    best: float
    """The value with the lowest TTFT p90."""
    seeds: int
    """Number of seeds with the default value."""
    worse: Estimate
    """Ratio of TTFT p90 with the default to that with the best value, paired by seed."""

    @property
    def chosen(self) -> float:
        """The value to use."""
        sure = self.seeds >= _ENOUGH_SEEDS and self.worse.low > 1.0
        return self.best if sure and self.default not in self.flat else self.default

    @property
    def reason(self) -> str:
        """Why the value was chosen, in words."""
        if self.default in self.flat:
            span = f"{as_number(min(self.flat))}–{as_number(max(self.flat))}"
            return f"within 5 % of the best, like every tried value in {span}; the default stays"
        if self.chosen == self.default:
            best = f"the best ({as_number(self.best)})"
            return f"not distinguishable from {best} with {self.seeds} seeds; the default stays"
        return f"the best of the tried values; the default {as_number(self.default)} is more than 5 % worse"


def choices(f: Findings) -> list[Choice]:
    """Choose each parameter."""
    f, scenario = f.side, plan.scenario(f.at_r)
    sweeps: list[tuple[str, float, Sequence[float], Callable[[float], Profile]]] = [
        (
            "ear: T_hot, tokens",
            EarParams().hot_pending_tokens,
            plan.T_HOT_TOKENS,
            lambda tokens: plan.t_hot_profile(int(tokens)),
        ),
        ("ear: T_cool, s", EarParams().cooldown_seconds, plan.T_COOL_S, plan.t_cool_profile),
        (
            "perilune: least gain, s",
            PeriluneParams().least_gain_seconds,
            plan.LEAST_GAIN_S,
            plan.least_gain_profile,
        ),
    ]
    found = []
    for name, default, values, profile in sweeps:
        swept = [(value, f.estimate(Point(scenario, profile(value)), "ttft_s.p90")) for value in values]
        best, lowest = min(swept, key=lambda row: row[1].value)
        flat = [value for value, e in swept if e.value <= _CLOSE * lowest.value]
        points = Point(scenario, profile(default)), Point(scenario, profile(best))
        seeds = len(f.values(points[0], "ttft_s.p90"))
        worse = f.ratio(*points, "ttft_s.p90")
        found.append(
            Choice(name=name, values=swept, default=default, flat=flat, best=best, seeds=seeds, worse=worse)
        )
    return found


def thresholds(f: Findings, subject: str) -> Table:
    """Show the choices as a table. `subject`: the arm and the traffic, for the title."""
    rows = []
    for choice in choices(f):
        swept = ", ".join(f"{as_number(v)}: {as_seconds(e.value)}" for v, e in choice.values)
        rows.append((choice.name, as_number(choice.chosen), choice.reason, swept))
    return Table(
        f"T_hot, T_cool and least gain — {subject}",
        ("parameter", "chosen", "reason", "TTFT p90 at R"),
        rows,
        "Everywhere else ear and perilune use their defaults. No source publishes values of T_hot or T_cool.",
    )
