"""Objects of Envoy Gateway and of the inference extension, held against their own CRDs; what
their controllers say is acted.
"""

from collections.abc import Callable
from typing import Any

from api_server import until
from operator_process import Operator
from pool_objects import becomes, condition, merge, pool, pools, quiet

from perilune_api.kube import Client

Object = dict[str, Any]

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
    await merge(client, f"{where}/status", status)


async def accept_routing(client: Client, namespace: str, name: str) -> None:
    """Accept all that it says of one pool."""
    for where, holder in (
        (f"{ROUTES.format(namespace)}/{name}", "parents"),
        (f"{POLICIES.format(namespace)}backendtrafficpolicies/{name}", "ancestors"),
        (f"{POLICIES.format(namespace)}envoyextensionpolicies/{name}", "ancestors"),
    ):
        await becomes(client, where)
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
    await merge(client, f"{where}/status", body)


async def route_is(client: Client, namespace: str, name: str, status: str, reason: str) -> Object:
    """Wait until the pool says so of its route, and return the pool."""

    def says_so(body: Object) -> bool:
        said = condition(body, "RouteProgrammed")
        return (said.get("status"), said.get("reason")) == (status, reason)

    return await becomes(client, pools(namespace, f"/{name}"), says_so)


async def test_two_pools_behind_one_envoy_gateway(routed: tuple[Client, str], router: Operator) -> None:
    """All five objects pass Envoy Gateway's own schemas; the one on the Gateway belongs to both pools."""
    client, namespace = routed
    gateway = {"parent": {"name": "g"}}
    await client.request("POST", GATEWAYS.format(namespace), GATEWAY)
    for name in ("p", "q"):  # one after the other: the older route wins
        await client.request("POST", pools(namespace), pool(name, gateway=gateway))
        route = f"{ROUTES.format(namespace)}/{name}"
        await becomes(client, route)
    shared = POLICIES.format(namespace) + "clienttrafficpolicies/g-perilune"
    await becomes(client, shared, lambda p: len(p["metadata"]["ownerReferences"]) == 2)
    await accept_routing(client, namespace, "p")
    traffic = await client.request("GET", f"{POLICIES.format(namespace)}backendtrafficpolicies/p")
    retried = traffic["spec"]["retry"]
    assert (retried["numRetries"], retried["retryOn"]["httpStatusCodes"]) == (1, [500])
    assert {"reset", "retriable-status-codes"} <= set(retried["retryOn"]["triggers"])
    refusal = await becomes(client, f"{POLICIES.format(namespace)}httproutefilters/p")
    assert refusal["spec"]["directResponse"]["statusCode"] == 404

    await program(client, GATEWAYS.format(namespace) + "/g", "False")
    await becomes(  # the Gateway that no controller has looked at yet is not programmed either
        client,
        pools(namespace, "/p"),
        lambda p: "AddressNotAssigned" in condition(p, "RouteProgrammed").get("message", ""),
    )
    await route_is(client, namespace, "p", "False", "GatewayNotProgrammed")
    await program(client, GATEWAYS.format(namespace) + "/g", "True")
    body = await route_is(client, namespace, "p", "True", "Programmed")
    assert condition(body, "Reconciling").get("reason") != "ApplyFailed"
    other = await client.request("GET", pools(namespace, "/q"))
    assert condition(other, "RouteProgrammed")["reason"] == "WaitingForRoute"
    await accept_routing(client, namespace, "q")

    body = await route_is(client, namespace, "q", "False", "RouteShadowed")
    assert f"go to pool {namespace}/p, whose route is older" in condition(body, "RouteProgrammed")["message"]
    assert condition(body, "Ready")["status"] == "False"
    apart = {"spec": {"gateway": {"hostnames": ["q.test"]}}}
    await merge(client, pools(namespace, "/q"), apart)
    await becomes(client, ROUTES.format(namespace) + "/q", lambda r: r["spec"].get("hostnames") == ["q.test"])
    await route_is(client, namespace, "q", "True", "Programmed")

    before = await quiet(router)  # neither takes the shared object for the other's late write
    for name in ("p", "q"):
        note = {"metadata": {"annotations": {"note": "look again"}}}
        await merge(client, pools(namespace, f"/{name}"), note)
    assert await quiet(router) == before


async def test_what_pools_share_goes_with_the_last_that_wants_it(
    routed: tuple[Client, str], router: Operator
) -> None:
    client, namespace = routed
    policies = POLICIES.format(namespace) + "clienttrafficpolicies"
    uids = {}
    for name in ("p", "q"):
        made = await client.request("POST", pools(namespace), pool(name, gateway={"parent": {"name": "g"}}))
        uids[name] = made["metadata"]["uid"]

    def owned_by(*pools: str) -> Callable[[Object], bool]:
        wanted = {uids[name] for name in pools}
        return lambda policy: {owner["uid"] for owner in policy["metadata"]["ownerReferences"]} == wanted

    await becomes(client, f"{policies}/g-perilune", owned_by("p", "q"))
    elsewhere = {"spec": {"gateway": {"parent": {"name": "h"}}}}
    await merge(client, pools(namespace, "/q"), elsewhere)
    left = await becomes(client, f"{policies}/g-perilune", owned_by("p"))
    assert left["spec"]["headers"]["earlyRequestHeaders"]["remove"]
    await becomes(client, f"{policies}/h-perilune", owned_by("q"))
    await merge(client, pools(namespace, "/p"), elsewhere)
    await becomes(
        client, policies, lambda all_: [p["metadata"]["name"] for p in all_["items"]] == ["h-perilune"]
    )
    await becomes(client, f"{policies}/h-perilune", owned_by("p", "q"))


async def test_a_gateway_of_the_inference_extension(routed: tuple[Client, str], router: Operator) -> None:
    client, namespace = routed
    gateway = {"mode": "inferenceExtension", "parent": {"name": "g"}}
    await client.request("POST", pools(namespace), pool(gateway=gateway))
    where = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/p"
    made = await becomes(client, where)
    assert made["spec"]["endpointPickerRef"]["name"] == "p-gateway"
    route = await becomes(client, ROUTES.format(namespace) + "/p")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"]) == ("inference.networking.k8s.io", "InferencePool")
    await client.request("POST", GATEWAYS.format(namespace), GATEWAY)
    await program(client, GATEWAYS.format(namespace) + "/g", "True")
    await accept(client, ROUTES.format(namespace) + "/p", "parents")
    body = await becomes(
        client,
        pools(namespace, "/p"),
        lambda p: "InferencePool" in condition(p, "RouteProgrammed")["message"],
    )
    assert condition(body, "RouteProgrammed")["reason"] == "WaitingForRoute"
    await accept(client, where, "parents")
    await becomes(
        client, pools(namespace, "/p"), lambda p: condition(p, "RouteProgrammed")["status"] == "True"
    )

    envoy = {"spec": {"gateway": {"mode": "envoyGateway"}}}
    await merge(client, pools(namespace, "/p"), envoy)
    await becomes(client, POLICIES.format(namespace) + "envoyextensionpolicies/p")

    async def left() -> Object:
        return await client.request("GET", where.removesuffix("/p"))

    await until(left, lambda listed: not listed["items"])


async def test_the_operators_client_policy_gives_way_and_comes_back(
    routed: tuple[Client, str], router: Operator
) -> None:
    client, namespace = routed
    await client.request("POST", GATEWAYS.format(namespace), GATEWAY)
    matches = [{"path": {"type": "PathPrefix", "value": "/coder/v1"}}]
    gateway = {"parent": {"name": "g"}, "matches": matches}
    await client.request("POST", pools(namespace), pool(gateway=gateway))
    where = POLICIES.format(namespace) + "clienttrafficpolicies"

    async def names() -> set[str]:
        listed = await client.request("GET", where)
        return {item["metadata"]["name"] for item in listed["items"]}

    await until(names, lambda found: found == {"g-perilune"})
    route = await until(lambda: client.request("GET", f"{ROUTES.format(namespace)}/p"), bool)
    assert route["spec"]["rules"][0]["matches"] == matches
    target = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "g"}
    theirs = {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1",
        "kind": "ClientTrafficPolicy",
        "metadata": {"name": "theirs"},
        "spec": {"targetRefs": [target]},
    }
    await client.request("POST", where, theirs)
    await until(names, lambda found: found == {"theirs"})
    note = {"metadata": {"annotations": {"note": "look again"}}}
    await merge(client, pools(namespace, "/p"), note)
    await client.request("DELETE", f"{where}/theirs")
    await until(names, lambda found: found == {"g-perilune"})
