"""Who may talk to whom, for clusters whose network enforces it: one NetworkPolicy for each component.

Engines serve whoever can reach their port, since Envoy sends requests there; what else they open, and the
store, is for the pool's own pods; gateways answer the Gateway's Envoys.
"""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.inference_pool.gateway import GatewayMode
from perilune_operator.kinds import ENVOY_GATEWAY
from perilune_operator.observe.facts import Object
from perilune_operator.render import mooncake
from perilune_operator.render.endpoints import nodes_per_endpoint
from perilune_operator.render.gateway import EXT_PROC_PORT
from perilune_operator.render.objects import Context
from perilune_operator.render.routing import mode

ENVOY: Object = {
    "app.kubernetes.io/name": "envoy",
    "app.kubernetes.io/component": "proxy",
    "app.kubernetes.io/managed-by": "envoy-gateway",
}
"""Labels of every Envoy that Envoy Gateway runs (its internal/infrastructure/kubernetes/proxy, v1.9)."""
METRICS_LABEL = "perilune.dev/metrics"
"""On a namespace, `true`: its pods may scrape ours."""


def network_policies(pool: Context) -> Iterator[Object]:
    mine = {"podSelector": {"matchLabels": {names.POOL_LABEL: pool.name}}}
    watchers = [
        mine,
        {"namespaceSelector": {"matchLabels": {METRICS_LABEL: "true"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": pool.defaults.namespace}}},
    ]
    yield _allow(pool, "engine", [{"ports": _ports(names.ENGINE_PORT)}, {"from": [mine]}])
    if nodes_per_endpoint(pool) > 1:  # who reaches a worker's queues can run what he likes there
        yield _allow(pool, "engine-worker", [{"from": [mine]}])
    yield _allow(
        pool,
        "gateway",
        [
            {"ports": _ports(EXT_PROC_PORT), **_askers(pool)},
            {"ports": _ports(names.ADMIN_PORT), "from": watchers},
        ],
    )
    if pool.spec.mooncake.store.enabled:
        yield _allow(
            pool,
            "master",
            [{"from": [mine]}, {"ports": _ports(mooncake.HTTP_PORT), "from": watchers}],
        )


def _askers(pool: Context) -> Object:
    """Who may ask for decisions: the Gateway's own Envoys. Envoy Gateway runs them in its namespace or in
    the Gateway's, so labels tell them; where Gateways of a class share their Envoys, these bear the class's,
    and it can run no others for a Gateway whose name is too long for a label.
    Other gateways have no labels that we know: anybody may ask."""
    parent = pool.spec.gateway.parent
    if mode(pool) is not GatewayMode.ENVOY_GATEWAY or parent is None:
        return {}
    owner = {
        f"{ENVOY_GATEWAY}/owning-gateway-name": parent.name,
        f"{ENVOY_GATEWAY}/owning-gateway-namespace": parent.namespace or pool.namespace,
    }
    shared = {"key": f"{ENVOY_GATEWAY}/owning-gatewayclass", "operator": "Exists"}
    envoys = [{"matchLabels": ENVOY | owner}, {"matchLabels": ENVOY, "matchExpressions": [shared]}]
    able = envoys if len(parent.name) <= names.LONGEST_LABEL else envoys[1:]
    return {"from": [{"namespaceSelector": {}, "podSelector": envoy} for envoy in able]}


def _allow(pool: Context, component: names.Component, ingress: list[Object]) -> Object:
    return pool.object(
        "NetworkPolicy",
        f"{pool.name}-{component}",
        component,
        spec={
            "podSelector": {"matchLabels": pool.labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    )


def _ports(*ports: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
