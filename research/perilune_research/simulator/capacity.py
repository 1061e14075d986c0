"""SLO capacity: the largest load at which a policy meets its SLOs.

Each seed has its own bisection over the rate, so a policy has one capacity per seed: the mean is reported,
the interval comes from the seeds, and two policies are compared pair by pair.

Cost: 6 to 10 simulations per policy and seed; seeds run in processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt

from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_research.processes import mapped
from perilune_research.simulator import measure
from perilune_research.simulator.bisection import last_that
from perilune_research.simulator.harness import Comparison, first_guess

TOLERANCE = 0.02
"""Relative tolerance of a capacity."""


@dataclass(frozen=True, slots=True)
class Slo:
    """The SLOs of a run. A run with a failed or refused request does not meet them."""

    ttft_p90_s: float = 5.0
    stretch: float = 1.25
    """Highest stretch of the median session; inf: no limit. Open loops have no stretch."""

    def holds(self, run: Run) -> bool:
        if not run.ttft_s or run.success_rate < 1.0:
            return False
        stretch = run.stretch.p50 if run.stretch else 0.0
        return run.ttft_s.p90 <= self.ttft_p90_s and stretch <= self.stretch


@dataclass(frozen=True, slots=True)
class Capacity:
    """SLO capacity of one policy."""

    policy: str
    by_seed: tuple[float, ...]
    """One capacity for each seed, in the trace's unit: sessions per second, or times as fast as recorded."""

    @property
    def rate(self) -> float:
        return mean(self.by_seed)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean, by bootstrap over the seeds."""
        return measure.interval(self.by_seed)

    def over(self, other: Capacity) -> tuple[float, float, float]:
        """(ratio of the means, and its 95 % interval by bootstrap over the seeds, which are paired)."""
        return measure.ratio(self.by_seed, other.by_seed)


def slo_capacity(
    comparison: Comparison, seeds: Sequence[int], jobs: int = 1, slo: Slo | None = None
) -> Iterator[Capacity]:
    """Yields the capacity of each policy as it is found. A policy that holds nowhere between 1/64 and 64
    times the first guess has 0 there, one that holds everywhere the largest rate tried."""
    one = partial(_of_seed, comparison, slo or Slo())
    work = [(policy, seed) for policy in comparison.policies for seed in seeds]
    with mapped(one, work, jobs) as rates:
        yield from _grouped(comparison.policies, len(seeds), iter(rates))


def _grouped(policies: Sequence[str], seeds: int, rates: Iterator[float]) -> Iterator[Capacity]:
    for policy in policies:
        yield Capacity(policy, tuple(next(rates) for _ in range(seeds)))


def _of_seed(comparison: Comparison, slo: Slo, work: tuple[str, int]) -> float:
    policy, seed = work

    def holds(rate: float) -> bool:
        workload = comparison.load.workload(rate, seed, comparison.fleet)
        return slo.holds(measure.run(comparison.play(policy, workload, seed), workload))

    low, high = last_that(holds, first_guess(comparison), TOLERANCE)
    return low if high == inf else sqrt(low * high)
