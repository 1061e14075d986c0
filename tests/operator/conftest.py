"""Real etcd, API server, controller manager: one at a time, a namespace for each test.

A start takes 6 s of CPU time, and a server that nobody uses takes a fortieth of a core from what follows.
So the tests that need one run one after the other, on one worker of xdist, and by what they need of it: first
those with a scheduler, which then ends, and last those with more CRDs, which then stay. `Servers` ends the
server when the next test needs none.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Generator
from contextlib import ExitStack
from pathlib import Path

import gateway_crds
import pytest
from api_server import ApiServer, new_namespace, program, started
from operator_process import Operator

from perilune_api import kube

KINDS = {
    "api_server": "plain",
    "routed_server": "routed",
    "scheduled_server": "scheduled",
    "own_server": "scheduled",
}
"""Fixture → the kind of API server that it is."""
ORDER = ("scheduled", "plain", "routed")
"""A running server can become each kind that follows its own."""


def kind_of(item: pytest.Item | None) -> str:
    """Return the kind of API server that a test needs; empty if it needs none."""
    names = getattr(item, "fixturenames", ())
    return next((kind for fixture, kind in KINDS.items() if fixture in names), "")


class Servers:
    """The API server that runs, if one does."""

    def __init__(self) -> None:
        self._kind = ""
        self._server: ApiServer | None = None
        self._running = ExitStack()

    def get(self, kind: str) -> ApiServer:
        if self._server is None or ORDER.index(kind) < ORDER.index(self._kind):
            self.end()
            self._kind = "scheduled" if kind == "scheduled" else "plain"
            with ExitStack() as starting:
                self._server = starting.enter_context(started(scheduler=kind == "scheduled"))
                self._running = starting.pop_all()
        if kind != self._kind:
            self._server.without_scheduler()
            if kind == "routed":
                asyncio.run(gateway_crds.install(self._server))
            self._kind = kind
        return self._server

    def end(self) -> None:
        self._running.close()
        self._kind, self._server = "", None


servers = Servers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a real API server, and put them together by what they need of it."""
    for item in items:
        if kind_of(item):
            item.add_marker("api_server")
            item.add_marker(pytest.mark.xdist_group("api_server"))
        elif "helm" in getattr(item, "fixturenames", ()):
            item.add_marker("api_server")

    def turn(item: pytest.Item) -> tuple[int, bool]:
        kind = kind_of(item)
        return ORDER.index(kind) + 1 if kind else 0, "own_server" in getattr(item, "fixturenames", ())

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if not kind_of(nextitem):
        servers.end()


@pytest.fixture
def api_server() -> ApiServer:
    """For most tests."""
    return servers.get("plain")


@pytest.fixture
def own_server() -> ApiServer:
    """For tests that restart it or change its CRD, and leave it as it was."""
    return servers.get("scheduled")


@pytest.fixture
def scheduled_server() -> ApiServer:
    """One whose pods are bound to nodes, by the real scheduler."""
    return servers.get("scheduled")


@pytest.fixture
def routed_server() -> ApiServer:
    """One with the CRDs of Gateway API, Envoy Gateway and the inference extension."""
    if missing := gateway_crds.missing():
        pytest.skip(f"NO CRDS: {', '.join(missing)} is missing; `make api-server` downloads it")
    return servers.get("routed")


@pytest.fixture
async def routed(routed_server: ApiServer) -> AsyncIterator[tuple[kube.Client, str]]:
    """Yield a client of the API server with routes, and a new namespace."""
    made = kube.Client(routed_server.access)
    yield made, await new_namespace(made)
    await made.close()


@pytest.fixture
def helm() -> Path:
    return program("helm")


@pytest.fixture
async def client(api_server: ApiServer) -> AsyncIterator[kube.Client]:
    made = kube.Client(api_server.access)
    yield made
    await made.close()


@pytest.fixture
async def namespace(client: kube.Client) -> str:
    """Return a new namespace for this test, in which the operator may have its Lease."""
    return await new_namespace(client)


@pytest.fixture
async def operator(api_server: ApiServer, namespace: str) -> AsyncIterator[Operator]:
    """With the rights that the chart gives it and no more."""
    made = Operator(api_server, namespace)
    yield made
    made.stop(signal.SIGKILL)


@pytest.fixture
async def router(routed_server: ApiServer, routed: tuple[kube.Client, str]) -> AsyncIterator[Operator]:
    """Yield an operator of the namespace in `routed`."""
    made = Operator(routed_server, routed[1])
    yield made
    made.stop(signal.SIGKILL)
