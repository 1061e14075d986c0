"""What the simulations gave, as figures, tables and bars read it: a metric of a point, with its interval.

A metric is a path into `report.Run` ("ttft_s.p90", "apc") or, with the prefix "extra.", into `extra.Extra`.
Means are over seeds; intervals are 95 % by bootstrap over seeds; two points are compared seed by seed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import UNSET

from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_research.evaluate.cells import Cell, Result, Scenario
from perilune_research.evaluate.plan import CAPACITIES, Point, Size
from perilune_research.evaluate.search import Found, Search
from perilune_research.simulator import measure


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


class Findings:
    """The results by point. Methods raise KeyError for a point that was not simulated."""

    def __init__(
        self,
        size: Size,
        at_r: Scenario,
        cells: Mapping[Cell, Result],
        found: Mapping[Search, Found] | None = None,
    ) -> None:
        self.size = size
        self._cells = cells
        self.at_r = at_r
        """The scenario at R."""
        self._estimates: dict[tuple[Point, str], Estimate] = {}
        self._ratios: dict[tuple[Point, Point, str, str], Estimate] = {}
        self._by_point: dict[Point, dict[int, Result]] = defaultdict(dict)
        for cell, result in cells.items():
            self._by_point[Point(cell.scenario, cell.arm)][cell.seed] = result
        self._capacity: dict[str, list[float]] = {}
        for name, (arm, store) in CAPACITIES.items():
            rates = [
                value.rate
                for search, value in sorted((found or {}).items(), key=lambda row: row[0].seed)
                if search.arm == arm and search.scenario.store_bytes_per_s == store
            ]
            if rates:
                self._capacity[name] = rates

    @property
    def r(self) -> float:
        """Sessions per second."""
        return self.at_r.rate

    @cached_property
    def side(self) -> Findings:
        """These findings restricted to the seeds of the side studies, so that all points of a study have the
        same seeds."""
        seeds = set(self.size.side_seeds)
        kept = {cell: result for cell, result in self._cells.items() if cell.seed in seeds}
        return Findings(self.size, self.at_r, kept)

    def results(self, point: Point) -> dict[int, Result]:
        """The point's results by seed."""
        if point not in self._by_point:
            raise KeyError(f"{point.arm} was not simulated in {point.scenario}")
        return dict(sorted(self._by_point[point].items()))

    def values(self, point: Point, metric: str) -> dict[int, float]:
        """The metric by seed; seeds without it (no move to judge) are left out."""
        found = {seed: _metric(result, metric) for seed, result in self.results(point).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def has(self, point: Point, metric: str) -> bool:
        return point in self._by_point and bool(self.values(point, metric))

    def estimate(self, point: Point, metric: str) -> Estimate:
        if (point, metric) not in self._estimates:
            self._estimates[point, metric] = estimate(list(self.values(point, metric).values()))
        return self._estimates[point, metric]

    def ratio(self, ours: Point, theirs: Point, metric: str, their_metric: str = "") -> Estimate:
        """Ratio of the means over the seeds that both points have."""
        key = (ours, theirs, metric, their_metric)
        if key not in self._ratios:
            self._ratios[key] = self._ratio(*key)
        return self._ratios[key]

    def _ratio(self, ours: Point, theirs: Point, metric: str, their_metric: str) -> Estimate:
        mine, other = self.values(ours, metric), self.values(theirs, their_metric or metric)
        seeds = [seed for seed in mine if seed in other]
        return Estimate(*measure.ratio([mine[s] for s in seeds], [other[s] for s in seeds]))

    def pooled(self, point: Point) -> Run:
        """The point's runs pooled over seeds, in the report's format."""
        results = self.results(point)
        return measure.pooled([r.run for r in results.values()], list(results), point.scenario.rate)

    @property
    def capacities(self) -> Mapping[str, Estimate]:
        """SLO capacities in sessions per second, of the arms of `plan.CAPACITIES`."""
        return {name: estimate(rates) for name, rates in self._capacity.items()}

    def capacity_ratio(self, ours: str, theirs: str) -> Estimate:
        return Estimate(*measure.ratio(self._capacity[ours], self._capacity[theirs]))


def estimate(sample: Sequence[float]) -> Estimate:
    """The mean and its interval; a single value is its own interval."""
    value = mean(sample)
    return Estimate(value, *(measure.interval(sample) if len(sample) > 1 else (value, value)))


def _metric(result: Result, metric: str) -> float | None:
    value: object = result.run
    for part in metric.split("."):
        value = result.extra if part == "extra" else getattr(value, part, UNSET)
    return float(value) if isinstance(value, int | float) else None
