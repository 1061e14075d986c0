"""What the console gets from the gateway: its files, and the event stream over real HTTP."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from routing_objects import fleet, request, session
from waiting import HANG

from perilune_api.topology import Place
from perilune_gateway.model import (
    Decision,
    DecisionRecord,
    Endpoint,
    Load,
    Reason,
    Refusal,
    RefuseReason,
)
from perilune_gateway.observe.console import STREAM, Stream
from perilune_gateway.observe.console.rows import Condition, condition, endpoint_row, point
from perilune_gateway.observe.decisions import Decisions, Totals
from perilune_gateway.observe.stats import EndpointStats
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_gateway.state.ejection import EjectionStats
from perilune_gateway.state.in_flight import Cause

A = EndpointStats(
    endpoint=Endpoint(address="a", place=Place("n", "r", "s")),
    load=Load(in_flight=2, sessions=7, pending_prefill_s=1.5),
)
B = EndpointStats(endpoint=Endpoint(address="b"))


@dataclass
class World:
    endpoints: tuple[EndpointStats, ...] = (A, B)
    decisions: Decisions = field(default_factory=Decisions)
    new_sessions: SessionAdmissionStats = SessionAdmissionStats()
    handoffs: tuple[dict[str, Any], ...] = ()
    now: float = 0.0

    def wall(self) -> float:
        self.now += 1.0
        return self.now

    def decide(self, count: int = 1, moved_from: str = "") -> None:
        for n in range(count):
            verdict = Decision("a", Reason.HOST, moved_from=moved_from)
            view = request(tokens=1000 + n, of=session("a", id="s"))
            self.decisions.add(
                DecisionRecord(
                    view=view, verdict=verdict, policy="ear", candidates=tuple(fleet(a=5)), cached_tokens=400
                )
            )


class Browser:
    """One reader of the stream."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def event(self, name: str) -> dict[str, Any]:
        """Return the next event of that name."""
        async with asyncio.timeout(HANG):
            while True:
                lines = (await self._content.readuntil(b"\n\n")).decode().splitlines()
                if lines[0] == f"event: {name}":
                    data: dict[str, Any] = json.loads(lines[1].removeprefix("data: "))
                    return data


@asynccontextmanager
async def streaming(world: World, **options: float):
    """`await browse()` → a Browser."""
    timing = {"tick_s": 0.01, "point_s": 1e9} | options
    stream = Stream(
        lambda: world.endpoints,
        lambda: world.new_sessions,
        lambda: world.handoffs,
        world.decisions,
        lambda: {"pool": "default/p"},
        world.wall,
        **timing,
    )
    app = web.Application()
    app.router.add_get(STREAM, stream.watch)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    task = asyncio.create_task(stream.run())
    try:
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(base) as http, AsyncExitStack() as open_streams:

            async def browse(status: int = 200) -> Browser:
                response = await open_streams.enter_async_context(http.get(STREAM))
                assert response.status == status
                return Browser(response.content)

            yield browse
    finally:
        task.cancel()
        stream.close()
        await runner.cleanup()


async def test_a_browser_first_gets_everything_and_then_what_changed():
    world = World()
    async with streaming(world) as browse:
        browser = await browse()
        hello = await browser.event("hello")
        assert (hello["pool"], [row["address"] for row in hello["endpoints"]]) == ("default/p", ["a", "b"])
        assert (await browser.event("state"))["endpoints"] == []
        world.endpoints = (A, replace(B, load=Load(in_flight=1)))
        while not (changed := (await browser.event("state"))["endpoints"]):
            pass
        assert [(row["address"], row["in_flight"]) for row in changed] == [("b", 1)]


async def test_an_endpoint_that_leaves_is_named():
    world = World()
    async with streaming(world) as browse:
        browser = await browse()
        await browser.event("state")
        world.endpoints = (B,)
        while not (left := (await browser.event("state"))["left"]):
            pass
        assert left == ["a"]


async def test_a_second_browser_sees_the_present_state():
    world = World()
    async with streaming(world) as browse:
        first = await browse()
        await first.event("hello")
        world.endpoints = (B,)
        while not (await first.event("state"))["left"]:
            pass
        hello = await (await browse()).event("hello")
        assert [row["address"] for row in hello["endpoints"]] == ["b"]


async def test_a_state_tells_the_load_of_the_endpoints_that_it_shows():
    world = World()
    async with streaming(world) as browse:
        browser = await browse()
        assert (await browser.event("state"))["now"]["requests_per_s"] == 0.0
        world.endpoints = (A, replace(B, load=Load(in_flight=5)))
        world.decide(3)
        while not (state := await browser.event("state"))["endpoints"]:
            pass
        assert state["now"]["in_flight"] == 7
        assert state["now"]["requests_per_s"] > 0


async def test_a_second_browser_sees_each_decision_once():
    world = World()
    async with streaming(world, tick_s=0.3) as browse:
        await (await browse()).event("state")
        world.decide(3)  # the next state tells both browsers
        second = await browse()
        seen = (await second.event("hello"))["decisions"]
        world.decide(1)
        while len(seen) < 4:
            seen += (await second.event("state"))["decisions"]
        assert sorted(decision["prompt_tokens"] for decision in seen) == [1000, 1000, 1001, 1002]


async def test_the_history_begins_with_the_gateway():
    async with streaming(World(), point_s=900.0) as browse:
        (first,) = (await (await browse()).event("hello"))["history"]
        assert (first["in_flight"], first["requests_per_s"]) == (2, 0.0)


async def test_decisions_come_once_the_newest_first_and_with_their_number():
    world = World()
    world.decide(3)  # before anybody watched
    async with streaming(world) as browse:
        browser = await browse()
        assert len((await browser.event("hello"))["decisions"]) == 3
        assert (await browser.event("state"))["decided"] == 0
        world.decide(120)
        while not (state := await browser.event("state"))["decided"]:
            pass
        assert state["decided"] == 120
        assert len(state["decisions"]) == 50
        assert state["decisions"][0]["prompt_tokens"] == 1119
        assert (await browser.event("state"))["decided"] == 0


async def test_new_sessions_are_shown_where_they_may_have_to_wait():
    world = World()
    async with streaming(world) as browse:
        browser = await browse()
        assert (await browser.event("hello"))["new_sessions"] is None
        world.new_sessions = SessionAdmissionStats(enabled=True, waiting=2, begun=7, refused=1)
        while not (shown := (await browser.event("state"))["new_sessions"]):
            pass
        assert shown == {"waiting": 2, "begun": 7, "refused": 1}


async def test_open_handoffs_are_told_at_once_and_until_they_end():
    world = World(handoffs=({"copied": 0.25},))
    async with streaming(world) as browse:
        browser = await browse()
        assert (await browser.event("hello"))["handoffs"] == [{"copied": 0.25}]
        world.handoffs = ()
        while (await browser.event("state"))["handoffs"]:
            pass


async def test_the_history_grows_without_a_browser():
    world = World()
    async with streaming(world, point_s=1.0) as browse:
        first = await browse()
        await first.event("point")
        hello = await (await browse()).event("hello")
        assert len(hello["history"]) >= 1


async def test_more_browsers_than_the_limit_are_refused():
    async with streaming(World()) as browse:
        for _ in range(16):
            await browse()
        await browse(status=503)


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (A, Condition.READY),
        (EndpointStats(endpoint=Endpoint(address="a", draining=True)), Condition.DRAINING),
        (EndpointStats(endpoint=Endpoint(address="a", ready=False)), Condition.DOWN),
        (EndpointStats(endpoint=Endpoint(address="a", ready=False), asleep=True), Condition.ASLEEP),
        (
            EndpointStats(
                endpoint=Endpoint(address="a", ready=False),
                ejection=EjectionStats(cause=Cause.LATE, since_s=1.0, bad=3, of=4),
            ),
            Condition.EJECTED,
        ),
        (EndpointStats(endpoint=Endpoint(address="a", ready=False), silent=True), Condition.SILENT),
    ],
)
def test_what_an_endpoint_does_has_one_word(stats: EndpointStats, expected: Condition):
    assert condition(stats) is expected


def test_a_row_has_place_load_and_hit_ratio_as_far_as_they_are_known():
    assert endpoint_row(A) == {
        "address": "a",
        "spine": "s",
        "rack": "r",
        "node": "n",
        "condition": "ready",
        "queue_s": 1.5,
        "in_flight": 2,
        "waiting": 0,
        "kv_usage": 0.0,
        "sessions": 7,
        "hit_ratio": None,
    }
    known = replace(A, prefix_queries_tokens=300.0, prefix_hits_tokens=200.0)
    assert endpoint_row(known)["hit_ratio"] == 0.667


def test_a_point_sums_an_interval():
    loads = (
        EndpointStats(
            endpoint=Endpoint(address="a"), load=Load(in_flight=3, pending_prefill_s=2.0, kv_usage=0.5)
        ),
        EndpointStats(endpoint=Endpoint(address="b"), load=Load(in_flight=1)),
    )
    before, now = Totals(10, 2, 1000, 500, 1), Totals(22, 4, 3000, 2000, 2)
    found = point(loads, SessionAdmissionStats(waiting=3), before, now, 5.0, 100.0)
    assert (found.requests_per_s, found.refusals_per_s, found.hit_ratio) == (2.0, 0.4, 0.75)
    assert (found.moves, found.in_flight, found.queue_s, found.kv_usage) == (1, 4, 2.0, 0.25)
    assert found.waiting == 3
    assert point((), SessionAdmissionStats(), now, now, 5.0, 100.0).hit_ratio is None


def test_totals_count_what_is_no_longer_kept():
    world = World(decisions=Decisions(capacity=2))
    world.decide(5)
    world.decide(1, moved_from="b")
    refusal = Refusal(RefuseReason.NO_ENDPOINT, "none")
    world.decisions.add(DecisionRecord(view=request(), verdict=refusal, policy=""))
    totals = world.decisions.totals
    assert (totals.recorded, totals.decisions, totals.refusals, totals.moves) == (7, 6, 1, 1)
    assert totals.cached_tokens == 6 * 400
