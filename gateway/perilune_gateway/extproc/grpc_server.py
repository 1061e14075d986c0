"""The gRPC server: Envoy's one method and gRPC health, by grpc.aio.

Messages of a stream are handled in order. While its tokens are awaited, a stream reads nothing, but learns at
once when Envoy has gone.

Choices: messages are handled as bytes with the read/write API, which costs a third less than generated
servicers; uvloop, where main installs it, saves another tenth. Pings from Envoy are welcome at any rate (the
default policy would drop the connection). A taken port is an error: SO_REUSEPORT would not spread the load,
because Envoy keeps one connection per worker.

Stopping: gRPC refuses the calls that wait when it shuts down. A call that arrives at that very moment may be
queued just after that and neither served nor refused; Envoy's request then waits for its message timeout.
gRPC looks at that queue again whenever a connection closes, so the server opens a few connections to itself
and closes them (`BYSTANDERS_S`). Envoy sends what is refused to another gateway if its retry policy has
`cancelled` (perilune_lab.envoy). A server that asks for client certificates cannot connect to itself and
stops without this.

Costs about 400 µs CPU per request with headers only, and 600 µs with a 130 KB body; two fifths of it are the
kernel's, since every read and write passes from grpc's thread to ours.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from perilune_api.names import EXT_PROC_SERVICE, HEALTH_SERVICES, LIVENESS
from perilune_gateway.extproc.exchange import Abort, Wait
from perilune_gateway.extproc.service import MESSAGE_BYTES, Service, Step, Stream
from perilune_gateway.extproc.tls import Tls

Context = grpc.aio.ServicerContext[bytes, bytes]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)
BYSTANDERS_S = (0.01, 0.1, 0.4)
"""When our own connections to a server that stops are closed, each so long after the one before."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How an HTTP/2 client begins: the preface and empty SETTINGS (RFC 9113, section 3.4)."""


class GrpcServer:
    """One listening server; see extproc.Server."""

    def __init__(self, service: Service, tls: Tls | None = None) -> None:
        self._service = service
        self._tls = tls
        self._health = health.aio.HealthServicer()
        self._to_oneself = _trusting() if tls else None
        self._server: grpc.aio.Server | None = None
        self._address = ("", 0)

    async def start(self, listen: str) -> int:
        server = grpc.aio.server(options=OPTIONS)
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._process)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": method}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            if self._tls:
                port = server.add_secure_port(listen, self._tls.grpc_credentials())
            else:
                port = server.add_insecure_port(listen)
        except RuntimeError as error:
            await server.stop(None)
            raise OSError(f"cannot listen on {listen}: taken, or not an address of this machine") from error
        await self.set_ready(False)
        await self._health.set(LIVENESS, SERVING)
        await server.start()
        self._server, self._address = server, (_reachable(listen.rpartition(":")[0]), port)
        return port

    async def set_ready(self, ready: bool) -> None:
        for service in HEALTH_SERVICES:
            if service != LIVENESS:
                await self._health.set(service, SERVING if ready else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        if self._server is None:
            return
        reachable = not (self._tls and self._tls.asks_for_client_certificates)
        pauses_s = BYSTANDERS_S if grace_s and reachable else ()
        bystanders = [await _bystander(*self._address, self._to_oneself) for _ in pauses_s]
        stopping = asyncio.create_task(self._server.stop(grace_s))
        for bystander, pause_s in zip(bystanders, pauses_s, strict=True):
            await asyncio.wait((stopping,), timeout=pause_s)
            if bystander is not None:
                bystander.transport.abort()
        await stopping

    async def _process(self, _requests: Any, context: Context) -> None:
        """One stream."""
        stream = self._service.open()
        try:
            while await _take(stream, context):
                pass
        finally:
            stream.closed()


async def _take(stream: Stream, context: Context) -> bool:
    """Handle one message. Returns False at the end of the stream.

    This is a function, so that no body is held while the next message is awaited, which may take as long as
    the answer. The read is shielded: gRPC cancels us when Envoy resets the stream, as it ends every stream,
    and a cancelled read leaks 100 bytes (grpcio 1.85). The end of the call ends the read as well."""
    raw = await asyncio.shield(context.read())
    if not isinstance(raw, bytes):  # grpc.aio.EOF
        return False
    await _carry_out(stream, context, stream.receive(raw))
    return True


async def _carry_out(stream: Stream, context: Context, step: Step) -> None:
    for message in step.messages:
        await context.write(message)
    match step.then:
        case Wait(encode):
            await _carry_out(stream, context, await stream.tokens(encode))
        case Abort(reason):
            await context.abort(grpc.StatusCode.INTERNAL, reason)


def _reachable(host: str) -> str:
    """The address at which a server that listens on `host` reaches itself."""
    return {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))


async def _bystander(host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.StreamWriter | None:
    """Open a connection that asks for nothing. Returns None where that fails."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            writer.write(GREETING)
            await reader.read(1)  # the server's greeting, so it knows of the connection
    except OSError:
        return None
    return writer


def _trusting() -> ssl.SSLContext:
    """A client context without verification, because the server that it reaches is this process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
