"""Clients that close their requests: engines and gateway end them as live ones do, wherever they are."""

from dataclasses import replace
from math import inf

import pytest

from perilune_api.pool import Pull, Routing, SessionAdmission
from perilune_gateway.model.handoff import GivenUp
from perilune_lab.simulate.clients import Clients
from perilune_lab.simulate.deployment import Arm, Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.simulation import RETRY_S, Simulation
from perilune_lab.simulate.transfers import KEPT_S

FOUR = Deployment(endpoints=4)
LOAD = OfferedLoad(window_s=60.0, warmup_s=0.0)


def play(
    patience_s: float,
    deployment: Deployment = FOUR,
    routing: Routing | None = None,
    *,
    retries: int = 2,
    rate: float = 3.0,
    policy: str = "perilune",
    link_factor: float = 1.0,
) -> Simulation:
    load = replace(LOAD, clients=Clients(patience_s=patience_s, retries=retries))
    workload = load.workload(rate, 3, H20.engine)
    faults = Faults(link_factor=link_factor)
    simulation = Simulation(workload, deployment, policy, routing or Routing(), faults, 1)
    simulation.run()
    return simulation


def causes(simulation: Simulation) -> set[GivenUp | None]:
    """Return why transfers ended before their KV was of use."""
    return {record.cause for record in simulation.gateways[0].handed_over}


def assert_nothing_is_left(simulation: Simulation) -> None:
    """Let all transfers come to their ends, and check that engines and gateways are free."""
    loop = simulation.loop
    ends_s = loop.now + KEPT_S + 60.0
    loop.run(lambda: loop.now > ends_s)
    for engine in simulation.engines.values():
        assert engine.load == 0, engine.address
        assert engine.scheduler.cache.usage == 0, engine.address
    for gateway in simulation.gateways:
        assert not gateway.state.requests, "requests that have ended are forgotten"
        views = gateway.state.fleet.recent(loop.now, gateway.state.sessions.bound)
        assert [view.load.in_flight for view in views] == [0] * len(views)
        assert [view.load.pending_prefill_s for view in views] == [0.0] * len(views)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_client_comes_again_and_gives_up_after_its_last_try(retries: int) -> None:
    simulation, tries = play(patience_s=1.0, retries=retries), retries + 1
    done = simulation.outcome.requests
    gave_up = [r for r in done if r.gave_up]
    came_back = [r for r in done if r.abandoned and r.succeeded]
    assert gave_up
    assert bool(came_back) == bool(retries)
    assert {r.abandoned for r in gave_up} == {tries}
    most_s = tries * 1.0 + retries * RETRY_S
    assert all(r.finished_s - r.submitted_s == pytest.approx(most_s) for r in gave_up)
    assert max(r.ttft_s for r in done if r.succeeded) <= most_s, "TTFT counts from the first try"
    assert_nothing_is_left(simulation)


def test_a_session_ends_with_the_turn_that_its_client_gives_up() -> None:
    simulation = play(patience_s=1.0)
    done, jobs = simulation.outcome.requests, simulation.workload.jobs
    ended = {r.task.session: r.task.number for r in done if r.gave_up}
    left_out = sum(len(jobs[session].tasks) - 1 - number for session, number in ended.items())
    assert len(done) == simulation.workload.requests - left_out


def test_patient_clients_change_nothing() -> None:
    patient, without_limit = (play(patience_s, rate=1.0).outcome.requests for patience_s in (1e6, inf))
    assert [r.finished_s for r in patient] == [r.finished_s for r in without_limit]
    assert not any(r.abandoned for r in patient)


def test_clients_leave_the_line_of_new_sessions() -> None:
    small = replace(H20, engine=replace(H20.engine, kv_pool_tokens=140_800))
    deployment = Deployment(endpoints=2, hardware=small)
    admits = Routing(session_admission=SessionAdmission(enabled=True, max_wait_seconds=60.0))
    simulation = play(2.0, deployment, admits)
    assert any(r.gave_up and r.endpoint < 0 for r in simulation.outcome.requests), "it was never sent"
    (gateway,) = simulation.gateways
    assert gateway.router.new_sessions.stats(simulation.loop.now).waiting == 0
    assert_nothing_is_left(simulation)


def test_legs_of_remote_prefills_end_with_their_requests() -> None:
    simulation = play(3.0, replace(FOUR, prefill_endpoints=2))
    assert sum(r.abandoned for r in simulation.outcome.requests)
    assert GivenUp.LEFT in causes(simulation)
    assert_nothing_is_left(simulation)


def test_kv_that_is_fetched_for_a_request_is_so_no_longer() -> None:
    holds = Routing(pull=Pull(max_seconds=1.0))
    simulation = play(0.8, replace(FOUR, arm=Arm.HANDOFF), holds, policy="round_robin", link_factor=10.0)
    assert GivenUp.LEFT in causes(simulation)
    assert_nothing_is_left(simulation)
