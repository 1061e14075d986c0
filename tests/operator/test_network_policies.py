"""Who may connect to a pool's pods, by its NetworkPolicies, where the network enforces them."""

from collections.abc import Mapping
from typing import Any

import pytest

from perilune_api import names
from perilune_api.inference_pool.checks import convert
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
ENVOY_GATEWAY = ["gateway.networking.k8s.io/HTTPRoute", "gateway.envoyproxy.io/EnvoyExtensionPolicy"]
EXTENSION = ["gateway.networking.k8s.io/HTTPRoute", "inference.networking.k8s.io/InferencePool"]
ATTACHED: Object = {"parent": {"name": "edge", "namespace": "infra"}}
CLIENT: Object = {"podSelector": {"matchLabels": {"app": "batch"}}}


def envoy(gateway: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "envoy",
        "app.kubernetes.io/component": "proxy",
        "app.kubernetes.io/managed-by": "envoy-gateway",
        "gateway.envoyproxy.io/owning-gateway-name": gateway,
        "gateway.envoyproxy.io/owning-gateway-namespace": "infra",
    }


PODS: Mapping[str, tuple[str, dict[str, str]]] = {
    "engine": ("ns", {"perilune.dev/pool": "p", "perilune.dev/component": "engine"}),
    "gateway": ("ns", {"perilune.dev/pool": "p", "perilune.dev/component": "gateway"}),
    "state": ("ns", {"perilune.dev/pool": "p", "perilune.dev/component": "state"}),
    "other pool": ("ns", {"perilune.dev/pool": "q", "perilune.dev/component": "gateway"}),
    "neighbour": ("ns", {"app": "web"}),
    "batch": ("ns", {"app": "batch"}),
    "envoy": ("envoy-gateway-system", envoy("edge")),
    "other envoy": ("envoy-gateway-system", envoy("other")),
    "envoy beside its Gateway": ("infra", envoy("edge")),
    "pod with an envoy's labels": ("web", envoy("edge")),
    "pod with a gateway's labels": ("web", {"perilune.dev/pool": "p", "perilune.dev/component": "gateway"}),
    "prometheus": ("monitoring", {}),
    "operator": ("perilune-system", {}),
}
NAMESPACES: Mapping[str, dict[str, str]] = {"monitoring": {"perilune.dev/metrics": "true"}}
POOLS_OWN = {"engine", "gateway", "state"}
ENVOYS = {"envoy", "envoy beside its Gateway"}


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    named = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    rules = selector.get("matchExpressions", [])
    return named and all(
        rule["key"] in labels and (rule["operator"] == "Exists" or labels[rule["key"]] in rule["values"])
        for rule in rules
    )


def matches(peer: Object, namespace: str, labels: Mapping[str, str]) -> bool:
    """As a NetworkPolicy of namespace ns reads it."""
    if "namespaceSelector" in peer:
        named = {"kubernetes.io/metadata.name": namespace, **NAMESPACES.get(namespace, {})}
        here = selects(peer["namespaceSelector"], named)
    else:
        here = namespace == "ns"
    return here and selects(peer.get("podSelector", {}), labels)


def callers(gateway: Object, kinds: list[str], component: str, port: int) -> set[str]:
    """Return the pods of PODS that may connect to a port of a component."""
    spec = convert({"model": {"name": "m"}, "gateway": gateway})
    made = plan("p", "ns", spec, Observed(uid="u", generation=1, kinds=frozenset(kinds)), 0.0, Defaults())
    (policy,) = (
        o
        for o in made.objects or ()
        if (o["kind"], o["metadata"]["name"]) == ("NetworkPolicy", f"p-{component}")
    )
    rules = [
        rule
        for rule in policy["spec"]["ingress"]
        if "ports" not in rule or port in [named["port"] for named in rule["ports"]]
    ]
    return {
        name
        for name, (namespace, labels) in PODS.items()
        if any("from" not in r or any(matches(p, namespace, labels) for p in r["from"]) for r in rules)
    }


def test_nobody_outside_of_the_pool_reaches_the_stores_master() -> None:
    """Its HTTP port has metrics, and requests that empty the store."""
    spec = convert({"model": {"name": "m"}, "mooncake": {"store": {"enabled": True}}, "gateway": ATTACHED})
    made = plan(
        "p", "ns", spec, Observed(uid="u", generation=1, kinds=frozenset(ENVOY_GATEWAY)), 0.0, Defaults()
    )
    (policy,) = [
        o for o in made.objects or () if o["metadata"]["name"] == "p-master" and "ingress" in o["spec"]
    ]
    peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert {name for name, (at, has) in PODS.items() if any(matches(p, at, has) for p in peers)} == POOLS_OWN


@pytest.mark.parametrize(
    ("gateway", "kinds", "component", "port", "may"),
    [
        pytest.param(
            ATTACHED,
            ENVOY_GATEWAY,
            "engine",
            8000,
            {*POOLS_OWN, *ENVOYS},
            id="an engine answers its own Gateway's Envoys, and its pool",
        ),
        pytest.param(
            ATTACHED,
            ENVOY_GATEWAY,
            "engine",
            names.METRICS_PORT,
            {*POOLS_OWN, "prometheus"},
            id="who scrapes reaches the port that has nothing but metrics",
        ),
        pytest.param(
            ATTACHED, ENVOY_GATEWAY, "engine", 5557, POOLS_OWN, id="its other ports are the pool's alone"
        ),
        pytest.param(
            ATTACHED, ENVOY_GATEWAY, "gateway", 9002, ENVOYS, id="a gateway decides for Envoys alone"
        ),
        pytest.param(
            ATTACHED,
            ENVOY_GATEWAY,
            "gateway",
            9003,
            {*POOLS_OWN, "prometheus", "operator"},
            id="its pages answer its pool, who scrapes, and the operator",
        ),
        pytest.param(
            {**ATTACHED, "clients": [CLIENT]},
            ENVOY_GATEWAY,
            "engine",
            8000,
            {*POOLS_OWN, *ENVOYS, "batch"},
            id="clients that the pool names besides",
        ),
        pytest.param(
            {**ATTACHED, "clients": [CLIENT]},
            EXTENSION,
            "engine",
            8000,
            {*POOLS_OWN, "batch"},
            id="another implementation's Envoys are those that the pool names",
        ),
        pytest.param(
            ATTACHED, EXTENSION, "engine", 8000, set(PODS), id="it names none: they cannot be known"
        ),
        pytest.param({}, ENVOY_GATEWAY, "engine", 8000, set(PODS), id="no Gateway"),
        pytest.param(
            {"replicas": 2, "clients": [CLIENT]},
            ENVOY_GATEWAY,
            "state",
            6379,
            {"gateway"},
            id="the server of shared state answers the pool's gateways alone",
        ),
    ],
)
def test_doors(gateway: Object, kinds: list[str], component: str, port: int, may: set[str]) -> None:
    assert callers(gateway, kinds, component, port) == may


def test_envoys_in_a_namespace_of_another_name_are_those_of_the_settings() -> None:
    """The chart's envoyNamespaces."""
    spec = convert({"model": {"name": "m"}, "gateway": ATTACHED})
    settings = Defaults(envoy_namespaces=("edge-system",))
    made = plan(
        "p", "ns", spec, Observed(uid="u", generation=1, kinds=frozenset(ENVOY_GATEWAY)), 0.0, settings
    )
    policies = [o for o in made.objects or () if o["kind"] == "NetworkPolicy"]
    assert "edge-system" in str(policies)
    assert "envoy-gateway-system" not in str(policies)
