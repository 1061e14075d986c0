"""What becomes of a pool in a real API server: its objects, status, refusals, and its end. Pods never run, so
readiness is written by hand.
"""

from typing import Any

from api_server import until
from operator_process import Operator
from pool_objects import becomes, condition, config_maps, deployments, merge, pool, pools, run_pods

from perilune_api.kube import Client
from perilune_api.pool import parse

Object = dict[str, Any]

NOT_OURS = {"kube-root-ca.crt", "perilune-operator"}
"""What a namespace of these tests has without any pool."""


async def test_a_pool_becomes_objects_and_follows_its_spec(
    client: Client, namespace: str, operator: Operator
) -> None:
    made = await client.request("POST", pools(namespace), pool(replicas=2))
    engine = await becomes(client, deployments(namespace, "/p-engine"), lambda d: d["spec"]["replicas"] == 2)
    owner = engine["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"]) == (made["metadata"]["uid"], True)
    await becomes(client, deployments(namespace, "/p-gateway"))
    body = await becomes(client, pools(namespace, "/p"), lambda p: bool(condition(p, "Ready")))
    assert condition(body, "Accepted")["status"] == "True"
    assert (condition(body, "EnginesReady")["status"], body["status"]["ready"]) == ("False", "0/2")
    assert condition(body, "RouteProgrammed")["reason"] == "NoRouteApi"

    scale = {"spec": {"replicas": 3}}
    await merge(client, pools(namespace, "/p/scale"), scale)
    await becomes(client, deployments(namespace, "/p-engine"), lambda d: d["spec"]["replicas"] == 3)
    await becomes(
        client,
        pools(namespace, "/p"),
        lambda p: (p["status"]["ready"], p["status"]["observedGeneration"]) == ("0/3", 2),
    )


async def test_a_changed_condition_becomes_an_event(
    client: Client, namespace: str, operator: Operator
) -> None:
    made = await client.request("POST", pools(namespace), pool())
    bad = {"spec": {"engine": {"args": ["--listen=elsewhere"]}}}
    await becomes(client, pools(namespace, "/p"), lambda p: condition(p, "Accepted").get("status") == "True")
    await merge(client, pools(namespace, "/p"), bad)

    async def told() -> list[tuple[str, str, bool]]:
        listed = await client.request("GET", f"/api/v1/namespaces/{namespace}/events")
        mine = [e for e in listed["items"] if e["involvedObject"].get("uid") == made["metadata"]["uid"]]
        return [(e["type"], e["reason"], e["message"].startswith("Accepted=")) for e in mine]

    await until(told, lambda events: {("Normal", "Valid", True), ("Warning", "Invalid", True)} <= set(events))


async def test_a_nodes_new_label_reaches_the_gateways_document(
    client: Client, namespace: str, operator: Operator
) -> None:
    name = f"gpu-{namespace}"
    label = "topology.kubernetes.io/rack"
    node = {"metadata": {"name": name, "labels": {label: "r1"}}}
    await client.request("POST", "/api/v1/nodes", node)
    status = {"status": {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}}
    await merge(client, f"/api/v1/nodes/{name}/status", status)
    await client.request("POST", pools(namespace), pool())
    await run_pods(client, namespace, 2, nodes=(name,))

    async def rack() -> str:
        document = await client.request("GET", config_maps(namespace, "/p-gateway"))
        return str(parse(document["data"]["pool.yaml"]).spec.topology.nodes[name].rack)

    try:
        await until(rack, lambda told: told == "r1")
        change = {"metadata": {"labels": {label: "r2"}}}
        await merge(client, f"/api/v1/nodes/{name}", change)
        await until(rack, lambda told: told == "r2")
    finally:
        await client.request("DELETE", f"/api/v1/nodes/{name}")


async def test_the_server_of_shared_state_comes_and_goes_with_the_second_gateway(
    client: Client, namespace: str, operator: Operator
) -> None:
    async def servers() -> set[str]:
        paths = (deployments(namespace), f"/api/v1/namespaces/{namespace}/services")
        lists = [await client.request("GET", path) for path in paths]
        names = ((listed["kind"], o["metadata"]["name"]) for listed in lists for o in listed["items"])
        return {kind for kind, name in names if name == "p-state"}

    def gateways(number: int) -> Object:
        return {"spec": {"gateway": {"replicas": number}}}

    await client.request("POST", pools(namespace), pool())
    await becomes(client, deployments(namespace, "/p-gateway"))
    assert await servers() == set()
    await merge(client, pools(namespace, "/p"), gateways(2))
    await until(servers, lambda found: found == {"DeploymentList", "ServiceList"})
    await merge(client, pools(namespace, "/p"), gateways(1))
    await until(servers, lambda found: found == set())


async def test_what_is_not_ours_is_left_alone(client: Client, namespace: str, operator: Operator) -> None:
    """A user's Service has the name of the pool's: it stays as it is, and the status says so."""
    services = f"/api/v1/namespaces/{namespace}/services"
    mine = {"metadata": {"name": "p"}, "spec": {"selector": {"app": "mine"}, "ports": [{"port": 80}]}}
    before = await client.request("POST", services, mine)
    await client.request("POST", pools(namespace), pool())
    body = await becomes(
        client, pools(namespace, "/p"), lambda p: condition(p, "Reconciling").get("reason") == "ApplyFailed"
    )
    assert "Service p exists and is not this pool's" in condition(body, "Reconciling")["message"]
    assert await client.request("GET", f"{services}/p") == before
    assert await client.request("GET", deployments(namespace, "/p-engine"))
    await client.request("DELETE", f"{services}/p")
    await becomes(client, f"{services}/p", lambda s: s["spec"]["selector"].get("perilune.dev/pool") == "p")


async def test_what_the_spec_no_longer_asks_for_goes(
    client: Client, namespace: str, operator: Operator
) -> None:
    store = {"engine": {"kind": "vllm"}, "mooncake": {"store": {"enabled": True}}}
    await client.request("POST", pools(namespace), pool(**store))
    await becomes(client, deployments(namespace, "/p-master"))
    off = {"spec": {"mooncake": {"store": {"enabled": False}}}}
    await merge(client, pools(namespace, "/p"), off)

    async def left() -> list[str]:
        listed = await client.request("GET", deployments(namespace))
        return [d["metadata"]["name"] for d in listed["items"]]

    await until(left, lambda names: sorted(names) == ["p-engine", "p-gateway"])


async def test_a_spec_that_only_we_can_refuse_touches_nothing(
    client: Client, namespace: str, operator: Operator
) -> None:
    await client.request("POST", pools(namespace), pool(engine={"kind": "vllm"}))
    engine = await becomes(client, deployments(namespace, "/p-engine"))
    bad = {"spec": {"engine": {"args": ["--block-size=32"]}, "replicas": 7}}
    await merge(client, pools(namespace, "/p"), bad)
    body = await becomes(
        client, pools(namespace, "/p"), lambda p: condition(p, "Accepted").get("status") == "False"
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
        kept[name] = await becomes(client, deployments(namespace, name))
    bad = {
        "engine": {"podTemplate": {"spec": {"containers": [{"name": "engine", "image": 5}]}}},
        "gateway": {"logLevel": "debug"},
        "routing": {"policy": {"name": "sticky"}},
        "replicas": 7,
    }
    await merge(client, pools(namespace, "/p"), {"spec": bad})
    body = await becomes(
        client, pools(namespace, "/p"), lambda p: condition(p, "Accepted").get("status") == "False"
    )
    assert condition(body, "Accepted")["message"] == (
        "expected string - at `$.spec.engine.podTemplate.spec.containers[0].image`"
    )
    assert (condition(body, "Accepted")["reason"], body["status"]["observedGeneration"]) == ("Invalid", 2)
    for name, before in kept.items():
        now = await client.request("GET", deployments(namespace, name))
        assert now["metadata"]["generation"] == before["metadata"]["generation"]
    document = await client.request("GET", config_maps(namespace, "/p-gateway"))
    assert "sticky" not in document["data"]["pool.yaml"]

    good = {"spec": {"engine": {"podTemplate": None}}}
    await merge(client, pools(namespace, "/p"), good)
    await becomes(client, pools(namespace, "/p"), lambda p: condition(p, "Accepted")["status"] == "True")
    now = await client.request("GET", deployments(namespace, "/p-engine"))
    assert now["spec"]["replicas"] == 7


async def test_a_deleted_pool_leaves_nothing(
    client: Client, namespace: str, operator: Operator, api_server: Any
) -> None:
    await client.request("POST", pools(namespace), pool())
    await becomes(client, deployments(namespace, "/p-gateway"))
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
        await becomes(
            client, where, lambda listed: {i["metadata"]["name"] for i in listed["items"]} <= NOT_OURS
        )
