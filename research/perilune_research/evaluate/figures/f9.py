"""f9: sensitivity of TTFT p90 and APC to rate, skew, KV pool, T_hot, T_cool and least gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Arm
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas, line, row
from perilune_research.evaluate.findings import Findings
from perilune_research.evaluate.plan import LOADS, SOME, Point

_METRICS = {"ttft_p90_s": "ttft_s.p90", "apc": "apc"}


class _Sweep(NamedTuple):
    name: str
    values: Mapping[float, str]
    """With how they are written."""
    arms: Sequence[Arm]
    point: Callable[[float, Arm], Point]


def _sweeps(f: Findings) -> list[_Sweep]:
    scenario = plan.scenario(f.at_r)
    by_load = {value: name for name, value in LOADS.items()}
    return [
        _Sweep("arrival rate", by_load, SOME, lambda x, arm: Point(plan.scenario(f.at_r, by_load[x]), arm)),
        _Sweep(
            "Zipf exponent of sessions",
            {a: f"{a:g}" for a in plan.ZIPF_ALPHAS},
            SOME,
            lambda x, arm: Point(plan.zipf_scenario(f.at_r, x), arm),
        ),
        _Sweep(
            "KV pool, tokens",
            {float(n): f"{n / 1000:.0f}k" for n in plan.KV_TOKENS},
            SOME,
            lambda x, arm: Point(plan.pool_scenario(f.at_r, int(x)), arm),
        ),
        _Sweep(
            "T_hot of ear, tokens",
            {float(n): f"{n // 1024}Ki" for n in plan.T_HOT_TOKENS},
            [Arm("ear")],
            lambda x, arm: Point(scenario, plan.t_hot_arm(int(x))),
        ),
        _Sweep(
            "T_cool of ear, s",
            {s: f"{s:g}" for s in plan.T_COOL_S},
            [Arm("ear")],
            lambda x, arm: Point(scenario, plan.t_cool_arm(x)),
        ),
        _Sweep(
            "least gain of perilune, s",
            {s: f"{s:g}" for s in plan.LEAST_GAIN_S},
            [Arm("perilune")],
            lambda x, arm: Point(scenario, plan.least_gain_arm(x)),
        ),
    ]


def _draw(context: Context) -> Drawn:
    f = context.findings.side
    sweeps = _sweeps(f)
    figure = canvas(18, 5.6)
    panels = figure.subplots(2, len(sweeps), sharex="col", sharey="row")
    rows = []
    for column, sweep in enumerate(sweeps):
        at = list(range(len(sweep.values)))
        for arm in sweep.arms:
            points = [sweep.point(x, arm) for x in sweep.values]
            for axes, path in zip(panels[:, column], _METRICS.values(), strict=True):
                line(axes, at, [f.estimate(p, path) for p in points], arm.policy, arm.policy)
            rows += [
                row(f, p, _METRICS, sweep=sweep.name, value=x, policy=arm.policy)
                for p, x in zip(points, sweep.values, strict=True)
            ]
        panels[0, column].set_title(sweep.name)
        panels[1, column].set_xticks(at, list(sweep.values.values()))
    panels[0, 0].set(ylabel="TTFT p90, s (log)", yscale="log")
    panels[1, 0].set(ylabel="APC", ylim=(0, 1))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SOME))
    return Drawn(figure, {"rows": rows})


F9 = Figure(
    "Sensitivity",
    "At R but for the first column; values are evenly spaced, whatever their distance. Bands are 95 %.",
    _draw,
)
