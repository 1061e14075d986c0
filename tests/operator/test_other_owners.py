"""What belongs to the Gateway's owner or to users themselves: routes, matches, client policies, buffers."""

import json
from typing import Any

import pytest
from plans import made

from perilune_api import paths
from perilune_api.inference_pool.checks import convert
from perilune_api.pool import SpecError
from perilune_gateway.request.paths import is_supported
from perilune_operator.observe.facts import Observed, key

Object = dict[str, Any]
KINDS = frozenset({"gateway.networking.k8s.io/HTTPRoute", "gateway.envoyproxy.io/EnvoyExtensionPolicy"})
DESTINATION = "x-gateway-destination-endpoint"


def client_policy(
    name: str = "theirs", gateway: str = "g", *, remove: tuple[str, ...] = (), buffer: str = "32Mi"
) -> Object:
    target = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}
    return {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1",
        "kind": "ClientTrafficPolicy",
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {
            "targetRefs": [target],
            "connection": {"bufferLimit": buffer},
            "headers": {"earlyRequestHeaders": {"remove": list(remove)}},
        },
    }


def objects(
    gateway: Object, *children: Object, limits: Object | None = None, kinds: frozenset[str] = KINDS
) -> dict[tuple[str, str], Object]:
    spec: Object = {"model": {"name": "m"}, "gateway": {"parent": {"name": "g"}, **gateway}}
    if limits:
        spec["routing"] = {"limits": limits}
    observed = Observed(
        uid="u", generation=1, kinds=kinds, children={key(child): child for child in children}
    )
    return {(o["kind"], o["metadata"]["name"]): o for o in made(spec, observed).objects or ()}


OURS = ("ClientTrafficPolicy", "g-perilune")


@pytest.mark.parametrize(
    ("gateway", "there", "creates"),
    [
        pytest.param({}, [], True, id="allowed, and nobody has one"),
        pytest.param({"clientTrafficPolicy": "none"}, [], False, id="not allowed"),
        pytest.param({}, [client_policy()], False, id="somebody has one"),
        pytest.param({}, [client_policy(gateway="other")], True, id="for another Gateway"),
        pytest.param({"parent": {"name": "g", "namespace": "infra"}}, [], False, id="a Gateway elsewhere"),
    ],
)
def test_a_client_policy_is_created_where_allowed_and_never_over_another(
    gateway: Object, there: list[Object], creates: bool
) -> None:
    assert (OURS in objects(gateway, *there)) is creates


@pytest.mark.parametrize(
    ("gateway", "there", "said"),
    [
        pytest.param({}, [client_policy()], "ClientTrafficPolicy theirs is not the operator's", id="theirs"),
        pytest.param({}, [client_policy(remove=(DESTINATION.upper(),))], "", id="theirs removes the header"),
        pytest.param(
            {},
            [client_policy(remove=(DESTINATION,), buffer="32Ki")],
            "it has to set connection.bufferLimit to 32Mi",
            id="theirs takes smaller bodies than the pool",
        ),
        pytest.param(
            {"parent": {"name": "g", "namespace": "infra"}},
            [],
            "and set connection.bufferLimit to 32Mi, or Envoy answers 413",
            id="a Gateway elsewhere",
        ),
        pytest.param(
            {"clientTrafficPolicy": "none"}, [], "gateway.clientTrafficPolicy is none", id="nobody's"
        ),
    ],
)
def test_the_status_tells_who_has_to_remove_the_header(
    gateway: Object, there: list[Object], said: str
) -> None:
    parent = {"name": "g", **gateway.get("parent", {})}
    accepted = {"conditions": [{"type": "Accepted", "status": "True"}], "parentRef": parent}
    done = [
        {"kind": kind, "metadata": {"name": "p", "namespace": "ns"}, "status": {"ancestors": [accepted]}}
        for kind in ("HTTPRoute", "BackendTrafficPolicy", "EnvoyExtensionPolicy")
    ]
    spec = {"model": {"name": "m"}, "gateway": {"parent": {"name": "g"}, **gateway}}
    observed = Observed(
        uid="u", generation=1, kinds=KINDS, children={key(child): child for child in (*there, *done)}
    )
    (route,) = (c for c in made(spec, observed).status.conditions if c.type == "RouteProgrammed")
    assert route.status == "True"
    if said:
        assert said in route.message
    else:
        assert DESTINATION not in route.message
        assert "bufferLimit" not in route.message


def buffers(made: dict[tuple[str, str], Object]) -> set[str]:
    policies = made["BackendTrafficPolicy", "p"]["spec"], made[OURS]["spec"]
    asks = made["EnvoyExtensionPolicy", "p"]["spec"]["extProc"][0]["backendSettings"]
    return {part["connection"]["bufferLimit"] for part in (*policies, asks)}


@pytest.mark.parametrize(
    ("limits", "size"),
    [(None, "32Mi"), ({"maxBodyBytes": 8 * 2**20}, "8Mi"), ({"maxBodyBytes": 1000}, "1000")],
)
def test_envoy_buffers_the_largest_body_that_the_pool_takes(limits: Object | None, size: str) -> None:
    assert buffers(objects({}, limits=limits)) == {size}


def test_pools_that_share_a_gateway_get_the_largest_buffer() -> None:
    """Whichever of them looks last, so that they do not take turns."""
    first = objects({}, limits={"maxBodyBytes": 64 * 2**20})[OURS]
    second = objects({}, first)[OURS]
    assert second["spec"]["connection"] == first["spec"]["connection"] == {"bufferLimit": "64Mi"}


def test_a_pools_own_matches() -> None:
    matches = [{"path": {"type": "PathPrefix", "value": "/coder/v1"}}]
    (rule,) = objects({"matches": matches})["HTTPRoute", "p"]["spec"]["rules"]
    assert rule["matches"] == matches


def test_a_route_of_ones_own_is_what_the_policies_are_about() -> None:
    made = objects({"route": "mine"})
    assert "HTTPRoute" not in {kind for kind, _ in made}
    for kind in ("BackendTrafficPolicy", "EnvoyExtensionPolicy"):
        (target,) = made[kind, "p"]["spec"]["targetRefs"]
        assert (target["kind"], target["name"]) == ("HTTPRoute", "mine")
    with pytest.raises(SpecError, match=r"spec\.gateway\.route"):
        convert(
            {
                "model": {"name": "m"},
                "gateway": {"route": "r", "mode": "inferenceExtension", "parent": {"name": "g"}},
            }
        )


def test_a_pool_that_names_no_matches_gets_the_paths_that_the_gateway_supports() -> None:
    """So that no other reaches an engine while no gateway runs."""
    (rule,) = objects({})["HTTPRoute", "p"]["spec"]["rules"]
    values = {(match["path"]["type"], match["path"]["value"]) for match in rule["matches"]}
    assert {("Exact", path) for path in (*paths.GENERATING, *paths.POOLING)} <= values
    assert {value for kind, value in values if kind == "PathPrefix"} == {"/v1/models", "/v1/responses"}
    assert len(rule["matches"]) <= 64, "as many as a rule may have"
    assert all(is_supported(value) for _, value in values)


def test_envoy_answers_at_other_paths_with_those_that_are_supported() -> None:
    """In the form of OpenAI's errors, also while no gateway runs."""
    made = objects({"hostnames": ["a.test"]}, kinds=KINDS | {"gateway.envoyproxy.io/HTTPRouteFilter"})
    routes = [made["HTTPRoute", name]["spec"] for name in ("p", "p-refused")]
    (served,), (rule,) = (route["rules"] for route in routes)
    assert routes[0]["parentRefs"] == routes[1]["parentRefs"]
    assert routes[0]["hostnames"] == routes[1]["hostnames"] == ["a.test"]
    prefixes = [match["path"]["value"] for match in rule["matches"]]
    assert {"/v1", "/inference"} <= set(prefixes)
    assert "/" not in prefixes, "the host may have other routes"
    assert not any(map(is_supported, prefixes))
    assert "backendRefs" not in rule, "nothing of this rule reaches an engine"
    (reference,) = [each["extensionRef"] for each in rule["filters"]]
    answer = made[reference["kind"], reference["name"]]["spec"]["directResponse"]
    assert (answer["statusCode"], answer["contentType"]) == (404, "application/json")
    error = json.loads(answer["body"]["inline"])["error"]
    named = error["message"].partition("Supported are ")[2].split(", ")
    assert {path.removesuffix("/ID") for path in named} == {m["path"]["value"] for m in served["matches"]}
    assert error["code"] == "not_found"
    assert len(answer["body"]["inline"]) <= 4096, "as long as Envoy lets it be"
    assert "%" not in answer["body"]["inline"], "Envoy would take it for a variable"


@pytest.mark.parametrize("opens", [True, False])
def test_no_gateway_is_asked_about_what_envoy_refuses(opens: bool) -> None:
    """Without one, and without failOpen, the answer would be 503."""
    made = objects({"failOpen": opens}, kinds=KINDS | {"gateway.envoyproxy.io/HTTPRouteFilter"})
    named = [
        target["name"] for obj in made.values() for target in obj.get("spec", {}).get("targetRefs") or ()
    ]
    assert "p" in named
    assert "p-refused" not in named
    assert ("HTTPRoute", "p-refused") in made


@pytest.mark.parametrize("gateway", [{"matches": [{"path": {"value": "/x"}}]}, {"route": "mine"}])
def test_a_user_who_names_requests_also_says_what_happens_to_others(gateway: Object) -> None:
    made = objects(gateway, kinds=KINDS | {"gateway.envoyproxy.io/HTTPRouteFilter"})
    assert "HTTPRouteFilter" not in {kind for kind, _ in made}
    assert ("HTTPRoute", "p-refused") not in made
