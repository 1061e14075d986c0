"""Real etcd, API server, controller manager: one for the whole run, a namespace for each test."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import CHART, ApiServer, binaries, grant, started

from perilune_api import kube

Object = dict[str, Any]


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """Shared by the whole run; tests take a namespace each."""
    with started() as server:
        yield server


@pytest.fixture(scope="session")
def scheduled_server() -> Iterator[ApiServer]:
    """One whose pods are bound to nodes, by the real scheduler."""
    with started(scheduler=True) as server:
        yield server


MODULES = "go/mod"
"""Beside the binaries' folder: Go's module cache, which holds other projects' CRDs."""
ENVOY_GATEWAY = "github.com/envoyproxy/gateway@v1.9.1/charts/gateway-helm/charts/crds/crds"
INFERENCE = "sigs.k8s.io/gateway-api-inference-extension@v1.5.0/config/crd/bases"


@pytest.fixture(scope="session")
def routed_server() -> Iterator[ApiServer]:
    """One with the CRDs of Gateway API, Envoy Gateway and the inference extension."""
    modules = binaries().parent / MODULES
    folders = [modules / ENVOY_GATEWAY, modules / ENVOY_GATEWAY / "generated", modules / INFERENCE]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        pytest.skip(f"NO CRDS OF ENVOY GATEWAY OR INFERENCE EXTENSION: {', '.join(missing)}")
    texts = [file.read_text() for folder in folders for file in sorted(folder.glob("*.yaml"))]
    crds = [crd for text in texts for crd in yaml.load_all(text, yaml.CSafeLoader) if crd]
    with started() as server:
        asyncio.run(_install(server, crds))
        yield server


async def _install(server: ApiServer, crds: list[Object]) -> None:
    client = kube.Client(server.access)
    where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    try:
        for crd in crds:
            if crd["kind"] == "CustomResourceDefinition":
                await client.request("POST", where, crd)
        until = time.monotonic() + 60
        for crd in crds:
            if crd["kind"] != "CustomResourceDefinition":
                continue
            while True:
                said = await client.request("GET", f"{where}/{crd['metadata']['name']}")
                conditions = (said.get("status") or {}).get("conditions") or ()
                if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                    break
                assert time.monotonic() < until, said["metadata"]["name"]
                await asyncio.sleep(0.1)
    finally:
        await client.close()


@pytest.fixture
async def routed(routed_server: ApiServer) -> AsyncIterator[tuple[kube.Client, str]]:
    """A client of it and a new namespace."""
    made = kube.Client(routed_server.access)
    yield made, await new_namespace(made)
    await made.close()


@pytest.fixture
def helm() -> Path:
    found = binaries() / "helm"
    if not found.exists():
        pytest.skip(f"NO HELM: not in {found.parent}")
    return found


@pytest.fixture
async def client(api_server: ApiServer) -> AsyncIterator[kube.Client]:
    made = kube.Client(api_server.access)
    yield made
    await made.close()


@pytest.fixture
async def namespace(client: kube.Client) -> str:
    """A new one for this test, in which the operator may have its Lease."""
    return await new_namespace(client)


async def new_namespace(client: kube.Client) -> str:
    name = f"t{time.monotonic_ns()}"
    await client.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    await grant(client, name, "Role", yaml.safe_load((CHART / "files/lease-rules.yaml").read_text()))
    return name
