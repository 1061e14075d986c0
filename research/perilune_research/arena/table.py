"""The arena's result as Markdown: a row for each load and router, and by how much Perilune is ahead or
behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import UnsetType

from perilune_lab.quantiles import mean
from perilune_lab.report import Quantiles, Run
from perilune_lab.simulate.measure import interval
from perilune_research.arena.contestants import OURS, Contestant, DynamoFrontend, Program
from perilune_research.arena.play import Cell

Played = Sequence[tuple[Cell, Run]]


class Group(NamedTuple):
    """One comparison: the load, and whether requests name their session in a header."""

    level: str
    named: bool

    def __str__(self) -> str:
        return f"{self.level}, {'with' if self.named else 'without'} session header"


class Estimate(NamedTuple):
    """A mean over seeds and its 95 % interval. For one seed, the interval is the mean itself."""

    mean: float
    low: float
    high: float


Metric = Callable[[Run], float | None]


def _of(quantiles: Quantiles | UnsetType, name: str) -> float | None:
    return None if isinstance(quantiles, UnsetType) else float(getattr(quantiles, name))


METRICS: Mapping[str, Metric] = {
    "TTFT p50 s": lambda run: _of(run.ttft_s, "p50"),
    "TTFT p90 s": lambda run: _of(run.ttft_s, "p90"),
    "E2E p90 s": lambda run: _of(run.e2e_s, "p90"),
    "hit ratio": lambda run: None if isinstance(run.apc, UnsetType) else run.apc,
}
COMPARED = ("TTFT p90 s", "E2E p90 s")
SEEDS_CANNOT_TELL = ", within what the seeds can tell"


def estimate(runs: Iterable[Run], metric: Metric) -> Estimate | None:
    """Return the metric's mean over the runs; None if no run has the metric."""
    sample = [value for value in map(metric, runs) if value is not None]
    if not sample:
        return None
    return Estimate(mean(sample), *(interval(sample) if len(sample) > 1 else (sample[0], sample[0])))


def grouped(played: Played) -> dict[Group, dict[str, list[Run]]]:
    """Return comparison → router → its runs, in the order of play."""
    found: dict[Group, dict[str, list[Run]]] = {}
    for cell, run in played:
        group = found.setdefault(Group(cell.level.name, cell.named), {})
        group.setdefault(cell.contestant.name, []).append(run)
    return found


class Comparison(NamedTuple):
    """Perilune and the best other router in one metric."""

    ours: Estimate
    best: Estimate
    name: str
    """Of the best other router."""

    @property
    def ratio(self) -> float:
        """Ours / best: above 1, Perilune is behind."""
        return self.ours.mean / self.best.mean


def compared(routers: Mapping[str, Sequence[Run]], metric: Metric) -> Comparison | None:
    """Compare Perilune with the best other router. None if one of them did not play or has no such metric."""
    found = {name: estimate(runs, metric) for name, runs in routers.items()}
    ours = found.pop(OURS, None)
    others = {name: value for name, value in found.items() if value is not None}
    if ours is None or not others:
        return None
    name = min(others, key=lambda each: others[each].mean)
    return Comparison(ours, others[name], name)


def table(played: Played) -> list[str]:
    """Return the lines of a table: means over seeds, with 95 % intervals if there are several seeds. The
    load at which Perilune does worst, against the best other router in any compared metric, comes first."""
    lines = [
        f"| load | router | {' | '.join(METRICS)} | failed | seeds |",
        f"|---|---|{'---:|' * (len(METRICS) + 2)}",
    ]
    for group, routers in sorted(grouped(played).items(), key=lambda item: -_worst(item[1])):
        for name, runs in routers.items():
            cells = (_cell(estimate(runs, metric)) for metric in METRICS.values())
            requests = sum(run.requests for run in runs)
            failed = requests - sum(run.succeeded for run in runs)
            lines.append(f"| {group} | {name} | {' | '.join(cells)} | {failed} of {requests} | {len(runs)} |")
    return lines


def _worst(routers: Mapping[str, Sequence[Run]]) -> float:
    found = (compared(routers, METRICS[title]) for title in COMPARED)
    return max((comparison.ratio for comparison in found if comparison), default=0.0)


def _cell(value: Estimate | None) -> str:
    if value is None:
        return "–"
    if value.low == value.high:
        return f"{value.mean:.2f}"
    return f"{value.mean:.2f} [{value.low:.2f}–{value.high:.2f}]"


def verdicts(played: Played) -> list[str]:
    """Return a line for each comparison and metric: by how much Perilune is ahead of the best other router,
    or behind it. Where it is farthest behind comes first."""
    lines: list[tuple[float, str]] = []
    for group, routers in grouped(played).items():
        for title in COMPARED:
            found = compared(routers, METRICS[title])
            if found is None:
                continue
            apart = found.ours.high < found.best.low or found.best.high < found.ours.low
            clear = apart and len(routers[OURS]) > 1 and len(routers[found.name]) > 1
            side = "ahead of" if found.ratio < 1 else "behind"
            line = (
                f"- {group}: {OURS} is {abs(found.ratio - 1):.0%} {side} the best other router"
                f" ({found.name}) in {title.removesuffix(' s')}{'' if clear else SEEDS_CANNOT_TELL}."
            )
            lines.append((found.ratio, line))
    return [line for _, line in sorted(lines, key=lambda each: -each[0])]


def legend(contestants: Iterable[Contestant], left_out: Mapping[str, str]) -> list[str]:
    """Return a line for each router with its version and settings, and one for each that was left out."""
    lines = []
    for c in contestants:
        version = f" ({c.front.package})" if isinstance(c.front, Program | DynamoFrontend) else ""
        lines.append(f"- {c.name}{version}: {c.settings}.")
    return [*lines, *(f"- Left out: {name}: {cause}" for name, cause in left_out.items())]
