"""The arena's result as Markdown: where Perilune is behind the best other router and where ahead, all
figures, and the routers' settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from perilune_lab.quantiles import mean
from perilune_lab.simulate.measure import interval, ratio
from perilune_research.arena.contestants import OURS, Contestant, DynamoFrontend, Program
from perilune_research.arena.kept import Row


class Group(NamedTuple):
    """One comparison: the load, and whether requests name their session in a header."""

    load: str
    session_header: bool

    def __str__(self) -> str:
        return f"{self.load}, {'with' if self.session_header else 'without'} session header"


class Estimate(NamedTuple):
    """A figure over seeds and its 95 % interval. For one seed, the interval is the figure itself."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} [{self.low:.2f}–{self.high:.2f}]"


Figure = Callable[[Row], float | None]

FIGURES: Mapping[str, Figure] = {
    "TTFT p50 s": lambda row: row.ttft_p50_s,
    "TTFT p90 s": lambda row: row.ttft_p90_s,
    "E2E p90 s": lambda row: row.e2e_p90_s,
    "hit ratio": lambda row: row.hit_ratio,
}
COMPARED = ("TTFT p90 s", "E2E p90 s")
STALE = "†"
"""Marks the figures in which rows have a part that the next run plays again."""


def grouped(rows: Iterable[Row]) -> dict[Group, dict[str, list[Row]]]:
    """Return comparison → router → its rows, in the order of play."""
    found: dict[Group, dict[str, list[Row]]] = {}
    for row in rows:
        group = found.setdefault(Group(row.load, row.session_header), {})
        group.setdefault(row.router, []).append(row)
    return found


class Comparison(NamedTuple):
    """Perilune and the best other router in one figure, over the seeds that both have played."""

    group: Group
    figure: str
    ratio: Estimate
    """Ours / theirs: above 1, Perilune is behind."""
    ours: float
    theirs: float
    best: str
    """Name of the best other router."""
    seeds: int

    @property
    def is_behind(self) -> bool:
        """Whether Perilune is behind by more than the seeds differ; with one seed, whether it is behind."""
        return self.ratio.low > 1

    @property
    def verdict(self) -> str:
        if self.seeds == 1:
            return "one seed"
        if self.is_behind:
            return "**behind**"
        return "ahead" if self.ratio.high < 1 else "the seeds cannot tell"


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """Compare Perilune with the best other router under every load; where it is farthest behind comes
    first."""
    found = (
        _compared(group, figure, routers) for group, routers in grouped(rows).items() for figure in COMPARED
    )
    return sorted(filter(None, found), key=lambda one: -one.ratio.mean)


def _compared(group: Group, figure: str, routers: Mapping[str, Sequence[Row]]) -> Comparison | None:
    """Return None if Perilune or all others lack the figure. The best other router is the one against which
    Perilune does worst. Rows of different rigs are not compared."""
    by_seed = {
        name: {(row.seed, row.rig): value for row in rows if (value := FIGURES[figure](row)) is not None}
        for name, rows in routers.items()
    }
    ours = by_seed.pop(OURS, {})
    found = []
    for name, theirs in by_seed.items():
        if seeds := sorted(ours.keys() & theirs.keys()):
            mine, its = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
            found.append(
                Comparison(
                    group=group,
                    figure=figure,
                    ratio=Estimate(*ratio(mine, its)),
                    ours=mean(mine),
                    theirs=mean(its),
                    best=name,
                    seeds=len(seeds),
                )
            )
    return max(found, key=lambda one: one.ratio.mean, default=None)


def lost(rows: Iterable[Row]) -> dict[Group, list[Comparison]]:
    """Return the loads under which Perilune is behind, and in what; the worst comes first."""
    found: dict[Group, list[Comparison]] = {}
    for one in comparisons(rows):
        if one.is_behind:
            found.setdefault(one.group, []).append(one)
    return found


def compared(rows: Iterable[Row]) -> list[str]:
    """Return the lines of the table of comparisons; none if there is nothing to compare."""
    lines = [
        f"| {one.group} | {one.figure} | {one.ours:.2f} | {one.theirs:.2f} | {one.best} | {one.ratio}"
        f" | {one.seeds} | {one.verdict} |"
        for one in comparisons(rows)
    ]
    head = [
        "| load | figure | Perilune | best other | which | ratio | seeds | |",
        "|---|---|---:|---:|---|---:|---:|---|",
    ]
    return [*head, *lines] if lines else []


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table of all figures: means over seeds, with 95 % intervals if there are
    several seeds. The loads are in the order of the table of comparisons."""
    groups = grouped(rows)
    order = dict.fromkeys([*(one.group for one in comparisons(rows)), *groups])
    old = set(stale(rows))
    lines = [
        f"| load | router | {' | '.join(FIGURES)} | failed | seeds |",
        f"|---|---|{'---:|' * (len(FIGURES) + 2)}",
    ]
    for group in order:
        for name, played in groups[group].items():
            cells = (_cell(estimate(played, figure)) for figure in FIGURES.values())
            requests = sum(row.requests for row in played)
            failed = requests - sum(row.succeeded for row in played)
            router = name if old.isdisjoint(played) else f"{name} {STALE}"
            lines.append(
                f"| {group} | {router} | {' | '.join(cells)} | {failed} of {requests} | {len(played)} |"
            )
    return lines


def stale(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of another version of their router than its newest row, or of another rig than the
    newest row of all."""
    ordered = sorted(rows, key=lambda row: row.at)
    newest = {row.router: row for row in ordered}
    return [row for row in ordered if (row.version, row.rig) != (newest[row.router].version, ordered[-1].rig)]


def estimate(rows: Iterable[Row], figure: Figure) -> Estimate | None:
    """Return the figure's mean over the rows; None if no row has the figure."""
    sample = [value for value in map(figure, rows) if value is not None]
    if not sample:
        return None
    return Estimate(mean(sample), *(interval(sample) if len(sample) > 1 else (sample[0], sample[0])))


def _cell(value: Estimate | None) -> str:
    return "–" if value is None else str(value)


def legend(contestants: Iterable[Contestant]) -> list[str]:
    """Return a line for each router with its version and settings."""
    lines = []
    for c in contestants:
        version = f" ({c.front.package})" if isinstance(c.front, Program | DynamoFrontend) else ""
        lines.append(f"- {c.name}{version}: {c.settings}.")
    return lines
