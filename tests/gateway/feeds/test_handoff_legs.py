"""The two legs of a hand-off, sent to servers that answer as a test likes."""

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
from waiting import HANG, pass_time

from perilune_gateway.feeds import bootstrap_pages, handoff_legs
from perilune_gateway.model.handoff import GivenUp, HandoffOutcome
from perilune_gateway.moves.handoff import Stage
from perilune_gateway.state.connectors import Connector, Connectors

PROMPT = text(1, 320)


@dataclass
class Scene:
    """A session on one of two engines, which drains; the legs are on their way."""

    rig: Handing
    engines: dict[str, Engine]
    source: str = ""

    @property
    def giver(self) -> Engine:
        return self.engines[self.source]

    @property
    def taker(self) -> Engine:
        (other,) = self.engines.keys() - {self.source}
        return self.engines[other]

    def begin(self) -> None:
        self.rig.router.configure(self.rig.pool(draining=self.source))
        self.rig.router.plan_moves()

    async def ended(self) -> tuple[HandoffOutcome, GivenUp | None]:
        async with asyncio.timeout(HANG):
            while not (done := [e for e in self.rig.router.moves.planner.ended if e.handoff]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return done[0].handoff.outcome, done[0].handoff.cause


@contextlib.asynccontextmanager
async def scene(connectors: Connectors | None = None) -> AsyncIterator[Scene]:
    """`connectors`: instead of those of the pool's state."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [Engine(), Engine()]
        addresses = [await stack.enter_async_context(engine.served()) for engine in engines]
        due = handoff_legs.Due()
        rig = Handing(pages=dict(zip(addresses, addresses, strict=True)), listeners=(due,))
        made = Scene(rig, dict(zip(addresses, engines, strict=True)))
        made.source = rig.turn("s", PROMPT).target
        http = await stack.enter_async_context(aiohttp.ClientSession())
        known = connectors or rig.state.connectors
        run = asyncio.create_task(handoff_legs.run(rig.handing_over, due, known, http))
        yield made
        run.cancel()
        await asyncio.wait({run})


async def test_the_take_leg_follows_the_give_legs_head_with_the_same_prompt() -> None:
    async with scene() as on:
        on.begin()
        await on.giver.accepted.wait()
        await on.taker.asked.wait()
        on.giver.go_on.set()
        (give,), (take,) = on.giver.bodies, on.taker.bodies
        assert give["prompt"] == take["prompt"] == PROMPT
        params, taking = give.pop("kv_transfer_params"), take.pop("kv_transfer_params")
        assert (give["max_tokens"], give["ignore_eos"], give["stream"]) == (1, True, True)
        assert take == give | {"stream": False}
        transfer = params.pop("transfer_id")
        assert params == {"do_remote_decode": True, "do_remote_prefill": False}
        assert taking == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{on.source}",
            "remote_engine_id": f"process of {on.source}",
            "transfer_id": transfer,
        }
        target = on.taker.address

        async def taken() -> None:
            while not on.rig.handing_over.stats().open[0].took:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        await asyncio.wait_for(taken(), HANG)
        on.rig.announce(target, PROMPT)
        assert await on.ended() == (HandoffOutcome.SWITCHED, None)
        assert on.rig.host("s") == target
        assert on.rig.handing_over.stats().legs == {"give": 1, "take": 1}


async def test_nobody_is_asked_to_take_what_was_not_accepted() -> None:
    async def refuses(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=400, text="too long")

    async with scene() as on:
        on.giver.handler = refuses
        on.begin()
        assert await on.ended() == (HandoffOutcome.FAILED, GivenUp.REFUSED)
        assert on.taker.bodies == []
        assert on.rig.host("s") == on.source


@pytest.mark.parametrize(
    ("bound", "silent", "cause"),
    [
        pytest.param("ACCEPT_S", "giver", GivenUp.NOT_ACCEPTED, id="accepted"),
        pytest.param("TAKE_S", "taker", GivenUp.NOT_TAKEN, id="taken"),
    ],
)
async def test_every_wait_has_a_bound(monkeypatch, bound: str, silent: str, cause: GivenUp) -> None:
    monkeypatch.setattr(handoff_legs, bound, HANG)
    async with scene() as on:
        getattr(on, silent).handler = never
        on.giver.go_on.set()
        on.begin()
        await getattr(on, silent).asked.wait()
        pass_time(HANG)
        assert await on.ended() == (HandoffOutcome.EXPIRED, cause)
        await asyncio.wait_for(getattr(on, silent).left.wait(), HANG)  # the engine need not go on
        loads = [on.rig.load(address).in_flight for address in on.engines]
        assert loads == [0, 0]


async def test_a_host_does_not_choose_whom_the_gateway_asks() -> None:
    async def elsewhere(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"http://{on.taker.address}/v1/completions")

    async with scene() as on:
        on.giver.handler = elsewhere
        on.begin()
        assert await on.ended() == (HandoffOutcome.FAILED, GivenUp.REFUSED)
        assert on.taker.bodies == []


async def test_an_answer_without_end_ends_both_legs() -> None:
    async def endless(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * 2**16)

    async with scene() as on:
        on.giver.handler, on.taker.handler = endless, never
        on.begin()
        assert await on.ended() == (HandoffOutcome.FAILED, GivenUp.UNREACHABLE)


async def test_a_leg_whose_connection_breaks_ends_both() -> None:
    async def breaks(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await on.taker.asked.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def accepts_and_breaks(
        engine: Engine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        return await breaks(engine, request, body)

    async with scene() as on:
        on.giver.handler, on.taker.handler = accepts_and_breaks, never
        on.begin()
        assert await on.ended() == (HandoffOutcome.FAILED, GivenUp.UNREACHABLE)
        await asyncio.wait_for(on.taker.left.wait(), HANG)


async def test_a_host_without_a_page_is_asked_for_nothing() -> None:
    async with scene() as on:
        on.giver.has_page = False
        on.begin()
        assert await on.ended() == (HandoffOutcome.FAILED, GivenUp.PAGE)
        assert on.giver.bodies == on.taker.bodies == []


async def test_a_host_that_is_too_busy_to_show_its_page_at_once_gives_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap_pages, "PAGE_S", 0.01)
    async with scene() as on:
        on.giver.page_after_s = 0.1
        on.begin()
        await asyncio.wait_for(on.taker.asked.wait(), HANG)


async def test_legs_of_what_was_given_up_are_cancelled() -> None:
    async with scene() as on:
        on.taker.handler = never
        on.begin()
        await asyncio.wait_for(on.taker.asked.wait(), HANG)
        on.rig.state.connectors.forget(on.source)
        on.rig.handing_over.step()
        assert await on.ended() == (HandoffOutcome.FAILED, GivenUp.PAGE)
        await asyncio.wait_for(on.taker.left.wait(), HANG)
        assert on.rig.handing_over.stats().open == ()


async def test_the_engine_id_is_asked_for_each_time() -> None:
    async with scene() as on:
        on.rig.state.connectors.answered(on.source, Connector(["an earlier process"], 1))
        on.begin()
        await asyncio.wait_for(on.taker.asked.wait(), HANG)
        params = on.taker.bodies[0]["kv_transfer_params"]
        assert params["remote_engine_id"] == f"process of {on.source}"
        assert on.rig.handing_over.stats().open[0].stage is Stage.COPYING


async def test_an_error_of_the_gateway_costs_one_hand_off_and_the_next_one_works() -> None:
    class FailsOnce(Connectors):
        failed = False

        def answered(self, address: str, connector: Connector) -> None:
            if not self.failed:
                self.failed = True
                raise RuntimeError

    async with scene(FailsOnce()) as on:
        on.giver.go_on.set()
        on.begin()
        assert await on.ended() == (HandoffOutcome.FAILED, GivenUp.ERROR)
        on.rig.router.plan_moves()
        await asyncio.wait_for(on.taker.asked.wait(), HANG)
