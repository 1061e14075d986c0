"""What both servers share: an ext_proc stream as bytes in, bytes out.

Per message: `wire.decode` → `exchange.receive` → the effects, encoded: messages to send, then perhaps to
wait for tokens, or to break the call off. The server carries that out and, when the stream ends, calls
`closed`.

Three ends of waiting for tokens: they come; they do not within `limits.decision_seconds`, then the byte
estimate is used; the prompt is at fault, then the client gets a 400.

Costs about 7 µs per message beside the router's work. Knows neither sockets nor HTTP/2.
"""

from __future__ import annotations

import asyncio
import logging
import time
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


class Tokenizer(Protocol):
    """tokens.Tokenizer, as far as streams need it."""

    async def encode(self, request: ParsedRequest) -> Tokens | Refusal: ...


class Step(Struct, frozen=True, gc=False):
    """What to do next: send these, then that; None: await the next message."""

    messages: list[bytes]
    then: Wait | Abort | None


class Service:
    """What a gateway's streams have in common.

    `limits` may be replaced while it runs. The counters are for metrics and tests.
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
        """`bytes_per_token`: of the estimate when tokens come too late. `default_mode`: what an Envoy sends
        that does not say it by itself, see `wire`."""
        self.limits = limits
        self.streams_open = 0
        self.streams_total = 0
        self.body_bytes_received = 0
        """Of request bodies; a request decided on its headers adds nothing."""
        self.protocol_errors = 0
        self.failures = 0
        """Bugs of ours: exceptions while a message was handled."""
        self.late_tokens = 0
        """Requests routed by estimate because their tokens came too late."""
        self.router = router
        self.tokenizer = tokenizer
        self.bytes_per_token = bytes_per_token
        self.default_mode = default_mode
        self.conformance = conformance

    def open(self) -> Stream:
        """A new stream; it has to be closed."""
        self.streams_total += 1
        self.streams_open += 1
        return Stream(self)


class Stream:
    """One call of the method. After a step that waits call `tokens`, and nothing else but `closed`."""

    __slots__ = ("_exchange", "_service")

    def __init__(self, service: Service) -> None:
        self._service = service
        self._exchange = Exchange(
            service.router, max_body_bytes=service.limits.max_body_bytes, conformance=service.conformance
        )

    def receive(self, raw: bytes) -> Step:
        """A message from Envoy. Raises nothing."""
        service = self._service
        try:
            inbound = wire.decode(raw, service.default_mode)
            if isinstance(inbound, Body) and inbound.kind is Kind.REQUEST_BODY:
                service.body_bytes_received += len(inbound.chunk)
            return _step(self._exchange.receive(inbound))
        except Exception as error:
            return self._failed(error)

    async def tokens(self, encode: Encode) -> Step:
        """Get the tokens that a step waits for. Raises nothing but CancelledError."""
        started = time.perf_counter()
        try:
            tokens = await self._encode(encode)
            return _step(self._exchange.tokens(tokens, time.perf_counter() - started))
        except Exception as error:
            return self._failed(error)

    def closed(self) -> None:
        """The stream has ended, however that came."""
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
        """The peer broke its protocol, or we have a bug: either way this stream is over."""
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
        else:  # always the last one
            return Step(messages, effect)
    return Step(messages, None)
