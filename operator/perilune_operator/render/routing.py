"""How requests come to the gateway, and with its answer to an engine: a route, and what stands beside it.

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
from perilune_operator.kinds import GATEWAY_API, INFERENCE
from perilune_operator.observe.facts import Object
from perilune_operator.render.gateway import EXT_PROC_PORT
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


def routing(pool: Context) -> Iterator[Object]:
    """All of it; nothing where there is no Gateway to attach a route to, or nobody who would read it."""
    made, parent = mode(pool), pool.spec.gateway.parent
    if made is GatewayMode.ENVOY_GATEWAY and parent is not None:
        yield _route(pool, parent, {"name": pool.name, "port": names.ENGINE_PORT})
        yield from _envoy_policies(pool, parent)
    if made is GatewayMode.INFERENCE_EXTENSION:
        yield _inference_pool(pool)
        if parent is not None:
            yield _route(pool, parent, {"group": INFERENCE, "kind": "InferencePool", "name": pool.name})


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
