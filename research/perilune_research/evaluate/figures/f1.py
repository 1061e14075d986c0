"""f1: how much longer a closed-loop replay takes than its trace, with every policy."""

from __future__ import annotations

from perilune_research.evaluate import plan
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas, colour, horizontal, row
from perilune_research.evaluate.plan import LOADS, Point

_METRICS = {"wall_per_trace": "wall_clock_factor_legacy"}
_LOAD_MARKERS = {"R/2": "|", "1.25 R": "d", "1.6 R": "x"}


def _draw(context: Context) -> Drawn:
    f = context.findings
    at_r = plan.scenario(f.at_r)
    points = sorted(
        (Point(at_r, profile) for profile in plan.every(f.at_r)),
        key=lambda p: f.estimate(p, _METRICS["wall_per_trace"]),
    )
    figure = canvas(8.5, 5.2)
    axes = figure.subplots()
    names = [p.profile.policy for p in points]
    found = [f.estimate(p, _METRICS["wall_per_trace"]) for p in points]
    horizontal(axes, names, found, [colour(n) for n in names], "")
    for load, marker in _LOAD_MARKERS.items():
        scenario = plan.scenario(f.at_r, load)
        values = [f.estimate(Point(scenario, p.profile), _METRICS["wall_per_trace"]).value for p in points]
        axes.plot(values, range(len(points)), marker, color="#222222", markersize=6, label=load)
    axes.axvline(1.0, color="black", linewidth=1.2, linestyle="--")
    axes.annotate(
        "as fast as the trace", (1.0, -0.5), xytext=(3, 0), textcoords="offset points", fontsize=7.5
    )
    axes.set_xlim(0)
    axes.set_xlabel("makespan of the replay / span of the trace (bars: R, with 95 %)")
    axes.legend(title="other loads", loc="center right")
    rows = [
        row(f, Point(plan.scenario(f.at_r, load), p.profile), _METRICS, policy=p.profile.policy, load=load)
        for p in points
        for load in LOADS
    ]
    return Drawn(figure, {"rows": rows})


F1 = Figure(
    "Wall-clock time / trace time",
    "A slow turn submits the next one later, so in a closed loop a bad router makes the whole work take"
    " longer. Dashed: 1, where the replay is as fast as the trace.",
    _draw,
)
