"""The CRD at a real API server: what it refuses, with which words, and what it fills in."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from api_server import program
from waiting import HANG

from perilune_api.inference_pool.checks import convert
from perilune_api.kube import MERGE, ApiError, Client

Object = dict[str, Any]
ROOT = Path(__file__).parents[2]
RACK, SPINE, ZONE = ({"name": name, "labels": ["l"]} for name in ("rack", "spine", "zone"))


def pool(name: str = "p", **spec: object) -> Object:
    return {
        "apiVersion": "perilune.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {"model": {"name": "m"}, **spec},
    }


def path(namespace: str, rest: str = "") -> str:
    return f"/apis/perilune.dev/v1alpha1/namespaces/{namespace}/inferencepools{rest}"


async def create(client: Client, namespace: str, body: Object) -> Object:
    return await client.request("POST", path(namespace), body, params={"fieldValidation": "Strict"})


async def test_the_smallest_pool_shows_what_it_will_be(client: Client, namespace: str) -> None:
    made = await create(client, namespace, pool())
    spec = made["spec"]
    assert (spec["replicas"], spec["engine"]["blockSize"], spec["routing"]["policy"]["name"]) == (
        1,
        16,
        "perilune",
    )
    assert convert(spec) == convert({"model": {"name": "m"}})


async def test_a_pool_of_selected_engines_needs_no_model(client: Client, namespace: str) -> None:
    selector = {"labels": {"app": "vllm"}, "port": "http"}
    body = pool(engine={"selector": selector})
    del body["spec"]["model"]
    made = await create(client, namespace, body)
    assert convert(made["spec"]) == convert({"engine": {"selector": selector}})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("spec", "KV transfer between engines", id="spec"),
        pytest.param("spec.routing", "How the gateway chooses the endpoint", id="routing"),
        pytest.param("spec.routing.limits", "Refuses a request with 429", id="limits"),
        pytest.param(
            "spec.routing.policy.name",
            "sticky: the endpoint that served the session first, always.",
            id="every policy",
        ),
        pytest.param("spec.routing.policy.outside", "outside <map[string]Object>", id="free form"),
        pytest.param("spec.topology.placement", "pack: engines go into as few domains", id="list"),
        pytest.param("status.conditions", "RFC 3339", id="status"),
    ],
)
def test_kubectl_explain_reads_like_documentation(api_server: Any, path: str, words: str) -> None:
    """Every field that it lists has a text."""
    kubectl = program("kubectl")
    access = (f"--kubeconfig={api_server.kubeconfig()}", f"--cache-dir={api_server.folder / 'kubectl'}")
    until = time.monotonic() + HANG
    while True:  # the server publishes a new kind's documentation some seconds after the kind
        command = [kubectl, *access, "explain", f"ipool.{path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
        assert time.monotonic() < until, done.stderr
        time.sleep(0.2)
    assert words in " ".join(done.stdout.split())
    assert "no description" not in done.stdout
    fields = re.findall(r"^  (\w+)\t<.*\n(.*)$", done.stdout.partition("FIELDS:")[2], re.M)
    assert fields or "FIELDS:" not in done.stdout  # a field of no fields
    assert not [name for name, text in fields if not text.strip().strip("^")]


BAD: list[Any] = [
    pytest.param({"model": None}, "name the model, as requests do", id="no model"),
    pytest.param({"model": {"name": ""}}, "spec.model.name", id="empty name"),
    pytest.param({"replica": 1}, 'unknown field "spec.replica"', id="typo"),
    pytest.param({"replicas": -1}, "spec.replicas: Invalid value: -1: spec.replicas in body", id="negative"),
    pytest.param({"engine": {"blockSize": "16"}}, "spec.engine.blockSize", id="text for a number"),
    pytest.param({"engine": {"blockSize": 12}}, "multiple of 8", id="block size"),
    pytest.param({"engine": {"kind": "sglang"}}, 'supported values: "vllm", "simulated"', id="enum"),
    pytest.param(
        {"engine": {"tensorParallel": 12}}, "fill whole nodes", id="tensor parallel over a node's half"
    ),
    pytest.param(
        {"engine": {"hashing": {"algorithm": "xxhash"}}}, "seed is needed with xxhash", id="random hashes"
    ),
    pytest.param({"engine": {"selector": {}}}, "selector.labels: Required value", id="no labels"),
    pytest.param(
        {"engine": {"selector": {"labels": {"app": "v"}, "port": "Not A Port"}}},
        "spec.engine.selector.port",
        id="no port",
    ),
    pytest.param({"roles": {"prefill": {}}}, 'unknown field "spec.roles"', id="roles"),
    pytest.param(
        {"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not be above", id="min > max"
    ),
    pytest.param(
        {"prefillScaling": {"minReplicas": 1, "maxReplicas": 2, "signal": "kvUsage"}},
        "endpoints that only prefill follow queueSeconds or ttftAttainment",
        id="a signal that prefill endpoints do not have",
    ),
    pytest.param(
        {"gateway": {"minReplicas": 2}}, "minReplicas and maxReplicas go together", id="half a range"
    ),
    pytest.param(
        {"gateway": {"minReplicas": 3, "maxReplicas": 2}},
        "minReplicas must not be above",
        id="gateways min > max",
    ),
    pytest.param(
        {"rollout": {"maxUnavailable": 0, "maxSurge": "0%"}},
        "nothing could ever be replaced",
        id="stuck rollout",
    ),
    pytest.param({"rollout": {"maxSurge": "many"}}, "spec.rollout.maxSurge", id="no number or percentage"),
    pytest.param(
        {"topology": {"levels": [SPINE, RACK]}}, "levels go from narrow to wide", id="levels out of order"
    ),
    pytest.param(
        {"topology": {"levels": [{"name": "rack", "labels": ["bad key!"]}]}}, "labels[0]", id="no label key"
    ),
    pytest.param({"engine": {"gpuResource": "gpu of mine"}}, "spec.engine.gpuResource", id="no resource"),
    pytest.param(
        {"topology": {"levels": [RACK], "placement": [{"level": "zone", "mode": "spread"}]}},
        "a level that levels do not name",
        id="placed by an unknown level",
    ),
    pytest.param({"gateway": {"logLevel": "loud"}}, "spec.gateway.logLevel", id="log level"),
    pytest.param({"topology": {"levels": [ZONE, ZONE]}}, "a level may be given once", id="level twice"),
    pytest.param(
        {"engine": {"kind": "simulated"}, "mooncake": {"store": {"enabled": True}}},
        "simulated engines have no store",
        id="simulated store",
    ),
    pytest.param(
        {"routing": {"policy": {"name": "fastest"}}},
        'spec.routing.policy.name: Unsupported value: "fastest"',
        id="policy",
    ),
    pytest.param(
        {"routing": {"policy": {"name": "My-Policy", "outside": {"My-Policy": {}}}}},
        "spec.routing.policy.name",
        id="no name of a policy",
    ),
    pytest.param({"mooncake": {"store": {"segmentSize": "80 GB"}}}, "segmentSize", id="quantity"),
    pytest.param(
        {"mooncake": {"store": {"segmentSize": "100m"}}}, "store.segmentSize", id="tenths of a byte"
    ),
    pytest.param({"gateway": {"parent": {"name": "My_Gateway"}}}, "spec.gateway.parent.name", id="no name"),
    pytest.param(
        {"gateway": {"parent": {"name": "g" * 245}}}, "may not be more than 244", id="too long a name"
    ),
    pytest.param(
        {"gateway": {"parent": {"name": "g", "namespace": "a.b"}}},
        "spec.gateway.parent.namespace",
        id="no namespace",
    ),
    pytest.param({"gateway": {"hostnames": ["a.test:80"]}}, "spec.gateway.hostnames[0]", id="no host"),
]


async def test_a_policy_of_a_package_is_kept_as_it_is_written(client: Client, namespace: str) -> None:
    policy = {"name": "mine", "outside": {"mine": {"gainSeconds": 2.5, "more": {"a": [1]}}, "other": {}}}
    made = await create(client, namespace, pool(routing={"policy": policy}))
    assert made["spec"]["routing"]["policy"] == policy


@pytest.mark.parametrize(("spec", "message"), BAD)
async def test_a_bad_spec_is_refused_in_words(
    client: Client, namespace: str, spec: Object, message: str
) -> None:
    with pytest.raises(ApiError) as error:
        await create(client, namespace, pool(**spec))
    assert message in error.value.message
    assert error.value.status in (400, 422)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("1p", id="a digit first: no Service may be called so"),
        pytest.param("my.pool", id="a dot"),
        pytest.param("p" * 46, id="too long for its pods' names"),
    ],
)
async def test_a_name_that_children_could_not_bear_is_refused(
    client: Client, namespace: str, name: str
) -> None:
    with pytest.raises(ApiError, match="a pool's name begins those of its Services"):
        await create(client, namespace, pool(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"model": {"name": "n"}}, "spec.model.name", id="model"),
        pytest.param({"engine": {"blockSize": 32}}, "blockSize cannot change", id="block size"),
        pytest.param({"engine": {"kind": "simulated"}}, "kind of engine cannot change", id="kind"),
        pytest.param(
            {"engine": {"selector": {"labels": {"app": "v"}}}}, "a pool keeps running engines", id="selector"
        ),
    ],
)
async def test_fields_that_cannot_change_are_refused(
    client: Client, namespace: str, change: Object, message: str
) -> None:
    await create(client, namespace, pool())
    with pytest.raises(ApiError) as error:
        await client.request("PATCH", path(namespace, "/p"), {"spec": change}, content_type=MERGE)
    assert message in error.value.message


async def test_scale_and_status_are_apart_from_the_spec(client: Client, namespace: str) -> None:
    made = await create(client, namespace, pool())
    scale = {"spec": {"replicas": 3}}
    await client.request("PATCH", path(namespace, "/p/scale"), scale, content_type=MERGE)
    status = {"status": {"replicas": 1, "ready": "1/3"}, "spec": {"replicas": 9}}
    after = await client.request("PATCH", path(namespace, "/p/status"), status, content_type=MERGE)
    assert (after["spec"]["replicas"], after["status"]["ready"]) == (3, "1/3")
    assert after["metadata"]["generation"] == made["metadata"]["generation"] + 1
