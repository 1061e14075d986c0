"""How fast the simulator is: simulated seconds per second of one core, and what a decision costs in a large
fleet."""

from dataclasses import replace
from random import Random
from time import process_time, thread_time

import pytest

from perilune_gateway.policy import POLICIES
from perilune_lab.simulator.faults import Faults
from perilune_lab.simulator.harness import Load, Plan
from perilune_lab.simulator.routing import Setting
from perilune_lab.simulator.simulation import Fleet, _Simulation

REAL_TIME = 2000.0
"""Simulated seconds per second of one core, at least, with 8 endpoints under a load near R."""


@pytest.mark.bench
@pytest.mark.parametrize("policy", ["round_robin", "lmetric_plus_one", "ear", "perilune"])
def test_speed_at_8_endpoints(policy: str):
    plan = Plan((policy,))
    workload = plan.load.workload(1.0, 2, plan.fleet)
    runs = [plan.play(policy, workload, 1) for _ in range(3)]
    best = max(runs, key=lambda outcome: outcome.speed)
    per_request_us = best.wall_s / workload.requests * 1e6
    print(f"\n{policy}: {best.speed:,.0f} × real time per core, {per_request_us:.0f} µs per request")
    assert best.speed >= REAL_TIME


@pytest.mark.bench
@pytest.mark.parametrize("policy", ["lmetric_plus_one", "ear", "perilune"])
def test_decisions_at_1000_endpoints(policy: str):
    """Time per decision with a shortlist, and how often it chooses as the full scan would: the same endpoint,
    or one of equal cost."""
    workload = replace(Load(), window_s=30.0, warmup_s=0.0).workload(200.0, 1, Fleet(1000))
    took_s: list[float] = []
    same: list[bool] = []

    simulation = _Simulation(workload, Setting(policy), POLICIES[policy], Fleet(1000), Faults(), 1)
    route = simulation.gateway.route

    def timed(sequence, now):
        began = thread_time()
        decision = route(sequence, now)
        took_s.append(thread_time() - began)
        return decision

    simulation.gateway.route = timed
    began = process_time()
    simulation.run()
    cost_us = (process_time() - began) / len(took_s) * 1e6
    p50, p99 = (sorted(took_s)[int(len(took_s) * q)] for q in (0.5, 0.99))
    print(
        f"\n{policy}: decision p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms; {cost_us:.0f} µs per request"
    )

    simulation = _Simulation(workload, Setting(policy), POLICIES[policy], Fleet(1000), Faults(), 1)
    gateway = simulation.gateway
    gather, decide = gateway._candidates, gateway.policy
    facts: list[tuple] = []

    def gathering(*given):
        facts[:] = [given]
        return gather(*given)

    def deciding(view, candidates, params, rng):
        state = rng.getstate()
        verdict = decide(view, candidates, params, rng)
        if view.ordinal % 40 == 0:
            gateway._large = False
            everyone = gather(*facts[0])
            gateway._large = True
            dice = Random()
            dice.setstate(state)
            whole = decide(view, everyone, params, dice)
            costs = {c.address: c.total for c in whole.costs}
            same.append(verdict.target == whole.target or costs[verdict.target] <= costs[whole.target])
        return verdict

    gateway._candidates, gateway.policy = gathering, deciding
    simulation.run()
    print(f"{policy}: {sum(same)} of {len(same)} choices as good as the full scan's")
    assert p99 < 0.002
    if (
        policy != "perilune"
    ):  # ranks idle endpoints by the speeds it has learned, which no shortlist by load knows
        assert sum(same) >= 0.995 * len(same)
