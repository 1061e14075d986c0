"""f6: TTFT, TPOT, APC and the worst endpoint of every policy."""

from __future__ import annotations

from perilune_research.evaluate import plan
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas, colour, horizontal, row
from perilune_research.evaluate.findings import Estimate
from perilune_research.evaluate.plan import Point

_METRICS = {
    "ttft_p90_s": "ttft_s.p90",
    "tpot_p90_s": "tpot_s.p90",
    "apc": "apc",
    "hotspot_max_s": "hotspot.ttft_p90_max_s",
}
_CEILING = "apc_ceiling.intra_session"
_PANELS = (
    ("TTFT p90, s", "ttft_p90_s", 1.0, True),
    ("TPOT p90, ms", "tpot_p90_s", 1e3, True),
    ("APC, %", "apc", 100.0, False),
    ("worst endpoint's TTFT p90, s", "hotspot_max_s", 1.0, True),
)


def _draw(context: Context) -> Drawn:
    f = context.findings
    scenario = plan.scenario(f.at_r)
    points = sorted(
        (Point(scenario, profile) for profile in plan.every(f.at_r)),
        key=lambda p: f.estimate(p, "ttft_s.p90"),
    )
    names = [p.profile.policy for p in points]
    figure = canvas(13, 4.6)
    for axes, (title, metric, factor, logarithmic) in zip(
        figure.subplots(1, 4, sharey=True), _PANELS, strict=True
    ):
        found = [Estimate(*(factor * x for x in f.estimate(p, _METRICS[metric]))) for p in points]
        horizontal(axes, names, found, [colour(name) for name in names])
        axes.set_title(title + (" (log)" if logarithmic else ""))
        if logarithmic:
            axes.set_xscale("log")
            axes.set_xlim(min(e.value for e in found) / 1.6, max(e.high for e in found) * 2.6)
        else:
            axes.set_xlim(0, 100)
            ceiling = 100 * f.estimate(points[0], _CEILING).value
            axes.axvline(ceiling, color="black", linestyle="--", linewidth=1)
            axes.annotate(
                "ceiling",
                (ceiling, len(points) - 0.6),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=7.5,
            )
    rows = [row(f, p, _METRICS, policy=p.profile.policy) for p in points]
    return Drawn(figure, {"apc_ceiling": f.estimate(points[0], _CEILING).value, "rows": rows})


F6 = Figure(
    "TTFT, TPOT, APC, hotspot of every policy at R",
    "Lowest TTFT p90 first; whiskers are 95 % over seeds. The ceiling of APC is what an infinite cache of"
    " each session alone would serve; policies above it also hit what other sessions computed.",
    _draw,
)
