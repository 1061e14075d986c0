"""perilune-extension-server: the command line, and the gRPC server that Envoy Gateway calls.

Envoy Gateway calls it whenever it translates routes, and keeps an Envoy's old configuration while no call
succeeds, so a mistake here stops no request.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from perilune_api import envoy_gateway_pb2 as pb
from perilune_api import kube
from perilune_operator.extension_server import hooks, statuses
from perilune_operator.extension_server.recent import Recent

log = logging.getLogger(__name__)

SERVICE = "envoygateway.extension.EnvoyGatewayExtension"
MESSAGE_BYTES = 256 * 1024 * 1024
"""The largest message: one has all listeners, routes and clusters of a Gateway."""
GRACE_S = 5.0
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)
_HOOKS: dict[str, tuple[type[Message], Callable[[Any], Message]]] = {
    "PostRouteModify": (pb.PostRouteModifyRequest, hooks.route),
    "PostClusterModify": (pb.PostClusterModifyRequest, hooks.cluster),
}


class Server:
    """One listening server. `certificate` and `key` are PEM, or empty without TLS."""

    def __init__(self, certificate: bytes = b"", key: bytes = b"") -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
        self._recent = Recent(time.monotonic)
        handlers = {name: _handler(name, *hook) for name, hook in _HOOKS.items()}
        last = "PostTranslateModify"
        handlers[last] = _handler(last, pb.PostTranslateModifyRequest, self._translate)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._tls = grpc.ssl_server_credentials([(key, certificate)]) if certificate else None

    def _translate(self, asked: pb.PostTranslateModifyRequest) -> Message:
        return hooks.translation(asked, self._recent.look(hooks.gateway(asked), hooks.named(asked)))

    async def start(self, listen: str) -> int:
        """Listen, and return the port. Raises OSError if it is taken."""
        try:
            if self._tls:
                port = self._server.add_secure_port(listen, self._tls)
            else:
                port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: taken, or not an address of this machine") from error
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _handler(
    name: str, request: type[Message], hook: Callable[[Any], Message]
) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(asked: Message, _context: object) -> Message:
        try:
            return hook(asked)
        except Exception:
            log.exception("no answer hook=%s", name)
            raise

    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=request.FromString,
        response_serializer=lambda answer: answer.SerializeToString(deterministic=True),
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="perilune-extension-server",
        description="Answer Envoy Gateway's hooks, so that its routes may have InferencePools of the"
        " inference extension (inference.networking.k8s.io) as backends.",
        epilog="example: perilune-extension-server --listen 0.0.0.0:9005",
    )
    add = parser.add_argument
    add("--listen", default="127.0.0.1:9005", metavar="IP:PORT", help="address of gRPC [%(default)s]")
    add("--tls-cert", type=Path, metavar="FILE", help="PEM file of its certificate [no TLS]")
    add("--tls-key", type=Path, metavar="FILE", help="PEM file of the certificate's key")
    add(
        "--write-status",
        action="store_true",
        help="write the status of InferencePools, too, which Envoy Gateway does not; needs the API server",
    )
    add(
        "--controller",
        default=statuses.ENVOY_GATEWAY,
        metavar="NAME",
        help="controllerName of Envoy Gateway's GatewayClasses, for --write-status [%(default)s]",
    )
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="[%(default)s]")
    add("--version", action="version", version=f"perilune {version('perilune')}")
    args = parser.parse_args(argv)
    if (args.tls_cert is None) != (args.tls_key is None):
        parser.error("--tls-cert and --tls-key go together")
    return args


async def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError for a port that is taken and files that are missing."""
    pair = [file.read_bytes() for file in (args.tls_cert, args.tls_key) if file]
    server, stopped = Server(*pair), asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stopped.set)
    client = await kube.connect() if args.write_status else None
    writing = asyncio.create_task(statuses.Statuses(client, args.controller).run()) if client else None
    try:
        log.info("listening port=%d", await server.start(args.listen))
        await stopped.wait()
        await server.stop(GRACE_S)
    finally:
        if client and writing:
            writing.cancel()
            await asyncio.wait((writing,))
            await client.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a clean stop, 1 if it cannot listen, 2 for a wrong call."""
    args = arguments(argv)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        asyncio.run(serve(args))
    except OSError as error:
        print(f"perilune-extension-server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
