"""The simulated gateway's books against the real ones."""

from random import Random

import pytest

from perilune_api.pool import Role, Topology
from perilune_gateway.model import EngineMetrics
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.in_flight import Load
from perilune_gateway.state.loads import Loads
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20
from perilune_research.simulator.beliefs import Beliefs, KnownSession
from perilune_research.simulator.fabric import SimulatedFabric


class FakeEngine:
    running = waiting = 0
    kv_usage = 0.0


@pytest.mark.parametrize("seed", range(10))
def test_load_is_kept_as_the_gateway_keeps_it(seed: int):
    rng = Random(seed)
    engines = [FakeEngine() for _ in range(3)]
    ours = Beliefs(engines, H20, Faults(), SimulatedFabric(H20, Faults(), rng), [Role.BOTH] * 3)
    requests = Loads()
    theirs = Fleet(H20.kv_pool_tokens, requests)
    theirs.set_endpoints(ours.endpoints, Topology())
    bound = {e.address: 0 for e in ours.endpoints}
    sessions = [KnownSession(name=str(n)) for n in range(5)]
    running: dict[int, tuple[int, int, float, int, bool]] = {}
    loads: dict[int, Load] = {}
    now = 1000.0
    ours.scrape(now)
    for endpoint in ours.endpoints:
        theirs.metrics(endpoint.address, EngineMetrics(), now)
    for ticket in range(200):
        now += 0.02
        if running and rng.random() < 0.5:
            done = rng.choice(list(running))
            e, new, prefill_s, context, known = running.pop(done)
            if not known:
                ours.prefill_done(e, new, prefill_s)
                requests.prefilled(loads[done])
            if not known and rng.random() < 0.5:
                running[done] = (e, new, prefill_s, context, True)
            else:
                ours.finish(e, context, 0.0)
                requests.finish(loads.pop(done))
        else:
            e, new, context = rng.randrange(3), rng.choice([0, 100, 9000]), rng.randrange(1, 50_000)
            prefill_s = new / 1000
            ours.start(e, context)
            ours.prefill_starts(e, new, prefill_s)
            address = ours.endpoints[e].address
            loads[ticket] = requests.start(
                address, uncached_tokens=new, prefill_s=prefill_s, context_tokens=context
            )
            running[ticket] = (e, new, prefill_s, context, False)
            session = rng.choice(sessions)
            if session.host >= 0:
                bound[ours.endpoints[session.host].address] -= 1
            bound[address] += 1
            ours.bind(session, e, now)
        for e, view in enumerate(theirs.view(now, bound)):
            mine, real = ours.load(e, now)._asdict(), view.load._asdict()
            assert mine | {"metrics_age_s": 0.0} == pytest.approx(real | {"metrics_age_s": 0.0}, abs=1e-6)


def test_speeds_are_learned_from_what_a_gateway_sees():
    faults = Faults(engine_belief=1.3, link_belief=0.7)
    beliefs = Beliefs(
        [FakeEngine(), FakeEngine()], H20, faults, SimulatedFabric(H20, faults, Random(0)), [Role.BOTH] * 2
    )
    true_s = H20.engine.prefill_s(20_000)
    assert beliefs.models[0].prefill_s(20_000) == pytest.approx(1.3 * true_s)

    class Seen:
        endpoint, uncached_tokens, prompt_tokens, source, moved_tokens = 0, 20_000, 20_000, -1, 0
        routed_s, held_s, expected_ttft_s = 0.0, 0.0, 1.0

    for n in range(1, 60):
        Seen.routed_s = n * 10.0
        beliefs.observe_prefill(Seen(), n * 10.0 + H20.engine.request_overhead_s(20_000) + true_s)
    assert beliefs.models[0].prefill_s(20_000) == pytest.approx(true_s, rel=0.02)
    assert 0 not in beliefs.unseen
    assert beliefs.models[1].prefill_s(20_000) == pytest.approx(true_s, rel=0.02), (
        "believed to be like others"
    )
