"""Real etcd, API server, controller manager: one for the whole run, a namespace for each test."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import gateway_crds
import pytest
from api_server import ApiServer, new_namespace, program, started
from operator_process import Operator

from perilune_api import kube

API_SERVERS = {"api_server", "own_server", "scheduled_server", "routed_server", "helm"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that need a real API server."""
    for item in items:
        if API_SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("api_server")


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """Shared by the whole run; tests take a namespace each."""
    with started() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[ApiServer]:
    """One that can be restarted, since nobody else has it."""
    with started() as server:
        yield server


@pytest.fixture(scope="session")
def scheduled_server() -> Iterator[ApiServer]:
    """One whose pods are bound to nodes, by the real scheduler."""
    with started(scheduler=True) as server:
        yield server


@pytest.fixture(scope="session")
def routed_server() -> Iterator[ApiServer]:
    """One with the CRDs of Gateway API, Envoy Gateway and the inference extension."""
    if missing := gateway_crds.missing():
        pytest.skip(f"NO CRDS: {', '.join(missing)} is missing; `make api-server` downloads it")
    with started() as server:
        asyncio.run(gateway_crds.install(server))
        yield server


@pytest.fixture
async def routed(routed_server: ApiServer) -> AsyncIterator[tuple[kube.Client, str]]:
    """A client of it and a new namespace."""
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
    """A new one for this test, in which the operator may have its Lease."""
    return await new_namespace(client)


@pytest.fixture
async def operator(api_server: ApiServer, namespace: str) -> AsyncIterator[Operator]:
    """With the rights that the chart gives it and no more."""
    made = Operator(api_server, namespace)
    yield made
    made.stop(signal.SIGKILL)


@pytest.fixture
async def router(routed_server: ApiServer, routed: tuple[kube.Client, str]) -> AsyncIterator[Operator]:
    """The same, of the namespace in `routed`."""
    made = Operator(routed_server, routed[1])
    yield made
    made.stop(signal.SIGKILL)
