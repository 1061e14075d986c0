"""Session admission as it is simulated: who waits, who is refused, and what it changes."""

from dataclasses import replace

import pytest
from msgspec import structs

from perilune_api.pool import Routing, SessionAdmission
from perilune_gateway.state.session_queue import Refused
from perilune_lab.quantiles import mean
from perilune_lab.simulate import measure
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.workload import Task, Workload
from perilune_lab.traces.agentic import Agentic
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.new_sessions import retry_after_s, tenant_of
from perilune_research.simulator.options import parse
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.simulation import SimulatedOutcome, simulate

OFF = SessionAdmission()
ON = SessionAdmission(enabled=True)
SMALL = replace(H20, engine=replace(H20.engine, kv_pool_tokens=40_000))
FLEET = SimulatedFleet(endpoints=2, hardware=SMALL)
LOAD = OfferedLoad(window_s=200.0, warmup_s=0.0, parameters=Agentic(context_tokens=30_000))


@pytest.fixture(scope="module")
def overload() -> Workload:
    return LOAD.workload(0.8, 3, FLEET.hardware.engine)


def play(
    workload: Workload,
    rules: SessionAdmission,
    fleet: SimulatedFleet = FLEET,
    *,
    gateways: int = 1,
    tenants: int = 1,
) -> SimulatedOutcome:
    routing = Routing(session_admission=rules)
    return simulate(
        workload, Setting(policy="perilune", routing=routing, gateways=gateways, tenants=tenants), fleet
    )


def waited_s(outcome: SimulatedOutcome) -> dict[int, float]:
    """Return for how long each session waited."""
    return {r.task.session: r.routed_s - r.submitted_s for r in outcome.requests if r.task.number == 0}


def times(outcome: SimulatedOutcome) -> list[tuple[int, float, float, int]]:
    return [(r.task.session, r.first_token_s, r.finished_s, r.endpoint) for r in outcome.requests]


def test_the_client_of_a_refused_session_comes_back_twice_when_it_was_told():
    request = SimulatedRequest(
        Task(
            session=0,
            number=0,
            run=0,
            prompt_tokens=1000,
            answer_run=0,
            output_tokens=100,
            gap_s=0.0,
            timestamp_s=0.0,
        ),
        0,
        0.0,
        0.0,
    )
    waits = []
    for request.refusals in (1, 2, 3):
        waits.append(retry_after_s(request, Refused(7.2)))
    assert waits == [8.0, 8.0, None]


def test_without_it_rules_change_nothing(overload: Workload):
    rules = structs.replace(OFF, max_wait_seconds=1.0, max_waiting=1)
    assert times(play(overload, rules)) == times(play(overload, OFF))


def test_where_every_context_fits_no_session_waits(overload: Workload):
    large = SimulatedFleet(
        endpoints=2, hardware=replace(H20, engine=replace(H20.engine, kv_pool_tokens=100_000_000))
    )
    assert times(play(overload, ON, large)) == times(play(overload, OFF, large))


def test_sessions_that_wait_for_long_are_all_served_and_overload_costs_no_more_work(overload: Workload):
    with_, without = play(overload, structs.replace(ON, max_wait_seconds=600.0)), play(overload, OFF)
    assert len(with_.requests) == len(without.requests) == overload.requests
    assert all(r.succeeded for r in with_.requests)
    waited = [r.task.number for r in with_.requests if r.routed_s > r.submitted_s]
    assert set(waited) == {0}
    cached = [sum(r.cached_tokens for r in outcome.requests) for outcome in (with_, without)]
    assert cached[0] > cached[1]


def test_sessions_that_come_to_four_gateways_begin_as_if_they_came_to_one(overload: Workload):
    patient = structs.replace(ON, max_wait_seconds=600.0)
    one, four = (waited_s(play(overload, patient, gateways=number)) for number in (1, 4))
    assert sum(one.values()) > 100.0
    assert sum(four.values()) == pytest.approx(sum(one.values()), rel=0.1)


def test_tenants_with_few_sessions_wait_less_than_the_one_with_most(overload: Workload):
    waits = waited_s(play(overload, structs.replace(ON, max_wait_seconds=600.0), gateways=2, tenants=4))
    by_size: dict[bool, list[float]] = {True: [], False: []}
    for session, seconds in waits.items():
        by_size[tenant_of(session, 4) == 0].append(seconds)
    assert mean(by_size[False]) < 0.8 * mean(by_size[True])


def test_a_session_that_is_refused_three_times_is_lost_and_counted_once(overload: Workload):
    outcome = play(overload, structs.replace(ON, max_wait_seconds=1.0))
    lost = [r for r in outcome.requests if r.rejected]
    assert lost
    assert {(r.task.number, r.refusals) for r in lost} == {(0, 3)}
    gone = {r.task.session for r in lost}
    assert not gone & {r.task.session for r in outcome.requests if r.succeeded}
    sessions = measure.run(outcome, overload).sessions
    assert sessions
    assert sessions.lost == len(gone)
    both = measure.pooled([measure.run(outcome, overload)] * 2, (1, 2), 0.8).sessions
    assert both
    assert both.lost == 2 * len(gone)


def test_times_are_measured_from_the_sessions_arrival(overload: Workload):
    outcome = play(overload, ON)
    starts = {job.name: job.start_s for job in overload.jobs}
    first = [r for r in outcome.requests if r.task.number == 0]
    assert [r.submitted_s for r in first] == [starts[overload.jobs[r.task.session].name] for r in first]


def test_the_command_line_turns_it_on():
    assert not parse([]).comparison.routing.session_admission.enabled
    assert parse(["--admission"]).comparison.routing.session_admission.enabled


def test_long_sessions_are_not_starved_by_short_ones():
    """More come for minutes than fit, and all begin: of long and short ones nobody is lost."""
    fleet = SimulatedFleet(
        endpoints=4, hardware=replace(H20, engine=replace(H20.engine, kv_pool_tokens=80_000))
    )
    load = OfferedLoad(window_s=300.0, warmup_s=0.0, parameters=Agentic(context_tokens=60_000))
    outcome = play(load.workload(0.8, 3, fleet.hardware.engine), ON, fleet)
    first = [r for r in outcome.requests if r.task.number == 0]
    long = [r for r in first if r.prompt_tokens > 24_000]
    assert len(long) > 30
    assert any(r.refusals for r in long)
    assert [r for r in first if r.rejected] == []
