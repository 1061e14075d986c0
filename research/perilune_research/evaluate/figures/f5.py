"""f5: the components of the simulated configuration, as a drawing, and as Mermaid text in its data file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perilune_api.policies import PeriluneParams
from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Profile, Scenario
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas
from perilune_research.simulator.deployment import Deployment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOVES = {
    Deployment.NONE: "migration: the target computes the KV again",
    Deployment.HANDOFF: "migration: KV handed over in planned moves",
    Deployment.STORE: "migration: the target reads KV from the store",
    Deployment.BOTH: "migration: KV handed over or read from the store",
    Deployment.OFFLOAD: "migration: KV read from host memory",
    Deployment.PULL: "migration: KV pulled by the target (hypothetical)",
}
_ROUTER, _INSTANCE, _CLIENT, _EDGE = "#dbe8ff", "#e4f3ea", "#f1f1f1", "#33475b"


def _draw(context: Context) -> Drawn:
    scenario, profile = plan.scenario(context.findings.at_r), plan.OURS
    figure = canvas(10, 4.6)
    axes = figure.subplots()
    axes.axis("off")
    axes.set(xlim=(-1, 100), ylim=(0, 50))
    _box(axes, 0, 20, 13, 12, _CLIENT, "agents", [f"{scenario.rate:g} sessions/s", "closed loop"])
    _box(axes, 24, 5, 30, 42, _ROUTER, f"router: {profile.policy}", [])
    for i, (title, lines) in enumerate(parts(profile, scenario)):
        _box(axes, 26, 34 - 9.4 * i, 26, 8, "white", title, lines)
    _arrow(axes, (13, 26), (24, 26), "prompt,\nsession", "-")
    height = 46 / scenario.endpoints
    for e in range(scenario.endpoints):
        y = 47 - (e + 1) * height + 0.5
        label = f"instance {e}: H20, KV {scenario.kv_tokens:,} tokens"
        _box(axes, 68, y, 26, height - 1.2, _INSTANCE, label, [])
        _arrow(axes, (54, 26), (68, y + (height - 1.2) / 2), "", "-")
    top, bottom = 47 - height / 2, 47 - (scenario.endpoints - 0.5) * height
    axes.annotate(
        "",
        (94, bottom),
        (94, top),
        arrowprops={
            "arrowstyle": "<->",
            "linestyle": "--",
            "color": "#d62f2f",
            "connectionstyle": "arc3,rad=-0.12",
        },
    )
    axes.text(
        99.5,
        25,
        _MOVES[scenario.deployment],
        rotation=270,
        va="center",
        color="#d62f2f",
        fontsize=8.5,
    )
    _arrow(axes, (68, 3.2), (39, 5), "KV events, load", ":")
    return Drawn(figure, {"mermaid": mermaid(profile, scenario), "world": context.findings.at_r})


def parts(profile: Profile, scenario: Scenario) -> list[tuple[str, list[str]]]:
    """Return the router's components, each as a title and lines with the parameters of the simulation."""
    p: PeriluneParams = profile.params.perilune
    return [
        ("session table", ["session → host, last move"]),
        ("prefix index", ["block hash → who holds it"]),
        ("load and costs in seconds", ["queues, links, learned speeds"]),
        (
            "migration",
            [f"gain > {p.least_gain_seconds:g} s and its fetch"],
        ),
    ]


def mermaid(profile: Profile, scenario: Scenario) -> str:
    """Return the drawing as Mermaid text."""
    lines = ["flowchart LR", "  agents([agents]) --> router"]
    lines += [f"  subgraph router [router: {profile.policy}]"]
    lines += [
        f'    r{i}["{title}: {", ".join(text)}"]' for i, (title, text) in enumerate(parts(profile, scenario))
    ]
    lines += ["  end"]
    lines += [f"  router --> i{e}[instance {e}]" for e in range(scenario.endpoints)]
    lines += [f"  i{e} -. migration .- i{e + 1}" for e in range(scenario.endpoints - 1)]
    return "\n".join(lines)


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, face: str, title: str, lines: list[str]
) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.8",
            facecolor=face,
            edgecolor=_EDGE,
            linewidth=1,
        )
    )
    tall = height > 20
    middle = y + height - 2.3 if tall else y + height / 2 + (1.3 if lines else 0)
    bold = "bold" if lines or tall else "normal"
    axes.text(x + width / 2, middle, title, ha="center", va="center", fontsize=8.5, fontweight=bold)
    if lines:
        axes.text(
            x + width / 2,
            middle - 2.9 - 0.8 * (len(lines) - 1),
            "\n".join(lines),
            ha="center",
            va="center",
            fontsize=7.3,
        )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], label: str, style: str) -> None:
    arrow = {"arrowstyle": "->", "color": _EDGE, "linewidth": 0.9, "linestyle": style}
    axes.annotate("", end, start, arrowprops=arrow)
    if label:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(x, y + (1.2 if style == "-" else -2.2), label, ha="center", fontsize=7.5)


F5 = Figure(
    "Components",
    "Generated from the configuration that was simulated: a router with its session table, equal instances,"
    " and the migration between them (dashed). `f5.json` has it as Mermaid.",
    _draw,
)
