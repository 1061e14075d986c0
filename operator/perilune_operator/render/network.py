"""How requests come to the gateway, who may talk to whom, who scrapes.

Envoy Gateway is told with four stock objects: an HTTPRoute to one Service that selects all engine pods, a
BackendTrafficPolicy that obeys the picked endpoint, an EnvoyExtensionPolicy that asks the gateway, and a
ClientTrafficPolicy on the Gateway that takes away a destination that a client sends itself (with fail-open
it would be obeyed). The last is per Gateway: pools that share one share it, and it can only be ours in the
pool's own namespace. A gateway of the inference extension is given an InferencePool whose picker is our
Service.
"""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.inference_pool.gateway import GatewayMode, ParentRef
from perilune_operator.kinds import ENVOY_GATEWAY, GATEWAY_API, INFERENCE
from perilune_operator.observe import Object
from perilune_operator.render import mooncake
from perilune_operator.render.endpoints import nodes_per_endpoint
from perilune_operator.render.gateway import ADMIN_PORT, EXT_PROC_PORT
from perilune_operator.render.objects import Context

BUFFER = "32Mi"
AT_ONCE = 65_536
"""Requests that one Envoy may have under way to the engines, and so to the gateway: every running answer is
one, for minutes. Of more than its own 1,024 it would answer 503; who is refused is the gateway's business."""
BREAKER: Object = {
    "maxConnections": AT_ONCE,
    "maxPendingRequests": AT_ONCE,
    "maxParallelRequests": AT_ONCE,
}
ENVOY: Object = {
    "app.kubernetes.io/name": "envoy",
    "app.kubernetes.io/component": "proxy",
    "app.kubernetes.io/managed-by": "envoy-gateway",
}
"""Labels of every Envoy that Envoy Gateway runs (its internal/infrastructure/kubernetes/proxy, v1.9)."""
METRICS_LABEL = "perilune.dev/metrics"
"""On a namespace, `true`: its pods may scrape ours."""


def mode(pool: Context) -> GatewayMode:
    """What `auto` stands for in this cluster."""
    given = pool.spec.gateway.mode
    if given is not GatewayMode.AUTO:
        return given
    if not pool.has("HTTPRoute"):
        return GatewayMode.NONE
    if pool.has("EnvoyExtensionPolicy"):
        return GatewayMode.ENVOY_GATEWAY
    return GatewayMode.INFERENCE_EXTENSION if pool.has("InferencePool") else GatewayMode.NONE


def network(pool: Context) -> Iterator[Object]:
    """Routes, policies, monitors."""
    made, parent = mode(pool), pool.spec.gateway.parent
    if made is GatewayMode.ENVOY_GATEWAY and parent is not None:
        yield _route(pool, parent, {"name": pool.name, "port": names.ENGINE_PORT})
        yield from _envoy_policies(pool, parent)
    if made is GatewayMode.INFERENCE_EXTENSION:
        yield _inference_pool(pool)
        if parent is not None:
            yield _route(pool, parent, {"group": INFERENCE, "kind": "InferencePool", "name": pool.name})
    yield from _policies(pool)
    if pool.has("PodMonitor"):
        yield _monitor(pool, "engine", "http", "PodMonitor")
        if pool.spec.mooncake.store.enabled:
            yield _monitor(pool, "master", "http", "PodMonitor")
    if pool.has("ServiceMonitor"):
        yield _monitor(pool, "gateway", "admin", "ServiceMonitor")


def _monitor(pool: Context, component: names.Component, port: str, kind: str) -> Object:
    """The gateway's by its Service, which is the object that the engines' autoscaler asks about. Its metrics
    have a label `endpoint`, as every scraped port has: theirs is kept."""
    pods = kind == "PodMonitor"
    scraped = {"port": port, "path": "/metrics", "interval": "15s"}
    made = pool.object(
        kind,
        f"{pool.name}-{component}",
        component,
        spec={
            "selector": {"matchLabels": pool.labels(component)},
            "podMetricsEndpoints" if pods else "endpoints": [
                scraped if pods else {**scraped, "honorLabels": True}
            ],
            "podTargetLabels": [names.POOL_LABEL],
        },
    )
    made["metadata"]["labels"] = {**pool.defaults.monitor_labels, **made["metadata"]["labels"]}
    return made


def _route(pool: Context, parent: ParentRef, backend: Object) -> Object:
    spec = pool.spec.gateway
    reference = {
        "name": parent.name,
        **({"namespace": parent.namespace} if parent.namespace else {}),
        **({"sectionName": parent.section_name} if parent.section_name else {}),
    }
    return pool.object(
        "HTTPRoute",
        pool.name,
        "gateway",
        spec={
            "parentRefs": [reference],
            **({"hostnames": list(spec.hostnames)} if spec.hostnames else {}),
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                    "backendRefs": [backend],
                    "timeouts": {"request": "0s"},
                }
            ],
        },
    )


def _envoy_policies(pool: Context, parent: ParentRef) -> Iterator[Object]:
    route = [{"group": GATEWAY_API, "kind": "HTTPRoute", "name": pool.name}]
    header = names.DESTINATION_HEADER
    yield pool.object(
        "BackendTrafficPolicy",
        pool.name,
        "gateway",
        spec={
            "targetRefs": route,
            "loadBalancer": {
                "type": "LeastRequest",
                "endpointOverride": {"extractFrom": [{"header": header}]},
            },
            "connection": {"bufferLimit": BUFFER},
            "circuitBreaker": dict(BREAKER),
            "timeout": {"tcp": {"connectTimeout": "1s"}, "http": {"requestTimeout": "0s"}},
            "retry": {
                "numRetries": 2,
                # reset: whatever no engine has begun to answer; a lost node then costs nobody a request
                "retryOn": {"triggers": ["connect-failure", "refused-stream", "reset"]},
            },
            # of a connection to a lost node, on which an answer is awaited
            "tcpKeepalive": {"probes": 3, "idleTime": "1s", "interval": "1s"},
        },
    )
    yield pool.object(
        "EnvoyExtensionPolicy",
        pool.name,
        "gateway",
        spec={
            "targetRefs": route,
            "extProc": [
                {
                    "backendRefs": [{"name": names.gateway_name(pool.name), "port": EXT_PROC_PORT}],
                    "messageTimeout": "2s",
                    "failOpen": pool.spec.gateway.fail_open,
                    "statusOnError": 503,
                    "processingMode": {
                        "allowModeOverride": True,
                        "request": {"body": "Buffered"},
                        # who really served: a pick that failed is then known, and not made again
                        "response": {"attributes": ["upstream.address"]},
                    },
                    "metadata": {"writableNamespaces": [names.DESTINATION_NAMESPACE]},
                    "backendSettings": {
                        "retry": {
                            "numRetries": 8,
                            "perRetry": {"backOff": {"baseInterval": "25ms", "maxInterval": "500ms"}},
                            "retryOn": {
                                "triggers": [
                                    "connect-failure",
                                    "refused-stream",
                                    "reset",
                                    "unavailable",
                                    "cancelled",
                                ]
                            },
                        },
                        "http2": {"initialStreamWindowSize": "16Mi", "initialConnectionWindowSize": "16Mi"},
                        "connection": {"bufferLimit": BUFFER},
                        "circuitBreaker": dict(BREAKER),
                    },
                }
            ],
        },
    )
    if parent.namespace in ("", pool.namespace):
        shared = pool.object(
            "ClientTrafficPolicy",
            shared_policy_name(parent),
            "gateway",
            spec={
                "targetRefs": [{"group": GATEWAY_API, "kind": "Gateway", "name": parent.name}],
                "connection": {"bufferLimit": BUFFER},
                "headers": {"earlyRequestHeaders": {"remove": [header]}},
            },
        )
        yield _shared(shared)


def shared_policy_name(parent: ParentRef) -> str:
    """Of the ClientTrafficPolicy of all pools behind one Gateway."""
    return f"{parent.name}-perilune"


def _shared(obj: Object) -> Object:
    """Owned by every pool that wants it: no one controls it, and no pool's label marks it for pruning."""
    meta = obj["metadata"]
    owners = [{k: v for k, v in o.items() if k != "controller"} for o in meta["ownerReferences"]]
    labels = {k: v for k, v in meta["labels"].items() if k != names.POOL_LABEL}
    return {**obj, "metadata": {**meta, "ownerReferences": owners, "labels": labels}}


def _inference_pool(pool: Context) -> Object:
    return pool.object(
        "InferencePool",
        pool.name,
        "gateway",
        spec={
            "selector": {"matchLabels": pool.labels("engine")},
            "targetPorts": [{"number": names.ENGINE_PORT}],
            "endpointPickerRef": {
                "name": names.gateway_name(pool.name),
                "port": {"number": EXT_PROC_PORT},
                "failureMode": "FailOpen" if pool.spec.gateway.fail_open else "FailClose",
            },
        },
    )


def _policies(pool: Context) -> Iterator[Object]:
    """Who may talk to whom, for clusters whose network enforces it."""
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
        [{"ports": _ports(EXT_PROC_PORT), **_askers(pool)}, {"ports": _ports(ADMIN_PORT), "from": watchers}],
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
