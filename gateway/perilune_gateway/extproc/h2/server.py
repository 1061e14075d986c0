"""The HTTP/2 server: sockets around `connection.Connection`, streams around `service.Stream`.

    socket ─▶ Link.data_received ─▶ TlsChannel, if any ─▶ Connection.receive ─▶ events ─▶ a Call per stream
    socket ◀─ Link.flush ◀───────── TlsChannel, if any ◀─ Connection.take ◀──── send, finish ◀──┘

`METHODS` maps each path to its call; other paths are UNIMPLEMENTED. This server answers gRPC health too, so
that both transports are reached, probed and deployed alike.

Answers are written once per read. `limits` bounds what a connection may cost; a connection that is closed for
exceeding a limit is counted by cause (`service.Closed`) and logged with the cause and the peer's address.

A request with headers only costs about 50 µs without the decision, system calls included. On a stream that is
half-closed and reset at once, as Envoy ends every stream, nothing is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import cast

from perilune_api.names import EXT_PROC_SERVICE
from perilune_gateway.extproc.h2 import limits
from perilune_gateway.extproc.h2.call import Call
from perilune_gateway.extproc.h2.connection import Connection
from perilune_gateway.extproc.h2.events import Message, Opened, Reset
from perilune_gateway.extproc.h2.ext_proc import ExtProc
from perilune_gateway.extproc.h2.health import Health, HealthCheck, HealthWatch
from perilune_gateway.extproc.h2.replies import Status
from perilune_gateway.extproc.h2.tls_channel import TlsChannel, TlsError
from perilune_gateway.extproc.service import Closed, Service
from perilune_gateway.extproc.tls import Tls

log = logging.getLogger(__name__)

BACKLOG = 1024
CHECK_S = 1.0
"""Seconds between two checks of the time limits of all connections."""


class H2Server:
    """One listening server; see extproc.Server."""

    def __init__(self, service: Service, tls: Tls | None = None) -> None:
        self.service = service
        self.tls = tls
        self.health = Health()
        self.links: set[Link] = set()
        self.changed = asyncio.Event()
        """Set whenever a link may have become quiet or was closed."""
        self.draining = False
        self._listener: asyncio.Server | None = None
        self._checking: asyncio.TimerHandle | None = None

    async def start(self, listen: str) -> int:
        host, _, port = listen.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: Link(self), host.strip("[]"), int(port), backlog=BACKLOG
            )
        except OSError as error:
            raise OSError(
                f"cannot listen on {listen}: taken, or not an address of this machine;"
                " choose another with --listen"
            ) from error
        self.health.start()
        self._checking = loop.call_later(CHECK_S, self._check_time)
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
        if self._checking is not None:
            self._checking.cancel()

    def closed(self, cause: Closed, peer: object, why: object) -> None:
        """Count and log a connection that this server closed because of a limit or an error."""
        self.service.connections_closed[cause] += 1
        level = logging.INFO if cause is Closed.IDLE else logging.WARNING
        log.log(level, "connection_closed cause=%s peer=%s error=%s", cause, _address(peer), why or "none")

    def _check_time(self) -> None:
        for link in list(self.links):
            link.check_time()
        self._checking = asyncio.get_running_loop().call_later(CHECK_S, self._check_time)

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
        self._tls = TlsChannel(server.tls.context()) if server.tls else None
        self._counted = False
        """Whether the cause of the connection's end was counted."""
        # For calls; `flush` comes after them.
        self.send = connection.send
        self.handled = connection.handled

    @property
    def calls(self) -> int:
        return len(self._calls)

    @property
    def quiet(self) -> bool:
        return self._connection.quiet

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        self.server.links.add(self)
        if self.server.draining:
            self.drain()
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._tls is not None:
            try:
                data = self._tls.receive(data)
            except TlsError as error:
                return self._refuse(error)
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
        for stream in ended:  # those that were not reset in the same read
            if call := self._calls.get(stream):
                call.ended()
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._close_calls()
        self.server.links.discard(self)
        self.server.changed.set()

    # Called by calls.

    def finish(self, stream: int, status: Status = Status.OK, reason: str = "") -> None:
        """End the stream from our side."""
        self._connection.finish(stream, status, reason)
        self._closed(stream)

    def flush(self) -> None:
        """Write what was sent. Call it at the end of every turn of the event loop that sends."""
        transport, connection = self._transport, self._connection
        if transport is None:
            return
        out = connection.take()
        if self._tls is not None:
            out = self._tls.send(out)
        if out:
            transport.write(out)
        if connection.cause is not None and not self._counted:
            self._counted = True
            self.server.closed(connection.cause, transport.get_extra_info("peername"), connection.error)
        if connection.ended:
            if self._tls is not None:
                transport.write(self._tls.close())
            self._leave(transport)
        elif out and transport.get_write_buffer_size() > limits.UNTAKEN_BYTES:
            untaken = f"{transport.get_write_buffer_size()} bytes are not read"
            self.server.closed(Closed.NOT_READING, transport.get_extra_info("peername"), untaken)
            transport.abort()
        if self.server.draining and connection.quiet:
            self.server.changed.set()

    # Called by the server.

    def check_time(self) -> None:
        self._connection.check_time()
        self.flush()

    def drain(self) -> None:
        self._connection.drain()
        self.flush()

    def close(self) -> None:
        """Reset open streams and close the connection."""
        self._connection.close()
        self.flush()

    def _refuse(self, error: TlsError) -> None:
        """End a connection whose TLS has failed."""
        if (transport := self._transport) is not None and self._tls is not None:
            self.server.closed(Closed.TLS_FAILED, transport.get_extra_info("peername"), error)
            transport.write(self._tls.send(b""))
            self._leave(transport)

    def _leave(self, transport: asyncio.Transport) -> None:
        """Close the socket when the peer has read everything, or after CLOSE_S."""
        self._close_calls()
        self._transport = None
        transport.close()
        asyncio.get_running_loop().call_later(limits.CLOSE_S, transport.abort)

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


METHODS: Mapping[str, Callable[[Link, int], Call]] = {
    f"/{EXT_PROC_SERVICE}/Process": lambda link, number: ExtProc(link.server.service.open(), link, number),
    "/grpc.health.v1.Health/Check": lambda link, number: HealthCheck(link.server.health, link, number),
    "/grpc.health.v1.Health/Watch": lambda link, number: HealthWatch(link.server.health, link, number),
}


def _address(peer: object) -> str:
    """Return `host:port` of a socket's address."""
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unknown"
