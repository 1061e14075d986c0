"""The operator with 50 pools of 20 pods among 5,000 nodes: what rounds, memory and documents cost.

Real etcd, API server, controller manager and scheduler; kwok plays nodes and kubelets. Times depend on the
machine, which all of these share, so they are only printed, with the time of one small write of a bystander.
Asserted is what does not: CPU time per round, memory, the size of documents and statuses, and that nothing is
written while nothing changes. Nodes are as large as real ones: their labels, their images, eight GPUs.
Where the CRDs of Envoy Gateway are in the cache, every pool has its route and policies too.
`make test-heavy ARGS='-k fifty_pools'`, or `python tests/bench/bench_operator.py`; both print what they
measure. NODES: another number of nodes.
"""

import asyncio
import itertools
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, redirect_stdout
from math import inf
from pathlib import Path
from typing import Any

import gateway_crds
import pytest
import yaml
from api_server import CHART, ApiServer, grant, started
from bars import Bar, quantile, table
from operator_process import Operator

from perilune_api.kube import MERGE, Client

Object = dict[str, Any]
POOLS, ENGINES, NODES = 50, 19, int(os.environ.get("NODES", "5000"))
AT_ONCE = 16
"""Requests that make nodes."""
ROUND_CPU_MS, MEMORY_MB, DOCUMENT_KB, STATUS_KB = 300.0, 300.0, 32.0, 16.0
"""What a round may cost with its writes, and the operator with all of it; the largest document of a pool, and
its status. A round takes 198 ms of CPU time while eight other programs want the two cores."""
NAMESPACE = "bench"
WHERE = f"/apis/perilune.dev/v1alpha1/namespaces/{NAMESPACE}/inferencepools"
IDLE_S = 35.0
"""Longer than the operator sleeps between two looks at a pool that nobody touches."""


def bucket_quantile(text: str, name: str, share: float) -> float:
    """Seconds, from a histogram's buckets, linear within one; at most the last edge. `name`: with labels."""
    name, _, labels = name.partition("{")
    found = re.findall(rf'^{name}_bucket{{{labels}le="([^"]+)"}} (\S+)', text, re.M)
    buckets = [(float(edge), float(count)) for edge, count in found] or [(inf, 0.0)]
    wanted, below, edge = share * buckets[-1][1], 0.0, 0.0
    for upper, count in buckets:
        if count >= wanted and upper == inf:
            return edge
        if count >= wanted:
            return edge + (upper - edge) * (wanted - below) / max(1.0, count - below)
        below, edge = count, upper
    return edge


def pool(name: str, routed: bool) -> Object:
    parent = {"parent": {"name": "g"}, "hostnames": [f"{name}.example.com"]} if routed else {}
    return {
        "apiVersion": "perilune.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": name},
            "replicas": ENGINES,
            "engine": {"kind": "simulated", "resources": {"requests": {"cpu": "10m"}}},
            "gateway": {"resources": {"requests": {"cpu": "10m"}}, **parent},
            "rollout": {"sessionSeconds": 0},
        },
    }


def node(i: int) -> Object:
    room = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}
    labels = {f"feature.node.kubernetes.io/cpu-{n}": "true" for n in range(40)}
    labels |= {
        "kubernetes.io/hostname": f"n{i}",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "topology.kubernetes.io/rack": f"r{i // 16}",
        "topology.kubernetes.io/spine": f"s{i // 256}",
    }
    images = [
        {"names": [f"registry.example.com/team/image-{n}@sha256:{n:064x}"], "sizeBytes": 1 << 30}
        for n in range(50)
    ]
    return {
        "metadata": {"name": f"n{i}", "labels": labels},
        "status": {"capacity": room, "allocatable": room, "images": images},
    }


async def until(client: Client, true: Callable[[list[Object]], bool], patience_s: float = 300.0) -> None:
    """Wait until it is true of all pools."""
    end = time.monotonic() + patience_s
    while True:
        items = (await client.request("GET", WHERE))["items"]
        if true(items):
            return
        assert time.monotonic() < end, [p.get("status", {}).get("ready") for p in items]
        await asyncio.sleep(0.5)


def serve(items: list[Object], ready: str) -> bool:
    """Every pool says so, and that nothing is on its way."""
    told = [
        (p["status"].get("ready"), {c["type"]: c["status"] for c in p["status"].get("conditions", ())})
        for p in items
        if "status" in p
    ]
    return len(told) == POOLS and all(r == ready and c.get("Reconciling") == "False" for r, c in told)


@asynccontextmanager
async def cluster(server: ApiServer) -> AsyncIterator[Client]:
    client = Client(server.access)
    try:
        await client.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        rules = yaml.safe_load((CHART / "files/lease-rules.yaml").read_text())
        await grant(client, NAMESPACE, "Role", rules)
        numbers = iter(range(NODES))

        async def make() -> None:
            for i in numbers:
                await client.request("POST", "/api/v1/nodes", node(i))
                await client.request(
                    "PATCH", f"/api/v1/nodes/n{i}", {"spec": {"taints": None}}, content_type=MERGE
                )

        await asyncio.gather(*(make() for _ in range(AT_ONCE)))
        yield client
    finally:
        await client.close()


async def measure(server: ApiServer, routed: bool) -> list[Bar]:
    operator = Operator(server, NAMESPACE)
    try:
        async with cluster(server) as client:
            async with asyncio.timeout(120):
                while await operator.status("/readyz") != 200:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            cpu_s, memory_mb = process(operator.process.pid)
            print(f"\n{NODES:,} nodes: memory {memory_mb:.0f} MB, CPU {cpu_s:.1f} s so far")
            before_s = cpu_s
            began = time.monotonic()
            took_s: list[float] = []
            bystander = asyncio.create_task(write_now_and_then(client, took_s))
            await asyncio.gather(
                *(client.request("POST", WHERE, pool(f"p{i}", routed)) for i in range(POOLS))
            )
            await until(client, lambda items: serve(items, f"{ENGINES}/{ENGINES}"))
            seconds = time.monotonic() - began
            bystander.cancel()
            routes = "with" if routed else "without"
            print(f"{POOLS} pools {routes} routes, {POOLS * (ENGINES + 1)} pods: ready after {seconds:.0f} s")
            await report(operator, "created all at once")
            p50, p99 = (quantile(took_s, share) for share in (0.5, 0.99))
            print(f"  one write of a bystander meanwhile: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms")

            await asyncio.sleep(2.0)  # the last events
            rounds, writes = await rounds_of(operator), await operator.writes()
            await asyncio.sleep(IDLE_S)
            more = await rounds_of(operator) - rounds
            idle_writes = await operator.writes() - writes
            print(f"nothing changes for {IDLE_S:.0f} s: {more:.0f} rounds, {idle_writes:.0f} writes")

            writes = await operator.writes()
            change = {"spec": {"replicas": ENGINES + 1}}
            for i in range(10):
                await client.request("PATCH", f"{WHERE}/p{i}", change, content_type=MERGE)
            wanted = f"{ENGINES + 1}/{ENGINES + 1}"
            await until(client, lambda items: sum(p["status"]["ready"] == wanted for p in items) == 10)
            await asyncio.sleep(2.0)
            made = await operator.writes() - writes
            print(f"10 pools get one more engine: {made:.0f} writes, {made / 10:.1f} each")

            rounds, cpu_s = await rounds_of(operator), process(operator.process.pid)[0]
            for i in range(20):  # nodes without pods of ours, one after the other, as they go and come
                await client.request(
                    "PATCH",
                    f"/api/v1/nodes/n{NODES - 1 - i}",
                    {"spec": {"unschedulable": True}},
                    content_type=MERGE,
                )
                await asyncio.sleep(0.2)
            await asyncio.sleep(3.0)
            more, spent_s = await rounds_of(operator) - rounds, process(operator.process.pid)[0] - cpu_s
            print(f"20 nodes are cordoned: {more:.0f} rounds, CPU {spent_s:.1f} s")
            await report(operator, "in all")
            cpu_s, memory_mb = process(operator.process.pid)
            document, status = await sizes(client)
            return [
                Bar(
                    "CPU per round", (cpu_s - before_s) / await rounds_of(operator) * 1e3, ROUND_CPU_MS, "ms"
                ),
                Bar("the operator's memory", memory_mb, MEMORY_MB, "MB"),
                Bar("largest pool document", document / 1024, DOCUMENT_KB, "KiB"),
                Bar("largest status", status / 1024, STATUS_KB, "KiB"),
                Bar("writes without a change", idle_writes, 0),
            ]
    finally:
        operator.stop()


async def sizes(client: Client) -> tuple[int, int]:
    """Return the bytes of the largest ConfigMap and of the largest status of a pool."""
    maps = (await client.request("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps"))["items"]
    pools = (await client.request("GET", WHERE))["items"]
    return (
        max(sum(map(len, (one.get("data") or {}).values())) for one in maps),
        max(len(json.dumps(one["status"])) for one in pools),
    )


async def write_now_and_then(client: Client, took_s: list[float]) -> None:
    """Write one object at a time, as the operator does."""
    where = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
    await client.request("POST", where, {"metadata": {"name": "bystander"}})
    for number in itertools.count():
        began = time.monotonic()
        await client.request("PATCH", f"{where}/bystander", {"data": {"n": str(number)}}, content_type=MERGE)
        took_s.append(time.monotonic() - began)
        await asyncio.sleep(0.1)


async def rounds_of(operator: Operator) -> float:
    return await operator.metric("perilune_operator_rounds_total")


async def report(operator: Operator, title: str) -> None:
    text = await operator.text()
    rounds, writes = await rounds_of(operator), await operator.writes()
    print(f"{title}: {rounds:.0f} rounds, {writes:.0f} writes ({writes / POOLS:.0f} a pool)")
    for name, words in (
        ("round_seconds", "a round"),
        ('reaction_seconds{changed="true",', "from another spec to the end of the round that carries it out"),
        ('reaction_seconds{changed="false",', "from any other event to the round's end"),
    ):
        p50, p99 = (bucket_quantile(text, f"perilune_operator_{name}", share) for share in (0.5, 0.99))
        print(f"  {words}: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms")
    cpu_s, memory_mb = process(operator.process.pid)
    print(f"  memory {memory_mb:.0f} MB, CPU {cpu_s:.1f} s")


def process(pid: int) -> tuple[float, float]:
    """CPU seconds so far, resident MB."""
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    (rss,) = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK"), int(rss) / 1024


@pytest.mark.api_server
@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.timeout(1_200)
def test_fifty_pools_among_thousands_of_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    routed = not gateway_crds.missing()
    with started(scheduler=True, kwok=True) as server:
        if routed:
            asyncio.run(gateway_crds.install(server))
        with capfd.disabled(), redirect_stdout(sys.stderr):  # what parallel tests show
            bars = asyncio.run(measure(server, routed))
            print(table(bars))
    assert [bar.row() for bar in bars if not bar.met] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-s", "-q"]))
