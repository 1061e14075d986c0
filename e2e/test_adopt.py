"""Engines that somebody else runs, in a Deployment made by hand: adopted by one `kubectl apply`, with and
without KV events; scaled, rolled and deleted by their owner under load; left again as they were, under the
load of those who ask the owner's Service.
"""

import json
import time
from functools import partial
from typing import Any

import pytest

from testbed import perilune_image
from testbed.http import Client, eventually, under_load
from testbed.kube import Kube
from testbed.pool import LivePool, is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

NAMESPACE, MODEL = "theirs", "their-30b"
FIRST_S = 60.0
"""Seconds from `kubectl apply` of the pool to the first request that was routed."""


class Theirs:
    """The Deployment and the Service in front of it, as their owner sees them."""

    def __init__(self, kube: Kube) -> None:
        self.kube = kube

    def start(self, events: bool) -> None:
        """Start the engines, or roll them. `events`: whether they publish KV events (unsaid in the pool)."""
        command = [
            *("perilune", "engine", "--listen", "$(POD_IP):8200", "--model", MODEL, "--name", "$(POD)"),
            *(("--events", "tcp://*:5557", "--replay", "tcp://*:5558") if events else ()),
        ]
        env = [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in (("POD", "metadata.name"), ("POD_IP", "status.podIP"))
        ]
        engine = {
            "name": "vllm",
            "image": perilune_image.ENGINE_NAME,
            "imagePullPolicy": "Never",
            "command": command,
            "env": env,
            "ports": [{"name": "api", "containerPort": 8200}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": "api"}, "periodSeconds": 1},
            "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        }
        spec = {
            "replicas": 4,
            "selector": {"matchLabels": {"app": "vllm"}},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 2}},
            "template": {"metadata": {"labels": {"app": "vllm"}}, "spec": {"containers": [engine]}},
        }
        meta = {"name": "vllm", "namespace": NAMESPACE}
        service = {"selector": {"app": "vllm"}, "ports": [{"port": 80, "targetPort": "api"}]}
        self.kube.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec},
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        )
        self.rolled()

    def rolled(self) -> None:
        words = ("rollout", "status", "deployment/vllm", "-n", NAMESPACE, "--timeout=300s")
        self.kube.ctl(*words, timeout_s=310)

    def pods(self) -> list[dict]:
        found = self.kube.get("pod", "-n", NAMESPACE, "-l", "app=vllm")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def addresses(self) -> set[str]:
        return {f"{pod['status']['podIP']}:8200" for pod in self.pods() if is_ready(pod)}

    def client(self) -> Client:
        """Return one that asks his own Service."""
        service = self.kube.get("service", "vllm", "-n", NAMESPACE)
        return Client(f"{service['spec']['clusterIP']}:80", "vllm", MODEL)

    def answers(self) -> None:
        assert self.client().complete().status == 200

    def are(self, count: int) -> None:
        assert len(self.addresses()) == len(self.pods()) == count

    def marks(self) -> dict[str, Any]:
        """Return, by the uid of each pod, what another program could have changed in it."""
        written = ("name", "labels", "annotations", "finalizers", "ownerReferences")
        return {
            pod["metadata"]["uid"]: {
                **{field: pod["metadata"].get(field) for field in written},
                "restarts": [status["restartCount"] for status in pod["status"]["containerStatuses"]],
            }
            for pod in self.pods()
        }


@pytest.fixture(scope="module")
def theirs(kube, edge, operator):
    yield Theirs(kube)
    kube.ctl("delete", "namespace", NAMESPACE, "--timeout=120s", timeout_s=130)


def adopt(pool: LivePool) -> None:
    """One `kubectl apply`, of the whole pool that a user needs to write."""
    pool.kube.apply(
        {
            "apiVersion": "perilune.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": pool.name, "namespace": pool.namespace},
            "spec": {
                "engine": {"selector": {"labels": {"app": "vllm"}, "port": "api"}},
                "gateway": {
                    "parent": {"name": "edge", "namespace": "edge"},
                    "hostnames": [f"{pool.name}.test"],
                },
                "routing": {"decisionHeader": "address"},
            },
        }
    )


@pytest.fixture(
    params=[
        pytest.param(False, id="without-events", marks=pytest.mark.long),
        pytest.param(True, id="with-events"),
    ]
)
def adopted(request, kube, edge, theirs):
    """Return the pool, once a request was routed, and whether its engines publish KV events."""
    theirs.start(events=request.param)
    eventually(theirs.answers)
    pool = LivePool(kube, edge, "adopted", NAMESPACE)
    pool.client = Client(edge, "adopted.test", MODEL)
    began = time.monotonic()
    adopt(pool)
    eventually(pool.answers, timeout_s=FIRST_S)
    assert time.monotonic() - began <= FIRST_S
    yield pool, request.param
    pool.delete()


def test_a_deployment_is_adopted_and_left_again(adopted, theirs):
    pool, events = adopted
    before, their_client = theirs.marks(), theirs.client()
    first = pool.client.complete("once upon a time " * 40, session="s")
    second = pool.client.complete("once upon a time " * 40 + "there was", session="s")
    assert (first.status, second.status) == (200, 200)
    assert first.decided == second.decided == second.served
    assert first.decided in theirs.addresses()

    def told() -> None:
        assert pool.conditions()["Ready"][0] == "True"
        assert pool.get()["status"]["ready"] == "4/4"
        assert pool.conditions()["RoutingExact"][0] == str(events)

    eventually(told, timeout_s=60)
    if not events:
        assert "--kv-events-config" in pool.message("RoutingExact")

    with under_load(pool.client) as load:
        load.goes_on()
        theirs.kube.ctl("scale", "deployment/vllm", "-n", NAMESPACE, "--replicas=2")
        theirs.rolled()
        load.goes_on()
        theirs.kube.ctl("scale", "deployment/vllm", "-n", NAMESPACE, "--replicas=4")
        theirs.rolled()
        load.goes_on()
        theirs.kube.ctl("rollout", "restart", "deployment/vllm", "-n", NAMESPACE)
        theirs.rolled()
        load.goes_on()
        theirs.kube.ctl(
            "delete", "pod", theirs.pods()[0]["metadata"]["name"], "-n", NAMESPACE, "--wait=false"
        )
        theirs.rolled()
        load.goes_on()
        eventually(partial(theirs.are, 4))
        kept = theirs.marks()
    assert load.failures == []
    assert not before.keys() & kept.keys()
    assert "perilune" not in json.dumps(kept)

    def left() -> None:
        assert pool.objects() == []

    with under_load(their_client) as load:
        load.goes_on()
        pool.delete()
        eventually(left, timeout_s=60)
        load.goes_on()
    assert load.failures == []
    assert {sample.served for sample in load.samples} == theirs.addresses()
    assert theirs.marks() == kept
