"""Where engines go: in the scheduler's words, and really: our pod specs, the real scheduler, eight nodes of
eight GPUs.

Two spines of two racks of two nodes, as Node objects; pods are bound and never run. Mooncake's segments lie
in the engines' pods, so where these go, they go.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from waiting import HANG

from perilune_api import kube
from perilune_api.conditions import Condition
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.topology import Placement
from perilune_api.kube import MERGE, ApiError, Client
from perilune_operator import kinds
from perilune_operator.observe import readers
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import Plan, plan
from perilune_operator.render.objects import Defaults
from perilune_operator.render.placement import placement

Object = dict[str, Any]
RACK, SPINE = "topology.kubernetes.io/rack", "topology.kubernetes.io/spine"
PLACES = [(f"n{i}", f"rack-{i // 2}", f"spine-{i // 4}") for i in range(8)]
STORE: Object = {"mooncake": {"store": {"enabled": True, "segmentSize": "1Gi"}}}


KEYS = {"node": "host", "rack": "rack-key"}
LABELS = {"perilune.dev/pool": "p", "perilune.dev/component": "engine", "perilune.dev/role": "both"}
SELECTOR = {
    "matchLabels": {"perilune.dev/pool": "p"},
    "matchExpressions": [
        {"key": "perilune.dev/component", "operator": "In", "values": ["engine", "engine-worker"]}
    ],
}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param((), {}, id="nothing asked"),
        pytest.param((Placement("zone", "pack"),), {}, id="a level that nobody named"),
        pytest.param(
            (Placement("rack", "spread", required=True),),
            {
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "rack-key",
                        "whenUnsatisfiable": "DoNotSchedule",
                        "labelSelector": {"matchLabels": LABELS},
                        "matchLabelKeys": ["pod-template-hash"],
                        "nodeTaintsPolicy": "Honor",
                    }
                ]
            },
            id="spread or wait",
        ),
        pytest.param(
            (Placement("rack", "pack"),),
            {
                "affinity": {
                    "podAffinity": {
                        "preferredDuringSchedulingIgnoredDuringExecution": [
                            {
                                "weight": 100,
                                "podAffinityTerm": {"topologyKey": "rack-key", "labelSelector": SELECTOR},
                            }
                        ]
                    }
                }
            },
            id="pack if possible",
        ),
        pytest.param(
            (Placement("node", "pack", required=True),),
            {
                "affinity": {
                    "podAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"topologyKey": "host", "labelSelector": SELECTOR}
                        ]
                    }
                }
            },
            id="pack or wait",
        ),
    ],
)
def test_placement_in_the_schedulers_words(wanted: tuple[Placement, ...], expected: object) -> None:
    assert placement(wanted, KEYS, LABELS, "pod-template-hash") == expected


def together(level: str, weight: int) -> Object:
    own = {"labelSelector": SELECTOR, "matchLabelKeys": ["leaderworkerset.sigs.k8s.io/group-index"]}
    return {"weight": weight, "podAffinityTerm": {"topologyKey": level, **own}}


def test_the_pods_of_one_endpoint_prefer_one_rack_and_then_one_spine() -> None:
    keys = {**KEYS, "spine": "spine-key"}
    preferred = [together("rack-key", 100), together("spine-key", 50)]
    only = {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}
    for part in ("leader", "worker"):
        assert placement((), keys, LABELS, "revision", part) == only


def test_leaders_are_spread_and_their_workers_follow_them() -> None:
    wanted = (Placement("rack", "together", required=True), Placement("rack", "spread"))
    own = together("rack-key", 0)["podAffinityTerm"]
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [own]}}
    leader = placement(wanted, KEYS, LABELS, "revision", "leader")
    assert leader["affinity"] == affinity
    assert [c["topologyKey"] for c in leader["topologySpreadConstraints"]] == ["rack-key"]
    assert placement(wanted, KEYS, LABELS, "revision", "worker") == {"affinity": affinity}


def test_an_endpoint_of_one_pod_has_nothing_to_keep_together() -> None:
    assert placement((Placement("rack", "together", required=True),), KEYS, LABELS, "revision") == {}


def node(name: str, labels: Object, gpus: int = 8) -> Object:
    room = {
        "cpu": "64",
        "memory": "512Gi",
        "ephemeral-storage": "1Ti",
        "pods": "110",
        "nvidia.com/gpu": str(gpus),
    }
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "status": {"capacity": room, "allocatable": room, "conditions": [ready]},
    }


class Racks:
    """Nodes of one test, and what is bound to them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.namespace = f"t{time.monotonic_ns()}"
        self.nodes: list[Object] = []
        self._to_delete: list[str] = []

    async def begin(self, *nodes: Object) -> None:
        await self.client.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        for each in nodes:
            name = each["metadata"]["name"]
            await self.client.request("POST", "/api/v1/nodes", {"metadata": each["metadata"]})
            self._to_delete.append(f"/api/v1/nodes/{name}")
            where, status = f"/api/v1/nodes/{name}", {"status": each["status"]}
            await self.client.request("PATCH", f"{where}/status", status, content_type=MERGE)
            await self.client.request("PATCH", where, {"spec": {"taints": None}}, content_type=MERGE)
        self.nodes = list(nodes)

    async def end(self) -> None:
        """Leave nothing on these nodes, because the next test's nodes have the same names."""
        here, now = (
            f"namespaces/{self.namespace}",
            {"gracePeriodSeconds": 0, "propagationPolicy": "Background"},
        )
        for kind in ("deployments", "replicasets"):
            await self.client.request("DELETE", f"/apis/apps/v1/{here}/{kind}", now)
        until = time.monotonic() + HANG
        while await self.pods() and time.monotonic() < until:
            await self.client.request("DELETE", f"/api/v1/{here}/pods", now)
            await asyncio.sleep(0.1)
        for where in self._to_delete:
            await self.client.request("DELETE", where)

    def plan(self, gpus: int, wanted: list[Object], **spec: object) -> Plan:
        engine = {"tensorParallel": gpus}
        body: Object = {
            "model": {"name": "m"},
            "engine": engine,
            "topology": {"placement": wanted},
            **spec,
        }
        seen = Observed(uid="uid-1", generation=1, nodes=tuple(readers.node(n) for n in self.nodes))
        return plan("p", self.namespace, convert(body), seen, 1.0, Defaults())

    async def place(self, made: Plan) -> None:
        """Make the plan's engines, with nothing but what concerns the scheduler."""
        for obj in made.objects or ():
            if obj["kind"] == "Deployment" and "gateway" not in obj["metadata"]["name"]:
                meta = {k: v for k, v in obj["metadata"].items() if k != "ownerReferences"}
                path = kinds.path(obj).rpartition("/")[0]
                await self.client.request("POST", path, {**obj, "metadata": meta})

    async def pods(self) -> list[Object]:
        where = f"/api/v1/namespaces/{self.namespace}/pods"
        selector = {"labelSelector": "perilune.dev/component=engine"}
        try:
            items: list[Object] = (await self.client.request("GET", where, params=selector))["items"]
        except ApiError:
            return []
        return items

    async def bound(self, number: int, pending: int = 0) -> list[str]:
        """Nodes of the engines, once `number` are bound and the scheduler has given up on `pending`."""
        until = time.monotonic() + HANG
        while True:
            pods = await self.pods()
            nodes = [p["spec"]["nodeName"] for p in pods if p["spec"].get("nodeName")]
            refused = [p for p in pods if _is_refused(p)]
            if (len(nodes), len(refused)) == (number, pending):
                return nodes
            assert time.monotonic() < until, [p.get("status") for p in pods if not p["spec"].get("nodeName")]
            await asyncio.sleep(0.1)


def _is_refused(pod: Object) -> bool:
    said = pod["status"].get("conditions") or ()
    return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in said)


def racks(nodes: list[str]) -> list[int]:
    """Engines per rack that has any, most first."""
    return sorted(Counter(int(name[1:]) // 2 for name in nodes).values(), reverse=True)


def spines(nodes: list[str]) -> list[int]:
    return sorted(Counter(int(name[1:]) // 4 for name in nodes).values(), reverse=True)


@pytest.fixture
async def cluster(scheduled_server: Any) -> AsyncIterator[Racks]:
    client = kube.Client(scheduled_server.access)
    made = Racks(client)
    yield made
    await made.end()
    await client.close()


LABELLED = [node(name, {RACK: rack, SPINE: spine}) for name, rack, spine in PLACES]


def by(level: str, mode: str, *, required: bool = False) -> Object:
    return {"level": level, "mode": mode, "required": required}


@pytest.mark.parametrize(
    ("gpus", "replicas", "placement", "per_rack", "pending"),
    [
        pytest.param(4, 4, [by("rack", "pack")], [4], 0, id="four fill one rack"),
        pytest.param(
            4,
            6,
            [by("rack", "pack")],
            [4, 2],
            0,
            id="who does not fit goes elsewhere",
            marks=pytest.mark.heavy,
        ),
        pytest.param(4, 6, [by("rack", "pack", required=True)], [4], 2, id="or waits"),
        pytest.param(4, 4, [by("rack", "spread")], [1, 1, 1, 1], 0, id="one in each rack"),
        pytest.param(
            4,
            8,
            [by("rack", "spread", required=True)],
            [2, 2, 2, 2],
            0,
            id="two in each rack",
            marks=pytest.mark.heavy,
        ),
        pytest.param(8, 4, [by("node", "spread", required=True), by("rack", "pack")], [2, 2], 0, id="both"),
    ],
)
async def test_engines_go_where_the_plan_says(
    cluster: Racks, gpus: int, replicas: int, placement: list[Object], per_rack: list[int], pending: int
) -> None:
    await cluster.begin(*LABELLED)
    await cluster.place(cluster.plan(gpus, placement, replicas=replicas))
    assert racks(await cluster.bound(replicas - pending, pending)) == per_rack


async def test_packed_under_one_spine_and_spread_over_its_racks(cluster: Racks) -> None:
    await cluster.begin(*LABELLED)
    placement = [by("spine", "pack", required=True), by("rack", "spread")]
    await cluster.place(cluster.plan(2, placement, replicas=4))
    nodes = await cluster.bound(4)
    assert (spines(nodes), racks(nodes)) == ([4], [2, 2])


async def test_engines_pack_together_and_their_segments_with_them(cluster: Racks) -> None:
    await cluster.begin(*LABELLED)
    await cluster.place(cluster.plan(4, [by("rack", "pack", required=True)], replicas=4, **STORE))
    assert racks(await cluster.bound(4)) == [4]
    for pod in await cluster.pods():
        (engine,) = pod["spec"]["containers"]
        env = {v["name"]: v for v in engine["env"]}
        assert env["MOONCAKE_HOST_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


async def test_racks_that_take_no_engine_do_not_count(cluster: Racks) -> None:
    """A cordoned node's rack is no place to spread to: else the others could never have two."""
    await cluster.begin(*LABELLED)
    for name in ("n6", "n7"):
        taint = {"spec": {"taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]}}
        await cluster.client.request("PATCH", f"/api/v1/nodes/{name}", taint, content_type=MERGE)
    await cluster.place(cluster.plan(4, [by("rack", "spread", required=True)], replicas=6))
    assert racks(await cluster.bound(6)) == [2, 2, 2]


async def test_nodes_without_labels_work_and_are_named(cluster: Racks) -> None:
    await cluster.begin(*[node(name, {}) for name, _, _ in PLACES[:2]])
    made = cluster.plan(4, [by("rack", "pack"), by("spine", "spread")], replicas=4)
    told = {c.type: (c.status, c.reason, c.message) for c in made.status.conditions}
    assert told[Condition.TOPOLOGY_RESOLVED][:2] == ("False", "UnlabelledNodes")
    assert "n0, n1" in told[Condition.TOPOLOGY_RESOLVED][2]
    await cluster.place(made)
    assert Counter(await cluster.bound(4)) == {"n0": 2, "n1": 2}


def test_pods_of_a_leader_worker_set_spread_by_a_label_that_they_have() -> None:
    """They have no `pod-template-hash`, by which a Deployment's pods tell their templates apart."""
    spread = {"topology": {"placement": [{"level": "rack", "mode": "spread"}]}}
    group = "leaderworkerset.sigs.k8s.io"
    for engine, kind, labels in (
        ({}, "Deployment", {"pod-template-hash"}),
        (
            {"tensorParallel": 8, "pipelineParallel": 2},
            "LeaderWorkerSet",
            {f"{group}/template-revision-hash", f"{group}/group-index"},
        ),
    ):
        spec = convert({"model": {"name": "m"}, "engine": engine, **spread})
        observed = Observed(
            uid="u", generation=1, kinds=frozenset({"leaderworkerset.x-k8s.io/LeaderWorkerSet"})
        )
        objects = plan("p", "ns", spec, observed, 0.0, Defaults()).objects or ()
        (workload,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, "p-engine")]
        keys = re.findall(r"'matchLabelKeys': \['([^']+)'\]", str(workload))
        assert set(keys) == labels
