"""How requests reach the gateway and then an engine: a route, and the policies that go with it.

Envoy Gateway is configured by six objects: an HTTPRoute to one Service that selects all engine pods, another
HTTPRoute with an HTTPRouteFilter that answers where a path is not supported, a BackendTrafficPolicy that
obeys the picked endpoint, an EnvoyExtensionPolicy that asks the gateway, and a ClientTrafficPolicy on the
Gateway that removes a destination that a client sends itself (with failOpen, Envoy would obey it). The
refusals have a route of their own because no policy is about it: Envoy answers there without a gateway, also
where the pool does not fail open. The ClientTrafficPolicy belongs to the Gateway: pools that share a Gateway
share it, and it must be in the Gateway's namespace, so the operator creates it only if that is the pool's,
the spec allows it, and no other is there: of two policies for one Gateway, Envoy Gateway takes only the
older. An implementation of the inference extension gets an
InferencePool whose endpoint picker is the gateway's Service.
"""

from collections.abc import Iterator, Sequence

from perilune_api import names, paths
from perilune_api.inference_pool.gateway import GatewayMode, ParentRef
from perilune_api.pool import SpecError
from perilune_api.quantities import quantity
from perilune_operator.kinds import ENVOY_GATEWAY, GATEWAY_API, INFERENCE
from perilune_operator.observe.facts import MANAGED_BY, MANAGER, Object
from perilune_operator.render.endpoints import with_duty
from perilune_operator.render.gateway import EXT_PROC_PORT
from perilune_operator.render.objects import Context, size

EXACT: Sequence[str] = (
    *paths.GENERATING,
    *paths.POOLING,
    *(path for path in paths.COUNTING if path.startswith("/v1/")),
)
PATHS: Sequence[Object] = (
    *({"path": {"type": "Exact", "value": path}} for path in EXACT),
    *({"path": {"type": "PathPrefix", "value": path}} for path in paths.PREFIXES),
)
"""The requests of a pool that names no matches: those that the gateway supports, so that no other reaches an
engine while no gateway runs."""
REFUSED: Sequence[Object] = tuple({"path": {"type": "PathPrefix", "value": path}} for path in paths.REFUSED)
"""What Envoy itself answers with a 404 that names the supported paths. It is not all the rest of a host,
which may belong to other routes."""
AT_ONCE = 65_536
"""Requests that one Envoy may have under way to the engines, and so to the gateway; one may run for minutes.
Envoy's default is 1,024, above which it would answer 503, but refusing requests is the gateway's
decision."""
BREAKER: Object = {
    "maxConnections": AT_ONCE,
    "maxPendingRequests": AT_ONCE,
    "maxParallelRequests": AT_ONCE,
}


HEALTH_CHECK: Object = {
    # Finds engines that are frozen or gone, even while no gateway runs.
    "active": {
        "type": "HTTP",
        "http": {"path": "/health", "expectedStatuses": [200]},
        "interval": "2s",
        "timeout": "2s",
        "unhealthyThreshold": 3,
        "healthyThreshold": 1,
    },
    # A coarse net below the gateway's own ejection, which compares engines and asks before it comes back.
    "passive": {
        "consecutive5XxErrors": 10,
        "consecutiveGatewayErrors": 5,
        "interval": "1s",
        "baseEjectionTime": "5s",
        "maxEjectionPercent": 50,
    },
}
"""When Envoy itself leaves an engine out. The next destination that the gateway named takes its place."""
GATEWAY_PING: Object = {"interval": "2s", "timeout": "1s"}
"""When Envoy closes its connection to a gateway. Its requests then go to another one, or on without it, and
the answers of engines no longer wait to be told to it. Not for pools that do not fail open: Envoy would break
off their answers that have begun. Envoy does not check gateways' health: of a cluster without a healthy
gateway it asks only each minute (Envoy Gateway cannot set `no_traffic_interval`), and it keeps a gateway that
has left while its last check was good."""


def mode(pool: Context) -> GatewayMode:
    """Return the mode of the spec, where `auto` is replaced by what this cluster offers."""
    given = pool.spec.gateway.mode
    if given is not GatewayMode.AUTO:
        return given
    if not pool.has("HTTPRoute"):
        return GatewayMode.NONE
    if pool.has("EnvoyExtensionPolicy"):
        return GatewayMode.ENVOY_GATEWAY
    return GatewayMode.INFERENCE_EXTENSION if pool.has("InferencePool") else GatewayMode.NONE


def _asked_again(fail_open: bool) -> Object:
    """Return how often and at which intervals Envoy asks gateways again that did not answer. If requests are
    then served without a gateway, they wait at most 0.1 s; otherwise a gateway has seconds to come back."""
    if fail_open:
        retries, base, longest = 3, "10ms", "25ms"
    else:
        retries, base, longest = 8, "25ms", "500ms"
    return {
        "numRetries": retries,
        "perRetry": {"backOff": {"baseInterval": base, "maxInterval": longest}},
    }


def routing(pool: Context) -> Iterator[Object]:
    """Yield all objects of the route; none without a Gateway to attach it to, or without the APIs."""
    made, parent = mode(pool), pool.spec.gateway.parent
    if made is GatewayMode.ENVOY_GATEWAY and parent is not None:
        if not pool.spec.gateway.route:
            yield _route(pool, parent, _services(pool))
            if pool.has("HTTPRouteFilter") and not pool.spec.gateway.matches:
                yield _refusing(pool, parent)
                yield _refusal(pool)
        yield from _envoy_policies(pool, parent)
    if made is GatewayMode.INFERENCE_EXTENSION:
        yield _inference_pool(pool)
        if parent is not None:
            yield _route(pool, parent, [{"group": INFERENCE, "kind": "InferencePool", "name": pool.name}])


def _services(pool: Context) -> list[Object]:
    """Return one Service, also for the engines of several pools: Envoy Gateway shares out requests among
    backends before it looks for the endpoint that the gateway chose, so a pool without engines would take the
    others' requests. Engines with several ports are several backends, of one Service and one cluster."""
    if (selector := pool.spec.engine.selector) is not None:
        ports = range(names.ENGINE_PORT, names.ENGINE_PORT + 1 + len(selector.further_ports))
        return [{"name": pool.name, "port": port} for port in ports]
    others, models = pool.spec.gateway.serves, names.models_name(pool.name)
    of_all = (models,) if pool.one_backend else (pool.name, *others)
    return [{"name": name, "port": names.ENGINE_PORT} for name in (of_all if others else (pool.name,))]


def _route(pool: Context, parent: ParentRef, backends: list[Object]) -> Object:
    matches = list(pool.spec.gateway.matches or PATHS)
    rule = {"matches": matches, "backendRefs": backends, "timeouts": {"request": "0s"}}
    return _http_route(pool, pool.name, parent, rule)


def _refusing(pool: Context, parent: ParentRef) -> Object:
    """Return the route of the requests that Envoy refuses."""
    reference = {"group": ENVOY_GATEWAY, "kind": "HTTPRouteFilter", "name": pool.name}
    rule = {"matches": list(REFUSED), "filters": [{"type": "ExtensionRef", "extensionRef": reference}]}
    return _http_route(pool, names.refusals_name(pool.name), parent, rule)


def _http_route(pool: Context, name: str, parent: ParentRef, rule: Object) -> Object:
    reference = {
        "name": parent.name,
        **({"namespace": parent.namespace} if parent.namespace else {}),
        **({"sectionName": parent.section_name} if parent.section_name else {}),
    }
    hosts = list(pool.spec.gateway.hostnames)
    spec = {"parentRefs": [reference], **({"hostnames": hosts} if hosts else {}), "rules": [rule]}
    return pool.object("HTTPRoute", name, "gateway", spec=spec)


def _refusal(pool: Context) -> Object:
    answer = {
        "statusCode": 404,
        "contentType": "application/json",
        "body": {"type": "Inline", "inline": paths.refusal((*EXACT, paths.MODELS, f"{paths.RESPONSES}/ID"))},
    }
    return pool.object("HTTPRouteFilter", pool.name, "gateway", spec={"directResponse": answer})


def _envoy_policies(pool: Context, parent: ParentRef) -> Iterator[Object]:
    route = [{"group": GATEWAY_API, "kind": "HTTPRoute", "name": pool.spec.gateway.route or pool.name}]
    header, buffer = names.DESTINATION_HEADER, pool.spec.routing.limits.max_body_bytes
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
            "connection": {"bufferLimit": size(buffer)},
            # A request on an open connection to a node that has vanished would wait for as long as the kernel
            # sends it again, a quarter of an hour; one on a new connection waits for connectTimeout.
            "circuitBreaker": {**BREAKER, "maxRequestsPerConnection": 1},
            "healthCheck": HEALTH_CHECK,
            "timeout": {"tcp": {"connectTimeout": "1s"}, "http": {"requestTimeout": "0s"}},
            "retry": {
                "numRetries": 1,  # a prompt that ends engines ends two at most
                # Requests that no engine has begun to answer, so that a lost node fails none of them (reset),
                # nor one whose engine has died while its HTTP server still answers, with 500.
                "retryOn": {
                    "triggers": ["connect-failure", "refused-stream", "reset", "retriable-status-codes"],
                    "httpStatusCodes": [500],
                },
            },
            # detects a lost node while an answer is awaited
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
                    "messageTimeout": _message_timeout(pool),
                    "failOpen": pool.spec.gateway.fail_open,
                    "statusOnError": 503,
                    "processingMode": {
                        "allowModeOverride": True,
                        "request": {"body": "Buffered"},
                        # the endpoint that really served, so that a failed pick is not repeated, and whether
                        # it broke off
                        "response": {"attributes": ["upstream.address", names.CODE_DETAILS]},
                    },
                    "metadata": {"writableNamespaces": [names.DESTINATION_NAMESPACE]},
                    "backendSettings": {
                        "retry": {
                            **_asked_again(pool.spec.gateway.fail_open),
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
                        "http2": {
                            "initialStreamWindowSize": "16Mi",
                            "initialConnectionWindowSize": "16Mi",
                            **({"connectionKeepalive": GATEWAY_PING} if pool.spec.gateway.fail_open else {}),
                        },
                        "connection": {"bufferLimit": size(buffer)},
                        "circuitBreaker": dict(BREAKER),
                        "timeout": {"tcp": {"connectTimeout": "1s"}},
                    },
                }
            ],
        },
    )
    if may_create_client_policy(pool, parent):
        there = [p["spec"].get("connection", {}).get("bufferLimit", 0) for p in _ours(pool)]
        largest = max([buffer, *(int(quantity(limit)) for limit in there)])  # of this Gateway's pools
        shared = pool.object(
            "ClientTrafficPolicy",
            shared_policy_name(parent),
            "gateway",
            spec={
                "targetRefs": [{"group": GATEWAY_API, "kind": "Gateway", "name": parent.name}],
                "connection": {"bufferLimit": size(largest)},
                "headers": {"earlyRequestHeaders": {"remove": [header, *names.INTERNAL_HEADERS]}},
            },
        )
        yield _shared(shared)


def _message_timeout(pool: Context) -> str:
    """Return the timeout. The same time in another form makes a new generation of the policy, on which Envoy
    Gateway reports again."""
    return f"{'0h' if pool.judge_again else ''}{pool.spec.routing.message_timeout_s}s"


def may_create_client_policy(pool: Context, parent: ParentRef) -> bool:
    here = parent.namespace in ("", pool.namespace)
    return here and pool.spec.gateway.client_traffic_policy == "create" and not foreign_policies(pool)


def foreign_policies(pool: Context) -> list[Object]:
    """Return the ClientTrafficPolicies of others that are there for the pool's Gateway."""
    return [p for p in pool.client_policies if not _is_ours(p)]


def _ours(pool: Context) -> list[Object]:
    return [p for p in pool.client_policies if _is_ours(p)]


def _is_ours(policy: Object) -> bool:
    return (policy["metadata"].get("labels") or {}).get(MANAGED_BY) == MANAGER


def is_for(policy: Object, parent: ParentRef) -> bool:
    """Return whether a ClientTrafficPolicy in the Gateway's namespace is for this Gateway, or for a listener
    of it."""
    spec = policy.get("spec") or {}
    targets = [*(spec.get("targetRefs") or ()), *([spec["targetRef"]] if spec.get("targetRef") else [])]
    return any(t.get("kind") == "Gateway" and t.get("name") == parent.name for t in targets)


def removes_destination(policy: Object) -> bool:
    """Return whether a ClientTrafficPolicy keeps clients from choosing their endpoint."""
    early = ((policy.get("spec") or {}).get("headers") or {}).get("earlyRequestHeaders") or {}
    return names.DESTINATION_HEADER in [name.lower() for name in early.get("remove") or ()]


def buffers(policy: Object, needed_bytes: int) -> bool:
    """Return whether a ClientTrafficPolicy lets bodies of this size in. Envoy Gateway's default is 32 KiB."""
    given = ((policy.get("spec") or {}).get("connection") or {}).get("bufferLimit", 0)
    try:
        return quantity(given) >= needed_bytes
    except ValueError:
        return False


def shared_policy_name(parent: ParentRef) -> str:
    """Return the name of the ClientTrafficPolicy of all pools behind one Gateway."""
    return f"{parent.name}-perilune"


def _shared(obj: Object) -> Object:
    """Return an object owned by every pool that wants it. No pool controls it, and no pool's label makes it
    prunable."""
    meta = obj["metadata"]
    owners = [{k: v for k, v in o.items() if k != "controller"} for o in meta["ownerReferences"]]
    labels = {k: v for k, v in meta["labels"].items() if k != names.POOL_LABEL}
    return {**obj, "metadata": {**meta, "ownerReferences": owners, "labels": labels}}


def _inference_pool(pool: Context) -> Object:
    """Render the InferencePool. Raises SpecError for selected engines of which only the name of a port is
    known."""
    selector = pool.spec.engine.selector
    ports = (names.ENGINE_PORT,) if selector is None else (selector.port, *selector.further_ports)
    if not all(isinstance(port, int) for port in ports):
        words = "An InferencePool of the inference extension has the numbers of ports: give them here"
        raise SpecError(f"{words} - at `$.spec.engine.selector.port`")
    labels = with_duty(pool, "serve") if selector is None else dict(selector.labels)
    made = pool.object(
        "InferencePool",
        pool.name,
        "gateway",
        spec={
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {
                "name": names.gateway_name(pool.name),
                "port": {"number": EXT_PROC_PORT},
                "failureMode": "FailOpen" if pool.spec.gateway.fail_open else "FailClose",
            },
        },
    )
    if pool.spec.gateway.tls is None:
        made["metadata"]["annotations"] = {names.PICKER_PROTOCOL: "h2c"}
    return made
