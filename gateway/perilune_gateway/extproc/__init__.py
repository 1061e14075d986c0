"""How Envoy reaches the gateway: one gRPC method, served by either of two servers that behave alike.

    bytes ─▶ server ─▶ Stream.receive ─▶ Step: messages, then nothing │ Wait │ Abort ─▶ server ─▶ bytes
             grpc_server, or h2         service: wire, exchange, tokenizer, counters

`h2` is a single-purpose HTTP/2 server. It costs about a sixth of the CPU of gRPC's own server with headers
only and a quarter with a 130 KB body (`docs/benchmarks.md`), so it is the default. `grpc_server` is gRPC's
own, for peers or places where the other may not serve. Both do TLS (`tls`). Only `new_server` knows the
servers; what they share is in `service`.
"""

from enum import StrEnum
from typing import Protocol

from perilune_gateway.extproc.grpc_server import GrpcServer
from perilune_gateway.extproc.h2.server import H2Server
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import Tls


class Server(Protocol):
    """Serves ext_proc and gRPC health on one port."""

    async def start(self, listen: str) -> int:
        """Serve on `listen` (`ip:port`; port 0 takes any) and return the port. The server is alive then, but
        ready only after `set_ready`.

        Raises OSError when the port is taken or not an address of this machine.
        """
        ...

    async def set_ready(self, ready: bool) -> None:
        """Set what health answers for every service but `liveness`, which is SERVING from `start` to
        `stop`."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Let health answer NOT_SERVING, refuse new streams, and give running ones `grace_s` to end."""
        ...


class Transport(StrEnum):
    GRPC = "grpc"
    H2 = "h2"


def new_server(transport: Transport, service: Service, tls: Tls | None = None) -> Server:
    """Make the server; without `tls` it serves in plain text."""
    match transport:
        case Transport.GRPC:
            return GrpcServer(service, tls)
        case Transport.H2:
            return H2Server(service, tls)
