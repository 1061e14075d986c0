from dataclasses import replace
from random import Random

import pytest

from perilune_api.policies import PeriluneParams
from perilune_api.pool import Role
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.workload import Workload
from perilune_research.simulator import routing
from perilune_research.simulator.beliefs import Beliefs, KnownSession
from perilune_research.simulator.fabric import SimulatedFabric
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.shortlist import CHEAPEST, LEAST_LOADED, Ranking, Shortlist
from perilune_research.simulator.simulation import SimulatedOutcome, simulate

MANY = SimulatedFleet(endpoints=300)


@pytest.fixture(scope="module")
def spread() -> Workload:
    return replace(OfferedLoad(), window_s=4.0, warmup_s=0.0).workload(50.0, 4, MANY.hardware.engine)


def played(policy: str, workload: Workload, every: int, monkeypatch: pytest.MonkeyPatch) -> SimulatedOutcome:
    monkeypatch.setattr(routing, "AUDIT_EVERY", every)
    return simulate(workload, Setting(policy=policy), MANY, seed=1)


@pytest.mark.parametrize(
    "policy", ["perilune", *(pytest.param(p, marks=pytest.mark.heavy) for p in ("dynamo", "sticky"))]
)
def test_it_chooses_as_a_look_at_all(policy: str, spread: Workload, monkeypatch: pytest.MonkeyPatch):
    seen = played(policy, spread, 1, monkeypatch).seen
    assert seen.audited == seen.decisions == len(seen.decision_s) == spread.requests > 150
    assert seen.agreed >= 0.995 * seen.audited


def test_looking_twice_changes_nothing(spread: Workload, monkeypatch: pytest.MonkeyPatch):
    often, never = (played("perilune", spread, every, monkeypatch) for every in (5, 10**9))
    assert [(s.endpoint, s.finished_s) for s in often.requests] == [
        (s.endpoint, s.finished_s) for s in never.requests
    ]


@pytest.mark.parametrize("policy", ["round_robin", pytest.param("power_of_two", marks=pytest.mark.heavy)])
def test_who_chooses_blindly_sees_everybody(policy: str, spread: Workload):
    outcome = simulate(spread, Setting(policy=policy), MANY, seed=1)
    assert outcome.seen.audited == 0
    assert len({s.endpoint for s in outcome.requests}) > spread.requests / 2


def fleet(n: int) -> tuple[Beliefs, Shortlist]:
    class Idle:
        running = waiting = 0
        kv_usage = 0.0

    faults = Faults()
    beliefs = Beliefs(
        [Idle() for _ in range(n)], H20, faults, SimulatedFabric(H20, faults, Random(0)), [Role.BOTH] * n
    )
    return beliefs, Shortlist(beliefs, PeriluneParams())


def test_holders_hosts_and_the_least_loaded():
    beliefs, shortlist = fleet(400)
    for e in range(300):
        beliefs.start(e, 1000)
    found = shortlist.of({7: 500, 8: 900}, [9], [], 0.0)
    assert {7, 8, 9} <= set(found)
    assert set(range(300, 300 + LEAST_LOADED)) <= set(found)
    assert found == sorted(found)
    assert len(found) < LEAST_LOADED + 8 * CHEAPEST


def test_a_fast_one_is_found_among_many_idle():
    beliefs, shortlist = fleet(400)
    shortlist.of({}, [], [], 0.0)
    beliefs.models[377] = beliefs.uncorrected.scaled(0.5)
    beliefs.unseen.discard(377)
    beliefs.changed.add(377)
    assert 377 in shortlist.of({}, [], [], 0.0)


def test_neighbours_of_the_deepest_holder():
    beliefs, shortlist = fleet(400)
    spine = beliefs.endpoints[399].place.spine
    near = [e for e in shortlist.of({399: 30_000, 0: 16}, [], [], 0.0) if e > 100]
    assert len(near) > CHEAPEST
    assert {beliefs.endpoints[e].place.spine for e in near} == {spine}


def test_beside_every_deep_holder():
    beliefs, shortlist = fleet(400)
    for e in range(200, 400):
        beliefs.start(e, 1000)
    found = set(shortlist.of({399: 30_000, 300: 20_000, 0: 16}, [], [], 0.0))
    racks = [beliefs.endpoints[e].place.rack for e in found - {399, 300, 0}]
    assert {beliefs.endpoints[e].place.rack for e in (399, 300)} <= set(racks)


def test_the_fewest_sessions_among_many_as_cheap():
    """Others are a little faster, or less busy."""
    beliefs, shortlist = fleet(400)
    for e in range(400):
        beliefs.unseen.discard(e)
        beliefs.models[e] = beliefs.uncorrected.scaled(1.02 if e == 250 else 1.0)
        if e == 250:
            beliefs.start(e, 1000)
        else:
            beliefs.bind(KnownSession(name=str(e)), e, 0.0)
    assert 250 in shortlist.of({}, [], [], 0.0)


@pytest.mark.parametrize("holders", [range(100, 140), range(100, 390)])
def test_the_least_loaded_of_common_holders(holders: range):
    beliefs, shortlist = fleet(400)
    for e in range(100, 390):
        beliefs.start(e, 1000)
        if e not in (120, 130):
            beliefs.start(e, 1000)
    assert {120, 130} <= set(shortlist.of({}, [], holders, 0.0))


def test_the_dead_are_left_out():
    beliefs, shortlist = fleet(400)
    assert 0 in shortlist.of({}, [], [], 0.0)
    beliefs.dead(0)
    assert 0 not in shortlist.of({}, [], [], 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_ranking_is_sorted_however_keys_change(seed: int):
    rng, ranking, keys = Random(seed), Ranking(), {}
    for _ in range(500):
        e = rng.randrange(30)
        if rng.random() < 0.2:
            ranking.remove(e)
            keys.pop(e, None)
        else:
            keys[e] = (float(rng.randrange(5)),)
            ranking.place(e, keys[e])
        expected = sorted(keys, key=lambda e: (keys[e], e))
        assert list(ranking.first(8)) == expected[:8]
        some = {e for e in range(30) if rng.random() < rng.random()}
        assert list(ranking.first_of(some, 3)) == [e for e in expected if e in some][:3]
