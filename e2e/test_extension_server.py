"""A standard InferencePool on plain Envoy Gateway, by our extension server: its picker is the extension's
own, then ours, then its own again, under load.

Everything is installed as docs/adopt.md says: the chart with `extensionServer.enabled`, Envoy Gateway with
the values that lie beside the chart, and our picker by the chart with `picker.pool`.
"""

import json
import time

import pytest

from testbed import epp, perilune, perilune_image
from testbed.http import Client, eventually, under_load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAMESPACE = "extended"
THEIRS = "inferencepools.inference.networking.k8s.io"
MODEL = "their-30b"
OURS = "qwen-perilune"
KNOWN_S = 35.0
"""Seconds after its installation from which on Envoy knows our picker's name (docs/adopt.md)."""


@pytest.fixture(scope="module")
def pool(kube, edge, inference_pools):
    """Return a client of an InferencePool with three engines and the extension's own picker."""
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    kube.apply(*epp.objects("epp", NAMESPACE, "qwen"), engines(), inference_pool(), route())
    try:
        for name in ("epp", "vllm"):
            words = ("rollout", "status", f"deployment/{name}", "-n", NAMESPACE, "--timeout=120s")
            kube.ctl(*words, timeout_s=130)
        client = Client(edge, "extended.test", MODEL)
        eventually(lambda: decided_by(client, ours=False), timeout_s=60)
        yield client
    finally:
        kube.ctl("delete", "namespace", NAMESPACE, "--timeout=120s", timeout_s=130)


def engines():
    command = ["perilune", "engine", "--listen", "$(POD_IP):8000", "--model", MODEL, "--name", "$(POD)"]
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
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
    }
    template = {"metadata": {"labels": {"app": "vllm"}}, "spec": {"containers": [engine]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm", "namespace": NAMESPACE},
        "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "vllm"}}, "template": template},
    }


def inference_pool():
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen", "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}, "failureMode": "FailClose"},
        },
    }


def route():
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "qwen"}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "qwen", "namespace": NAMESPACE},
        "spec": {
            "parentRefs": [{"name": "edge", "namespace": "edge"}],
            "hostnames": ["extended.test"],
            "rules": [{"backendRefs": [backend]}],
        },
    }


def decided_by(client, *, ours):
    answer = client.complete()
    assert answer.status == 200, answer.body
    assert bool(answer.decided) is ours


def patch(kube, which):
    """One of the patches that the chart wrote."""
    found = kube.get("configmap", OURS, "-n", NAMESPACE)["data"][which]
    kube.ctl("patch", THEIRS, "qwen", "-n", NAMESPACE, "--type=merge", "-p", found)
    return json.loads(found)


def test_the_picker_is_swapped_under_load_and_back(kube, pool):
    repository, tag = perilune_image.NAME.rsplit(":", 1)
    image = f"image.repository={repository},image.tag={tag},image.pullPolicy=Never"
    values = ("--skip-crds", "--set-string", f"picker.pool=qwen,{image}")
    kube.install("picker", perilune.CHART, NAMESPACE, *values)
    time.sleep(KNOWN_S)
    try:
        with under_load(pool) as load:
            load.goes_on()
            steps = {"taken": time.monotonic()}
            patch(kube, "take")
            eventually(lambda: decided_by(pool, ours=True), timeout_s=60)
            steps["ours"] = time.monotonic()
            load.goes_on(60)
            turns = [pool.complete("again " * 400, session="stays") for _ in range(3)]
            steps["given back"] = time.monotonic()
            assert patch(kube, "back")["spec"]["endpointPickerRef"]["name"] == "epp"
            eventually(lambda: decided_by(pool, ours=False), timeout_s=60)
            steps["theirs"] = time.monotonic()
            load.goes_on(60)
        assert load.failures == [], steps
        assert len({turn.served for turn in turns}) == 1
        assert turns[-1].json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    finally:
        kube.helm("uninstall", "picker", "-n", NAMESPACE, "--wait")


def test_an_answer_may_take_longer_than_envoys_own_timeout(pool):
    answer = pool.complete("a long story", stream=True, max_tokens=3500, ignore_eos=True)
    assert answer.status == 200
    assert answer.seconds > 15
    assert answer.body.decode().strip().endswith("data: [DONE]")
