"""Requests that come at once to engines which have just started: their gauges read 0 for as long as the first
requests compile kernels, and the gateway's own count spreads the requests."""

from collections import Counter
from random import Random

import pytest
from router_rig import USUAL, Rig, pool
from routing_objects import head

from perilune_api.pool import EndpointSpec
from perilune_gateway.model import EngineMetrics

ADDRESSES = [f"10.0.0.{n}:8000" for n in range(1, 5)]
REQUESTS, SECONDS, SCRAPED_S = 40, 2.0, 0.25


@pytest.mark.parametrize("sessions", [True, False], ids=["sessions", "without a session"])
@pytest.mark.parametrize("announced", [False, True], ids=["nothing announced", "all announced"])
@pytest.mark.parametrize("events", [True, False], ids=["with events", "without events"])
def test_forty_requests_to_four_new_engines_end_as_ten_each(
    events: bool, announced: bool, sessions: bool
) -> None:
    """Whether or not their prompts are announced meanwhile."""
    listed = [EndpointSpec(address=a, events=(f"tcp://{a}",) if events else ()) for a in ADDRESSES]
    rig, dice = Rig(pool(endpoints=listed, engine=USUAL)), Random(1)
    went: Counter[str] = Counter()
    for number in range(REQUESTS):
        if not number % round(SCRAPED_S / SECONDS * REQUESTS):
            for address in ADDRESSES:
                rig.state.fleet.metrics(address, EngineMetrics(), rig.now)
        ids = [dice.randrange(50_000) for _ in range(dice.randrange(200, 4_000))]
        of = head("/v1/completions", x_session_id=f"s{number}") if sessions else None
        target = rig.route(ids, of).destinations[0]
        went[target] += 1
        if events and announced:
            rig.stored(target, ids)
        rig.now += SECONDS / REQUESTS
        rig.router.tick()
    assert all(abs(went[address] - REQUESTS / len(ADDRESSES)) <= 1 for address in ADDRESSES), went
