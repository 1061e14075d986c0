"""The data of the evaluation's pages, and how figures of several pages are written side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import inf
from pathlib import Path
from random import Random
from statistics import geometric_mean
from typing import NamedTuple

from perilune_lab.quantiles import mean
from perilune_lab.simulate import measure
from perilune_research.evaluation.metrics import Metric
from perilune_research.evaluation.plan import DEFAULT
from perilune_research.evaluation.rows import Key, Rows, read
from perilune_research.table import Table, ranged

NEVER = "never"
CLOSE = 0.03
"""Distance from 1 up to which a ratio is written with three digits after the point."""


class Played(NamedTuple):
    """One deployment at one load with one policy, on one page."""

    page: str
    pool: str
    load: str
    policy: str = DEFAULT


class Pages:
    """The data of the pages in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows = cache(self._read)

    def policies(self, page: str, pool: str, load: str) -> list[str]:
        """Return the policies that were played there. Raises OSError without the page's data."""
        return [policy for *there, policy in self._rows(page) if there == [pool, load]]

    def values(self, played: Played, metric: Metric) -> list[float]:
        """Return the figure of each seed; infinity if there is none. Empty if it was not played, or if the
        page does not have this figure."""
        found = self._rows(played.page).get(Key(*played[1:]), {}).get(metric.path)
        return [] if found is None else [inf if value is None else value for value in found] or [inf]

    def text(self, played: Played, metric: Metric) -> str:
        """Return the mean over the seeds; empty if it was not played."""
        values = self.values(played, metric)
        if not values:
            return ""
        return metric.form(mean(values)) if inf not in values else NEVER

    def ratios(self, one: Played, other: Played, metric: Metric) -> list[float]:
        """Return the ratio of two figures in each seed."""
        return [
            1.0 if ours == theirs else ours / theirs
            for ours, theirs in zip(self.values(one, metric), self.values(other, metric), strict=True)
        ]

    def of_means(self, one: Played, other: Played, metric: Metric) -> str:
        """Return the ratio of two means, with its 95 % interval by bootstrap over seeds."""
        return ranged(measure.ratio(self.values(one, metric), self.values(other, metric)))

    def _read(self, page: str) -> Rows:
        return read(self._folder / f"{page}.json")


class Column(NamedTuple):
    title: str
    metric: Metric
    load: str = ""
    """The load, if it is the same in all lines."""
    pool: str = ""


class Line(NamedTuple):
    cells: tuple[str, ...]
    played: Played


def grid(pages: Pages, names: Sequence[str], lines: Iterable[Line], columns: Sequence[Column]) -> Table:
    """Return means: one line for each deployment, load or policy, one column for each figure."""

    def cell(played: Played, column: Column) -> str:
        there = played._replace(load=column.load or played.load, pool=column.pool or played.pool)
        return pages.text(there, column.metric)

    rows = [[*line.cells, *(cell(line.played, column) for column in columns)] for line in lines]
    return Table("", [*names, *(column.title for column in columns)], rows)


def by_load(metric: Metric, loads: Iterable[str]) -> list[Column]:
    return [Column(load, metric, load) for load in loads]


def seed_by_seed(ratios: Sequence[float]) -> str:
    """Return the geometric mean of the ratios of one seed each, with its 95 % interval by bootstrap.
    It has three digits after the point if it is close to 1, or if two would hide on which side of 1 a bound
    lies."""
    rng, n = Random(len(ratios)), len(ratios)
    found = sorted(geometric_mean(rng.choices(ratios, k=n)) for _ in range(measure.RESAMPLES))
    low, high = (found[round((measure.RESAMPLES - 1) * q)] for q in (0.025, 0.975))
    middle = geometric_mean(ratios)
    reads_as_one = any(f"{figure:.2f}" == "1.00" for figure in (low, high))
    digits = 3 if abs(middle - 1) < CLOSE or reads_as_one else 2
    return f"{middle:.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]"


def spread(ratios: Sequence[float]) -> str:
    """Return the geometric mean and the range."""
    return f"{geometric_mean(ratios):.2f}, {min(ratios):.2f}–{max(ratios):.2f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def plain(metric: Metric) -> str:
    """Return its name without a unit."""
    name = metric.name.removesuffix(" s").removesuffix(" ms").removesuffix(" tokens/s")
    return name[0].upper() + name[1:]
