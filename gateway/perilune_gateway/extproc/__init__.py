"""Serves Envoy's external processing (ext_proc): one gRPC method, by either of two servers that behave alike.

    bytes ─▶ server ─▶ Stream.receive ─▶ Reply: messages, then nothing │ Wait │ Abort ─▶ server ─▶ bytes
             grpc_server, or h2         service: wire, exchange, tokenizer, counters

`h2` is a single-purpose HTTP/2 server. It costs about a sixth of the CPU of gRPC's own server with headers
only and a quarter with a 130 KB body (`docs/benchmarks.md`), so it is the default. `grpc_server` uses gRPC's
own server, where only that is acceptable. Both support TLS (`tls`). `new_server` chooses the server;
`service` has what both share.
"""

from enum import StrEnum
from typing import Protocol

from perilune_gateway.extproc.h2.server import H2Server
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import Tls


class Server(Protocol):
    """Serves ext_proc and gRPC health on one port."""

    async def start(self, listen: str) -> int:
        """Serve on `listen` (`ip:port`; port 0 takes a free one) and return the port. Health then answers
        SERVING for `liveness`, and for the other services after `set_ready`.

        Raises OSError when the port is taken or not an address of this machine.
        """
        ...

    async def set_ready(self, ready: bool) -> None:
        """Set what health answers for every service except `liveness`, which is SERVING from `start` to
        `stop`."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Make health answer NOT_SERVING, refuse new streams, and give open ones `grace_s` to end."""
        ...


class Transport(StrEnum):
    """The server of ext_proc."""

    GRPC = "grpc"
    H2 = "h2"


def new_server(transport: Transport, service: Service, tls: Tls | None = None) -> Server:
    """Return a server of that kind. Without `tls` it serves in plain text."""
    match transport:
        case Transport.GRPC:
            from perilune_gateway.extproc.grpc_server import GrpcServer  # here, since few gateways need gRPC

            return GrpcServer(service, tls)
        case Transport.H2:
            return H2Server(service, tls)
