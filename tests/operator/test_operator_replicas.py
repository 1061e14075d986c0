"""Engines that come and go by number: scale-down, emptied nodes, autoscalers. What scheduler,
kubelet and gateway would do is acted.
"""

import itertools
import re
from typing import Any

import pytest
from api_server import until
from operator_process import Operator
from pool_objects import becomes, condition, deployments, engines, gateway_page, merge, pool, pools, run_pods

from perilune_api import kube, names
from perilune_api.kube import Client

Object = dict[str, Any]


async def test_a_scale_down_waits_for_the_gateways_word(
    client: Client, namespace: str, operator: Operator
) -> None:
    """Marked, kept, answered by the gateway (its page is acted), gone; the other engine is not touched."""
    await client.request("POST", pools(namespace), pool(replicas=2, rollout={"sessionSeconds": 3600}))
    await run_pods(client, namespace, 3)
    await becomes(
        client,
        pools(namespace, "/p"),
        lambda p: p["status"]["ready"] == "2/2" and condition(p, "GatewayReady")["status"] == "True",
    )
    scale = {"spec": {"replicas": 1}}
    await merge(client, pools(namespace, "/p/scale"), scale)
    (chosen,) = await until(lambda: engines(client, namespace, marked=True), lambda found: len(found) == 1)
    body = await becomes(
        client, pools(namespace, "/p"), lambda p: condition(p, "Draining")["reason"] == "SessionsLeaving"
    )
    assert chosen["metadata"]["name"] in condition(body, "Draining")["message"]
    assert (body["status"]["ready"], condition(body, "Reconciling")["status"]) == ("1/1", "True")
    engine = await client.request("GET", deployments(namespace, "/p-engine"))
    assert engine["spec"]["replicas"] == 2

    async with gateway_page(client, namespace) as page:
        page.drained(chosen)
        left = await until(lambda: engines(client, namespace), lambda found: len(found) == 1)
    assert left[0]["metadata"]["name"] != chosen["metadata"]["name"]
    body = await becomes(
        client,
        pools(namespace, "/p"),
        lambda p: condition(p, "Draining")["status"] == condition(p, "Reconciling")["status"] == "False",
    )
    assert body["status"]["ready"] == "1/1"


async def test_a_cordoned_nodes_engine_takes_no_new_sessions(
    client: Client, namespace: str, operator: Operator
) -> None:
    node, other = f"node-{namespace}", f"other-{namespace}"
    await client.request("POST", pools(namespace), pool(replicas=2))
    await run_pods(client, namespace, 3, nodes=(node, other))
    await becomes(client, pools(namespace, "/p"), lambda p: p["status"]["ready"] == "2/2")
    body = {"metadata": {"name": node}, "spec": {"unschedulable": True}}
    await client.request("POST", "/api/v1/nodes", body)
    (marked,) = await until(lambda: engines(client, namespace, marked=True), lambda found: len(found) == 1)
    assert marked["spec"]["nodeName"] == node
    body = await becomes(
        client, pools(namespace, "/p"), lambda p: condition(p, "Draining")["reason"] == "NodesLeaving"
    )
    assert condition(body, "Ready")
    free = {"spec": {"unschedulable": False}}
    await merge(client, f"/api/v1/nodes/{node}", free)
    await until(lambda: engines(client, namespace, marked=True), lambda found: found == [])
    await client.request("DELETE", f"/api/v1/nodes/{node}")


async def test_an_autoscaler_takes_over_without_a_drop(
    client: Client, namespace: str, operator: Operator
) -> None:
    """Of engines and of gateways: the number of now stays until the autoscaler writes another."""
    await client.request("POST", pools(namespace), pool(replicas=4, gateway={"replicas": 3}))
    engine = await becomes(client, deployments(namespace, "/p-engine"))
    gateway = await becomes(client, deployments(namespace, "/p-gateway"))
    hpa = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
    change = {
        "replicas": None,  # the API server then says 1
        "scaling": {"minReplicas": 2, "maxReplicas": 8},
        "gateway": {"minReplicas": 2, "maxReplicas": 5},
    }
    await merge(client, pools(namespace, "/p"), {"spec": change})
    for name in ("/p-engine", "/p-gateway"):
        await becomes(client, hpa + name)
    assert (await client.request("GET", pools(namespace, "/p")))["spec"]["replicas"] == 4
    for name, before in (("/p-engine", engine), ("/p-gateway", gateway)):
        now = await client.request("GET", deployments(namespace, name))
        assert now["metadata"]["generation"] == before["metadata"]["generation"]

    five = {"spec": {"replicas": 5}}  # as the autoscaler does
    await merge(client, deployments(namespace, "/p-gateway/scale"), five)

    def claims(deployment: Object) -> list[bool]:
        fields = deployment["metadata"]["managedFields"]
        ours = [e["fieldsV1"] for e in fields if e["manager"] == "perilune-operator"]
        return ["f:replicas" in fields["f:spec"] for fields in ours]

    await becomes(client, deployments(namespace, "/p-gateway"), lambda d: claims(d) == [False])
    change = {"gateway": {"logLevel": "debug"}}
    await merge(client, pools(namespace, "/p"), {"spec": change})
    now = await becomes(
        client,
        deployments(namespace, "/p-gateway"),
        lambda d: "--log-level=debug" in str(d["spec"]["template"]),
    )
    assert now["spec"]["replicas"] == 5
    assert claims(now) == [False]
    events = await client.request("GET", f"/api/v1/namespaces/{namespace}/events")
    said = {event["message"] for event in events["items"] if event["reason"] == "Scaled"}
    assert said <= {"replicas 1 → 4: an autoscaler takes over as many as run"}


async def test_a_pool_scales_itself_by_its_gateways_pages(
    client: Client, namespace: str, operator: Operator
) -> None:
    """Without any autoscaler: up while prefill waits, down to the least when none does."""
    limits = {"minReplicas": 1, "maxReplicas": 3, "upSeconds": 0, "downSeconds": 0}
    scaling = {"signal": "queueSeconds", **limits}
    await client.request("POST", pools(namespace), pool(scaling=scaling, rollout={"sessionSeconds": 0}))
    await run_pods(client, namespace, 2)
    async with gateway_page(client, namespace) as page:
        page.text = 'perilune_endpoint_pending_prefill_seconds{endpoint="10.1.0.1:8000"} 6.0\n'
        await becomes(client, pools(namespace, "/p"), lambda p: p["spec"]["replicas"] == 2)
        await becomes(client, deployments(namespace, "/p-engine"), lambda d: d["spec"]["replicas"] == 2)
        said = "replicas 1 → 2: 6.0 s of prefill queued, 0.0 KV caches in use"
        events = f"/api/v1/namespaces/{namespace}/events"
        await becomes(client, events, lambda found: said in {e["message"] for e in found["items"]})
        page.text = 'perilune_endpoint_pending_prefill_seconds{endpoint="10.1.0.1:8000"} 0.0\n'
        await becomes(client, pools(namespace, "/p"), lambda p: p["spec"]["replicas"] == 1)
        # A tool applies its manifest again, which names another number.
        again = {"spec": {"replicas": 3}}
        where = pools(namespace, "/p")
        await client.request(
            "PATCH", where, again, params={"fieldManager": "gitops"}, content_type=kube.MERGE
        )
        contested = await becomes(client, where, lambda p: condition(p, "ReplicasContested"))
        assert "spec.scaling, gitops (which writes" in condition(contested, "ReplicasContested")["message"]
        assert contested["spec"]["replicas"] == 3, "it is not written to and fro"
    hpa = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
    assert (await client.request("GET", hpa))["items"] == []


@pytest.mark.heavy
async def test_endpoints_that_only_prefill_scale_by_their_own_queues(
    client: Client, namespace: str, operator: Operator
) -> None:
    """Their Deployment changes, and neither the pool's spec nor the endpoints that get requests do."""
    limits = {"minReplicas": 1, "maxReplicas": 3, "upSeconds": 0, "downSeconds": 0}
    split = pool(prefillReplicas=1, mooncake={"transfer": "handoff"}, prefillScaling=limits)
    await client.request("POST", pools(namespace), split)
    await run_pods(client, namespace, 3)
    listed = await client.request("GET", f"/api/v1/namespaces/{namespace}/pods")
    (name,) = [p["metadata"]["name"] for p in listed["items"] if "-prefill-" in p["metadata"]["name"]]
    of_its_own = {"status": {"podIP": "10.1.0.2"}}
    await merge(client, f"/api/v1/namespaces/{namespace}/pods/{name}/status", of_its_own)
    sample = 'perilune_endpoint_pending_prefill_seconds{{endpoint="10.1.0.{}:8000"}} {}\n'.format
    prefill = deployments(namespace, "/p-prefill")
    async with gateway_page(client, namespace) as page:
        page.text = sample(1, 99.0) + sample(2, 3.0)
        await becomes(client, prefill, lambda d: d["spec"]["replicas"] == 2)
        said = "endpoints that only prefill 1 → 2: 3.0 s of prefill queued, 0.0 KV caches in use"
        events = f"/api/v1/namespaces/{namespace}/events"
        await becomes(client, events, lambda found: said in {e["message"] for e in found["items"]})
        page.text = sample(1, 99.0) + sample(2, 0.0)
        await becomes(client, prefill, lambda d: d["spec"]["replicas"] == 1)
    made = await client.request("GET", pools(namespace, "/p"))
    assert (made["spec"]["replicas"], made["spec"]["prefillReplicas"]) == (1, 1)


@pytest.mark.heavy
async def test_a_pool_scales_itself_by_its_first_tokens(
    client: Client, namespace: str, operator: Operator
) -> None:
    """More and more come late while the only endpoint has prompts to prefill."""
    limits = {"minReplicas": 1, "maxReplicas": 2, "upSeconds": 0, "target": "0.9", "ttftSeconds": 5}
    await client.request("POST", pools(namespace), pool(scaling={"signal": "ttftAttainment", **limits}))
    await run_pods(client, namespace, 2)
    asked = itertools.count(1)
    async with gateway_page(client, namespace) as page:

        async def look() -> Object:
            bucket, late = f"{names.FIRST_TOKENS}_bucket", 100 * next(asked)
            page.text = (
                'perilune_endpoint_pending_prefill_seconds{endpoint="10.1.0.1:8000"} 6.0\n'
                f'{bucket}{{le="5.0"}} 10.0\n{bucket}{{le="+Inf"}} {late}.0\n'
            )
            return await client.request("GET", pools(namespace, "/p"))

        await until(look, lambda p: p["spec"]["replicas"] == 2)
    events = f"/api/v1/namespaces/{namespace}/events"
    said = re.compile(r"replicas 1 → 2: 6\.0 s of prefill queued, .*, 0 of \d+00 first tokens in time")
    await becomes(client, events, lambda found: any(said.match(e["message"]) for e in found["items"]))
