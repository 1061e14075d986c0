"""One NetworkPolicy for each component, for clusters whose network enforces them.

An engine's HTTP port and a gateway are open to the Gateway's Envoys and to `gateway.clients`. Where Envoys
cannot be known and no clients are given, they are open to all. Everything of the pool is open to the pool's
own pods, except for the server of shared state, which is open to the pool's gateways alone. Ports with
metrics are also open to namespaces with METRICS_LABEL, and those of gateways to the operator's namespace. An
engine's port for metrics has nothing else (engine_door.py). Mooncake's master serves them at the same port as
requests that empty the store, so it is the pool's alone. Engines that others run (engine.selector) get no
policy.

Peers of other namespaces are named by their namespace, and labels of pods only choose among its pods:
anybody who may create a pod can give it any label."""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.inference_pool.gateway import GatewayMode
from perilune_operator.kinds import ENVOY_GATEWAY
from perilune_operator.observe.facts import Object
from perilune_operator.observe.readers import NAMESPACE_NAME
from perilune_operator.render import shared_state
from perilune_operator.render.endpoints import nodes_per_endpoint, ranks, with_duty
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
"""Label of a namespace; with the value `true`, its pods may scrape metrics of the pool."""


def network_policies(pool: Context) -> Iterator[Object]:
    mine = {"podSelector": {"matchLabels": {names.POOL_LABEL: pool.name}}}
    scrapers = {"namespaceSelector": {"matchLabels": {METRICS_LABEL: "true"}}}
    callers = _callers(pool)
    served = {"from": callers} if callers is not None else {}
    scraped = {"ports": _ports(names.METRICS_PORT), "from": [scrapers]}
    inside = [mine]
    if server := pool.spec.gateway.served_by:
        labels = {names.POOL_LABEL: server, names.COMPONENT_LABEL: "gateway"}
        inside.append({"podSelector": {"matchLabels": labels}})
    if pool.spec.engine.selector is None:
        yield _allow(
            pool,
            "engine",
            [{"from": inside}, {"ports": _ports(names.ENGINE_PORT), **served}, scraped],
            with_duty(pool, "serve"),
        )
    if pool.spec.prefill_replicas:
        yield _allow(pool, "prefill", [{"from": [mine]}, scraped], with_duty(pool, "prefill"))
    if nodes_per_endpoint(pool) > 1:  # a client of a worker's queues could run any code there
        yield _allow(pool, "engine-worker", [{"from": inside if ranks(pool) > 1 else [mine]}])
    if not server:
        yield _allow(
            pool,
            "gateway",
            [
                {"ports": _ports(EXT_PROC_PORT), **({} if callers is None else {"from": callers})},
                {
                    "ports": _ports(names.ADMIN_PORT),
                    "from": [mine, scrapers, _namespaces(pool.defaults.namespace)],
                },
            ],
        )
    if shared_state.is_managed(pool.spec.gateway):
        gateways = {"podSelector": {"matchLabels": pool.labels("gateway")}}
        yield _allow(pool, "state", [{"ports": _ports(shared_state.PORT), "from": [gateways]}])
    if pool.spec.mooncake.store.enabled:
        yield _allow(pool, "master", [{"from": inside}])


def _callers(pool: Context) -> list[Object] | None:
    """Return the peers that may send requests and ask for decisions: those that the pool names, and the
    Gateway's own Envoys; None if anyone may. Envoy Gateway runs its Envoys in its own namespace or the
    Gateway's. Envoys that the Gateways of a class share carry the class's label instead; a Gateway whose name
    is too long for a label can only have shared ones. The labels of other implementations' Envoys are
    unknown."""
    given, parent = list(pool.spec.gateway.clients), pool.spec.gateway.parent
    by_envoy_gateway = mode(pool) is GatewayMode.ENVOY_GATEWAY or pool.spec.gateway.served_by
    if not by_envoy_gateway or parent is None:
        return given or None
    owner = {
        f"{ENVOY_GATEWAY}/owning-gateway-name": parent.name,
        f"{ENVOY_GATEWAY}/owning-gateway-namespace": parent.namespace or pool.namespace,
    }
    shared = {"key": f"{ENVOY_GATEWAY}/owning-gatewayclass", "operator": "Exists"}
    envoys = [{"matchLabels": ENVOY | owner}, {"matchLabels": ENVOY, "matchExpressions": [shared]}]
    able = envoys if len(parent.name) <= names.LONGEST_LABEL else envoys[1:]
    where = _namespaces(*pool.defaults.envoy_namespaces, parent.namespace or pool.namespace)
    return [*given, *({**where, "podSelector": envoy} for envoy in able)]


def _namespaces(*names: str) -> Object:
    """Return a peer: these namespaces, by the label that the API server gives each of them."""
    one_of = {"key": NAMESPACE_NAME, "operator": "In", "values": sorted(set(names))}
    return {"namespaceSelector": {"matchExpressions": [one_of]}}


def _allow(
    pool: Context, component: names.Component, ingress: list[Object], pods: dict[str, str] | None = None
) -> Object:
    """Return a policy. `pods`: the labels that select the pods; without them, those of the component."""
    return pool.object(
        "NetworkPolicy",
        f"{pool.name}-{component}",
        component,
        spec={
            "podSelector": {"matchLabels": pods or pool.labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    )


def _ports(*ports: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
