"""One ext_proc stream as bytes in, bytes out; both servers use it.

Each message goes through `wire.decode` and `exchange.receive`. The result is a `Reply`: encoded messages to
send, and then, if it says so, to wait (for tokens, for another endpoint, or for the session's turn), or to
abort the call. The server carries it out, and calls `closed` when the stream ends.

Costs about 7 µs per message besides the router's work. Does not depend on sockets or HTTP/2.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from enum import StrEnum

from msgspec import Struct

from perilune_gateway.extproc import wire
from perilune_gateway.extproc.exchange import Abort, Effect, Entrance, Exchange, Hold, Router, Send, Wait
from perilune_gateway.extproc.messages import Body, Kind
from perilune_gateway.extproc.waiting import Waiting
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.tracing import Trace
from perilune_gateway.routing.new_sessions import Queued

log = logging.getLogger(__name__)

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


class Reply(Struct, frozen=True, gc=False):
    """Send `messages`, then carry out `then`; None means to await the next message."""

    messages: list[bytes]
    then: Wait | Hold | Abort | None


class Service:
    """The settings and counters that all streams of a gateway share, whatever their pools."""

    def __init__(
        self,
        entrance: Entrance,
        pools: Iterable[Waiting],
        *,
        conformance: bool = False,
        trace: Callable[[str, str], Trace | None] | None = None,
        authorization: str = "",
    ) -> None:
        """`entrance` chooses a request's pool, `pools` has what their requests wait for. The rest is for
        `Exchange`."""
        self.streams_open = 0
        self.streams_total = 0
        self.body_bytes_received = 0
        """Bytes of request bodies. A request that is decided by its headers adds none."""
        self.protocol_errors = 0
        self.failures = 0
        """Number of exceptions other than ProtocolError, which are bugs of this gateway."""
        self.connections_closed: dict[str, int] = dict.fromkeys(Closed, 0)
        """Number of connections that the h2 server closed, by cause."""
        self.entrance = entrance
        self.conformance = conformance
        self.trace = trace
        self.authorization = authorization
        self._pools: dict[Router, Waiting] = {pool.router: pool for pool in pools}

    def add(self, pool: Waiting) -> None:
        """Take in a further pool."""
        self._pools[pool.router] = pool

    def remove(self, pool: Waiting) -> None:
        """Forget a pool that has no request any more."""
        self._pools.pop(pool.router, None)

    def of(self, router: Router) -> Waiting:
        """Return what the requests of this router's pool wait for."""
        return self._pools[router]

    @property
    def late_tokens(self) -> int:
        """Number of requests routed by an estimate because their tokens came too late."""
        return sum(pool.late_tokens for pool in self._pools.values())

    @property
    def max_body_bytes(self) -> int:
        """The limit while a request's pool is not known."""
        return max(pool.limits.max_body_bytes for pool in self._pools.values())

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
        try:
            pool = self._service.of(self._exchange.router)
            if isinstance(wait, Hold):
                return _reply(self._exchange.attach(await pool.attachment(wait)))
            if isinstance(wait.what, Queued):
                return _reply(self._exchange.begun(await pool.begun(wait.what)))
            tokens = await pool.tokens(wait.what)
            return _reply(self._exchange.tokens(tokens, time.perf_counter() - started))
        except Exception as error:
            return self._failed(error)

    def closed(self) -> None:
        """End the stream and its request. Call it exactly once, however the stream ended."""
        self._service.streams_open -= 1
        self._exchange.closed()

    def _failed(self, error: Exception) -> Reply:
        """End the stream because Envoy violated the protocol or because of a bug of this gateway."""
        if isinstance(error, ProtocolError):
            self._service.protocol_errors += 1
            log.warning("protocol_error state=%s error=%s", self._exchange.state, error)
        else:
            self._service.failures += 1
            log.error("stream_failed state=%s", self._exchange.state, exc_info=error)
        return _reply(self._exchange.fail())


def _reply(effects: list[Effect]) -> Reply:
    messages: list[bytes] = []
    for effect in effects:
        if isinstance(effect, Send):
            messages.append(wire.encode(effect.message))
        else:  # always the last effect
            return Reply(messages, effect)
    return Reply(messages, None)
