"""How Envoy reaches the gateway: one gRPC method, served by either of two servers that behave alike.

    bytes ─▶ server ─▶ Stream.receive ─▶ Step: messages, then nothing │ Wait │ Abort ─▶ server ─▶ bytes
             grpc_server, or h2         service: wire, exchange, tokenizer, counters

`h2` is a single-purpose HTTP/2 server: about a sixth of the CPU of gRPC's own with headers only, a quarter
with a 130 KB body (`docs/benchmarks.md`), for a trusted peer, which Envoy is. `grpc_server` is gRPC's own,
which has met more peers than Envoy. Both pass the same tests of abuse, failures and stops under load, so the
default is the one that costs less, `h2`. TLS is `grpc`'s alone (`tls`).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from perilune_api.pool import SpecError
from perilune_gateway.extproc.grpc_server import GrpcServer
from perilune_gateway.extproc.h2.server import H2Server
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import KeyPair


class Server(Protocol):
    """Serves ext_proc and gRPC health on one port."""

    async def start(self, listen: str) -> int:
        """Serve on `listen` (`ip:port`, port 0: any); the port. Alive, but not ready: see `set_ready`.

        Raises OSError when the port is taken or not ours.
        """
        ...

    async def set_ready(self, ready: bool) -> None:
        """What health answers for every service but `liveness`, which is SERVING from `start` to `stop`."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Health says NOT_SERVING, new streams are refused, running ones get `grace_s` to end."""
        ...


class Transport(StrEnum):
    GRPC = "grpc"
    H2 = "h2"


SERVERS: Mapping[Transport, Callable[[Service], Server]] = {
    Transport.GRPC: GrpcServer,
    Transport.H2: H2Server,
}


def new_server(transport: Transport, service: Service, key_pair: KeyPair | None = None) -> Server:
    """Raises SpecError for a key pair with a transport that does no TLS."""
    if key_pair is None:
        return SERVERS[transport](service)
    if transport is not Transport.GRPC:
        raise SpecError(f"{transport} does no TLS: it needs `--transport {Transport.GRPC}` - at `--tls-cert`")
    return GrpcServer(service, key_pair)
