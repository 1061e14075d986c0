"""The kinds of objects that the operator creates: their API, and whether every cluster has them.

`render`, `apply` and `observe` create, write and watch them by this table. For a new kind the operator also
needs a right (`charts/perilune/files`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

GATEWAY_API = "gateway.networking.k8s.io"
ENVOY_GATEWAY = "gateway.envoyproxy.io"
INFERENCE = "inference.networking.k8s.io"
MONITORING = "monitoring.coreos.com"
CERT_MANAGER = "cert-manager.io"
LEADER_WORKER_SET = "leaderworkerset.x-k8s.io"


class Kind(NamedTuple):
    """A kind of object."""

    api: str
    """Group and version; the core group has no name."""
    plural: str
    optional: bool = False
    """Whether some clusters lack it."""


KINDS: Mapping[str, Kind] = {
    "ConfigMap": Kind("v1", "configmaps"),
    "Service": Kind("v1", "services"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "Deployment": Kind("apps/v1", "deployments"),
    "Role": Kind("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io/v1", "rolebindings"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "HorizontalPodAutoscaler": Kind("autoscaling/v2", "horizontalpodautoscalers"),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "HTTPRoute": Kind(f"{GATEWAY_API}/v1", "httproutes", optional=True),
    "BackendTLSPolicy": Kind(f"{GATEWAY_API}/v1", "backendtlspolicies", optional=True),
    "BackendTrafficPolicy": Kind(f"{ENVOY_GATEWAY}/v1alpha1", "backendtrafficpolicies", optional=True),
    "EnvoyExtensionPolicy": Kind(f"{ENVOY_GATEWAY}/v1alpha1", "envoyextensionpolicies", optional=True),
    "HTTPRouteFilter": Kind(f"{ENVOY_GATEWAY}/v1alpha1", "httproutefilters", optional=True),
    "ClientTrafficPolicy": Kind(f"{ENVOY_GATEWAY}/v1alpha1", "clienttrafficpolicies", optional=True),
    "InferencePool": Kind(f"{INFERENCE}/v1", "inferencepools", optional=True),
    "PodMonitor": Kind(f"{MONITORING}/v1", "podmonitors", optional=True),
    "ServiceMonitor": Kind(f"{MONITORING}/v1", "servicemonitors", optional=True),
    "Certificate": Kind(f"{CERT_MANAGER}/v1", "certificates", optional=True),
    "LeaderWorkerSet": Kind(f"{LEADER_WORKER_SET}/v1", "leaderworkersets", optional=True),
}
"""The InferencePool in this table is the Gateway API inference extension's, not Perilune's."""

EVERYWHERE = tuple(name for name, kind in KINDS.items() if not kind.optional)
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    api: tuple(name for name, kind in KINDS.items() if kind.api == api)
    for api in dict.fromkeys(kind.api for kind in KINDS.values() if kind.optional)
}
"""API → its optional kinds."""


def full_name(kind: str) -> str:
    """Return `group/Kind`, which distinguishes an optional kind from another API's kind of that name."""
    return f"{KINDS[kind].api.partition('/')[0]}/{kind}"


def collection(api: str, namespace: str, plural: str) -> str:
    """Return the path of all objects of a kind. An empty `namespace` stands for the whole cluster."""
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    return f"{root}{f'/namespaces/{namespace}' if namespace else ''}/{plural}"


def path(obj: Mapping[str, Any]) -> str:
    """Return the path of one object."""
    meta, kind = obj["metadata"], KINDS[obj["kind"]]
    return f"{collection(kind.api, meta['namespace'], kind.plural)}/{meta['name']}"
