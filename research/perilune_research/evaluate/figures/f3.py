"""f3: the same sessions with a chatbot's gaps and with an agent's. Slower turns mean more sessions at once,
which make turns slower; think time dilutes this loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perilune_lab.quantiles import mean
from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Cell, Profile, Scenario
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas
from perilune_research.evaluate.scenes import Scene, open_sessions, steps, watch
from perilune_research.simulator.request import SimulatedRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PROFILE = Profile("lmetric")
_SLOWER = 1.2
_ROWS, _SHOWN_S, _BINS = 9, 240.0, 120
_TTFT, _DECODE, _GAP = "#d62f2f", "#009e73", "#c9d3de"
_LOOP = "slower turns → more sessions at once → slower turns"


def _draw(context: Context) -> Drawn:
    from matplotlib.patches import Patch

    f = context.findings
    calm = plan.scenario(f.at_r, "R/2")
    scenarios = {"chatbot": replace(calm, gap_s=30.0), "agentic": replace(calm, gap_s=0.0)}
    figure = canvas(12, 6.4)
    panels = figure.subplots(2, 2, height_ratios=(1.7, 1), sharey="row")
    data = {}
    for column, (name, scenario) in enumerate(scenarios.items()):
        scene, slower = (_scene(each, f.size.seeds[0]) for each in (scenario, _slowed(scenario)))
        begin_s = scenario.warmup_s
        rows = _chosen(scene, begin_s)
        _timeline(panels[0, column], rows, begin_s)
        gaps = "30 s between turns" if column == 0 else "the next turn at once"
        panels[0, column].set_title(f"{name}: {gaps}")
        grew = _sessions(panels[1, column], scene, slower, scenario)
        share = grew["turn_share_of_cycle"]
        weight = "the whole cycle" if share == 1.0 else f"{share:.0%} of a cycle, the rest is think time"
        panels[1, column].set_title(f"{_LOOP}\na turn is {weight}", fontsize=9)
        data[name] = {
            "gap_s": scenario.gap_s,
            "turns": [
                {
                    "row": i,
                    "submitted_s": round(s.submitted_s, 3),
                    "first_token_s": round(s.first_token_s, 3),
                    "finished_s": round(s.finished_s, 3),
                }
                for i, turns in enumerate(rows)
                for s in turns
            ],
            **grew,
        }
    panels[0, 0].set_ylabel("sessions")
    panels[1, 0].set_ylabel("sessions in progress")
    figure.legend(
        handles=[
            Patch(color=_TTFT, label="waiting and prefill (TTFT)"),
            Patch(color=_DECODE, label="decode"),
            Patch(color=_GAP, label="between turns"),
        ],
        loc="outside lower center",
        ncols=3,
    )
    return Drawn(figure, {"policy": _PROFILE.policy, "slower": _SLOWER, **data})


def _slowed(scenario: Scenario) -> Scenario:
    return replace(scenario, slowdown=_SLOWER)


def _scene(scenario: Scenario, seed: int) -> Scene:
    return watch(Cell(scenario, _PROFILE, seed))


def _chosen(scene: Scene, begin_s: float) -> list[list[SimulatedRequest]]:
    """Return the turns of the sessions with most turns in the shown time, in the order of their first turn
    there."""
    rows: dict[int, list[SimulatedRequest]] = {}
    for s in scene.requests:
        if begin_s <= s.submitted_s < begin_s + _SHOWN_S:
            rows.setdefault(s.task.session, []).append(s)
    longest = sorted(rows.values(), key=len, reverse=True)[:_ROWS]
    return sorted(longest, key=lambda turns: turns[0].submitted_s)


def _timeline(axes: Axes, rows: Sequence[Sequence[SimulatedRequest]], begin_s: float) -> None:
    for y, turns in enumerate(rows):
        first, last = turns[0].submitted_s - begin_s, turns[-1].finished_s - begin_s
        axes.barh(y, last - first, left=first, height=0.12, color=_GAP)
        for s in turns:
            at = s.submitted_s - begin_s
            axes.barh(y, s.first_token_s - s.submitted_s, left=at, height=0.62, color=_TTFT)
            decode_s = s.finished_s - s.first_token_s
            axes.barh(y, decode_s, left=s.first_token_s - begin_s, height=0.62, color=_DECODE)
    axes.set(xlim=(0, _SHOWN_S), ylim=(-0.6, _ROWS - 0.4), yticks=[], xlabel="s")


def _sessions(axes: Axes, scene: Scene, slower: Scene, scenario: Scenario) -> dict[str, Any]:
    """Draw the sessions in progress, with engines as they are and with slower ones. Return the data."""
    begin_s, end_s = 0.0, scenario.window_s
    at = [end_s * (i + 0.5) / _BINS for i in range(_BINS)]
    normal, slow = (steps(open_sessions(s), begin_s, end_s, _BINS) for s in (scene, slower))
    axes.plot(at, normal, color="#0057d9", label="engines as they are")
    axes.plot(at, slow, color="#d62f2f", label=f"engines {_SLOWER - 1:.0%} slower")
    measured = [i for i, s in enumerate(at) if s >= scenario.warmup_s]
    more = mean(slow[i] for i in measured) / mean(normal[i] for i in measured) - 1
    axes.legend(
        loc="upper left", title=f"{more:+.0%} sessions after the warm-up", title_fontsize=8.5, fontsize=8
    )
    axes.set(xlabel="s", xlim=(0, end_s))
    axes.set_ylim(0)
    axes.grid(alpha=0.25)
    turn_s = mean(s.finished_s - s.submitted_s for s in scene.requests)
    return {
        "turn_share_of_cycle": turn_s / (turn_s + (scenario.gap_s or 0.0)),
        "more_sessions": more,
        "sessions": {
            "columns": ["s", "in_progress", "in_progress_slower"],
            "rows": [[round(x, 2) for x in values] for values in zip(at, normal, slow, strict=True)],
        },
    }


F3 = Figure(
    "A chatbot's turns and an agent's, the same prompts",
    "One run of lmetric at R/2 each. Above: some sessions during four minutes. Below: sessions in progress,"
    " with engines as they are and 20 % slower. Think time dilutes a slowdown, because a turn is only a part"
    " of the cycle.",
    _draw,
)
