"""f9: sensitivity of TTFT p90 and APC to rate, skew, KV pool, T_hot, T_cool and least gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Profile
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas, line, row
from perilune_research.evaluate.findings import Findings
from perilune_research.evaluate.plan import LOADS, SOME, Point

_METRICS = {"ttft_p90_s": "ttft_s.p90", "apc": "apc"}


class _Sweep(NamedTuple):
    """The values of one parameter, and the points to which they lead."""

    name: str
    values: Mapping[float, str]
    """Value → its text on the axis."""
    profiles: Sequence[Profile]
    point: Callable[[float, Profile], Point]


def _sweeps(f: Findings) -> list[_Sweep]:
    scenario = plan.scenario(f.at_r)
    by_load = {value: name for name, value in LOADS.items()}
    return [
        _Sweep(
            "arrival rate",
            by_load,
            SOME,
            lambda x, profile: Point(plan.scenario(f.at_r, by_load[x]), profile),
        ),
        _Sweep(
            "Zipf exponent of sessions",
            {a: f"{a:g}" for a in plan.ZIPF_ALPHAS},
            SOME,
            lambda x, profile: Point(plan.zipf_scenario(f.at_r, x), profile),
        ),
        _Sweep(
            "KV pool, tokens",
            {float(n): f"{n / 1000:.0f}k" for n in plan.KV_TOKENS},
            SOME,
            lambda x, profile: Point(plan.pool_scenario(f.at_r, int(x)), profile),
        ),
        _Sweep(
            "T_hot of ear, tokens",
            {float(n): f"{n // 1024}Ki" for n in plan.T_HOT_TOKENS},
            [Profile("ear")],
            lambda x, profile: Point(scenario, plan.t_hot_profile(int(x))),
        ),
        _Sweep(
            "T_cool of ear, s",
            {s: f"{s:g}" for s in plan.T_COOL_S},
            [Profile("ear")],
            lambda x, profile: Point(scenario, plan.t_cool_profile(x)),
        ),
        _Sweep(
            "least gain of perilune, s",
            {s: f"{s:g}" for s in plan.LEAST_GAIN_S},
            [Profile("perilune")],
            lambda x, profile: Point(scenario, plan.least_gain_profile(x)),
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
        for profile in sweep.profiles:
            points = [sweep.point(x, profile) for x in sweep.values]
            for axes, path in zip(panels[:, column], _METRICS.values(), strict=True):
                line(axes, at, [f.estimate(p, path) for p in points], profile.policy, profile.policy)
            rows += [
                row(f, p, _METRICS, sweep=sweep.name, value=x, policy=profile.policy)
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
    "All columns except the first are at R. Values are evenly spaced on the axis. Bands are 95 % intervals.",
    _draw,
)
