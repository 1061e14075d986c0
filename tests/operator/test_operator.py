"""The operator's own process against a real API server, with the rights that the chart gives it and no more.

Pods never run, so readiness is written by hand.
"""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from math import nan
from random import Random
from typing import Any

import pytest
import yaml
from api_server import CHART, NARROW, NARROW_TOKEN, PATIENCE_S, ApiServer, grant, new_namespace, until
from operator_process import Operator

from perilune_api.kube import APPLY, MERGE, ApiError, Client
from perilune_api.pool import parse
from perilune_gateway.feeds import drained
from perilune_gateway.feeds.kubernetes import KubernetesPool

Object = dict[str, Any]
NOT_OURS = {"kube-root-ca.crt", "perilune-operator"}
"""What a namespace of these tests has without any pool."""


def pools(namespace: str, rest: str = "") -> str:
    return f"/apis/perilune.dev/v1alpha1/namespaces/{namespace}/inferencepools{rest}"


def deployments(namespace: str, rest: str = "") -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments{rest}"


def config_maps(namespace: str, rest: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps{rest}"


def pool(name: str = "p", **spec: object) -> Object:
    return {
        "apiVersion": "perilune.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {"model": {"name": "m"}, "engine": {"kind": "simulated"}, **spec},
    }


@pytest.fixture
async def operator(api_server: Any, namespace: str) -> AsyncIterator[Operator]:
    made = Operator(api_server, namespace)
    yield made
    made.stop(signal.SIGKILL)


def condition(body: Object, name: str) -> Object:
    found = [c for c in body.get("status", {}).get("conditions", ()) if c["type"] == name]
    return found[0] if found else {}


async def engines(client: Client, namespace: str, *, marked: bool = False) -> list[Object]:
    """Engine pods that are not being deleted; `marked`: those that drain."""
    selector = {"labelSelector": "perilune.dev/component=engine"}
    listed = await client.request("GET", f"/api/v1/namespaces/{namespace}/pods", params=selector)
    here = [p for p in listed["items"] if "deletionTimestamp" not in p["metadata"]]
    return [
        p for p in here if not marked or "perilune.dev/draining" in (p["metadata"].get("annotations") or {})
    ]


async def run_pods(client: Client, namespace: str, number: int, nodes: tuple[str, ...] = ()) -> None:
    """Do a scheduler's and a kubelet's part: bind engines to `nodes`, say of `number` pods that they run."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    listed = await until(lambda: client.request("GET", pods), lambda found: len(found["items"]) == number)
    status = {"phase": "Running", "podIP": "10.1.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    for pod, node in zip(await engines(client, namespace), nodes, strict=False):
        name = pod["metadata"]["name"]
        target = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
        await client.request("POST", f"{pods}/{name}/binding", target)
    for item in listed["items"]:
        where = f"{pods}/{item['metadata']['name']}/status"
        await client.request("PATCH", where, {"status": status}, content_type=MERGE)


async def say_drained(client: Client, namespace: str, engine: Object) -> None:
    """Do the gateway's part: nothing of its own runs there any more."""
    listed = await client.request("GET", f"/api/v1/namespaces/{namespace}/pods")
    (gateway,) = [p["metadata"]["name"] for p in listed["items"] if "-gateway-" in p["metadata"]["name"]]
    mark = engine["metadata"]["annotations"]["perilune.dev/draining"]
    word = {"metadata": {"annotations": {f"drained.perilune.dev/{gateway}": mark}}}
    where = f"/api/v1/namespaces/{namespace}/pods/{engine['metadata']['name']}/status"
    await client.request("PATCH", where, word, content_type=MERGE)


async def test_a_pool_becomes_objects_and_follows_its_spec(
    client: Client, namespace: str, operator: Operator
) -> None:
    made = await client.request("POST", pools(namespace), pool(replicas=2))
    engine = await until(
        lambda: client.request("GET", deployments(namespace, "/p-engine")),
        lambda d: d["spec"]["replicas"] == 2,
    )
    owner = engine["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"]) == (made["metadata"]["uid"], True)
    await until(lambda: client.request("GET", deployments(namespace, "/p-gateway")), bool)
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")), lambda p: bool(condition(p, "Ready"))
    )
    assert condition(body, "Accepted")["status"] == "True"
    assert (condition(body, "EnginesReady")["status"], body["status"]["ready"]) == ("False", "0/2")
    assert condition(body, "RouteProgrammed")["reason"] == "NoRouteApi"

    scale = {"spec": {"replicas": 3}}
    await client.request("PATCH", pools(namespace, "/p/scale"), scale, content_type=MERGE)
    await until(
        lambda: client.request("GET", deployments(namespace, "/p-engine")),
        lambda d: d["spec"]["replicas"] == 3,
    )
    await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: (p["status"]["ready"], p["status"]["observedGeneration"]) == ("0/3", 2),
    )


async def test_a_scale_down_waits_for_the_gateways_word(
    client: Client, namespace: str, operator: Operator
) -> None:
    """Marked, kept, answered by the (here acted) gateway, gone: and the other engine is not touched."""
    await client.request("POST", pools(namespace), pool(replicas=2, rollout={"sessionSeconds": 3600}))
    await run_pods(client, namespace, 3)
    await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: p["status"]["ready"] == "2/2" and condition(p, "GatewayReady")["status"] == "True",
    )
    scale = {"spec": {"replicas": 1}}
    await client.request("PATCH", pools(namespace, "/p/scale"), scale, content_type=MERGE)
    (chosen,) = await until(lambda: engines(client, namespace, marked=True), lambda found: len(found) == 1)
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "Draining")["reason"] == "SessionsLeaving",
    )
    assert chosen["metadata"]["name"] in condition(body, "Draining")["message"]
    assert (body["status"]["ready"], condition(body, "Progressing")["status"]) == ("1/1", "True")
    engine = await client.request("GET", deployments(namespace, "/p-engine"))
    assert engine["spec"]["replicas"] == 2

    await say_drained(client, namespace, chosen)
    left = await until(lambda: engines(client, namespace), lambda found: len(found) == 1)
    assert left[0]["metadata"]["name"] != chosen["metadata"]["name"]
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "Draining")["status"] == condition(p, "Progressing")["status"] == "False",
    )
    assert body["status"]["ready"] == "1/1"


async def test_a_cordoned_nodes_engine_takes_no_new_sessions(
    client: Client, namespace: str, operator: Operator
) -> None:
    node, other = f"node-{namespace}", f"other-{namespace}"
    await client.request("POST", pools(namespace), pool(replicas=2))
    await run_pods(client, namespace, 3, nodes=(node, other))
    await until(
        lambda: client.request("GET", pools(namespace, "/p")), lambda p: p["status"]["ready"] == "2/2"
    )
    body = {"metadata": {"name": node}, "spec": {"unschedulable": True}}
    await client.request("POST", "/api/v1/nodes", body)
    (marked,) = await until(lambda: engines(client, namespace, marked=True), lambda found: len(found) == 1)
    assert marked["spec"]["nodeName"] == node
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "Draining")["reason"] == "NodesLeaving",
    )
    assert condition(body, "Ready")
    free = {"spec": {"unschedulable": False}}
    await client.request("PATCH", f"/api/v1/nodes/{node}", free, content_type=MERGE)
    await until(lambda: engines(client, namespace, marked=True), lambda found: found == [])
    await client.request("DELETE", f"/api/v1/nodes/{node}")


async def test_an_autoscaler_takes_over_without_a_drop(
    client: Client, namespace: str, operator: Operator
) -> None:
    """Of engines and of gateways: the number of now stays until the autoscaler writes another."""
    await client.request("POST", pools(namespace), pool(replicas=4, gateway={"replicas": 3}))
    engine = await until(lambda: client.request("GET", deployments(namespace, "/p-engine")), bool)
    gateway = await until(lambda: client.request("GET", deployments(namespace, "/p-gateway")), bool)
    hpa = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
    change = {
        "replicas": None,  # the API server then says 1
        "scaling": {"minReplicas": 2, "maxReplicas": 8},
        "gateway": {"minReplicas": 2, "maxReplicas": 5},
    }
    await client.request("PATCH", pools(namespace, "/p"), {"spec": change}, content_type=MERGE)
    for name in ("/p-engine", "/p-gateway"):
        await until(lambda name=name: client.request("GET", hpa + name), bool)
    assert (await client.request("GET", pools(namespace, "/p")))["spec"]["replicas"] == 4
    for name, before in (("/p-engine", engine), ("/p-gateway", gateway)):
        now = await client.request("GET", deployments(namespace, name))
        assert now["metadata"]["generation"] == before["metadata"]["generation"]

    five = {"spec": {"replicas": 5}}  # as the autoscaler does
    await client.request("PATCH", deployments(namespace, "/p-gateway/scale"), five, content_type=MERGE)

    def claims(deployment: Object) -> list[bool]:
        fields = deployment["metadata"]["managedFields"]
        ours = [e["fieldsV1"] for e in fields if e["manager"] == "perilune-operator"]
        return ["f:replicas" in fields["f:spec"] for fields in ours]

    await until(
        lambda: client.request("GET", deployments(namespace, "/p-gateway")), lambda d: claims(d) == [False]
    )
    change = {"gateway": {"logLevel": "debug"}}
    await client.request("PATCH", pools(namespace, "/p"), {"spec": change}, content_type=MERGE)
    now = await until(
        lambda: client.request("GET", deployments(namespace, "/p-gateway")),
        lambda d: "--log-level=debug" in str(d["spec"]["template"]),
    )
    assert now["spec"]["replicas"] == 5
    assert claims(now) == [False]


async def test_a_nodes_new_label_reaches_the_gateways_document(
    client: Client, namespace: str, operator: Operator
) -> None:
    name = f"gpu-{namespace}"
    label = "topology.kubernetes.io/rack"
    node = {"metadata": {"name": name, "labels": {label: "r1"}}}
    await client.request("POST", "/api/v1/nodes", node)
    status = {"status": {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}}
    await client.request("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=MERGE)
    await client.request("POST", pools(namespace), pool())

    async def rack() -> str:
        document = await client.request("GET", config_maps(namespace, "/p-gateway"))
        return str(parse(document["data"]["pool.yaml"]).spec.topology.nodes[name].rack)

    try:
        await until(rack, lambda told: told == "r1")
        change = {"metadata": {"labels": {label: "r2"}}}
        await client.request("PATCH", f"/api/v1/nodes/{name}", change, content_type=MERGE)
        await until(rack, lambda told: told == "r2")
    finally:
        await client.request("DELETE", f"/api/v1/nodes/{name}")


async def test_nothing_is_written_when_nothing_changes(
    client: Client, namespace: str, operator: Operator
) -> None:
    await client.request("POST", pools(namespace), pool())
    await until(lambda: client.request("GET", pools(namespace, "/p")), lambda p: bool(condition(p, "Ready")))
    await run_pods(client, namespace, 2)
    await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: (
            condition(p, "GatewayReady").get("status") == "True"
            and condition(p, "EnginesReady").get("status") == "True"
            and condition(p, "Progressing").get("status") == "False"
        ),
    )
    rounds = await operator.metric("perilune_operator_rounds_total")
    writes, before = nan, {}
    for i in range(
        4
    ):  # each wakes the pool, none changes what should be; the first waits for the last events
        if i == 1:
            writes, before = await operator.writes(), await client.request("GET", pools(namespace, "/p"))
        note = {"metadata": {"annotations": {"note": str(i)}}}
        await client.request("PATCH", pools(namespace, "/p"), note, content_type=MERGE)
        rounds = await until(
            lambda: operator.metric("perilune_operator_rounds_total"), lambda n, seen=rounds: n > seen
        )
    assert await operator.writes() == writes
    after = await client.request("GET", pools(namespace, "/p"))
    assert after["status"] == before["status"]


async def test_writes_are_as_many_as_changes(client: Client, namespace: str, operator: Operator) -> None:
    """Of four pools one is scaled: its Deployment is written once, and nothing of the others."""
    for name in "abcd":
        await client.request("POST", pools(namespace), pool(name, replicas=1))
    for name in "abcd":
        await until(
            lambda name=name: client.request("GET", deployments(namespace, f"/{name}-gateway")),
            lambda d: d["status"].get("unavailableReplicas") == 1,
        )
    before = await quiet(operator)
    scale = {"spec": {"replicas": 2}}
    await client.request("PATCH", pools(namespace, "/a/scale"), scale, content_type=MERGE)
    await until(
        lambda: client.request("GET", deployments(namespace, "/a-engine")),
        lambda d: d["status"].get("replicas") == 2,
    )
    after = await quiet(operator)
    made = {kind: number - before.get(kind, 0) for kind, number in after.items()}
    assert {kind for kind, number in made.items() if number} - {"Event"} == {"Deployment", "InferencePool"}
    assert made.get("Event", 0) <= 1, "what changed, told once"
    assert made["Deployment"] == 1
    assert made["InferencePool"] <= 3, "status: wanted number, rollout, its end"


async def quiet(operator: Operator) -> dict[str, float]:
    """Writes by kind, once no pool can be resting between two rounds any more and none was made."""
    end = time.monotonic() + PATIENCE_S
    seen: dict[str, float] = {}
    while True:
        found = re.findall(
            r'^perilune_operator_writes_total{kind="(\w+)",method="\w+"} (\S+)', await operator.text(), re.M
        )
        now: dict[str, float] = {}
        for kind, number in found:
            now[kind] = now.get(kind, 0.0) + float(number)
        if now == seen:
            return now
        assert time.monotonic() < end, now
        seen = now
        await asyncio.sleep(2.5)  # not to synchronise: that nothing happens meanwhile is the point


async def test_what_is_not_ours_is_left_alone(client: Client, namespace: str, operator: Operator) -> None:
    """A user's Service has the name of the pool's: it stays as it is, and the status says so."""
    services = f"/api/v1/namespaces/{namespace}/services"
    mine = {"metadata": {"name": "p"}, "spec": {"selector": {"app": "mine"}, "ports": [{"port": 80}]}}
    before = await client.request("POST", services, mine)
    await client.request("POST", pools(namespace), pool())
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "Progressing").get("reason") == "ApplyFailed",
    )
    assert "Service p is there already" in condition(body, "Progressing")["message"]
    assert await client.request("GET", f"{services}/p") == before
    assert await client.request("GET", deployments(namespace, "/p-engine"))
    await client.request("DELETE", f"{services}/p")
    await until(
        lambda: client.request("GET", f"{services}/p"),
        lambda s: s["spec"]["selector"].get("perilune.dev/pool") == "p",
    )


async def test_rights_in_one_namespace_are_enough_for_its_pools(
    client: Client, namespace: str, api_server: Any
) -> None:
    def rules(name: str) -> list[Object]:
        return list(yaml.safe_load((CHART / f"files/{name}-rules.yaml").read_text()))

    await grant(client, namespace, "Role", rules("operator") + rules("lease"), NARROW)
    await grant(client, "", "ClusterRole", rules("cluster"), NARROW)
    operator = Operator(api_server, namespace, token=NARROW_TOKEN)
    try:
        await client.request("POST", pools(namespace), pool())
        body = await until(
            lambda: client.request("GET", pools(namespace, "/p")), lambda p: bool(condition(p, "Ready"))
        )
        assert condition(body, "Progressing")["reason"] != "ApplyFailed"
        assert await client.request("GET", deployments(namespace, "/p-engine"))
    finally:
        operator.stop(signal.SIGKILL)


async def test_a_gateways_own_rights(
    client: Client, namespace: str, operator: Operator, api_server: Any
) -> None:
    """Its token is enough to see its document and pods and to answer a draining mark; for nothing else."""
    await client.request("POST", pools(namespace), pool(replicas=1))
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/p-gateway/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    issued = await until(lambda: client.request("POST", account, request), bool)
    (engine,) = await until(lambda: engines(client, namespace), lambda found: len(found) == 1)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    name = engine["metadata"]["name"]
    mark = {"metadata": {"annotations": {"perilune.dev/draining": "now"}}}
    await client.request("PATCH", f"{pods}/{name}", mark, content_type=MERGE)
    gateway = Client(api_server.as_user(issued["status"]["token"]))
    try:
        watched = KubernetesPool(gateway, namespace, "p")
        await watched.first()
        assert [p["metadata"]["name"] for p in watched.pods] == [name]
        answering = asyncio.create_task(drained.run(watched, "gw-1", lambda address: True))
        answered = await until(
            lambda: client.request("GET", f"{pods}/{name}"),
            lambda p: "drained.perilune.dev/gw-1" in p["metadata"]["annotations"],
        )
        answering.cancel()
        assert answered["metadata"]["annotations"]["drained.perilune.dev/gw-1"] == "now"
        image = {"spec": {"containers": [{"name": "engine", "image": "evil"}]}}
        for method, where, body in (
            ("PATCH", f"{pods}/{name}", image),
            ("DELETE", f"{pods}/{name}", None),
            ("GET", f"/api/v1/namespaces/{namespace}/secrets", None),
            ("GET", config_maps(namespace), None),
            ("GET", "/api/v1/nodes", None),
        ):
            with pytest.raises(ApiError, match="Forbidden"):
                await gateway.request(method, where, body, content_type=MERGE)
        through_status = await gateway.request("PATCH", f"{pods}/{name}/status", image, content_type=MERGE)
        assert through_status["spec"] == answered["spec"]
    finally:
        await gateway.close()


async def test_another_hand_is_undone(client: Client, namespace: str, operator: Operator) -> None:
    await client.request("POST", pools(namespace), pool())
    await until(lambda: client.request("GET", deployments(namespace, "/p-gateway")), bool)
    image = {"spec": {"template": {"spec": {"containers": [{"name": "gateway", "image": "evil"}]}}}}
    await client.request(
        "PATCH",
        deployments(namespace, "/p-gateway"),
        image,
        content_type="application/strategic-merge-patch+json",
    )
    await until(
        lambda: client.request("GET", deployments(namespace, "/p-gateway")),
        lambda d: "evil" not in str(d["spec"]["template"]["spec"]),
    )
    await client.request("DELETE", config_maps(namespace, "/p-gateway"))
    await until(lambda: client.request("GET", config_maps(namespace, "/p-gateway")), bool)


async def test_what_the_spec_no_longer_asks_for_goes(
    client: Client, namespace: str, operator: Operator
) -> None:
    store = {"engine": {"kind": "vllm"}, "mooncake": {"store": {"enabled": True}}}
    await client.request("POST", pools(namespace), pool(**store))
    await until(lambda: client.request("GET", deployments(namespace, "/p-master")), bool)
    off = {"spec": {"mooncake": {"store": {"enabled": False}}}}
    await client.request("PATCH", pools(namespace, "/p"), off, content_type=MERGE)

    async def left() -> list[str]:
        listed = await client.request("GET", deployments(namespace))
        return [d["metadata"]["name"] for d in listed["items"]]

    await until(left, lambda names: sorted(names) == ["p-engine", "p-gateway"])


async def test_engines_of_other_roles_go_once_each_role_serves_and_their_sessions_have_left(
    client: Client, namespace: str, operator: Operator
) -> None:
    spec = {"replicas": 1, "engine": {"kind": "vllm"}, "rollout": {"sessionSeconds": 3600}}
    await client.request("POST", pools(namespace), pool(**spec))
    await run_pods(client, namespace, 2)
    await until(
        lambda: client.request("GET", pools(namespace, "/p")), lambda p: p["status"]["ready"] == "1/1"
    )
    roles = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    split = {"spec": {"roles": roles, "mooncake": {"transfer": "connector"}}}
    await client.request("PATCH", pools(namespace, "/p"), split, content_type=MERGE)
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")), lambda p: p["status"]["ready"] == "0/2"
    )
    assert "p-engine of the spec before goes once" in condition(body, "Progressing")["message"]

    async def left() -> list[str]:
        listed = await client.request("GET", deployments(namespace))
        return sorted(d["metadata"]["name"] for d in listed["items"])

    await until(left, lambda found: found == ["p-decode", "p-engine", "p-gateway", "p-prefill"])
    (old,) = [p for p in await engines(client, namespace) if "p-engine-" in p["metadata"]["name"]]
    await run_pods(client, namespace, 4)
    (marked,) = await until(lambda: engines(client, namespace, marked=True), lambda found: len(found) == 1)
    assert marked["metadata"]["uid"] == old["metadata"]["uid"]
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "Draining")["reason"] == "SessionsLeaving",
    )
    assert old["metadata"]["name"] in condition(body, "Draining")["message"]
    assert "p-engine" in await left()
    await say_drained(client, namespace, marked)
    assert await until(left, lambda found: "p-engine" not in found) == ["p-decode", "p-gateway", "p-prefill"]


async def test_a_spec_that_only_we_can_refuse_touches_nothing(
    client: Client, namespace: str, operator: Operator
) -> None:
    await client.request("POST", pools(namespace), pool(engine={"kind": "vllm"}))
    engine = await until(lambda: client.request("GET", deployments(namespace, "/p-engine")), bool)
    bad = {"spec": {"engine": {"args": ["--block-size=32"]}, "replicas": 7}}
    await client.request("PATCH", pools(namespace, "/p"), bad, content_type=MERGE)
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "Accepted").get("status") == "False",
    )
    assert "`$.spec.engine.args[0]`" in condition(body, "Accepted")["message"]
    assert condition(body, "Accepted")["observedGeneration"] == 2
    assert condition(body, "EnginesReady")
    now = await client.request("GET", deployments(namespace, "/p-engine"))
    assert now["metadata"]["generation"] == engine["metadata"]["generation"]


async def test_what_the_api_server_refuses_of_a_spec_touches_nothing(
    client: Client, namespace: str, operator: Operator
) -> None:
    """Not even what it would take of it; and the pool goes on once it is mended."""
    await client.request("POST", pools(namespace), pool())
    kept = {}
    for name in ("/p-engine", "/p-gateway"):
        kept[name] = await until(lambda name=name: client.request("GET", deployments(namespace, name)), bool)
    bad = {
        "engine": {"podTemplate": {"spec": {"containers": [{"name": "engine", "image": 5}]}}},
        "gateway": {"logLevel": "debug"},
        "routing": {"policy": "sticky"},
        "replicas": 7,
    }
    await client.request("PATCH", pools(namespace, "/p"), {"spec": bad}, content_type=MERGE)
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "Accepted").get("status") == "False",
    )
    assert condition(body, "Accepted")["message"] == (
        "expected string - at `$.spec.engine.podTemplate.spec.containers[0].image`"
    )
    assert (condition(body, "Accepted")["reason"], body["status"]["observedGeneration"]) == ("Invalid", 2)
    for name, before in kept.items():
        now = await client.request("GET", deployments(namespace, name))
        assert now["metadata"]["generation"] == before["metadata"]["generation"]
    document = await client.request("GET", config_maps(namespace, "/p-gateway"))
    assert "policy: ear" in document["data"]["pool.yaml"]

    good = {"spec": {"engine": {"podTemplate": None}}}
    await client.request("PATCH", pools(namespace, "/p"), good, content_type=MERGE)
    await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "Accepted")["status"] == "True",
    )
    now = await client.request("GET", deployments(namespace, "/p-engine"))
    assert now["spec"]["replicas"] == 7


async def test_a_deleted_pool_leaves_nothing(
    client: Client, namespace: str, operator: Operator, api_server: Any
) -> None:
    await client.request("POST", pools(namespace), pool())
    await until(lambda: client.request("GET", deployments(namespace, "/p-gateway")), bool)
    await client.request("DELETE", pools(namespace, "/p"))
    for where in (
        pools(namespace),
        deployments(namespace),
        config_maps(namespace),
        f"/api/v1/namespaces/{namespace}/services",
        f"/api/v1/namespaces/{namespace}/pods",
        f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
        f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    ):
        await until(
            lambda where=where: client.request("GET", where),
            lambda listed: {i["metadata"]["name"] for i in listed["items"]} <= NOT_OURS,
        )


async def test_a_late_write_of_an_older_plan_is_overwritten(
    client: Client, namespace: str, operator: Operator
) -> None:
    """As an operator would do that was stopped between its check and its write."""
    await client.request("POST", pools(namespace), pool(replicas=2))
    engine = await until(lambda: client.request("GET", deployments(namespace, "/p-engine")), bool)
    await until(lambda: client.request("GET", pools(namespace, "/p")), lambda p: bool(condition(p, "Ready")))
    late = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "p-engine",
            "labels": engine["metadata"]["labels"],
            "ownerReferences": engine["metadata"]["ownerReferences"],
            "annotations": {"perilune.dev/hash": "older"},
        },
        "spec": {**engine["spec"], "replicas": 9},
    }
    await client.request(
        "PATCH",
        deployments(namespace, "/p-engine"),
        late,
        params={"fieldManager": "perilune-operator", "force": "true"},
        content_type=APPLY,
    )
    await until(
        lambda: client.request("GET", deployments(namespace, "/p-engine")),
        lambda d: d["spec"]["replicas"] == 2,
    )


async def test_of_two_operators_one_acts(
    client: Client, namespace: str, operator: Operator, api_server: Any
) -> None:
    """One is stopped past its Lease and resumed: the other acts, and it does not act again."""
    await until(lambda: operator.metric("perilune_operator_leader"), lambda n: n == 1)
    second = Operator(api_server, namespace, "two")
    try:
        await until(lambda: second.status("/readyz"), lambda s: s == 200)
        await client.request("POST", pools(namespace), pool(replicas=1))
        await until(lambda: client.request("GET", deployments(namespace, "/p-engine")), bool)
        assert await second.writes() == 0
        operator.process.send_signal(signal.SIGSTOP)
        scale = {"spec": {"replicas": 4}}
        await client.request("PATCH", pools(namespace, "/p/scale"), scale, content_type=MERGE)
        await until(
            lambda: client.request("GET", deployments(namespace, "/p-engine")),
            lambda d: d["spec"]["replicas"] == 4,
        )
        operator.process.send_signal(signal.SIGCONT)
        await until(lambda: operator.metric("perilune_operator_leader"), lambda n: n == 0)
        written = await operator.writes()
        scale = {"spec": {"replicas": 5}}
        await client.request("PATCH", pools(namespace, "/p/scale"), scale, content_type=MERGE)
        await until(
            lambda: client.request("GET", deployments(namespace, "/p-engine")),
            lambda d: d["spec"]["replicas"] == 5,
        )
        assert await operator.writes() == written
        assert second.stop() == 0, second.log.read_text()
        await until(lambda: operator.metric("perilune_operator_leader"), lambda n: n == 1)
    finally:
        second.stop(signal.SIGKILL)


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
        await until(
            lambda: client.request("GET", pools(namespace, "/whole")),
            lambda p: bool(condition(p, "Ready")),
        )
        listed = await client.request("GET", deployments(namespace))
        assert sorted(d["metadata"]["name"] for d in listed["items"]) == ["whole-engine", "whole-gateway"]
        for where in (
            config_maps(namespace, "/whole-gateway"),
            f"/api/v1/namespaces/{namespace}/services/whole",
        ):
            assert await client.request("GET", where)
    finally:
        last.stop(signal.SIGKILL)


async def test_a_pool_deleted_behind_the_operators_back_stays_deleted(own_server: ApiServer) -> None:
    """It forgets the pool, and a node that went meanwhile. It sleeps while the API server starts anew, twice:
    what is deleted in between is too old for its watches to hear of."""
    client = Client(own_server.access)
    namespace = await new_namespace(client)
    for name in ("n1", "n2"):
        await client.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        status = {"status": {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}}
        await client.request("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=MERGE)
    operator = Operator(own_server, namespace)

    async def restarted() -> None:
        own_server.restart()
        while True:
            try:
                await until(lambda: client.request("GET", pools(namespace)), bool)
                return
            except OSError:
                await asyncio.sleep(0.1)

    try:
        for name in "pq":
            await client.request("POST", pools(namespace), pool(name))
        for name in ("/p-engine", "/q-engine"):
            await until(lambda name=name: client.request("GET", deployments(namespace, name)), bool)
        operator.process.send_signal(signal.SIGSTOP)
        await restarted()
        await client.request("DELETE", pools(namespace, "/p"))
        await client.request("DELETE", "/api/v1/nodes/n2")
        await restarted()
        operator.process.send_signal(signal.SIGCONT)
        await until(
            lambda: client.request("GET", pools(namespace, "/q")),
            lambda q: q["status"]["fabric"]["nodes"] == 1,
        )
        await until(lambda: operator.metric("perilune_operator_pools"), lambda n: n == 1)
    finally:
        operator.stop(signal.SIGKILL)
        await client.close()


async def test_probes_and_a_quick_end(client: Client, namespace: str, operator: Operator) -> None:
    await until(lambda: operator.status("/readyz"), lambda s: s == 200)
    await client.request("POST", pools(namespace), pool())
    await until(lambda: client.request("GET", pools(namespace, "/p")), lambda p: bool(condition(p, "Ready")))
    assert await operator.status("/healthz") == 200
    began = time.monotonic()
    assert operator.stop() == 0, operator.log.read_text()
    assert time.monotonic() - began < 5


ROUTES = "/apis/gateway.networking.k8s.io/v1/namespaces/{}/httproutes"
POLICIES = "/apis/gateway.envoyproxy.io/v1alpha1/namespaces/{}/"
CONTROLLER = "gateway.envoyproxy.io/gatewayclass-controller"


async def accept(client: Client, where: str, holder: str) -> None:
    """Do Envoy Gateway's part: accept a route (holder: parents) or policy (ancestors)."""
    said = {
        "type": "Accepted",
        "status": "True",
        "reason": "Accepted",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    key = "parentRef" if holder == "parents" else "ancestorRef"
    status = {"status": {holder: [{"controllerName": CONTROLLER, key: {"name": "g"}, "conditions": [said]}]}}
    await client.request("PATCH", f"{where}/status", status, content_type=MERGE)


async def accept_routing(client: Client, namespace: str, name: str) -> None:
    """All that it says of one pool."""
    for where, holder in (
        (f"{ROUTES.format(namespace)}/{name}", "parents"),
        (f"{POLICIES.format(namespace)}backendtrafficpolicies/{name}", "ancestors"),
        (f"{POLICIES.format(namespace)}envoyextensionpolicies/{name}", "ancestors"),
    ):
        await until(lambda where=where: client.request("GET", where), bool)
        await accept(client, where, holder)


GATEWAYS = "/apis/gateway.networking.k8s.io/v1/namespaces/{}/gateways"
GATEWAY: Object = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "Gateway",
    "metadata": {"name": "g"},
    "spec": {"gatewayClassName": "c", "listeners": [{"name": "http", "port": 80, "protocol": "HTTP"}]},
}


async def program(client: Client, where: str, status: str) -> None:
    """Say of a Gateway whether it serves."""
    said = {
        "type": "Programmed",
        "status": status,
        "reason": "Programmed" if status == "True" else "AddressNotAssigned",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    body = {"status": {"conditions": [said]}}
    await client.request("PATCH", f"{where}/status", body, content_type=MERGE)


@pytest.fixture
async def router(routed_server: Any, routed: tuple[Client, str]) -> AsyncIterator[Operator]:
    made = Operator(routed_server, routed[1])
    yield made
    made.stop(signal.SIGKILL)


async def test_two_pools_behind_one_envoy_gateway(routed: tuple[Client, str], router: Operator) -> None:
    """All four objects pass Envoy Gateway's own schemas; the one on the Gateway belongs to both pools."""
    client, namespace = routed
    gateway = {"parent": {"name": "g"}}
    await client.request("POST", GATEWAYS.format(namespace), GATEWAY)
    for name in ("p", "q"):  # one after the other: the older route wins
        await client.request("POST", pools(namespace), pool(name, gateway=gateway))
        route = f"{ROUTES.format(namespace)}/{name}"
        await until(lambda route=route: client.request("GET", route), bool)
    shared = POLICIES.format(namespace) + "clienttrafficpolicies/g-perilune"
    await until(lambda: client.request("GET", shared), lambda p: len(p["metadata"]["ownerReferences"]) == 2)
    await accept_routing(client, namespace, "p")

    async def becomes(status: str, reason: str) -> Object:
        return await until(
            lambda: client.request("GET", pools(namespace, "/p")),
            lambda p: (
                (condition(p, "RouteProgrammed").get("status"), condition(p, "RouteProgrammed").get("reason"))
                == (status, reason)
            ),
        )

    await becomes("False", "WaitingForRoute")
    await program(client, GATEWAYS.format(namespace) + "/g", "False")
    body = await becomes("False", "GatewayNotProgrammed")
    assert "AddressNotAssigned" in condition(body, "RouteProgrammed")["message"]
    await program(client, GATEWAYS.format(namespace) + "/g", "True")
    body = await becomes("True", "Programmed")
    assert condition(body, "Progressing").get("reason") != "ApplyFailed"
    other = await client.request("GET", pools(namespace, "/q"))
    assert condition(other, "RouteProgrammed")["reason"] == "WaitingForRoute"
    await accept_routing(client, namespace, "q")

    async def of_q(status: str, reason: str) -> Object:
        return await until(
            lambda: client.request("GET", pools(namespace, "/q")),
            lambda p: (
                (condition(p, "RouteProgrammed")["status"], condition(p, "RouteProgrammed")["reason"])
                == (status, reason)
            ),
        )

    body = await of_q("False", "RouteShadowed")
    assert f"go to pool {namespace}/p, whose route is older" in condition(body, "RouteProgrammed")["message"]
    assert condition(body, "Ready")["status"] == "False"
    apart = {"spec": {"gateway": {"hostnames": ["q.test"]}}}
    await client.request("PATCH", pools(namespace, "/q"), apart, content_type=MERGE)
    await until(
        lambda: client.request("GET", ROUTES.format(namespace) + "/q"),
        lambda r: r["spec"].get("hostnames") == ["q.test"],
    )
    await of_q("True", "Programmed")

    before = await quiet(router)  # neither takes the shared object for the other's late write
    for name in ("p", "q"):
        note = {"metadata": {"annotations": {"note": "look again"}}}
        await client.request("PATCH", pools(namespace, f"/{name}"), note, content_type=MERGE)
    assert await quiet(router) == before


async def test_a_gateway_of_the_inference_extension(routed: tuple[Client, str], router: Operator) -> None:
    client, namespace = routed
    gateway = {"mode": "inferenceExtension", "parent": {"name": "g"}}
    await client.request("POST", pools(namespace), pool(gateway=gateway))
    where = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/p"
    made = await until(lambda: client.request("GET", where), bool)
    assert made["spec"]["endpointPickerRef"]["name"] == "p-gateway"
    route = await until(lambda: client.request("GET", ROUTES.format(namespace) + "/p"), bool)
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"]) == ("inference.networking.k8s.io", "InferencePool")
    await client.request("POST", GATEWAYS.format(namespace), GATEWAY)
    await program(client, GATEWAYS.format(namespace) + "/g", "True")
    await accept(client, ROUTES.format(namespace) + "/p", "parents")
    body = await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: "InferencePool" in condition(p, "RouteProgrammed")["message"],
    )
    assert condition(body, "RouteProgrammed")["reason"] == "WaitingForRoute"
    await accept(client, where, "parents")
    await until(
        lambda: client.request("GET", pools(namespace, "/p")),
        lambda p: condition(p, "RouteProgrammed")["status"] == "True",
    )

    envoy = {"spec": {"gateway": {"mode": "envoyGateway"}}}
    await client.request("PATCH", pools(namespace, "/p"), envoy, content_type=MERGE)
    await until(lambda: client.request("GET", POLICIES.format(namespace) + "envoyextensionpolicies/p"), bool)

    async def left() -> Object:
        return await client.request("GET", where.removesuffix("/p"))

    await until(left, lambda listed: not listed["items"])
