"""SLO capacity: the largest load at which a policy meets its SLOs.

A bisection over the rate for each seed gives a policy one capacity per seed. Their mean is reported, their
spread gives the interval, and two policies are compared seed by seed.

Cost: 6 to 10 simulations per policy and seed, in parallel processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt

from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.bisection import last_that
from perilune_lab.terminal.processes import mapped
from perilune_research.simulator.harness import Comparison, first_guess

TOLERANCE = 0.02
"""Relative tolerance of a capacity."""


@dataclass(frozen=True, slots=True)
class Slo:
    """The SLOs of a run. A run with a failed or refused request does not meet them."""

    ttft_p90_s: float = 5.0
    stretch: float = 1.25
    """Highest stretch of the median session; inf: no limit. Open loops have no stretch, so it always holds
    there."""

    def holds(self, run: Run) -> bool:
        """Return whether a run meets the SLOs."""
        if not run.ttft_s or run.success_rate < 1.0:
            return False
        stretch = run.stretch.p50 if run.stretch else 0.0
        return run.ttft_s.p90 <= self.ttft_p90_s and stretch <= self.stretch


@dataclass(frozen=True, slots=True)
class Capacity:
    """SLO capacity of one policy."""

    policy: str
    by_seed: tuple[float, ...]
    """One capacity per seed: in sessions per second for generated traffic, for a file a factor on the
    recorded speed."""

    @property
    def rate(self) -> float:
        """The mean capacity."""
        return mean(self.by_seed)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean, by bootstrap over the seeds."""
        return measure.interval(self.by_seed)

    def over(self, other: Capacity) -> tuple[float, float, float]:
        """Return (ratio of the mean capacities, low, high) with the 95 % interval, by bootstrap over the
        pairs of one seed."""
        return measure.ratio(self.by_seed, other.by_seed)


def slo_capacity(
    comparison: Comparison, seeds: Sequence[int], jobs: int = 1, slo: Slo | None = None
) -> Iterator[Capacity]:
    """Yield the capacity of each policy as it is found. The search covers 1/64 to 64 times the first guess.
    A seed with which the policy meets the SLOs nowhere there has capacity 0; one with which it meets them
    everywhere has the largest rate tried."""
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
        workload = comparison.load.workload(rate, seed, comparison.fleet.hardware.engine)
        return slo.holds(measure.run(comparison.play(policy, workload, seed), workload))

    low, high = last_that(holds, first_guess(comparison), TOLERANCE)
    return low if high == inf else sqrt(low * high)
