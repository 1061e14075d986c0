"""The give leg of a request whose prompt another endpoint prefills, sent to a server that answers as a test
likes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs
from router_rig import USUAL, C, Rig, completion, pool
from routing_objects import head
from waiting import HANG, pass_time, until

from perilune_api.pool import Disaggregation, EndpointSpec, Role, Routing
from perilune_gateway.feeds import bootstrap_pages, pages
from perilune_gateway.feeds.prefill_legs import PrefillLegs
from perilune_gateway.model import Outcome, Refusal, RefuseReason, RequestHead, Routed
from perilune_gateway.model.handoff import Attachment, GivenUp
from perilune_gateway.model.tracing import SAMPLED, Trace
from perilune_gateway.state.connectors import Connector

PROMPT = list(range(3_200))
HEAD = head("/v1/completions", authorization="Bearer key", x_session_id="s")


def said(engine_id: str) -> dict[str, Any]:
    """Return what a bootstrap page says."""
    return {"0": {"engine_id": engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}


@dataclass
class Giver:
    """A prefill endpoint."""

    status: int = 200
    accepts: asyncio.Event = field(default_factory=asyncio.Event)
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    page: dict[str, Any] = field(default_factory=lambda: said("engine-0"))
    has_page: asyncio.Event = field(default_factory=asyncio.Event)
    """Until then the page does not answer."""
    breaks_off: bool = False
    answer: bytes = b"data: [DONE]"

    async def query(self, _: web.Request) -> web.Response:
        await self.has_page.wait()
        return web.json_response(self.page)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.breaks_off and request.transport:
            request.transport.close()
        try:
            await self.accepts.wait()
            answer = web.StreamResponse(status=self.status)
            await answer.prepare(request)
            await self.computed.wait()
            await answer.write_eof(self.answer)
        except asyncio.CancelledError:
            self.left.set()
            raise
        return answer


@dataclass
class Scene:
    rig: Rig
    giver: Giver
    legs: PrefillLegs
    address: str
    routed: Routed
    heard: asyncio.Event
    """The gateway has read an answer's head."""

    async def give(self, of: RequestHead = HEAD, **more: object) -> Attachment | None:
        assert self.routed.remote
        return await self.legs.give(self.routed.ticket, self.routed.remote, of, completion(PROMPT, **more))

    def given_up(self, outcome: Outcome = Outcome.COMPLETED) -> dict[GivenUp, int]:
        """After the request has ended so."""
        self.rig.finish(self.routed, outcome)
        return dict(self.rig.router.moves.remote_prefills.stats().given_up)


@contextlib.asynccontextmanager
async def scene(**own: str) -> AsyncIterator[Scene]:
    """Serve a prefill engine to a request, which may wait for it longer than a pool may say. `own`: headers
    of all requests of the gateway."""
    giver, app = Giver(), web.Application()
    giver.has_page.set()
    app.router.add_post("/v1/completions", giver.complete)
    app.router.add_get("/query", giver.query)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = "{}:{}".format(*runner.addresses[0])
    listed = [
        EndpointSpec(address=address, events=("tcp://p",), bootstrap=address, role=Role.PREFILL),
        EndpointSpec(address=C, events=("tcp://d",), bootstrap="10.0.0.3:8998"),
    ]
    rig = Rig(
        pool(
            endpoints=listed,
            routing=Routing(disaggregation=Disaggregation(coming_requests=1)),
            engine=USUAL,
        )
    )
    for i, endpoint in enumerate(listed):
        rig.state.connectors.answered(endpoint.address, Connector([f"engine-{i}"], 1))
    legs = PrefillLegs(rig.router.moves.remote_prefills, rig.state.connectors, "secret")
    heard, trace = asyncio.Event(), aiohttp.TraceConfig()

    async def hear(_: aiohttp.ClientSession, __: object, ended: aiohttp.TraceRequestEndParams) -> None:
        if ended.method == "POST":
            heard.set()

    trace.on_request_end.append(hear)
    async with aiohttp.ClientSession(headers=own, trace_configs=[trace]) as http:
        run = asyncio.create_task(legs.run(http))
        await asyncio.sleep(0)
        made = Scene(rig, giver, legs, address, rig.route(PROMPT, HEAD), heard)
        structs.force_setattr(made.routed.remote, "accept_s", HANG)
        structs.force_setattr(made.routed.remote, "give_s", 2 * HANG)
        yield made
        run.cancel()
        await asyncio.wait({run})
    await runner.cleanup()


async def test_the_request_goes_on_when_its_prompt_is_accepted_not_when_it_is_computed() -> None:
    async with scene() as on:
        on.giver.accepts.set()
        attached = await on.give(temperature=0.5, stop=["x"], stream=False, max_tokens=99)
        assert attached is not None
        assert not on.giver.computed.is_set()
        (give,), (headers,) = on.giver.bodies, on.giver.headers
        params = give.pop("kv_transfer_params")
        assert give == {
            "model": "m",
            "prompt": PROMPT,
            "temperature": 0.5,
            "max_tokens": 1,
            "ignore_eos": True,
            "stream": True,
        }
        assert headers["Authorization"] == "Bearer key"
        transfer = params.pop("transfer_id")
        assert params == {"do_remote_decode": True, "do_remote_prefill": False}
        assert json.loads(attached.params) == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{on.address}",
            "remote_engine_id": "engine-0",
            "transfer_id": transfer,
        }
        assert attached.headers == (
            ("x-perilune-transfer-target", C),
            ("x-perilune-engine-secret", "secret"),
        )


async def test_a_key_that_engines_demand_stands_in_for_the_clients() -> None:
    async with scene(authorization="Bearer of engines") as on:
        on.giver.accepts.set()
        assert await on.give() is not None
        (headers,) = on.giver.headers
        assert [v for name, v in headers.items() if name.lower() == "authorization"] == ["Bearer of engines"]


async def test_a_prompt_that_is_not_accepted_in_time_is_not_waited_for() -> None:
    async with scene() as on:
        gives = asyncio.create_task(on.give())
        await until(lambda: on.giver.bodies)
        pass_time(HANG)
        assert await gives is None
        await asyncio.wait_for(on.giver.left.wait(), HANG)  # the engine need not go on
        assert on.given_up() == {GivenUp.NOT_ACCEPTED: 1}


async def test_an_engine_that_has_restarted_is_taken_from_by_its_new_id() -> None:
    async with scene() as on:
        on.giver.page = said("its next process")
        on.giver.accepts.set()
        attached = await on.give()
        assert attached is not None
        assert json.loads(attached.params)["remote_engine_id"] == "its next process"
        assert on.rig.state.connectors.known[on.address].engine_ids == ["its next process"]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(None, id="slow"),
        pytest.param({}, id="nobody has registered"),
        pytest.param({"0": {"engine_id": "half", "worker_addr": {}}}, id="no worker has registered"),
    ],
)
async def test_no_request_waits_longer_for_a_page_than_for_the_prompts_acceptance(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_pages, "PAGE_S", 2 * HANG)
    async with scene() as on:
        if page is None:
            on.giver.has_page.clear()
        else:
            on.giver.page = page
        on.giver.accepts.set()
        gives = asyncio.create_task(on.give())
        await on.heard.wait()
        pass_time(HANG)
        async with asyncio.timeout(HANG):
            assert await gives is None
            await on.giver.left.wait()
        on.giver.has_page.set()
        assert on.given_up() == {GivenUp.PAGE: 1}


async def test_an_error_of_the_gateway_costs_one_leg() -> None:
    async with scene() as on:
        assert on.routed.remote
        unreadable = on.legs.give(on.routed.ticket, on.routed.remote, HEAD, b"no JSON")
        assert await asyncio.wait_for(unreadable, HANG) is None
        assert all(view.endpoint.ready for view in on.rig.state.fleet.view(on.rig.now))
        on.giver.accepts.set()
        another = on.rig.route(list(range(5_000, 8_200)))
        assert another.remote
        structs.force_setattr(another.remote, "accept_s", HANG)
        assert await on.legs.give(another.ticket, another.remote, HEAD, completion(PROMPT)) is not None
        assert on.given_up() == {GivenUp.ERROR: 1}


async def test_a_refused_prompt_goes_to_the_target_at_once() -> None:
    async with scene() as on:
        on.giver.status = 400
        on.giver.accepts.set()
        on.giver.computed.set()
        assert await on.give() is None
        assert on.given_up() == {GivenUp.REFUSED: 1}


async def test_an_answer_without_end_is_read_no_further_than_its_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene() as on:
        on.giver.accepts.set()
        on.giver.answer = b"x" * (pages.LEG_BYTES + 1)
        assert await on.give() is not None
        on.giver.computed.set()
        await until(lambda: "prefill for another endpoint failed" in caplog.text)
        assert on.given_up() == {GivenUp.UNREACHABLE: 1}


async def test_a_prompt_at_which_a_prefill_endpoint_breaks_off_may_break_engines() -> None:
    async with scene() as on:
        on.giver.breaks_off = True
        assert await on.give() is None
        on.rig.router.prefills_itself(on.routed.ticket)
        on.rig.router.on_reset(on.routed.ticket, C)
        assert on.given_up(Outcome.FAILED) == {GivenUp.BROKE_OFF: 1}
        refusal = on.rig.ask(PROMPT, HEAD)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.status) == (RefuseReason.RESETS, 400)


async def test_a_giver_without_a_connector_is_asked_for_nothing() -> None:
    async with scene() as on:
        on.rig.state.connectors.forget(on.address)
        assert await on.give() is None
        assert on.giver.bodies == []
        assert on.given_up() == {GivenUp.PAGE: 1}


async def test_the_leg_of_a_request_that_has_ended_is_cancelled() -> None:
    async with scene() as on:
        on.giver.accepts.set()
        assert await on.give() is not None
        assert on.given_up(Outcome.CANCELLED) == {GivenUp.LEFT: 1}
        await asyncio.wait_for(on.giver.left.wait(), HANG)


async def test_the_engine_that_prefills_is_told_of_the_trace_too() -> None:
    async with scene() as on:
        on.giver.accepts.set()
        traced = head("/v1/completions", traceparent="of the client", tracestate="vendor=value")
        traced.trace = Trace(
            trace_id=1, span_id=2, parent_id=3, flags=SAMPLED, started_at=5.0, operation="chat"
        )
        assert await on.give(traced) is not None
        (headers,) = on.giver.headers
        assert headers["traceparent"] == traced.trace.traceparent
        assert headers["tracestate"] == "vendor=value"


@pytest.mark.parametrize(
    ("body", "given"),
    [
        pytest.param(b"\xef\xbb\xbf" + completion(PROMPT), True, id="a byte order mark"),
        pytest.param(completion(PROMPT)[:-1] + b',"x":"\xff"}', False, id="no UTF-8 in a field of nobody"),
        pytest.param(
            completion(PROMPT)[:-1] + b',"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}", False, id="nested deeply"
        ),
    ],
)
async def test_what_a_client_writes_into_its_body_is_not_its_prefill_endpoints_fault(
    body: bytes, given: bool
) -> None:
    async with scene() as on:
        on.giver.accepts.set()
        on.giver.computed.set()
        assert on.routed.remote
        attached = await on.legs.give(on.routed.ticket, on.routed.remote, HEAD, body)
        assert (attached is not None) is given
        view = next(v for v in on.rig.state.fleet.view(on.rig.now) if v.endpoint.address == on.address)
        assert view.endpoint.ready, "not suspected"
        assert on.given_up() == ({} if given else {GivenUp.ERROR: 1})
