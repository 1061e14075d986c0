"""The legs of KV that a request's endpoint fetches, sent to servers that answer as a test likes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from handing_rig import Handing, text
from leg_engines import Engine, never
from msgspec import structs
from routing_objects import head
from waiting import HANG, pass_time

from perilune_gateway.feeds import handoff_legs
from perilune_gateway.feeds.pull_legs import PullLegs
from perilune_gateway.model import Routed
from perilune_gateway.model.handoff import GivenUp

HELD = text(1, 6_400)
PROMPT = [*HELD, *text(2, 100)]


@dataclass
class Scene:
    """A request to one endpoint, which is to fetch what the other one holds."""

    rig: Handing
    giver: Engine
    taker: Engine
    legs: PullLegs
    http: aiohttp.ClientSession
    routed: Routed

    async def fetch(self) -> tuple[bool, dict[GivenUp, int], list[str]]:
        """Fetch within HANG seconds, and return whether that succeeded, the causes if not, and which engines
        count as unreachable."""
        assert self.routed.pull
        pull = self.routed.pull
        structs.force_setattr(pull, "within_s", HANG)
        fetched = await self.legs.fetch(self.routed.ticket, pull)
        names = {self.giver.address: "giver", self.taker.address: "taker"}
        dead = [v.endpoint.address for v in self.rig.state.fleet.view(self.rig.now) if not v.endpoint.ready]
        return (
            fetched,
            dict(self.rig.router.moves.pulling.stats().given_up),
            [names[address] for address in dead],
        )


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        giver, taker = Engine(), Engine()
        giver.go_on.set()
        source, target = [await stack.enter_async_context(engine.served()) for engine in (giver, taker)]
        rig = Handing(pages={source: source, target: target}, policy="round_robin")
        rig.announce(source, HELD)
        asked = head("/v1/completions")
        asked.subset = frozenset({target})
        legs = PullLegs(rig.router.moves.pulling, rig.state.connectors)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        run = asyncio.create_task(legs.run(http))
        await asyncio.sleep(0)
        yield Scene(rig, giver, taker, legs, http, rig.route(PROMPT, asked))
        run.cancel()
        await asyncio.wait({run})


async def fails(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=500)


async def breaks(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def babbles(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="no JSON")


async def floods(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" " * 65_536)


async def redirects(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=307, headers={"Location": str(request.url)})


async def test_both_engines_are_sent_the_prefix_and_the_request_goes_on() -> None:
    async with scene() as on:
        assert await on.fetch() == (True, {}, [])
        (give,), (take,) = on.giver.bodies, on.taker.bodies
        assert give["prompt"] == take["prompt"] == HELD
        assert take["kv_transfer_params"]["remote_engine_id"] == f"process of {on.giver.address}"


@pytest.mark.parametrize(
    ("end", "answer", "cause", "dead"),
    [
        pytest.param("giver", fails, GivenUp.REFUSED, [], id="the giver refuses"),
        pytest.param("taker", fails, GivenUp.REFUSED, [], id="the taker refuses"),
        pytest.param("giver", breaks, GivenUp.UNREACHABLE, ["giver"], id="the giver is gone"),
        pytest.param("taker", breaks, GivenUp.UNREACHABLE, ["taker"], id="the taker is gone"),
        pytest.param("taker", babbles, GivenUp.UNREACHABLE, ["taker"], id="the taker's answer is none"),
        pytest.param("giver", floods, GivenUp.UNREACHABLE, ["giver"], id="the giver's answer has no end"),
        pytest.param("taker", floods, GivenUp.UNREACHABLE, ["taker"], id="the taker's answer has no end"),
        pytest.param("taker", redirects, GivenUp.REFUSED, [], id="the taker sends us elsewhere"),
    ],
)
async def test_the_end_whose_leg_fails_is_blamed(end: str, answer, cause: GivenUp, dead: list[str]) -> None:
    async with scene() as on:
        getattr(on, end).handler = answer
        assert await on.fetch() == (False, {cause: 1}, dead)


@pytest.mark.parametrize("end", ["giver", "taker"])
async def test_a_leg_that_hangs_is_given_up_in_time(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bound of the pull, which is shorter than those of its legs."""
    for bound in ("ACCEPT_S", "TAKE_S"):
        monkeypatch.setattr(handoff_legs, bound, 2 * HANG)
    async with scene() as on:
        engine = getattr(on, end)
        engine.handler = never
        fetch = asyncio.create_task(on.fetch())
        await engine.asked.wait()
        pass_time(HANG)
        assert await fetch == (False, {GivenUp.NOT_TAKEN: 1}, [])
        await asyncio.wait_for(engine.left.wait(), HANG)


async def test_the_legs_of_a_client_that_leaves_are_cancelled() -> None:
    async with scene() as on:
        on.taker.handler = never
        fetch = asyncio.create_task(on.fetch())
        await asyncio.wait_for(on.taker.asked.wait(), HANG)
        fetch.cancel()
        await asyncio.wait({fetch})
        await asyncio.wait_for(on.taker.left.wait(), HANG)


async def test_a_giver_whose_page_is_gone_is_not_asked() -> None:
    async with scene() as on:
        on.rig.state.connectors.forget(on.giver.address)
        assert await on.fetch() == (False, {GivenUp.PAGE: 1}, [])
        assert on.giver.bodies == on.taker.bodies == []


async def test_an_error_of_the_gateway_costs_the_pull_and_not_the_request() -> None:
    async with scene() as on:
        structs.force_setattr(on.routed.pull, "transfer_id", 7)  # no value of a header
        assert await on.fetch() == (False, {GivenUp.ERROR: 1}, [])


async def test_a_page_without_an_engine_is_no_page() -> None:
    async with scene() as on:
        on.giver.has_page = False
        assert await on.fetch() == (False, {GivenUp.PAGE: 1}, [])
        assert on.giver.bodies == on.taker.bodies == []


async def test_a_gateway_that_stops_fetches_nothing_more() -> None:
    async with scene() as on:
        await on.http.close()
        assert await on.fetch() == (False, {GivenUp.LEFT: 1}, [])
