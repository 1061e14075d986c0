"""What an engine is given when its pool does not say: by the size of the model."""

from typing import Any

import pytest
from plans import LWS, made

from perilune_api.inference_pool.checks import convert
from perilune_operator.observe.facts import Observed
from perilune_operator.render.sizes import weights_bytes

Object = dict[str, Any]
QWEN = "Qwen/Qwen3-Coder-30B-A3B-Instruct"


def engine(spec: Object, kind: str = "Deployment") -> Object:
    observed = Observed(uid="u", generation=1, kinds=frozenset({LWS}))
    (found,) = (
        o
        for o in made(spec, observed).objects or ()
        if (o["kind"], o["metadata"]["name"]) == (kind, "p-engine")
    )
    body: Object = found["spec"]
    return body


def pod(spec: Object) -> Object:
    template: Object = engine(spec)["template"]["spec"]
    return template


def container(spec: Object) -> Object:
    (found,) = pod(spec)["containers"]
    return dict(found)


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        pytest.param({"name": QWEN}, 60, id="two bytes each, active parameters are not all"),
        pytest.param({"name": QWEN + "-FP8"}, 30, id="one byte"),
        pytest.param({"name": "Qwen2.5-72B-Instruct-AWQ"}, 36, id="half a byte, a version before it"),
        pytest.param({"name": "mistralai/Mixtral-8x22B-v0.1"}, 352, id="experts"),
        pytest.param({"name": "Qwen/Qwen3-0.6B"}, 1.2, id="a fraction"),
        pytest.param({"name": "HuggingFaceTB/SmolLM2-135M"}, 0.27, id="millions"),
        pytest.param({"name": "coder", "source": QWEN}, 60, id="the source's name"),
        pytest.param({"name": QWEN, "source": "/models/coder"}, 60, id="a path without one"),
        pytest.param({"name": "deepseek-ai/DeepSeek-V3"}, 60, id="a name that does not tell"),
        pytest.param({"name": "deepseek-ai/DeepSeek-V3", "weightsSize": "685G"}, 685, id="as the pool says"),
    ],
)
def test_the_size_of_the_weights(model: Object, gigabytes: float) -> None:
    assert weights_bytes(convert({"model": model}).model) == gigabytes * 1e9


def test_a_30b_on_one_gpu_is_given_what_it_needs() -> None:
    assert container({"model": {"name": QWEN}})["resources"] == {
        "requests": {"cpu": "3", "memory": "34Gi", "ephemeral-storage": "58Gi"},
        "limits": {"memory": "106Gi", "nvidia.com/gpu": "1"},
    }


def test_each_pod_of_an_endpoint_that_spans_nodes_is_given_its_part() -> None:
    wide = {"tensorParallel": 8, "pipelineParallel": 2}
    model = {"name": "deepseek-ai/DeepSeek-V3", "weightsSize": "685G", "cache": {"claim": "models"}}
    pods = engine({"model": model, "engine": wide}, "LeaderWorkerSet")["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        (runs,) = pods[part]["spec"]["containers"]
        assert runs["resources"]["requests"] == {"cpu": "17", "memory": "194Gi"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(
            {"requests": {"memory": "8Gi"}},
            {"requests": {"cpu": "3", "ephemeral-storage": "58Gi", "memory": "8Gi"}, "limits": {}},
            id="memory: request and limit are the pool's",
        ),
        pytest.param(
            {"limits": {"memory": "200Gi"}},
            {
                "requests": {"cpu": "3", "ephemeral-storage": "58Gi"},
                "limits": {"memory": "200Gi"},
            },
            id="a limit alone is also the request",
        ),
        pytest.param(
            {"requests": {"cpu": 8}},
            {
                "requests": {"memory": "34Gi", "ephemeral-storage": "58Gi", "cpu": 8},
                "limits": {"memory": "106Gi"},
            },
            id="cpu alone",
        ),
    ],
)
def test_what_the_pool_says_holds(given: Object, expected: Object) -> None:
    asked = container({"model": {"name": QWEN}, "engine": {"resources": given}})["resources"]
    limits = {name: amount for name, amount in asked.get("limits", {}).items() if "gpu" not in name}
    assert {"requests": asked["requests"], "limits": limits} == expected


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        pytest.param({"model": {"name": QWEN}}, 1800, id="60 GB"),
        pytest.param({"model": {"name": "m", "weightsSize": "685G"}}, 14_300, id="685 GB"),
        pytest.param({"model": {"name": "m", "weightsSize": "8T"}}, 86_400, id="no longer than a day"),
        pytest.param({"model": {"name": QWEN}, "engine": {"startupSeconds": 60}}, 60, id="as the pool says"),
        pytest.param({"model": {"name": "m"}, "engine": {"kind": "simulated"}}, 600, id="simulated"),
    ],
)
def test_the_time_that_an_engine_may_take_to_start(spec: Object, seconds: int) -> None:
    body = engine(spec)
    (runs,) = body["template"]["spec"]["containers"]
    probe = runs["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == seconds
    assert body["progressDeadlineSeconds"] > seconds


@pytest.mark.parametrize(("given", "flag"), [({}, "auto"), ({"contextTokens": 32768}, "32768")])
def test_the_longest_request_is_the_models_unless_the_pool_says(given: Object, flag: str) -> None:
    args = container({"model": {"name": QWEN, **given}})["args"]
    assert [arg for arg in args if arg.startswith("--max-model-len")] == [f"--max-model-len={flag}"]


@pytest.mark.parametrize(
    ("spec", "shared"),
    [
        pytest.param({}, False, id="one process"),
        pytest.param({"engine": {"tensorParallel": 2}}, True, id="two processes"),
        pytest.param({"mooncake": {"transfer": "offload"}}, True, id="blocks offloaded by one process"),
    ],
)
def test_shared_memory_for_whoever_needs_it(spec: Object, shared: bool) -> None:
    made = pod({"model": {"name": "m"}, **spec})
    assert ("shm" in [volume["name"] for volume in made["volumes"]]) is shared
    mounts = [mount["mountPath"] for mount in made["containers"][0]["volumeMounts"]]
    assert ("/dev/shm" in mounts) is shared


@pytest.mark.parametrize(("given", "number"), [({}, "1"), ({"rdmaDevices": 4}, "4")])
def test_rdma_devices_are_counted_apart_from_gpus(given: Object, number: str) -> None:
    spec = {"tensorParallel": 8, "rdmaResource": "rdma/hca", **given}
    limits = container({"model": {"name": "m"}, "engine": spec})["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca"]) == ("8", number)


def test_engines_and_the_master_wait_for_a_lost_node_and_gateways_and_their_server_do_not() -> None:
    objects = made(
        {"model": {"name": "m"}, "mooncake": {"store": {"enabled": True}}}, Observed(uid="u", generation=1)
    ).objects
    waits = {
        o["metadata"]["name"]: {
            t["tolerationSeconds"]
            for t in o["spec"]["template"]["spec"]["tolerations"]
            if "tolerationSeconds" in t
        }
        for o in objects or ()
        if o["kind"] == "Deployment"
    }
    assert waits == {"p-engine": {300}, "p-master": {300}, "p-gateway": {10}, "p-state": {10}}
