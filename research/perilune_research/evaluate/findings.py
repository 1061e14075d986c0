"""The results of the simulations, as figures, tables and bars read them: metrics of points, with intervals.

A metric is named by its path in `report.Run` ("ttft_s.p90", "apc") or, with the prefix "extra.", in
`extra.Extra`. Means are over seeds, intervals are 95 % by bootstrap over seeds, and two points are compared
seed by seed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import UNSET

from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_research.evaluate.cells import Cell, Result, Scenario
from perilune_research.evaluate.plan import CAPACITIES, Point, Size
from perilune_research.evaluate.search import Found, Search
from perilune_research.simulator.deployment import Deployment


class Estimate(NamedTuple):
    """A mean and its 95 % interval."""

    value: float
    low: float
    high: float


class Findings:
    """The results by point. Methods, but not `has`, raise KeyError for a point that was not simulated."""

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
            self._by_point[Point(cell.scenario, cell.profile)][cell.seed] = result
        self._capacity: dict[str, list[float]] = {}
        for name, profile in CAPACITIES.items():
            rates = [
                value.rate
                for search, value in sorted((found or {}).items(), key=lambda row: row[0].seed)
                if search.profile == profile
            ]
            if rates:
                self._capacity[name] = rates

    @property
    def deployment(self) -> Deployment:
        return self.at_r.deployment

    @property
    def r(self) -> float:
        """R, in sessions per second; for a recorded trace, a factor on the recorded speed."""
        return self.at_r.rate

    @cached_property
    def side(self) -> Findings:
        """These findings restricted to the seeds of the side studies, so that all points of a study have the
        same seeds."""
        seeds = set(self.size.side_seeds)
        kept = {cell: result for cell, result in self._cells.items() if cell.seed in seeds}
        return Findings(self.size, self.at_r, kept)

    def results(self, point: Point) -> dict[int, Result]:
        """Return the point's results by seed."""
        if point not in self._by_point:
            raise KeyError(f"{point.profile} was not simulated in {point.scenario}")
        return dict(sorted(self._by_point[point].items()))

    def values(self, point: Point, metric: str) -> dict[int, float]:
        """Return the metric by seed, without the seeds that lack it, such as the accuracy where no session
        moved."""
        found = {seed: _metric(result, metric) for seed, result in self.results(point).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def has(self, point: Point, metric: str) -> bool:
        """Return whether the point was simulated and has the metric with some seed."""
        return point in self._by_point and bool(self.values(point, metric))

    def estimate(self, point: Point, metric: str) -> Estimate:
        """Return the metric's mean over the seeds that have it."""
        if (point, metric) not in self._estimates:
            self._estimates[point, metric] = estimate(list(self.values(point, metric).values()))
        return self._estimates[point, metric]

    def ratio(self, ours: Point, theirs: Point, metric: str, their_metric: str = "") -> Estimate:
        """Return the ratio of the means over the seeds that both points have. `their_metric`: the metric of
        `theirs`, if it is another one."""
        key = (ours, theirs, metric, their_metric)
        if key not in self._ratios:
            self._ratios[key] = self._ratio(*key)
        return self._ratios[key]

    def _ratio(self, ours: Point, theirs: Point, metric: str, their_metric: str) -> Estimate:
        mine, other = self.values(ours, metric), self.values(theirs, their_metric or metric)
        seeds = [seed for seed in mine if seed in other]
        return Estimate(*measure.ratio([mine[s] for s in seeds], [other[s] for s in seeds]))

    def pooled(self, point: Point) -> Run:
        """Return the point's runs pooled over seeds, in the report's format."""
        results = self.results(point)
        return measure.pooled([r.run for r in results.values()], list(results), point.scenario.rate)

    @property
    def capacities(self) -> Mapping[str, Estimate]:
        """SLO capacities of the profiles in `plan.CAPACITIES`, in sessions per second."""
        return {name: estimate(rates) for name, rates in self._capacity.items()}

    def capacity_ratio(self, ours: str, theirs: str) -> Estimate:
        """Return the ratio of two capacities, given by their names in `plan.CAPACITIES`."""
        return Estimate(*measure.ratio(self._capacity[ours], self._capacity[theirs]))


def estimate(sample: Sequence[float]) -> Estimate:
    """Return the mean and its interval. The interval of a single value is that value."""
    value = mean(sample)
    return Estimate(value, *(measure.interval(sample) if len(sample) > 1 else (value, value)))


def _metric(result: Result, metric: str) -> float | None:
    value: object = result.run
    for part in metric.split("."):
        value = result.extra if part == "extra" else getattr(value, part, UNSET)
    return float(value) if isinstance(value, int | float) else None
