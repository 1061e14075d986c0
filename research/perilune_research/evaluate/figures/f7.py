"""f7: the effects of affinity alone, of migration alone, and of both."""

from __future__ import annotations

from perilune_research.evaluate import plan
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas, line, row
from perilune_research.evaluate.plan import ABLATION, LOADS, Point

_METRICS = {
    "ttft_p90_s": "ttft_s.p90",
    "apc": "apc",
    "hotspot_max_s": "hotspot.ttft_p90_max_s",
    "wall_clock_factor": "wall_clock_factor",
}
_TITLES = ("TTFT p90, s", "APC", "worst endpoint's TTFT p90, s", "wall-clock factor")


def _draw(context: Context) -> Drawn:
    f = context.findings
    figure = canvas(12, 3.4)
    panels = figure.subplots(1, 4)
    rows = []
    for name, profile in ABLATION.items():
        points = [Point(plan.scenario(f.at_r, load), profile) for load in LOADS]
        for axes, path in zip(panels, _METRICS.values(), strict=True):
            line(axes, list(LOADS.values()), [f.estimate(p, path) for p in points], name, profile.policy)
        rows += [
            row(f, p, _METRICS, arm=name, policy=str(profile), load=load)
            for p, load in zip(points, LOADS, strict=True)
        ]
    for axes, title in zip(panels, _TITLES, strict=True):
        axes.set_title(title)
        axes.set_xticks(list(LOADS.values()), list(LOADS))
    for axes in (panels[0], panels[2]):
        axes.set_yscale("log")
        axes.set_title(axes.get_title() + " (log)")
    panels[1].set_ylim(0, 1)
    panels[3].set_ylim(0.9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return Drawn(figure, {"rows": rows})


F7 = Figure(
    "Ablation",
    "Affinity alone, migration alone, and both, over the load: the migration planner beside a policy, or both"
    " in one policy. Bands are 95 %.",
    _draw,
)
