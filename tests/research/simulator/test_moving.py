"""The gateway's planner in a simulation: sessions move with their KV, the old copy is freed, arms by name."""

from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest

from perilune_api.pool import Migration, Pull, Routing
from perilune_gateway.model import Reason
from perilune_gateway.model.handoff import HandoffOutcome
from perilune_gateway.moves.planner import Planner, State
from perilune_lab.simulate import measure
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.runs import ROOT, Runs
from perilune_lab.simulate.workload import Workload
from perilune_research.simulator import simulation
from perilune_research.simulator.cache import RunCache
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.harness import Comparison
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.setting import PLANNER, Setting

PLANS_ALONE = Routing(pull=Pull(enabled=False))
"""KV moves by plans only, not with requests."""
LOAD = OfferedLoad(window_s=120.0, warmup_s=0.0)


@pytest.fixture(scope="module")
def busy() -> Workload:
    return LOAD.workload(1.2, 3, SimulatedFleet().hardware.engine)


def played(
    workload: Workload, arm: str, deployment: Deployment = Deployment.PULL, **migration: int
) -> simulation.Simulation:
    setting = Setting(policy=arm, routing=Routing(migration=Migration(**migration)), deployment=deployment)
    run = simulation.Simulation(
        workload, setting, simulation.POLICIES[setting.policy_name], SimulatedFleet(), Faults(), 1
    )
    run.run()
    return run


def counts(planner: Planner) -> dict[State, int]:
    found = dict.fromkeys(State, 0)
    for (_, state), n in planner.stats(0.0).moves.items():
        found[state] += n
    return found


@pytest.mark.parametrize(
    "policy",
    ["perilune", *(pytest.param(p, marks=pytest.mark.heavy) for p in ("sticky", "least_loaded", "ear"))],
)
def test_every_move_that_starts_ends_and_everything_is_served(policy: str, busy: Workload):
    run = played(busy, policy + PLANNER)
    assert len(run.done) == busy.requests
    n = counts(run.gateway.moves.planner)
    assert n[State.STARTED] == n[State.COMPLETED] + n[State.FAILED]
    planned = [s for s in run.done if s.reason in (Reason.PLANNED, Reason.REPLICA)]
    assert len(planned) == n[State.STARTED]
    if policy in ("sticky", "least_loaded"):
        assert n[State.STARTED] > 5
    assert run.gateway.moves.planner.stats(run.now).in_flight == {}


def test_a_moved_session_takes_its_cache_along_and_leaves_none_behind(busy: Workload):
    run = played(busy, "sticky" + PLANNER)
    moved = [s for s in run.done if s.reason is Reason.PLANNED and s.source >= 0]
    assert moved
    assert mean(s.cached_tokens / s.prompt_tokens for s in moved) > 0.5
    last = {s.task.session: s for s in sorted(run.done, key=lambda s: s.number)}
    for s in moved:
        if last[s.task.session] is s:  # it did not come back since
            own = run.gateway.moves.own_runs(s)
            assert not any(r in run.engines[s.moved_from].cache.held for r in own)


def test_where_host_memory_is_read_a_planned_move_is_priced_with_it(busy: Workload):
    costs_s = {}
    for arm in (Deployment.NONE, Deployment.OFFLOAD):
        planner = played(busy, "sticky" + PLANNER, arm).gateway.moves.planner
        costs_s[arm] = mean(one.move.cost_s for one in planner.ended)
    assert costs_s[Deployment.OFFLOAD] < costs_s[Deployment.NONE] / 2


def test_the_budget_is_kept():
    for_long = replace(LOAD, window_s=180.0).workload(1.2, 3, SimulatedFleet().hardware.engine)
    run = played(for_long, "sticky" + PLANNER, moves_per_minute=2)
    starts = sorted(s.submitted_s for s in run.done if s.reason in (Reason.PLANNED, Reason.REPLICA))
    assert len(starts) > 3
    assert all(later - earlier >= 60.0 for earlier, later in zip(starts, starts[2:], strict=False))


@pytest.mark.heavy
def test_arms_of_the_ablation_are_policies_with_and_without_the_planner(busy: Workload):
    arms = ("sticky", "least_loaded" + PLANNER, "sticky" + PLANNER)
    plan = Comparison(policies=arms, load=LOAD)
    outcomes = {arm: plan.play(arm, busy, 1) for arm in arms}
    assert [outcome.policy for outcome in outcomes.values()] == list(arms)
    moves = {}
    for arm, outcome in outcomes.items():
        found = measure.run(outcome, busy).migrations
        moves[arm] = found and found.total
    assert moves["sticky"] == 0
    assert min(moves[arms[1]], moves[arms[2]]) > 0
    again = plan.play(arms[2], busy, 1)
    assert [s.finished_s for s in again.requests] == [s.finished_s for s in outcomes[arms[2]].requests]


def test_a_dead_endpoint_ends_its_moves(busy: Workload):
    setting = Setting(policy="sticky" + PLANNER, deployment=Deployment.PULL)
    faults = Faults(dead_endpoint=2, dead_at_s=80.0)
    run = simulation.Simulation(busy, setting, simulation.POLICIES["sticky"], SimulatedFleet(), faults, 1)
    run.run()
    assert run.gateway.moves.planner.stats(run.now).in_flight == {}
    n = counts(run.gateway.moves.planner)
    assert n[State.STARTED] == n[State.COMPLETED] + n[State.FAILED] > 0


@pytest.fixture(scope="module")
def handed(busy: Workload) -> simulation.Simulation:
    setting = Setting(policy="sticky" + PLANNER, routing=PLANS_ALONE, deployment=Deployment.HANDOFF)
    run = simulation.Simulation(busy, setting, simulation.POLICIES["sticky"], SimulatedFleet(), Faults(), 1)
    run.run()
    return run


def test_hand_offs_copy_first_and_switch_then_and_the_next_turn_finds_its_context(
    handed: simulation.Simulation, busy: Workload
):
    assert len(handed.done) == busy.requests
    assert handed.handing_over.outcomes[HandoffOutcome.SWITCHED] > 5
    assert not any(r.source >= 0 for r in handed.done)  # no request waits for a pull
    turns: dict[int, list[SimulatedRequest]] = {}
    for request in sorted(handed.done, key=lambda r: r.number):
        turns.setdefault(request.task.session, []).append(request)
    switched = [
        (before, after)
        for rows in turns.values()
        for before, after in pairwise(rows)
        if after.endpoint != before.endpoint and after.reason is Reason.HOST
    ]
    assert len(switched) > 5
    assert mean(after.cached_tokens / before.prompt_tokens for before, after in switched) > 0.9


def test_hand_offs_leave_nothing_behind(handed: simulation.Simulation):
    assert handed.gateway.moves.planner.stats(handed.now).in_flight == {}
    b = handed.beliefs
    assert (b.in_flight, b.pending_tokens, b.context_tokens) == ([0] * 8, [0] * 8, [0] * 8)
    assert handed.fabric.bytes > 0


def test_an_endpoint_that_dies_ends_its_hand_offs(busy: Workload):
    setting = Setting(policy="sticky" + PLANNER, deployment=Deployment.HANDOFF)
    faults = Faults(dead_endpoint=2, dead_at_s=80.0)
    run = simulation.Simulation(busy, setting, simulation.POLICIES["sticky"], SimulatedFleet(), faults, 1)
    run.run()
    assert len(run.done) == busy.requests
    assert run.gateway.moves.planner.stats(run.now).in_flight == {}


@pytest.mark.parametrize("policy", ["perilune", "lmetric_plus_one"])
def test_with_default_triggers_no_drain_and_no_kv_with_requests_hand_off_is_as_none(
    policy: str, busy: Workload
):
    ends = [
        [
            r.finished_s
            for r in simulation.simulate(
                busy, Setting(policy=policy, routing=PLANS_ALONE, deployment=arm)
            ).requests
        ]
        for arm in (Deployment.NONE, Deployment.HANDOFF)
    ]
    assert ends[0] == ends[1]


def test_only_what_nobody_uses_is_freed():
    runs = Runs()
    shared = runs.add(ROOT, 32)
    mine = runs.add(shared, 64)
    events: list[tuple[int, int]] = []
    cache = RunCache(runs, 1000, lambda run, depth: events.append((run, depth)))
    cache.pin(mine)
    cache.grow(mine, 96)
    cache.release([mine])
    assert cache.held == {shared: 32, mine: 96}
    cache.unpin(mine)
    events.clear()
    cache.release([mine])
    assert (cache.held, cache.used_tokens, cache.idle_tokens) == ({shared: 32}, 32, 32)
    assert events == [(mine, 32)]
    cache.release([mine])
    assert cache.used_tokens == 32
