"""One ext_proc stream as bytes in, bytes out; both servers use it.

Each message goes through `wire.decode` and `exchange.receive`. The result is a `Reply`: encoded messages to
send, and then, if it says so, to wait (for tokens, for another endpoint, or for the session's turn), or to
abort the call. The server carries it out, and calls `closed` when the stream ends.

Waiting for tokens ends in one of three ways. The tokens come; or they do not come within
`limits.decision_seconds`, and the estimate from bytes is used; or the prompt is invalid, and the client gets
a 400.

Waiting until a new session may begin ends when the router names its ticket, for which `begin_sessions` asks
ten times per second, or when the stream ends.

Costs about 7 µs per message besides the router's work. Does not depend on sockets or HTTP/2.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from perilune_api.pool import Limits
from perilune_gateway.extproc import wire
from perilune_gateway.extproc.exchange import Abort, Effect, Entrance, Exchange, Hold, Router, Send, Wait
from perilune_gateway.extproc.messages import Body, Kind
from perilune_gateway.model import ProtocolError, Refusal, RequestHead, Tokens, TokenSource
from perilune_gateway.model.handoff import Attachment, Fetched, KvPull, RemotePrefill
from perilune_gateway.model.tracing import Trace
from perilune_gateway.request.openai import ParsedRequest
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.routing.router import Encode

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds after which the router is asked again which sessions begin."""
MESSAGE_BYTES = 64 * 1024 * 1024
"""Size in bytes of the largest message that is accepted or sent."""


class Closed(StrEnum):
    """Why the h2 server closed a connection. gRPC's own server does not report it."""

    TLS_FAILED = "tls_failed"
    """The peer speaks no TLS, offers no HTTP/2 within it, or has no trusted certificate."""
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    PROTOCOL_ERROR = "protocol_error"
    """The peer violated HTTP/2."""
    FLOOD = "flood"
    """The peer exceeded a limit on a connection."""
    NOT_READING = "not_reading"
    """The peer does not read its answers."""
    IDLE = "idle"
    """No stream was open for `limits.IDLE_S`."""


class Tokenizer(Protocol):
    """The part of tokens.Tokenizer that streams need."""

    async def encode(self, request: ParsedRequest) -> Tokens | Refusal: ...


class Giver(Protocol):
    """The part of feeds.prefill_legs.PrefillLegs that streams need."""

    async def give(
        self, ticket: int, remote: RemotePrefill, head: RequestHead, body: bytes
    ) -> Attachment | None: ...


class Fetcher(Protocol):
    """The part of feeds.pull_legs.PullLegs that streams need."""

    async def fetch(self, ticket: int, pull: KvPull) -> bool: ...


class Reply(Struct, frozen=True, gc=False):
    """Send `messages`, then carry out `then`; None means to await the next message."""

    messages: list[bytes]
    then: Wait | Hold | Abort | None


class Service:
    """The settings and counters that all streams of a gateway share.

    `limits` may be replaced at any time; new streams use the new ones. In a gateway with several pools, each
    pool has a service of its own, for what its requests wait for; the streams and their counters are those of
    the one in front.
    """

    def __init__(
        self,
        entrance: Entrance,
        tokenizer: Tokenizer | None,
        *,
        limits: Limits,
        bytes_per_token: float = 4.0,
        conformance: bool = False,
        giver: Giver | None = None,
        fetcher: Fetcher | None = None,
        trace: Callable[[str], Trace | None] | None = None,
        authorization: str = "",
        pools: Mapping[object, Service] | None = None,
    ) -> None:
        """`pools`: the services of several pools, by their routers, which `entrance` chooses. `giver` has
        prompts prefilled on other endpoints, `fetcher` has KV fetched for requests; None if targets always do
        it themselves. `bytes_per_token` is for the estimate when tokens come too late. `trace` and
        `authorization` are for `Exchange`."""
        self.limits = limits
        self.streams_open = 0
        self.streams_total = 0
        self.body_bytes_received = 0
        """Bytes of request bodies. A request that is decided by its headers adds none."""
        self.protocol_errors = 0
        self.failures = 0
        """Number of exceptions other than ProtocolError, which are bugs of this gateway."""
        self.late_tokens = 0
        """Number of requests routed by an estimate because their tokens came too late."""
        self._beginning: dict[int, asyncio.Future[Refusal | None]] = {}
        """The ends of waiting, by ticket."""
        self.connections_closed: dict[str, int] = dict.fromkeys(Closed, 0)
        """Number of connections that the h2 server closed, by cause."""
        self.entrance = entrance
        self.tokenizer = tokenizer
        self.bytes_per_token = bytes_per_token
        self.conformance = conformance
        self.giver = giver
        self.fetcher = fetcher
        self.trace = trace
        self.authorization = authorization
        self.pools = pools or {}

    @property
    def max_body_bytes(self) -> int:
        """The limit while a request's pool is not known."""
        if not self.pools:
            return self.limits.max_body_bytes
        return max(service.limits.max_body_bytes for service in self.pools.values())

    async def begin_sessions(self, router: Router) -> None:
        """Let the waiting sessions begin when the router says so, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for ticket, refusal in router.due():
                if (waiting := self._beginning.get(ticket)) and not waiting.done():
                    waiting.set_result(refusal)

    def begin_all(self) -> None:
        """Let all waiting sessions begin, because the gateway stops."""
        for waiting in self._beginning.values():
            if not waiting.done():
                waiting.set_result(None)

    async def begun(self, queued: Queued) -> Refusal | None:
        """Wait until the session begins, or is refused. Raises only CancelledError."""
        waiting: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._beginning[queued.ticket] = waiting
        try:
            return await waiting
        finally:
            del self._beginning[queued.ticket]

    def open(self) -> Stream:
        """Begin a stream. The caller must call its `closed`."""
        self.streams_total += 1
        self.streams_open += 1
        return Stream(self)


class Stream:
    """One call of Envoy's method. After a reply with Wait or Hold, call `waited` or `closed` and nothing
    else."""

    __slots__ = ("_exchange", "_service")

    def __init__(self, service: Service) -> None:
        self._service = service
        self._exchange = Exchange(
            service.entrance,
            max_body_bytes=service.max_body_bytes,
            conformance=service.conformance,
            trace=service.trace,
            authorization=service.authorization,
        )

    def receive(self, raw: bytes) -> Reply:
        """Handle a message from Envoy. Raises nothing."""
        service = self._service
        try:
            inbound = wire.decode(raw)
            if isinstance(inbound, Body) and inbound.kind is Kind.REQUEST_BODY:
                service.body_bytes_received += len(inbound.chunk)
            return _reply(self._exchange.receive(inbound))
        except Exception as error:
            return self._failed(error)

    async def waited(self, wait: Wait | Hold) -> Reply:
        """Get what the last reply waits for. Raises only CancelledError."""
        started = time.perf_counter()
        pool = self._service.pools.get(self._exchange.router, self._service)
        try:
            if isinstance(wait, Hold):
                return _reply(self._exchange.attach(await _attachment(pool, wait)))
            if isinstance(wait.what, Queued):
                return _reply(self._exchange.begun(await pool.begun(wait.what)))
            tokens = await self._encode(pool, wait.what)
            return _reply(self._exchange.tokens(tokens, time.perf_counter() - started))
        except Exception as error:
            return self._failed(error)

    def closed(self) -> None:
        """End the stream and its request. Call it exactly once, however the stream ended."""
        self._service.streams_open -= 1
        self._exchange.closed()

    async def _encode(self, pool: Service, encode: Encode) -> Tokens | Refusal:
        assert pool.tokenizer is not None
        try:
            async with asyncio.timeout(pool.limits.decision_seconds):
                return await pool.tokenizer.encode(encode.request)
        except TimeoutError:
            self._service.late_tokens += 1
            log.warning("late_tokens body_bytes=%d", encode.body_bytes)
            count = max(1, round(encode.body_bytes / pool.bytes_per_token))
            return Tokens(count, TokenSource.ESTIMATE)

    def _failed(self, error: Exception) -> Reply:
        """End the stream because Envoy violated the protocol or because of a bug of this gateway."""
        if isinstance(error, ProtocolError):
            self._service.protocol_errors += 1
            log.warning("protocol_error state=%s error=%s", self._exchange.state, error)
        else:
            self._service.failures += 1
            log.error("stream_failed state=%s", self._exchange.state, exc_info=error)
        return _reply(self._exchange.fail())


async def _attachment(pool: Service, hold: Hold) -> Attachment | Fetched | None:
    giver, transfer = pool.giver, hold.transfer
    if isinstance(transfer, KvPull):
        return Fetched() if pool.fetcher and await pool.fetcher.fetch(hold.ticket, transfer) else None
    return await giver.give(hold.ticket, transfer, hold.head, hold.body) if giver else None


def _reply(effects: list[Effect]) -> Reply:
    messages: list[bytes] = []
    for effect in effects:
        if isinstance(effect, Send):
            messages.append(wire.encode(effect.message))
        else:  # always the last effect
            return Reply(messages, effect)
    return Reply(messages, None)
