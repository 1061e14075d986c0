"""Against real runs on 8 H20: 1,214 requests in 600 s, 274 sessions, without migration; TTFT in seconds.

How far this goes: the published runs do not say their load as a rate of this generator, so two rates were
chosen to stand for them, which leaves the times of each one degree of freedom: 0.6 sessions/s for the
policies that balance load, 1.0 (about R) for those measured at peak. No single rate fits all: at 0.6 LMetric
and sticky take half and a quarter of the published times. At peak `ear` pulls the KV of sessions that move;
where it cannot (the published run had no migration) it is five times slower there, since a move then is a
recompute. At R the intervals are wide: 16 seeds leave ± 50 %, and LMetric and sticky do not part.
"""

import pytest

from perilune_lab.report import Run
from perilune_lab.simulate.loads import OfferedLoad
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.harness import Comparison, piece, pooled

pytestmark = pytest.mark.timeout(600)  # a minute of computing, and more on a busy machine

MODERATE, PEAK = 0.6, 1.0
"""Sessions per second."""


def played(rate: float, seeds: int, *policies: str, deployment: Deployment) -> dict[str, Run]:
    comparison = Comparison(policies=policies, load=OfferedLoad(), deployment=deployment)
    rows = [row for seed in range(1, seeds + 1) for row in piece(comparison, (rate, seed))]
    return {run.policy: run for run in pooled(comparison, rows)}


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    policies = ("ear", "sticky", "lmetric", "least_loaded", "round_robin", "static_pd")
    return played(MODERATE, 4, *policies, deployment=Deployment.NONE)


@pytest.mark.e2e
def test_at_the_peak_ear_is_best_and_times_are_as_anchored():
    peak = played(PEAK, 16, "ear", "sticky", "lmetric", deployment=Deployment.PULL)
    p90 = {policy: run.ttft_s.p90 for policy, run in peak.items()}
    assert p90["ear"] < min(p90["lmetric"], p90["sticky"])
    assert p90 == pytest.approx({"ear": 7.24, "lmetric": 15.6, "sticky": 18.0}, rel=0.35)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("policy", "quantile", "seconds"),
    [
        ("ear", "p90", 7.24),
        ("least_loaded", "p50", 1.20),
        ("least_loaded", "p90", 12.8),
        ("least_loaded", "p99", 46.1),
        ("round_robin", "p90", 39.7),
        ("static_pd", "p50", 62.8),
    ],
)
def test_times_within_35_percent(policy: str, quantile: str, seconds: float, runs: dict[str, Run]):
    assert getattr(runs[policy].ttft_s, quantile) == pytest.approx(seconds, rel=0.35)


@pytest.mark.e2e
def test_the_order_is_the_measured_one(runs: dict[str, Run]):
    p90 = {policy: run.ttft_s.p90 for policy, run in runs.items()}
    assert p90["ear"] < p90["lmetric"] < p90["least_loaded"] < p90["round_robin"] < p90["static_pd"]
    assert p90["ear"] < p90["sticky"]
    apc = {policy: run.apc for policy, run in runs.items()}
    assert apc["round_robin"] < apc["least_loaded"] < apc["lmetric"] < apc["sticky"]
