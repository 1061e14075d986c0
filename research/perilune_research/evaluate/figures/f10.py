"""f10: the pending prefill of every endpoint over time, in tokens and in seconds, with moves as arrows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Cell, Profile
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas
from perilune_research.evaluate.scenes import Scene, pending, steps, watch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PROFILES = (Profile("sticky"), Profile("ear"), Profile("perilune"))
_SHOWN_S, _BIN_S = 600.0, 5.0


def _draw(context: Context) -> Drawn:
    from matplotlib.colors import PowerNorm

    f = context.findings
    scenario = plan.scenario(f.at_r)
    begin_s, end_s = scenario.warmup_s, min(scenario.window_s, scenario.warmup_s + _SHOWN_S)
    bins = int((end_s - begin_s) / _BIN_S)
    scenes = [watch(Cell(scenario, profile, f.size.seeds[0])) for profile in _PROFILES]
    figure = canvas(18, 5.8)
    panels = figure.subplots(2, len(_PROFILES), sharex=True, sharey=True)
    data = []
    for in_seconds in (False, True):
        grids = [_grid(scene, begin_s, end_s, bins, in_seconds) for scene in scenes]
        top = max(max(max(line) for line in grid) for grid in grids)
        for column, (scene, grid) in enumerate(zip(scenes, grids, strict=True)):
            axes = panels[int(in_seconds), column]
            edges = [i * _BIN_S for i in range(bins + 1)]
            mesh = axes.pcolormesh(
                edges,
                [e - 0.5 for e in range(len(grid) + 1)],
                grid,
                cmap="YlOrRd",
                norm=PowerNorm(0.5, 0, top),
                rasterized=True,
            )
            unit = "s" if in_seconds else "tokens"
            axes.set_title(f"{scene.cell.profile.policy}, pending prefill in {unit}")
            _arrows(axes, scene, begin_s, end_s)
            data.append(
                {
                    "policy": scene.cell.profile.policy,
                    "unit": unit,
                    "pending": [[round(x, 2 if in_seconds else 0) for x in line] for line in grid],
                }
            )
        bar = figure.colorbar(mesh, ax=list(panels[int(in_seconds)]), pad=0.01)
        bar.set_label("seconds" if in_seconds else "tokens")
    for axes in panels[:, 0]:
        axes.set_ylabel("endpoint")
    for axes in panels[1]:
        axes.set_xlabel("s after the warm-up")
    moves = {scene.cell.profile.policy: _moves(scene, begin_s, end_s) for scene in scenes}
    return Drawn(
        figure,
        {
            "bin_s": _BIN_S,
            "begin_s": begin_s,
            "heat": data,
            "moves": {"columns": ["s", "from", "to"], **moves},
        },
    )


def _grid(scene: Scene, begin_s: float, end_s: float, bins: int, in_seconds: bool) -> list[list[float]]:
    """Return one row of bins per endpoint."""
    return [
        steps(pending(scene, e, in_seconds=in_seconds), begin_s, end_s, bins)
        for e in range(scene.cell.scenario.endpoints)
    ]


def _moves(scene: Scene, begin_s: float, end_s: float) -> list[tuple[float, int, int]]:
    """Return each move as (seconds after the warm-up, source, target)."""
    return [
        (round(s.submitted_s - begin_s, 2), s.moved_from, s.endpoint)
        for s in scene.requests
        if s.moved_from >= 0 and begin_s <= s.submitted_s < end_s
    ]


def _arrows(axes: Axes, scene: Scene, begin_s: float, end_s: float) -> None:
    for at_s, source, target in _moves(scene, begin_s, end_s):
        axes.annotate(
            "",
            (at_s, target),
            (at_s, source),
            arrowprops={"arrowstyle": "-|>", "color": "#0057d9", "linewidth": 0.7, "mutation_scale": 7},
        )


F10 = Figure(
    "Pending prefill of every endpoint over time",
    "One run of each policy at R: the ten minutes after the warm-up, as the router believed. The colour scale"
    " is a square root. Arrows are sessions that move. Queues that look equal in tokens differ in seconds,"
    " because prefill time grows quadratically.",
    _draw,
)
