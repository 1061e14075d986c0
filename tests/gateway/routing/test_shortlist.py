"""In a large pool a decision looks closely at a few endpoints, and chooses as if it had looked at all."""

from random import Random

import pytest
from property_examples import examples
from router_rig import USUAL, Rig, pool
from routing_objects import head

from perilune_api.policies import PolicyChoice, PolicyName
from perilune_api.pool import EndpointSpec, Routing, Shadow
from perilune_gateway.model import EngineMetrics
from perilune_gateway.routing.shortlist import ABOVE, CHEAPEST, DEEPEST

ADDRESSES = [f"10.0.{n >> 8}.{n & 255}:8000" for n in range(400)]
LISTED = [EndpointSpec(address=a, events=(f"tcp://{a}",)) for a in ADDRESSES]
WHOLE = Routing(shadow=Shadow(policies=(PolicyName.RANDOM,)))
"""With a shadow policy that may choose any endpoint, all are candidates."""


def busy(seed: int, routing: Routing = Routing(), count: int = len(ADDRESSES)) -> Rig:  # noqa: B008
    """Return a pool of which each endpoint has another load and caches another part of the prompt."""
    rig, dice = Rig(pool(endpoints=LISTED[:count], engine=USUAL, routing=routing), seed=seed), Random(seed)
    for address in ADDRESSES[:count]:
        rig.state.fleet.metrics(address, EngineMetrics(), rig.now)
        for _ in range(dice.randrange(1, 4)):
            rig.queue(address, dice.uniform(0.0, 4.0), dice.randrange(1, 9_000))
        if held := max(0, dice.randrange(-300, 120)):
            rig.stored(address, range(16 * held))
    return rig


@pytest.mark.parametrize("session", ["", "s"])
@pytest.mark.parametrize("seed", range(examples(12)))
def test_the_choice_is_that_among_all(seed: int, session: str) -> None:
    few, all_ = busy(seed), busy(seed, WHOLE)
    for tokens in (300, 2_000, 2_100):
        of = head("/v1/completions", x_session_id=session) if session else None
        chosen, expected = (rig.record(rig.route(range(tokens), of)) for rig in (few, all_))
        cost = {c.address: c.total for c in expected.verdict.costs}
        assert len(cost) == len(ADDRESSES)
        assert len(chosen.candidates) <= 2 * CHEAPEST + DEEPEST + 1
        assert cost[chosen.target] == cost[expected.target]


def test_a_sessions_host_is_always_looked_at() -> None:
    rig = busy(1)
    of = head("/v1/completions", x_session_id="s")
    host = rig.record(rig.route(range(300), of)).target
    rig.queue(host, 500.0)
    record = rig.record(rig.route(range(300), of))
    assert host in {candidate.address for candidate in record.candidates}


def test_a_small_pool_is_looked_at_whole() -> None:
    rig = busy(1, count=ABOVE)
    assert len(rig.record(rig.route(range(300))).candidates) == ABOVE


def test_a_policy_that_may_choose_any_endpoint_sees_all() -> None:
    rig = busy(1, Routing(policy=PolicyChoice(name=PolicyName.RANDOM)))
    assert len(rig.record(rig.route(range(300))).candidates) == len(ADDRESSES)


def test_equal_endpoints_get_equally_many_new_sessions() -> None:
    rig = Rig(pool(endpoints=LISTED[:200], engine=USUAL))
    dice = Random(1)
    targets = [
        rig.route(
            [dice.randrange(50_000) for _ in range(400)], head("/v1/completions", x_session_id=f"s{n}")
        ).destinations[0]
        for n in range(200)
    ]
    assert len(set(targets)) == 200
