"""The highest rate at which a policy keeps its SLO."""

from math import inf

import pytest

from perilune_lab.report import Quantiles, Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.bisection import last_that
from perilune_lab.simulate.loads import OfferedLoad
from perilune_research.simulator.capacity import Capacity, Slo, slo_capacity
from perilune_research.simulator.harness import Comparison


@pytest.mark.parametrize("edge", [0.02, 0.3, 1.0, 1.01, 7.0, 60.0])
def test_the_edge_is_bracketed(edge: float):
    tried = []
    low, high = last_that(lambda x: tried.append(x) or x <= edge, 1.0, 0.02)
    assert low <= edge < high <= low * 1.02
    assert len(tried) < 14


def test_an_edge_too_far_away_is_told():
    assert last_that(lambda x: False, 1.0, 0.02) == (0.0, 1 / 64)
    assert last_that(lambda x: True, 1.0, 0.02) == (64.0, inf)


def run(p90: float, stretch: float, success: float = 1.0) -> Run:
    def at(value: float) -> Quantiles:
        return Quantiles(value, value, value, value, value)

    return Run(
        policy="p",
        requests=1,
        succeeded=1,
        rejected=0,
        success_rate=success,
        ttft_s=at(p90),
        stretch=at(stretch),
    )


@pytest.mark.parametrize(
    ("measured", "holds"),
    [
        pytest.param(run(5.0, 1.25), True, id="both just met"),
        pytest.param(run(5.1, 1.0), False, id="late first tokens"),
        pytest.param(run(1.0, 1.3), False, id="stretched sessions"),
        pytest.param(run(1.0, 1.0, 0.99), False, id="refused requests"),
        pytest.param(
            Run(policy="p", requests=0, succeeded=0, rejected=0, success_rate=0.0),
            False,
            id="nothing measured",
        ),
        pytest.param(
            Run(
                policy="p", requests=1, succeeded=1, rejected=0, success_rate=1.0, ttft_s=run(1.0, 1.0).ttft_s
            ),
            True,
            id="open loop",
        ),
    ],
)
def test_a_run_meets_its_slos_or_not(measured: Run, holds: bool):
    assert Slo().holds(measured) is holds


def test_capacities_with_and_without_load_balancing():
    """What is found holds, what is 5 % above does not, and a hot host is worth leaving."""
    comparison = Comparison(policies=("ear", "sticky"), load=OfferedLoad(window_s=75.0, warmup_s=0.0))
    ear, sticky = slo_capacity(comparison, [1, 2])
    for capacity in (ear, sticky):
        for seed, rate in zip((1, 2), capacity.by_seed, strict=True):
            for times, holds in ((0.95, True), (1.05, False)):
                workload = comparison.load.workload(rate * times, seed, comparison.fleet.hardware.engine)
                assert (
                    Slo().holds(measure.run(comparison.play(capacity.policy, workload, seed), workload))
                    is holds
                )
    assert ear.rate > sticky.rate > 0
    times, low, high = ear.over(sticky)
    assert times == pytest.approx(ear.rate / sticky.rate)
    assert low <= times <= high


def test_ratios_are_paired():
    ours, theirs = Capacity("a", (2.0, 4.0, 6.0)), Capacity("b", (1.0, 2.0, 3.0))
    assert ours.over(theirs) == (2.0, 2.0, 2.0)
    assert ours.over(Capacity("c", (0.0, 0.0, 0.0))) == (inf, inf, inf)
    assert ours.interval[0] < ours.rate < ours.interval[1]
