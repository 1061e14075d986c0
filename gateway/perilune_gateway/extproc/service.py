"""What both servers share: one ext_proc stream as bytes in, bytes out.

For each message, `wire.decode` → `exchange.receive` → encoded effects: messages to send, and then perhaps to
wait for tokens or to abort the call. The server carries these out and calls `closed` when the stream ends.

Waiting for tokens ends in one of three ways. The tokens come; or they do not come within
`limits.decision_seconds`, and the estimate from bytes is used; or the prompt is invalid, and the client gets
a 400.

Costs about 7 µs per message beside the router's work. Knows neither sockets nor HTTP/2.
"""

from __future__ import annotations

import asyncio
import logging
import time
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from perilune_api.pool import Limits
from perilune_gateway.extproc import wire
from perilune_gateway.extproc.exchange import Abort, Effect, Exchange, Router, Send, Wait
from perilune_gateway.extproc.messages import Body, BodyMode, Kind
from perilune_gateway.model import ProtocolError, Refusal, Tokens, TokenSource
from perilune_gateway.request.openai import ParsedRequest
from perilune_gateway.routing.router import Encode

log = logging.getLogger(__name__)

MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message that is taken or sent."""


class Closed(StrEnum):
    """Why a server closed a connection while the gateway goes on. gRPC's own server does not tell."""

    TLS_FAILED = "tls_failed"
    """No TLS, no HTTP/2 within it, or no certificate that we trust."""
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    PROTOCOL_ERROR = "protocol_error"
    FLOOD = "flood"
    """Beyond one of the limits on a connection."""
    NOT_READING = "not_reading"
    """The peer does not take its answers."""
    IDLE = "idle"


class Tokenizer(Protocol):
    """The part of tokens.Tokenizer that streams need."""

    async def encode(self, request: ParsedRequest) -> Tokens | Refusal: ...


class Step(Struct, frozen=True, gc=False):
    """Send `messages`, then do `then`; None means to await the next message."""

    messages: list[bytes]
    then: Wait | Abort | None


class Service:
    """What all streams of a gateway share.

    `limits` may be replaced at any time and applies to the next stream. The counters are for metrics and
    tests.
    """

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        *,
        limits: Limits,
        bytes_per_token: float = 4.0,
        default_mode: BodyMode = BodyMode.BUFFERED,
        conformance: bool = False,
    ) -> None:
        """`bytes_per_token` serves the estimate that is used when tokens come too late. `default_mode` is the
        body mode of an Envoy that does not tell its mode, see `wire`."""
        self.limits = limits
        self.streams_open = 0
        self.streams_total = 0
        self.body_bytes_received = 0
        """Bytes of request bodies; a request that is decided on its headers adds none."""
        self.protocol_errors = 0
        self.failures = 0
        """Exceptions while a message was handled, which are bugs of ours."""
        self.late_tokens = 0
        """Requests routed by estimate because their tokens came too late."""
        self.connections_closed: dict[str, int] = dict.fromkeys(Closed, 0)
        """Connections that a server closed on its own, by cause."""
        self.router = router
        self.tokenizer = tokenizer
        self.bytes_per_token = bytes_per_token
        self.default_mode = default_mode
        self.conformance = conformance

    def open(self) -> Stream:
        """Begin a stream, which has to be closed."""
        self.streams_total += 1
        self.streams_open += 1
        return Stream(self)


class Stream:
    """One call of Envoy's method. After a step that waits, call `tokens` or `closed` and nothing else."""

    __slots__ = ("_exchange", "_service")

    def __init__(self, service: Service) -> None:
        self._service = service
        self._exchange = Exchange(
            service.router, max_body_bytes=service.limits.max_body_bytes, conformance=service.conformance
        )

    def receive(self, raw: bytes) -> Step:
        """Handle a message from Envoy. Raises nothing."""
        service = self._service
        try:
            inbound = wire.decode(raw, service.default_mode)
            if isinstance(inbound, Body) and inbound.kind is Kind.REQUEST_BODY:
                service.body_bytes_received += len(inbound.chunk)
            return _step(self._exchange.receive(inbound))
        except Exception as error:
            return self._failed(error)

    async def tokens(self, encode: Encode) -> Step:
        """Get the tokens that the last step waits for. Raises only CancelledError."""
        started = time.perf_counter()
        try:
            tokens = await self._encode(encode)
            return _step(self._exchange.tokens(tokens, time.perf_counter() - started))
        except Exception as error:
            return self._failed(error)

    def closed(self) -> None:
        """Give back what the stream holds; call it once, however the stream ended."""
        self._service.streams_open -= 1
        self._exchange.closed()

    async def _encode(self, encode: Encode) -> Tokens | Refusal:
        service = self._service
        try:
            async with asyncio.timeout(service.limits.decision_seconds):
                return await service.tokenizer.encode(encode.request)
        except TimeoutError:
            service.late_tokens += 1
            log.warning("late_tokens body_bytes=%d", encode.body_bytes)
            count = max(1, round(encode.body_bytes / service.bytes_per_token))
            return Tokens(count, TokenSource.ESTIMATE)

    def _failed(self, error: Exception) -> Step:
        """End the stream because the peer broke the protocol or because of a bug of ours."""
        if isinstance(error, ProtocolError):
            self._service.protocol_errors += 1
            log.warning("protocol_error state=%s error=%s", self._exchange.state, error)
        else:
            self._service.failures += 1
            log.error("stream_failed state=%s", self._exchange.state, exc_info=error)
        return _step(self._exchange.fail())


def _step(effects: list[Effect]) -> Step:
    messages: list[bytes] = []
    for effect in effects:
        if isinstance(effect, Send):
            messages.append(wire.encode(effect.message))
        else:  # always the last effect
            return Step(messages, effect)
    return Step(messages, None)
