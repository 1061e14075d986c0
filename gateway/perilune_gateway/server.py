"""The gRPC server: Envoy's one method around an Exchange, and gRPC health.

Per stream: read a message → `wire.decode` → `exchange.receive` → carry out the effects (send, wait for
tokens, abort) → … → the stream ends → `exchange.closed`. Messages of a stream are handled in order; while its
tokens are awaited a stream reads nothing, but learns at once that Envoy has gone.

Three ends of waiting for tokens: they come; they do not within `limits.decision_seconds`, then the byte
estimate is used; the prompt is at fault, then the client gets a 400.

Choices: messages are handled as bytes with the read/write API, which costs a third less than generated
servicers; uvloop, where main installs it, another tenth. Pings from Envoy are welcome at any rate (the
default policy would drop the connection). A taken port is an error (no SO_REUSEPORT: Envoy keeps one
connection per worker, so it would not spread the load anyway).

Costs about 250 µs CPU per request with headers only, 350 µs with a 130 KB body. No TLS.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from perilune_api.names import EXT_PROC_SERVICE, HEALTH_SERVICES
from perilune_api.pool import Limits
from perilune_gateway import wire
from perilune_gateway.exchange import Abort, Effect, Exchange, Router, Send, Wait
from perilune_gateway.messages import Body, BodyMode, Kind, ProtocolError
from perilune_gateway.model import Encode, Refusal, Tokens, TokenSource
from perilune_gateway.openai import ParsedRequest

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MESSAGE_BYTES = 64 * 1024 * 1024
LIVENESS = "liveness"
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


class Tokenizer(Protocol):
    """tokens.Tokenizer, as far as the server needs it."""

    async def encode(self, request: ParsedRequest) -> Tokens | Refusal: ...


class Hooks(Protocol):
    """metrics.Metrics, as far as the server feeds it."""

    def stream_opened(self) -> None: ...
    def stream_closed(self) -> None: ...
    def body_received(self, size_bytes: int) -> None: ...


class Server:
    """One listening gRPC server around a router.

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
        hooks: Hooks | None = None,
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
        self._router = router
        self._tokenizer = tokenizer
        self._bytes_per_token = bytes_per_token
        self._default_mode = default_mode
        self._conformance = conformance
        self._hooks = hooks
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> int:
        """Serve on `listen` (`ip:port`, port 0: any); the port. Alive, but not ready: see `set_ready`.

        Raises OSError when the port is taken or not ours.
        """
        server = grpc.aio.server(options=OPTIONS)
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._process)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": method}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError as error:
            await server.stop(None)
            raise OSError(f"cannot listen on {listen}: taken, or not an address of this machine") from error
        await self.set_ready(False)
        await self._health.set(LIVENESS, SERVING)
        await server.start()
        self._server = server
        return port

    async def set_ready(self, ready: bool) -> None:
        """What health answers for every service but `liveness`, which is SERVING from `start` to `stop`."""
        for service in HEALTH_SERVICES:
            if service != LIVENESS:
                await self._health.set(service, SERVING if ready else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Health says NOT_SERVING, new streams are refused, running ones get `grace_s` to end."""
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _process(self, _requests: Any, context: Context) -> None:
        """One stream."""
        exchange = Exchange(
            self._router, max_body_bytes=self.limits.max_body_bytes, conformance=self._conformance
        )
        self.streams_total += 1
        self.streams_open += 1
        if self._hooks:
            self._hooks.stream_opened()
        try:
            while await self._step(exchange, context):
                pass
        finally:
            self.streams_open -= 1
            if self._hooks:
                self._hooks.stream_closed()
            exchange.closed()

    async def _step(self, exchange: Exchange, context: Context) -> bool:
        """One message; False at the end of the stream. A function, so that no body is held while the next
        message is awaited, which may take as long as the answer."""
        raw = await context.read()
        if not isinstance(raw, bytes):  # grpc.aio.EOF
            return False
        await self._carry_out(exchange, context, self._receive(exchange, raw))
        return True

    def _receive(self, exchange: Exchange, raw: bytes) -> list[Effect]:
        try:
            inbound = wire.decode(raw, self._default_mode)
            if isinstance(inbound, Body) and inbound.kind is Kind.REQUEST_BODY:
                self.body_bytes_received += len(inbound.chunk)
                if self._hooks:
                    self._hooks.body_received(len(inbound.chunk))
            return exchange.receive(inbound)
        except Exception as error:
            return self._failed(exchange, error)

    async def _carry_out(self, exchange: Exchange, context: Context, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    await context.write(wire.encode(message))
                case Wait(encode):  # always the last one
                    await self._carry_out(exchange, context, await self._tokens(exchange, encode))
                case Abort(reason):
                    await context.abort(grpc.StatusCode.INTERNAL, reason)

    async def _tokens(self, exchange: Exchange, encode: Encode) -> list[Effect]:
        started = time.perf_counter()
        tokens: Tokens | Refusal
        try:
            async with asyncio.timeout(self.limits.decision_seconds):
                tokens = await self._tokenizer.encode(encode.request)
        except TimeoutError:
            self.late_tokens += 1
            log.warning("late_tokens body_bytes=%d", encode.body_bytes)
            count = max(1, round(encode.body_bytes / self._bytes_per_token))
            tokens = Tokens(count, TokenSource.ESTIMATE)
        except Exception as error:
            return self._failed(exchange, error)
        try:
            return exchange.tokens(tokens, time.perf_counter() - started)
        except Exception as error:
            return self._failed(exchange, error)

    def _failed(self, exchange: Exchange, error: Exception) -> list[Effect]:
        """The peer broke its protocol, or we have a bug: either way this stream is over."""
        if isinstance(error, ProtocolError):
            self.protocol_errors += 1
            log.warning("protocol_error state=%s error=%s", exchange.state, error)
        else:
            self.failures += 1
            log.error("stream_failed state=%s", exchange.state, exc_info=error)
        return exchange.fail()
