"""The HTTP/2 server: sockets around `connection.Connection`, streams around `service.Stream`.

    socket ─▶ Link.data_received ─▶ Connection.receive ─▶ events ─▶ a Call per stream ─▶ Link.flush ─▶ socket

`METHODS` says which call serves which path; other paths are UNIMPLEMENTED. A call is synchronous: it
answers a message before it returns, or, when tokens have to be awaited, starts a task and keeps what comes
meanwhile; the peer gets no credit for that, and other streams go on.

Health is served here too, and not by a gRPC server on a second port: then both transports are reached,
probed and deployed alike, for 60 lines more.

Answers are written once per read, and what a peer does not take is limited (`UNTAKEN_BYTES`, on top of what
flow control limits): beyond that the connection is cut.

A request with headers only costs about 50 µs with everything but the decision, system calls included.
Trusts its peer with CPU: no rate limits, no timeouts. Half-closed and reset at once, as Envoy ends every
stream, it answers nothing any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from perilune_api.names import EXT_PROC_SERVICE
from perilune_gateway.extproc.exchange import Abort, Wait
from perilune_gateway.extproc.h2.connection import Connection
from perilune_gateway.extproc.h2.events import Message, Opened, Reset
from perilune_gateway.extproc.h2.health import Health, HealthCheck, HealthWatch
from perilune_gateway.extproc.h2.replies import Status
from perilune_gateway.extproc.service import Service, Step
from perilune_gateway.routing.router import Encode

log = logging.getLogger(__name__)

UNTAKEN_BYTES = 256 * 1024 * 1024
CLOSE_S = 1.0
"""How long a peer may take to read our last words."""
BACKLOG = 1024


class Call(Protocol):
    """One stream, from `opened` to `closed`."""

    def message(self, raw: bytes) -> None: ...
    def ended(self) -> None:
        """The peer sends no more."""
        ...

    def closed(self) -> None:
        """Exactly once, whoever ended the stream."""
        ...


class H2Server:
    """One listening server; see transport.Server."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.health = Health()
        self.links: set[Link] = set()
        self.changed = asyncio.Event()
        """Set whenever a link may have become quiet, or is gone."""
        self.draining = False
        self._listener: asyncio.Server | None = None

    async def start(self, listen: str) -> int:
        host, _, port = listen.rpartition(":")
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: Link(self), host.strip("[]"), int(port), backlog=BACKLOG
            )
        except OSError as error:
            raise OSError(f"cannot listen on {listen}: taken, or not an address of this machine") from error
        self.health.start()
        return int(self._listener.sockets[0].getsockname()[1])

    async def set_ready(self, ready: bool) -> None:
        self.health.set_ready(ready)

    async def stop(self, grace_s: float) -> None:
        if self._listener is None:
            return
        self._listener.close()
        self.draining = True
        self.health.stop()
        for link in self.links:
            link.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._until(lambda: all(link.quiet for link in self.links))
        except TimeoutError:
            log.warning("drain_ended streams=%d", sum(link.calls for link in self.links))
        for link in list(self.links):
            link.close()
        await self._until(lambda: not self.links)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class Link(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: H2Server) -> None:
        self.server = server
        self._connection = connection = Connection()
        self._calls: dict[int, Call] = {}
        self._transport: asyncio.Transport | None = None
        # for calls; `flush` comes after them
        self.send = connection.send
        self.handled = connection.handled

    @property
    def calls(self) -> int:
        return len(self._calls)

    @property
    def quiet(self) -> bool:
        return self._connection.quiet

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.server.links.add(self)
        if self.server.draining:
            self.drain()
        self.flush()

    def data_received(self, data: bytes) -> None:
        ended: list[int] = []
        for event in self._connection.receive(data):
            if isinstance(event, Message):
                if call := self._calls.get(event.stream):
                    call.message(event.payload)
            elif isinstance(event, Opened):
                self._open(event.stream, event.path)
            elif isinstance(event, Reset):
                self._closed(event.stream)
            else:
                ended.append(event.stream)
        for stream in ended:  # those that were not reset at once
            if call := self._calls.get(stream):
                call.ended()
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._close_calls()
        self.server.links.discard(self)
        self.server.changed.set()

    # What calls call.

    def finish(self, stream: int, status: Status = Status.OK, message: str = "") -> None:
        """End the stream from our side."""
        self._connection.finish(stream, status, message)
        self._closed(stream)

    def flush(self) -> None:
        """Write what is to be written. Called at the end of every turn of the event loop that sends."""
        transport, connection = self._transport, self._connection
        if transport is None:
            return
        if out := connection.take():
            transport.write(out)
        if connection.ended:
            if connection.error is not None:
                log.warning(
                    "connection_broken code=%s error=%s", connection.error.code.name, connection.error
                )
            self._close_calls()
            self._transport = None
            transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S, transport.abort)
        elif out and transport.get_write_buffer_size() > UNTAKEN_BYTES:
            log.warning("connection_stuck untaken_bytes=%d", transport.get_write_buffer_size())
            transport.abort()
        if self.server.draining and connection.quiet:
            self.server.changed.set()

    # What the server calls.

    def drain(self) -> None:
        self._connection.drain()
        self.flush()

    def close(self) -> None:
        """Reset what still runs, and go."""
        self._connection.close()
        self.flush()

    def _open(self, stream: int, path: str) -> None:
        method = METHODS.get(path)
        if method is None:
            self._connection.finish(stream, Status.UNIMPLEMENTED, f"unknown method {path}")
        else:
            self._calls[stream] = method(self, stream)

    def _closed(self, stream: int) -> None:
        if call := self._calls.pop(stream, None):
            call.closed()

    def _close_calls(self) -> None:
        while self._calls:
            self._closed(next(iter(self._calls)))


class ExtProc:
    """Envoy's method."""

    __slots__ = ("_closed", "_ended", "_inbox", "_link", "_number", "_stream", "_waiting")

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self._stream = link.server.service.open()
        self._waiting: asyncio.Task[None] | None = None
        self._inbox: deque[bytes] | None = None  # what comes while tokens are awaited
        self._ended = False
        self._closed = False

    def message(self, raw: bytes) -> None:
        if self._waiting is None:
            self._carry_out(self._stream.receive(raw))
            self._link.handled(self._number, len(raw))
        elif self._inbox is None:
            self._inbox = deque((raw,))
        else:
            self._inbox.append(raw)

    def ended(self) -> None:
        self._ended = True
        if self._waiting is None:
            self._link.finish(self._number)

    def closed(self) -> None:
        self._closed = True
        if self._waiting is not None:
            self._waiting.cancel()
        self._stream.closed()

    def _carry_out(self, step: Step) -> None:
        for message in step.messages:
            self._link.send(self._number, message)
        match step.then:
            case None:
                pass
            case Wait(encode):
                self._waiting = asyncio.get_running_loop().create_task(self._wait(encode))
            case Abort(reason):
                self._link.finish(self._number, Status.INTERNAL, reason)

    async def _wait(self, encode: Encode) -> None:
        step = await self._stream.tokens(encode)
        self._waiting = None
        self._carry_out(step)
        while self._inbox and self._waiting is None and not self._closed:
            self.message(self._inbox.popleft())
        if self._ended and self._waiting is None and not self._closed:
            self._link.finish(self._number)
        self._link.flush()


METHODS: Mapping[str, Callable[[Link, int], Call]] = {
    f"/{EXT_PROC_SERVICE}/Process": ExtProc,
    "/grpc.health.v1.Health/Check": lambda link, number: HealthCheck(link.server.health, link, number),
    "/grpc.health.v1.Health/Watch": lambda link, number: HealthWatch(link.server.health, link, number),
}
