"""The reconciler's tasks of one pool: one whose deletion no watch has reported, and readings that fail."""

import asyncio
import time
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import pytest
import virtual_time
from prometheus_client import CollectorRegistry
from waiting import until

from perilune_operator.metrics import Metrics
from perilune_operator.observe.gateway_pages import FIRST_READ_S, GatewayPages
from perilune_operator.reconcile import Reconciler
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]


class Leads:
    """The Lease of an operator that always leads."""

    def remaining_s(self) -> float:
        return inf


class Server:
    """Stands for kube.Client: a cluster with nothing but these pools, and no news of them."""

    def __init__(self, *pools: Object) -> None:
        self.pools = pools
        self.writes: list[str] = []

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        if method == "GET":
            items = list(self.pools) if path.endswith("/inferencepools") else []
            return {"items": items, "resources": [], "metadata": {"resourceVersion": "1"}}
        self.writes.append(path)
        return {**body, "metadata": {**body["metadata"], "resourceVersion": "2", "uid": "made"}}

    async def watch(self, *_: Any) -> AsyncIterator[Object]:
        await asyncio.Event().wait()
        yield {}


def pool(uid: str) -> Object:
    meta = {"name": "p", "namespace": "ns", "uid": uid, "resourceVersion": "1", "generation": 1}
    return {"metadata": meta, "spec": {"model": {"name": "m"}, "engine": {"kind": "simulated"}}}


@pytest.mark.parametrize("there", [(), (pool("another"),)], ids=["gone", "made again"])
async def test_a_pool_that_does_not_exist_any_more_is_forgotten_and_nothing_is_written(there: Any) -> None:
    server, registry = Server(*there), CollectorRegistry()
    reconciler = made(server, registry)
    watches = asyncio.create_task(reconciler.cluster.run())
    try:
        reconciler.pool_seen(pool("first"))
        assert registry.get_sample_value("perilune_operator_pools") == 1
        await until(lambda: registry.get_sample_value("perilune_operator_pools") == 0)
        assert server.writes == []
    finally:
        watches.cancel()
        await reconciler.close()


async def test_a_pool_that_exists_is_carried_out() -> None:
    server = Server(pool("first"))
    reconciler = made(server, CollectorRegistry())
    watches = asyncio.create_task(reconciler.cluster.run())
    try:
        reconciler.pool_seen(pool("first"))
        await until(lambda: any("/deployments/" in path for path in server.writes))
    finally:
        watches.cancel()
        await reconciler.close()


def test_the_gateways_are_read_again_after_a_reading_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    readings = 0

    async def read(*_: object, **__: object) -> None:
        nonlocal readings
        readings += 1
        raise RecursionError("a page like no other")

    monkeypatch.setattr(GatewayPages, "read", read)

    async def scenario() -> None:
        reconciler = made(Server(pool("first")), CollectorRegistry())
        reconciler.pool_seen(pool("first"))
        await asyncio.sleep(4 * FIRST_READ_S)
        await reconciler.close()

    virtual_time.run(scenario)
    assert readings >= 4
    assert caplog.text.count("reading gateways failed by a defect pool=ns/p") == readings


def made(server: Any, registry: CollectorRegistry) -> Reconciler:
    fence = Leads()
    return Reconciler(
        server,
        fence,
        Defaults(),
        Metrics(registry, fence.remaining_s),
        namespace="ns",
        pools_at_once=2,
        clock=time.monotonic,
        wall_clock=time.time,
    )
