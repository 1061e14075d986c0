"""Against real runs on 8 H20 without migration: 1,214 requests in 600 s, TTFT in seconds.

Generated traffic of about the same volume. What is held: the published order of capped least-loaded,
round-robin and 4P4D below the affinity policies, and the times of those that depend on volume rather than on
that trace's few heavy sessions. Not reproduced: sticky (18.0) and LMetric (15.6) are faster here (4.8 and
7.7), because the real trace's sessions meet on one endpoint more often than generated ones; sticky is then
the better of the two.
"""

import pytest

from perilune_lab.report import Run
from perilune_lab.simulator.harness import Load, Plan, piece, pooled

RATE = 0.6
"""Sessions per second: 1.5 requests per second in the measured part."""
POLICIES = ("ear", "sticky", "lmetric", "least_loaded", "round_robin", "static_pd")


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    plan = Plan(POLICIES, Load(), pullable=False)
    rows = [row for seed in (1, 2, 3, 4) for row in piece(plan, (RATE, seed))]
    return {run.policy: run for run in pooled(plan, rows)}


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
