"""What all figures share: the title with *simulated*, colours, files, bars and lines with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perilune_research import data
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import OURS, Point
from perilune_research.evaluate.traffic import Traffic

if TYPE_CHECKING:  # matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLOURS = {
    "perilune": "#0057d9",
    "ear": "#009e73",
    "lmetric_plus_one": "#e69f00",
    "sticky": "#a2449a",
    "lmetric": "#d62f2f",
    "dynamo": "#6aa300",
    "least_loaded": "#8c6d46",
    "round_robin": "#777777",
    "static_pd": "#444444",
    "sticky+planner": "#d62f2f",
    "least_loaded+planner": "#8c6d46",
}
OTHER = "#9db2c9"
"""Colour of all other policies."""
MARKERS = {
    "perilune": "o",
    "ear": "s",
    "lmetric_plus_one": "^",
    "sticky": "D",
    "lmetric": "v",
    "dynamo": "P",
    "least_loaded+planner": "X",
}
_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "perilune",
}


@dataclass(frozen=True, slots=True)
class Context:
    """What figures are drawn from."""

    findings: Findings
    traffic: Traffic


class Drawn(NamedTuple):
    """A figure that was drawn."""

    canvas: Canvas
    data: Mapping[str, Any]
    """What the figure shows, for its data file."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its texts, and the function that draws it."""

    title: str
    caption: str
    draw: Callable[[Context], Drawn]

    def make(self, context: Context, folder: Path, name: str) -> None:
        """Draw the figure and write it as SVG and PNG, with its data as JSON. Raises OSError if it cannot
        write them."""
        import matplotlib as mpl

        mpl.use("Agg")
        with mpl.rc_context(_SETTINGS):
            drawn = self.draw(context)
            arm = context.findings.deployment
            drawn.canvas.suptitle(f"{self.title} — SIMULATED, arm {arm}", fontsize=11, fontweight="bold")
            drawn.canvas.savefig(folder / f"{name}.svg", metadata={"Date": None})
            drawn.canvas.set_layout_engine("none")  # laid out once for both
            drawn.canvas.savefig(folder / f"{name}.png", dpi=110)
        document = {"figure": name, "title": self.title, "simulated": True, "arm": arm, **drawn.data}
        (folder / f"{name}.json").write_bytes(data.encode(document))


def canvas(width: float, height: float) -> Canvas:
    """Return an empty canvas of that size, in inches."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout="constrained")


def colour(policy: str) -> str:
    """Return the colour of a policy in all figures."""
    return COLOURS.get(policy, OTHER)


def error(found: Estimate) -> tuple[float, float]:
    """Return the lengths of the error bar below and above the value."""
    return max(0.0, found.value - found.low), max(0.0, found.high - found.value)


def horizontal(
    axes: Axes, names: Sequence[str], found: Sequence[Estimate], colours: Sequence[str], form: str = "{:.3g}"
) -> None:
    """Draw horizontal bars with intervals from top to bottom, each with its value at its right end."""
    at = range(len(names))
    low, high = zip(*(error(e) for e in found), strict=True)
    axes.barh(
        at,
        [e.value for e in found],
        xerr=[low, high],
        color=list(colours),
        height=0.7,
        error_kw={"ecolor": "#333333", "elinewidth": 0.8, "capsize": 1.5},
    )
    for y, e in zip(at, found, strict=True):
        axes.annotate(
            form.format(e.value),
            (e.high, y),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    axes.set_yticks(list(at), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def line(
    axes: Axes, xs: Sequence[float], found: Sequence[Estimate], label: str, policy: str, style: str = "-"
) -> None:
    """Draw a line with its intervals as a band."""
    axes.plot(
        xs,
        [e.value for e in found],
        style,
        color=colour(policy),
        label=label,
        marker=MARKERS.get(policy, "o"),
        markersize=4,
        linewidth=2.0 if policy == OURS.policy else 1.3,
    )
    axes.fill_between(
        xs, [e.low for e in found], [e.high for e in found], color=colour(policy), alpha=0.12, linewidth=0
    )
    axes.grid(alpha=0.25)


def row(f: Findings, point: Point, metrics: Mapping[str, str], **names: object) -> dict[str, object]:
    """Return one row of a data file: `names`, and each metric that the point has as [mean, low, high]."""
    values = {name: f.estimate(point, path) for name, path in metrics.items() if f.has(point, path)}
    return {**names, "sessions_per_s": point.scenario.rate, **values}
