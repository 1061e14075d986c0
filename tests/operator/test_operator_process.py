"""The operator as a process: next to another one, killed, asleep, asked for its health, stopped."""

import asyncio
import signal
from random import Random
from typing import Any

import pytest
from api_server import ApiServer, new_namespace, until
from operator_process import Operator, program
from pool_objects import becomes, condition, config_maps, deployments, merge, pool, pools

from perilune_api.kube import Client
from perilune_operator.kinds import EVERYWHERE, KINDS, collection

Object = dict[str, Any]


async def test_of_two_operators_one_acts(
    client: Client, namespace: str, operator: Operator, api_server: Any
) -> None:
    """One is stopped past its Lease and resumed: the other acts, and it does not act again."""
    await until(lambda: operator.metric("perilune_operator_leader"), lambda n: n == 1)
    second = Operator(api_server, namespace, "two")
    try:
        await until(lambda: second.status("/readyz"), lambda s: s == 200)
        await client.request("POST", pools(namespace), pool(replicas=1))
        await becomes(client, deployments(namespace, "/p-engine"))
        assert await second.writes() == 0
        operator.process.send_signal(signal.SIGSTOP)
        scale = {"spec": {"replicas": 4}}
        await merge(client, pools(namespace, "/p/scale"), scale)
        await becomes(client, deployments(namespace, "/p-engine"), lambda d: d["spec"]["replicas"] == 4)
        operator.process.send_signal(signal.SIGCONT)
        await until(lambda: operator.metric("perilune_operator_leader"), lambda n: n == 0)
        written = await operator.writes()
        scale = {"spec": {"replicas": 5}}
        await merge(client, pools(namespace, "/p/scale"), scale)
        await becomes(client, deployments(namespace, "/p-engine"), lambda d: d["spec"]["replicas"] == 5)
        assert await operator.writes() == written
        assert second.stop() == 0, second.log.read_text()
        await until(lambda: operator.metric("perilune_operator_leader"), lambda n: n == 1)
    finally:
        second.stop(signal.SIGKILL)


@pytest.mark.heavy
async def test_an_operator_killed_at_any_point_leaves_work_that_the_next_ends(
    client: Client, namespace: str, api_server: Any
) -> None:
    await client.request("POST", pools(namespace), pool("whole", replicas=2))
    dice = Random(7)
    for i in range(4):
        victim = Operator(api_server, namespace, f"victim-{i}")
        await until(lambda victim=victim: victim.status("/healthz"), lambda s: s == 200)
        await asyncio.sleep(dice.uniform(0.0, 1.0))  # not to synchronise: where it dies is the point
        victim.stop(signal.SIGKILL)
    last = Operator(api_server, namespace, "last")
    try:
        await becomes(client, pools(namespace, "/whole"), lambda p: bool(condition(p, "Ready")))
        listed = await client.request("GET", deployments(namespace))
        assert sorted(d["metadata"]["name"] for d in listed["items"]) == ["whole-engine", "whole-gateway"]
        for where in (
            config_maps(namespace, "/whole-gateway"),
            f"/api/v1/namespaces/{namespace}/services/whole",
        ):
            assert await client.request("GET", where)
    finally:
        last.stop(signal.SIGKILL)


@pytest.mark.heavy
async def test_a_pool_deleted_behind_the_operators_back_stays_deleted(own_server: ApiServer) -> None:
    """It forgets the pool, and a node that went meanwhile. It sleeps while the API server restarts, twice:
    what is deleted in between is too old for its watches to hear of."""
    client = Client(own_server.access)
    namespace = await new_namespace(client)
    for name in ("n1", "n2"):
        await client.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        status = {"status": {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}}
        await merge(client, f"/api/v1/nodes/{name}/status", status)
    operator = Operator(own_server, namespace)

    async def restarted() -> None:
        own_server.restart()
        while True:
            try:
                await becomes(client, pools(namespace))
                return
            except OSError:
                await asyncio.sleep(0.1)

    try:
        for name in "pq":
            await client.request("POST", pools(namespace), pool(name))
        for name in ("/p-engine", "/q-engine"):
            await becomes(client, deployments(namespace, name))
        operator.process.send_signal(signal.SIGSTOP)
        await restarted()
        await client.request("DELETE", pools(namespace, "/p"))
        await client.request("DELETE", "/api/v1/nodes/n2")
        await restarted()
        operator.process.send_signal(signal.SIGCONT)
        await becomes(client, pools(namespace, "/q"), lambda q: q["status"]["fabric"]["nodes"] == 1)
        await until(lambda: operator.metric("perilune_operator_pools"), lambda n: n == 1)
    finally:
        operator.stop(signal.SIGKILL)
        await client.close()


@pytest.mark.parametrize(
    ("end", "propagation"),
    [
        pytest.param(signal.SIGTERM, "Foreground", id="the chart was uninstalled, and the client waits"),
        pytest.param(signal.SIGKILL, "Background", id="the operator has died"),
    ],
)
async def test_a_pool_can_be_deleted_while_no_operator_runs(
    client: Client, namespace: str, operator: Operator, end: signal.Signals, propagation: str
) -> None:
    """Nothing waits for an operator: no finalizer holds anything, and garbage collection takes all."""
    kinds = {kind: collection(KINDS[kind].api, namespace, KINDS[kind].plural) for kind in EVERYWHERE}
    kinds["Secret"] = collection("v1", namespace, "secrets")

    async def there() -> list[tuple[str, Object]]:
        lists = {kind: await client.request("GET", where) for kind, where in kinds.items()}
        return [(kind, item["metadata"]) for kind, listed in lists.items() for item in listed["items"]]

    def names(found: list[tuple[str, Object]]) -> set[tuple[str, str]]:
        return {(kind, meta["name"]) for kind, meta in found}

    before = names(await there())
    large = pool(replicas=2, gateway={"replicas": 2})
    await client.request("POST", pools(namespace), large)
    await becomes(client, pools(namespace, "/p"), lambda p: bool(condition(p, "Ready")))
    await becomes(client, deployments(namespace, "/p-state"))
    made = await there()
    assert {"Secret", "Deployment", "Role", "PodDisruptionBudget"} <= {kind for kind, _ in made}
    assert [(kind, meta["name"]) for kind, meta in made if meta.get("finalizers")] == []
    operator.stop(end)
    params = {"propagationPolicy": propagation}
    await client.request("DELETE", pools(namespace, "/p"), params=params)
    await becomes(client, pools(namespace), lambda listed: listed["items"] == [])
    await until(there, lambda found: names(found) <= before)


async def test_probes_and_a_clean_end(client: Client, namespace: str, api_server: ApiServer) -> None:
    operator = Operator(api_server, namespace, start=program)
    await until(lambda: operator.status("/readyz"), lambda s: s == 200)
    await client.request("POST", pools(namespace), pool())
    await becomes(client, pools(namespace, "/p"), lambda p: bool(condition(p, "Ready")))
    assert await operator.status("/healthz") == 200
    assert operator.stop() == 0, operator.log.read_text()
