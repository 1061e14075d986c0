"""Transfers that overlap with prefills: how much earlier a turn's first token comes."""

from dataclasses import replace

import pytest

from perilune_api.pool import Disaggregation, Routing
from perilune_lab.simulate.deployment import Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.outcome import PlayedRequest
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import Workload

PAIR = Deployment(endpoints=2, prefill_endpoints=1)
ELSEWHERE = Routing(disaggregation=Disaggregation(coming_requests=1_000, max_seconds=1_000.0))
"""Every long prompt is prefilled elsewhere."""


@pytest.fixture(scope="module")
def idle() -> Workload:
    """Sessions that seldom meet."""
    return OfferedLoad(window_s=400.0, warmup_s=0.0).workload(0.01, 4, H20.engine)


def first_turns(workload: Workload, *, overlap: bool, link_factor: float) -> dict[int, PlayedRequest]:
    """Return the first turns of the sessions, all of which are prefilled elsewhere."""
    deployment, faults = replace(PAIR, overlap=overlap), Faults(link_factor=link_factor)
    outcome = simulate(workload, deployment, "perilune", ELSEWHERE, faults)
    assert all(r.succeeded for r in outcome.requests)
    found = {r.task.session: r for r in outcome.requests if not r.task.number}
    assert found
    assert all(r.leg_cached_tokens >= 0 for r in found.values())
    return found


def test_a_copy_that_is_faster_than_the_prefill_ends_with_its_last_layer(idle: Workload) -> None:
    serial, overlapped = (first_turns(idle, overlap=o, link_factor=1.0) for o in (False, True))
    first = next(iter(serial))
    copy_s = H20.transfer_s(serial[first].prompt_tokens)
    assert copy_s < H20.engine.prefill_s(serial[first].prompt_tokens)
    saved_s = serial[first].ttft_s - overlapped[first].ttft_s
    assert saved_s == pytest.approx(copy_s * (1 - 1 / H20.layers), rel=1e-6)
    assert all(overlapped[s].ttft_s < serial[s].ttft_s for s in serial)


def test_a_slower_copy_begins_with_the_prefill(idle: Workload) -> None:
    serial, overlapped = (first_turns(idle, overlap=o, link_factor=50.0) for o in (False, True))
    first = next(iter(serial))
    saved_s = serial[first].ttft_s - overlapped[first].ttft_s
    assert saved_s == pytest.approx(H20.engine.prefill_s(serial[first].prompt_tokens), rel=0.02)


def test_the_deployments_name_says_so() -> None:
    assert replace(PAIR, overlap=True).name.endswith("1 only prefill, transfers overlap with prefills")
