"""Stand-ins around a real Envoy, for tests of the transport and for trying things out.

    client ─▶ Envoy ─▶ StubEndpoint (says what it received, answers as its path tells)
                │
                └─ perilune_gateway.extproc with ScriptedRouter, or StubProcessor: ext_proc by hand

Each request says by its own headers and path what is to happen to it, so that tests share one Envoy and run
side by side. Nothing here measures, retries or sleeps on its own account.
"""

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Self

import grpc
import grpc.aio
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from waiting import HANG

from perilune_api import extproc_pb2 as pb
from perilune_api.names import EXT_PROC_SERVICE
from perilune_gateway.extproc import wire
from perilune_gateway.extproc.messages import Outbound
from perilune_gateway.model import (
    NEED_BODY,
    EngineFields,
    NeedBody,
    Outcome,
    Refusal,
    RefuseReason,
    RequestHead,
    Routed,
    Tokens,
)
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.routing.router import Encode

ID = "x-test-id"
ROUTE = "x-test-route"
"""Destinations, comma-separated."""
PHASE = "x-test-phase"
"""headers (default), body or tokens: when ScriptedRouter decides."""
PRIORITY = "x-test-priority"
"""To be written into the body."""
REFUSE = "x-test-refuse"
"""A RefuseReason instead of a route."""
ILL = "x-test-ill"
"""`a=503,b=die`: what endpoints of these names do instead of answering."""
DO = "x-test-do"
"""What StubProcessor does, see its `acts`."""


class ScriptedRouter:
    """Decides as the request's own headers tell, and notes what it is told."""

    def __init__(self) -> None:
        self.tickets: dict[int, str] = {}
        """Ticket → test id; a ticket given back is gone."""
        self.bodies: dict[str, bytes] = {}
        self.subsets: dict[str, frozenset[str] | None] = {}
        self.tokens: dict[str, Tokens] = {}
        self.responses: dict[str, tuple[int, str, bool]] = {}
        """Test id → status, served, streamed."""
        self.resets: dict[str, str] = {}
        """Test id → the endpoint that broke off."""
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        """Test id → every `finished`; more than one is a bug."""
        self._finished: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._ordinal = 0

    async def outcome(self, test_id: str) -> Outcome:
        """Wait for the end of the request, and return how it ended."""
        await asyncio.wait_for(self._finished[test_id].wait(), HANG)
        return self.outcomes[test_id][0]

    def on_headers(self, head: RequestHead) -> Routed | Refusal | NeedBody:
        self.subsets[head.headers.get(ID, "")] = head.subset
        if head.has_body and head.headers.get(PHASE, "headers") != "headers":
            return NEED_BODY
        return self._decide(head)

    def on_body(self, head: RequestHead, body: bytes) -> Routed | Refusal | Encode:
        self.bodies[head.headers.get(ID, "")] = body
        if head.headers[PHASE] != "tokens":
            return self._decide(head)
        request = parse("/v1/completions", json.dumps({"model": "m", "prompt": "p"}).encode())
        assert isinstance(request, ParsedRequest)
        return Encode(head, request, len(body))

    def on_tokens(self, encode: Encode, tokens: Tokens, waited_s: float = 0.0) -> Routed | Refusal:
        self.tokens[encode.head.headers.get(ID, "")] = tokens
        return self._decide(encode.head)

    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None:
        self.responses[self.tickets[ticket]] = (status, served, streamed)

    def on_reset(self, ticket: int, served: str) -> None:
        self.resets[self.tickets[ticket]] = served

    def decision_header(self, routed: Routed, served: str) -> str:
        return routed.decision_header

    def on_usage(self, ticket: int, cached_tokens: int) -> None:
        """Do nothing, because nobody asks."""

    def on_output(self, ticket: int, tokens: int) -> None:
        """Do nothing, because nobody asks."""

    def finished(self, ticket: int, outcome: Outcome) -> None:
        test_id = self.tickets.pop(ticket, f"ticket {ticket}, which is not held")
        self.outcomes[test_id].append(outcome)
        self._finished[test_id].set()

    def refused(self, head: RequestHead, refusal: Refusal) -> None:
        """Do nothing, because nobody asks."""

    def _decide(self, head: RequestHead) -> Routed | Refusal:
        if reason := head.headers.get(REFUSE):
            retry_after_s = 1.5 if reason == RefuseReason.OVERLOADED else 0.0
            return Refusal(RefuseReason(reason), "as the test says", retry_after_s)
        ticket = self._ordinal
        self._ordinal += 1
        self.tickets[ticket] = head.headers.get(ID, "")
        destinations = tuple(head.headers.get(ROUTE, "").split(","))
        priority = int(head.headers[PRIORITY]) if PRIORITY in head.headers else None
        return Routed(
            ticket=ticket,
            destinations=destinations,
            request_id=f"request-{ticket}",
            decision_header=f"{destinations[0]}; scripted",
            fields=EngineFields(priority),
        )


class StubEndpoint:
    """An HTTP server that says what it received.

    /sse streams one event, and one more each second for `?seconds=`, and ends when `let_go(test_id)` was
    called; /sse/break then breaks the connection instead; /die breaks it before any answer; /status/N answers
    N; /hang answers when let go; all other paths answer at once. The answer is JSON: name, sha1 and bytes of
    the body, its framing.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.address = ""
        self.hits: dict[str, int] = defaultdict(int)
        """By test id."""
        self.left: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set when a request is over here, also because its client went away."""
        self._let_go: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._arrived: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._runner: web.AppRunner | None = None

    def let_go(self, test_id: str) -> None:
        self._let_go[test_id].set()

    async def arrived(self, test_id: str) -> None:
        """Wait until the request is here, its body read."""
        await asyncio.wait_for(self._arrived[test_id].wait(), HANG)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"{host}:{port}"
        self.name = self.name or self.address
        return self

    async def __aexit__(self, *error: object) -> None:
        for event in self._let_go.values():
            event.set()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        test_id = request.headers.get(ID, "")
        try:
            return await self._answer_to(request, test_id)
        finally:
            self.left[test_id].set()

    async def _answer_to(self, request: web.Request, test_id: str) -> web.StreamResponse:
        body = await request.read()
        self.hits[test_id] += 1
        self._arrived[test_id].set()
        kind, _, detail = request.path.strip("/").partition("/")
        received = {
            "name": self.name,
            "sha1": hashlib.sha1(body).hexdigest(),
            "bytes": len(body),
            "content_length": request.headers.get("content-length"),
            "transfer_encoding": request.headers.get("transfer-encoding"),
        }
        ills = dict(entry.split("=") for entry in request.headers.get(ILL, "").split(",") if entry)
        ill = ills.get(self.name, "")
        if kind == "die" or ill == "die":
            _abort(request.protocol)
        if kind == "hang":
            await self._let_go[test_id].wait()
        if kind == "sse":
            return await self._stream(request, test_id, broken=detail == "break")
        status = detail if kind == "status" else ill
        return web.json_response(received, status=int(status) if status.isdigit() else 200)

    async def _stream(self, request: web.Request, test_id: str, broken: bool) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b"data: first\n\n")
        for _ in range(int(request.query.get("seconds", 0))):
            await asyncio.sleep(1)
            await reply.write(b"data: more\n\n")
        await self._let_go[test_id].wait()
        if broken:
            _abort(request.protocol)
        elif request.transport is not None and not request.transport.is_closing():
            await reply.write(b"data: [DONE]\n\n")
        return reply


def _abort(connection: RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()


Act = Callable[["Call"], Awaitable[None]]


class Call:
    """One ext_proc stream as StubProcessor's acts see it."""

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes], first: pb.ProcessingRequest) -> None:
        self.context = context
        self.duplex = first.protocol_config.request_body_mode == pb.ProcessingMode.FULL_DUPLEX_STREAMED
        headers = {h.key: h.raw_value.decode() for h in first.request_headers.headers.headers}
        self.test_id, self.do, self.route = (headers.get(name, "") for name in (ID, DO, ROUTE))

    async def read(self) -> pb.ProcessingRequest | None:
        """Read the next message; None at the end."""
        raw = await self.context.read()
        return pb.ProcessingRequest.FromString(raw) if isinstance(raw, bytes) else None

    async def write(self, *messages: Outbound) -> None:
        for message in messages:
            await self.context.write(wire.encode(message))

    async def until_end(self) -> None:
        """Read, and answer nothing, until the stream ends."""
        while await self.read() is not None:
            pass


class StubProcessor:
    """An ext_proc server by hand: `acts[request header x-test-do]` plays the server's part of a stream.

    `ended[test_id]` is set when the stream has ended, on whichever side.
    """

    def __init__(self, acts: dict[str, Act]) -> None:
        self.acts = acts
        self.address = ""
        self.ended: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        server = grpc.aio.server()
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._process)
        handler = grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": method})
        server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._server = server
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def _process(self, _requests: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        first = await context.read()
        if not isinstance(first, bytes):
            return
        call = Call(context, pb.ProcessingRequest.FromString(first))
        try:
            await self.acts[call.do](call)
        finally:
            self.ended[call.test_id].set()
