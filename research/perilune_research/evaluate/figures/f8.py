"""f8: dispatch coupling, which is what slower turns do to a whole replay, measured and by theory.

In a closed loop the number L of turns in flight is the fixed point L = ΛN · W(L), where ΛN is the number of
turns per second and W the seconds of a turn. A slowdown (1 + ε) of every turn changes it by dL/dε =
L / (1 − ΛN W′(L)). The theory takes W′ from neighbouring loads. The measurement compares L with that of
engines that are 10 % slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, nan

from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Profile
from perilune_research.evaluate.figures.style import MARKERS, Context, Drawn, Figure, canvas, colour
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import COUPLED, LOADS, SLOWDOWN, Point

_MOST = 10.0
"""Largest amplification by theory that is drawn. A larger one is a triangle at this height."""


def _draw(context: Context) -> Drawn:
    f = context.findings.side
    figure = canvas(11.5, 4.4)
    wall, amplified = figure.subplots(1, 2)
    rows, highest = [], _MOST
    for number, profile in enumerate(COUPLED):
        points = [Point(plan.scenario(f.at_r, load), profile) for load in LOADS]
        turn_s = [f.estimate(p, "turn_s.mean") for p in points]
        ratio = [f.estimate(p, "wall_clock_factor_legacy") for p in points]
        style = {"color": colour(profile.policy), "marker": MARKERS.get(profile.policy, "o"), "markersize": 5}
        wall.errorbar(
            [e.value for e in turn_s],
            [e.value for e in ratio],
            xerr=[[e.value - e.low for e in turn_s], [e.high - e.value for e in turn_s]],
            yerr=[[e.value - e.low for e in ratio], [e.high - e.value for e in ratio]],
            elinewidth=0.6,
            label=profile.policy,
            **style,
        )
        theory = amplification(f, points)
        measured = [measured_amplification(f, load, profile) for load in LOADS]
        highest = max(highest, *measured)
        xs = [x + 0.012 * (number - len(COUPLED) / 2) for x in LOADS.values()]
        finite = [a if a <= _MOST else nan for a in theory]
        amplified.plot(xs, finite, "o--", color=style["color"], linewidth=1, fillstyle="none", markersize=7)
        diverging = [x for x, a in zip(xs, theory, strict=True) if a > _MOST]
        amplified.plot(diverging, [_MOST] * len(diverging), "^", color=style["color"], markersize=4)
        amplified.plot(xs, measured, linewidth=1.4, **style)
        rows += [
            {
                "policy": profile.policy,
                "load": load,
                "turn_s": turn_s[i],
                "wall_per_trace": ratio[i],
                "amplification_theory": theory[i],
                "amplification_measured": measured[i],
            }
            for i, load in enumerate(LOADS)
        ]
    wall.axhline(1.0, color="black", linestyle="--", linewidth=1)
    wall.set(
        xscale="log",
        xlabel="mean W_turn, s (log); R/2, R, 1.25 R, 1.6 R along each line",
        ylabel="wall / trace",
    )
    wall.legend(loc="upper left")
    wall.grid(alpha=0.25)
    amplified.set(
        ylabel="amplification of a slowdown",
        ylim=(-0.5, highest * 1.05),
        title="filled: measured, engines 10 % slower; hollow: 1 / (1 − ΛN W′(L*))",
    )
    amplified.set_xticks(list(LOADS.values()), list(LOADS))
    amplified.axhline(1.0, color="black", linestyle=":", linewidth=1)
    amplified.grid(alpha=0.25)
    return Drawn(figure, {"slowdown": SLOWDOWN, "drawn_up_to": _MOST, "rows": rows})


def amplification(f: Findings, points: Sequence[Point]) -> list[float]:
    """Return 1 / (1 − ΛN W′(L*)) at each of a policy's points, which are in the order of load; inf where the
    loop diverges."""
    in_flight = [f.estimate(p, "extra.in_flight").value for p in points]
    turn_s = [f.estimate(p, "turn_s.mean").value for p in points]
    found = []
    for i in range(len(points)):
        before, after = max(0, i - 1), min(len(points) - 1, i + 1)
        slope = (turn_s[after] - turn_s[before]) / (in_flight[after] - in_flight[before])
        coupling = in_flight[i] / turn_s[i] * slope
        found.append(1 / (1 - coupling) if coupling < 1 else float("inf"))
    return found


def measured_amplification(f: Findings, load: str, profile: Profile) -> float:
    """Return d ln L / d ln W, from a comparison with slightly slower engines."""
    scenario = plan.scenario(f.at_r, load)
    grown: Estimate = f.ratio(
        Point(plan.slower(scenario), profile), Point(scenario, profile), "extra.in_flight"
    )
    return log(grown.value) / log(SLOWDOWN)


F8 = Figure(
    "Dispatch coupling",
    "Left: the slower the turns of a policy, the longer the whole replay takes. Right: by how much a slowdown"
    " of every turn grows the number of turns in flight, measured and by theory. 1 is no coupling; a triangle"
    " marks a loop that diverges, so that nothing is stationary.",
    _draw,
)
