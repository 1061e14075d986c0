"""What probes and pages show of the live state."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from handing_rig import Handing, text
from msgspec.structs import replace
from router_rig import SMALL, A, B, Rig, pool
from routing_objects import head

from perilune_api.pool import EndpointSpec, EngineTls
from perilune_gateway.feeds.pool_events import EventFeeds, EventSink
from perilune_gateway.model import EngineMetrics
from perilune_gateway.observe.admin import endpoint_json
from perilune_gateway.observe.console.rows import endpoint_row
from perilune_gateway.observe.health import Status
from perilune_gateway.observe.snapshot import Snapshots
from perilune_gateway.state.engine_blocks import EngineBlocks


@pytest.fixture
def rig() -> Rig:
    return Rig(pool(endpoints=[A, B]))


@asynccontextmanager
async def snapshots_of(rig: Rig) -> AsyncIterator[Snapshots]:
    blocks = EngineBlocks(rig.router.state.index, rig.block_size, store=False)
    feeds = EventFeeds(
        EventSink(blocks, rig.state.parity, rig.router, lambda: rig.now, rig.state.block_tokens),
        time.time,
        Random(1),
    )
    yield Snapshots(rig.router, blocks, feeds, None, lambda: rig.now)
    await feeds.close()


@pytest.fixture
async def snapshots(rig: Rig) -> AsyncIterator[Snapshots]:
    async with snapshots_of(rig) as made:
        yield made


def scrapes_fail(rig: Rig, address: str, *, answered_before: bool) -> None:
    fleet = rig.router.state.fleet
    if answered_before:
        fleet.metrics(address, EngineMetrics(), rig.now)
    for _ in range(2):
        rig.now += 1.0
        fleet.metrics(address, None, rig.now)


@pytest.mark.parametrize(
    ("down", "answered_before", "serves"),
    [
        pytest.param((), True, True, id="all answer"),
        pytest.param((A,), False, True, id="one answers"),
        pytest.param((A, B), True, True, id="only their metrics fail"),
        pytest.param((A, B), False, False, id="none has ever answered"),
    ],
)
async def test_a_probe_is_told_what_health_says(rig, snapshots, down, answered_before, serves) -> None:
    for address in down:
        scrapes_fail(rig, address, answered_before=answered_before)
    assert snapshots.serves() is serves
    assert (snapshots.health("").status is not Status.UNREADY) is serves


async def test_an_empty_pool_serves_nobody(rig, snapshots) -> None:
    rig.router.configure(pool(endpoints=[]))
    assert not snapshots.serves()


@pytest.mark.parametrize(("tls", "url"), [(None, "http://"), (EngineTls("ca.crt", "p.ns.svc"), "https://")])
async def test_a_cure_asks_engines_as_the_pool_says(tls: EngineTls | None, url: str) -> None:
    async with snapshots_of(Rig(pool(engine=replace(SMALL, tls=tls)))) as snapshots:
        problems = snapshots.health("").problems
        assert {found.endpoint for found in problems if f"{url}{found.endpoint}/" in found.cure} == {A, B}


async def test_console_and_pages_have_a_row_for_each_rank_of_an_engine() -> None:
    one = EndpointSpec(address=A, events=("tcp://a:5557", "tcp://a:5558"))
    rig = Rig(pool(endpoints=[one, EndpointSpec(address=B)]))
    rig.stored(f"{A}#1", range(3 * rig.block_size))
    async with snapshots_of(rig) as snapshots:
        rows = snapshots.endpoints()
    told = {row["address"]: row["index"].device for row in map(endpoint_json, rows)}
    assert told == {f"{A}#0": 0, f"{A}#1": 3, B: 0}
    assert [endpoint_row(row)["address"] for row in rows] == list(told)


async def test_sessions_that_were_forgotten_are_counted(rig, snapshots) -> None:
    rig.router.state.sessions.max_sessions = 2
    for name in "abc":
        rig.route(range(20), head("/v1/completions", x_session_id=name))
    found = snapshots.snapshot()
    assert (found.sessions_bound, found.sessions_evicted) == (2, 1)


async def test_bodies_that_go_on_where_another_ended_are_counted(rig, snapshots) -> None:
    turn = {"role": "user", "content": "word " * 10_000}
    for turns in (1, 2, 3):
        body = json.dumps({"model": "m", "messages": [turn] * turns}).encode()
        rig.router.on_body(head("/v1/chat/completions"), body)
    assert snapshots.snapshot().bodies_parsed_in_part == 2


async def test_a_handoff_on_its_way_says_how_much_the_target_has_announced() -> None:
    rig = Handing()
    source = rig.turn("s", text(1, 320)).target
    target = B if source == A else A
    async with snapshots_of(rig) as snapshots:
        assert snapshots.handoffs() == []
        (legs,) = rig.drain(source)
        rig.handing_over.giving(legs)
        (row,) = snapshots.handoffs()
        assert row["session_id"] == "s"
        assert (row["source"], row["target"], row["reason"]) == (source, target, "drain")
        assert (row["stage"], row["tokens"], row["copied"]) == ("copying", 320, 0.0)
        rig.announce(target, text(1, 80))
        assert snapshots.handoffs()[0]["copied"] == 0.25
        rig.handing_over.took(legs, 320, 0.1)
        rig.announce(target, text(1, 320), after=80)
        assert rig.host("s") == target
        assert snapshots.handoffs() == []
