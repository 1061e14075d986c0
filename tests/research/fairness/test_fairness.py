"""What a tenant at ten times its share costs another one, on a tiny pool in virtual time."""

import pytest

from perilune_lab.traces.agentic import Agentic
from perilune_research.fairness.play import GREEDY, QUIET, Setting, Shares, compare

TINY = Setting(share=0.03, endpoints=2, window_s=240.0, warmup_s=60.0, traffic=Agentic(context_tokens=30_000))


def test_the_quiet_tenant_sends_the_same_alone_and_beside_the_greedy_one() -> None:
    alone, both = TINY.workload(1, greedy=False), TINY.workload(1, greedy=True)
    quiet = [job for job in both.jobs if job.tenant == QUIET]
    assert [(job.name, job.start_s) for job in quiet] == [(job.name, job.start_s) for job in alone.jobs]
    greedy = [job for job in both.jobs if job.tenant == GREEDY]
    assert len(greedy) > 5 * len(quiet) > 0


@pytest.fixture(scope="module")
def one() -> Shares:
    return compare(TINY, 1, range(1, 2))


def test_fair_shares_serve_the_quiet_tenant_earlier_than_in_turn(one: Shares) -> None:
    assert one.alone.ttft_p90_s <= one.fair.ttft_p90_s < one.in_turn.ttft_p90_s


def test_fair_shares_cost_no_throughput(one: Shares) -> None:
    assert one.throughput_ratio > 0.9
