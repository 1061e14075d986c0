"""Serves gRPC health (grpc.health.v1): Check answers once, Watch with every change.

The answers are those of gRPC's own servicer: `liveness` is SERVING from `start` to `stop`, and every other
known service while the gateway is ready. An unknown service is NOT_FOUND to Check and SERVICE_UNKNOWN to
Watch.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from perilune_api.names import HEALTH_SERVICES, LIVENESS
from perilune_gateway.extproc.h2.call import Link
from perilune_gateway.extproc.h2.replies import Status

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The status of each service, and the watches that are notified of changes."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {}
        self._watches: set[HealthWatch] = set()

    def start(self) -> None:
        self._set(dict.fromkeys(HEALTH_SERVICES, NOT_SERVING) | {LIVENESS: SERVING})

    def set_ready(self, ready: bool) -> None:
        self._set(dict.fromkeys(HEALTH_SERVICES, SERVING if ready else NOT_SERVING) | {LIVENESS: SERVING})

    def stop(self) -> None:
        """Answer NOT_SERVING from now on, and end the watches, which would otherwise keep a drain waiting."""
        self._set(dict.fromkeys(HEALTH_SERVICES, NOT_SERVING))
        for watch in list(self._watches):
            watch.finish()

    def status(self, service: str) -> Any:
        """Return the service's status, or None for an unknown service."""
        return self._status.get(service)

    def watch(self, watch: HealthWatch) -> None:
        self._watches.add(watch)

    def forget(self, watch: HealthWatch) -> None:
        self._watches.discard(watch)

    def _set(self, status: dict[str, Any]) -> None:
        self._status = status
        for watch in list(self._watches):
            watch.notify()


class HealthCheck:
    """A call of Check."""

    def __init__(self, health: Health, link: Link, number: int) -> None:
        self._health, self._link, self._number = health, link, number

    def message(self, raw: bytes) -> None:
        service = _service(raw)
        status = None if service is None else self._health.status(service)
        if service is None:
            self._link.finish(self._number, Status.INTERNAL, "not a HealthCheckRequest")
        elif status is None:
            self._link.finish(self._number, Status.NOT_FOUND, "unknown service")
        else:
            self._link.send(self._number, _response(status))
            self._link.finish(self._number)

    def ended(self) -> None:
        self._link.finish(self._number, Status.INTERNAL, "no request")

    def closed(self) -> None:
        pass


class HealthWatch:
    """A call of Watch."""

    def __init__(self, health: Health, link: Link, number: int) -> None:
        self._health, self._link, self._number = health, link, number
        self._service: str | None = None
        self._sent: Any = None

    def message(self, raw: bytes) -> None:
        self._link.handled(self._number, len(raw))
        self._service = _service(raw)
        if self._service is None:
            self._link.finish(self._number, Status.INTERNAL, "not a HealthCheckRequest")
        else:
            self._health.watch(self)
            self.notify()

    def notify(self) -> None:
        """Send the status if it has changed."""
        assert self._service is not None
        status = self._health.status(self._service)
        status = SERVICE_UNKNOWN if status is None else status
        if status != self._sent:
            self._sent = status
            self._link.send(self._number, _response(status))
            self._link.flush()

    def finish(self) -> None:
        self._link.finish(self._number)
        self._link.flush()

    def ended(self) -> None:
        """Do nothing: a watch has one request, and lasts until the peer resets it."""

    def closed(self) -> None:
        self._health.forget(self)


def _service(raw: bytes) -> str | None:
    try:
        return str(health_pb2.HealthCheckRequest.FromString(raw).service)
    except DecodeError:
        return None


def _response(status: Any) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())
