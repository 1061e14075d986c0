"""Engines that others run, on a real API server: served, and never touched. The gateway is
acted."""

from typing import Any

from api_server import until
from operator_process import Operator
from pool_objects import becomes, condition, deployments, gateway_page, merge, pool, pools, run_pods

from perilune_api import names
from perilune_api.kube import Client

Object = dict[str, Any]
PARTS = {
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Service": "/api/v1/namespaces/{}/services",
}


def theirs(replicas: int = 2) -> Object:
    """Return a Deployment of vLLM as a team has made it by hand."""
    container = {"name": "vllm", "image": "vllm", "ports": [{"name": "http", "containerPort": 8200}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "vllm"}},
            "template": {"metadata": {"labels": {"app": "vllm"}}, "spec": {"containers": [container]}},
        },
    }


def as_written(obj: Object) -> Object:
    """Return an object without what Kubernetes itself goes on writing: its status."""
    meta = {k: v for k, v in obj["metadata"].items() if k not in ("resourceVersion", "managedFields")}
    return {"metadata": meta, "spec": obj["spec"]}


async def test_engines_of_others_are_served_and_never_touched(
    client: Client, namespace: str, operator: Operator
) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"

    async def of_theirs() -> list[Object]:
        listed = await client.request("GET", pods, params={"labelSelector": "app=vllm"})
        deployment = await client.request("GET", deployments(namespace, "/vllm"))
        return [*map(as_written, (deployment, *listed["items"]))]

    async def objects() -> set[str]:
        found = [(kind, await client.request("GET", part.format(namespace))) for kind, part in PARTS.items()]
        return {f"{kind}/{o['metadata']['name']}" for kind, listed in found for o in listed["items"]}

    await client.request("POST", deployments(namespace), theirs())
    await until(of_theirs, lambda found: len(found) == 3)
    selected = {"engine": {"selector": {"labels": {"app": "vllm"}, "port": "http"}}}
    body = pool(gateway={"mode": "none"}) | {"spec": selected | {"gateway": {"mode": "none"}}}
    await client.request("POST", pools(namespace), body)
    await run_pods(client, namespace, 3)
    before = await of_theirs()
    async with gateway_page(client, namespace) as page:
        page.text = (
            'perilune_endpoint_ready{endpoint="10.0.0.1:8200"} 1.0\n'
            'perilune_endpoint_ready{endpoint="10.0.0.2:8200"} 0.0\n'
            f'{names.FINDINGS}{{finding="no_events"}} 2.0\n'
            "perilune_sessions_bound 0.0\n"
        )
        told = await becomes(
            client, pools(namespace, "/p"), lambda p: condition(p, "Ready").get("status") == "True"
        )
    assert (told["status"]["ready"], told["status"]["replicas"]) == ("1/2", 2)
    assert condition(told, "RoutingExact")["status"] == "False"
    assert "--kv-events-config" in condition(told, "RoutingExact")["message"]
    assert not told["status"].get("selector")
    service = await client.request("GET", f"/api/v1/namespaces/{namespace}/services/p")
    assert service["spec"]["selector"] == {"app": "vllm"}
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    ours = {"Deployment/p-gateway", "NetworkPolicy/p-gateway", "Service/p", "Service/p-gateway"}
    assert await objects() == ours | {"Deployment/vllm"}

    await client.request("DELETE", pools(namespace, "/p"))
    assert await until(objects, lambda left: left == {"Deployment/vllm"})
    assert await of_theirs() == before


async def test_a_pool_that_would_run_and_select_is_refused_by_name(
    client: Client, namespace: str, operator: Operator
) -> None:
    body = pool()
    body["spec"] = {"engine": {"selector": {"labels": {"app": "vllm"}}}, "replicas": 3}
    await client.request("POST", pools(namespace), body)
    told = await becomes(client, pools(namespace, "/p"), lambda p: bool(condition(p, "Accepted")))
    assert condition(told, "Accepted")["status"] == "False"
    assert "at `$.spec.replicas`" in condition(told, "Accepted")["message"]
    scale = {"spec": {"replicas": None}}
    await merge(client, pools(namespace, "/p"), scale)
    await becomes(client, pools(namespace, "/p"), lambda p: condition(p, "Accepted")["status"] == "True")
