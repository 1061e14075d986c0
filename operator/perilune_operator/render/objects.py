"""What all rendered objects share: labels, owner, and the security and resources of containers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import kopf

from perilune_api import names
from perilune_api.crd import API_VERSION, KIND
from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_api.inference_pool.types import Resources
from perilune_api.pool import Routing
from perilune_api.quantities import quantity
from perilune_operator.kinds import KINDS, full_name
from perilune_operator.observe.facts import MANAGED_BY, MANAGER, Object
from perilune_operator.observe.topology import Fabric
from perilune_operator.render import secrets
from perilune_operator.render.secrets import Chosen

USER = 65_532
"""uid and gid of every container, unless the platform gives others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The settings with which the operator was started."""

    image: str = "ghcr.io/perilune/perilune:0.1.0"
    """The image with operator and gateway."""
    engine_image: str = "vllm/vllm-openai:v0.33.0"
    master_image: str = ""
    """The image with mooncake_master; empty for the engines' image."""
    namespace: str = "perilune-system"
    """The operator's own namespace."""
    monitor_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of PodMonitors and ServiceMonitors, by which a Prometheus selects them."""
    simulated_image: str = "ghcr.io/perilune/perilune-engine:0.1.0"
    """The image with the simulated engine."""
    version: str = "0.1.0"
    """The operator's own version."""
    ipv6: bool = False
    """Whether the pods' first address is an IPv6 one, as the operator's own is."""

    pull_secrets: Sequence[str] = ()
    """Secrets with which the pods of all pools pull their images."""
    state_image: str = "valkey/valkey:8"
    """The image of the server of gateways' shared state."""
    envoy_namespaces: Sequence[str] = ("envoy-gateway-system",)
    """Namespaces in which Envoy Gateway runs Envoys."""
    platform_user: bool = False
    """Whether the platform gives pods their uid and groups, as OpenShift does."""
    gateways: int = 2
    """Gateway pods of a new pool that does not say how many."""
    state_tls: bool = True
    """Whether the operator can make the certificate of its servers of shared state."""

    @property
    def revision(self) -> str:
        """A name of everything by which two operators may render other pods of one spec."""
        images = (self.image, self.engine_image, self.master_image, self.simulated_image, self.state_image)
        named = " ".join((*images, *self.pull_secrets, *([f"{self.gateways}"] if self.gateways > 1 else ())))
        named += " platform's user" if self.platform_user else ""
        named += "" if self.state_tls else " no certificates"
        return f"{self.version}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One pool, as the renderers see it."""

    name: str
    namespace: str
    uid: str
    spec: InferencePoolSpec
    fabric: Fabric
    kinds: frozenset[str]
    """`group/Kind` of the optional APIs that the cluster has."""
    defaults: Defaults
    routing: Routing | None = None
    """The routing in force, if that is another than the spec's: after a canary."""
    chosen: Chosen | None = None
    """The secrets that its pods refer to; None for those of a new pool."""
    replicas: int | None = None
    """Replicas that the engines' workload should have now: more than the spec's while engines drain. None for
    the spec's."""
    gateways: int | None = None
    """Replicas of the gateway; None when an autoscaler sets them."""
    default_gateways: int | None = None
    """The number of gateways that the operator chose for a spec that names none; None: the spec names it."""
    gateways_read_at: str | None = None
    """The only version of the gateway's Deployment to which `gateways` may be applied; None for any."""
    client_policies: Sequence[Object] = ()
    """The ClientTrafficPolicies that are there for the pool's Gateway, the operator's among them."""
    one_backend: bool = True
    """The Service of all pools that the gateway serves reaches all of their engines, so the route may lead to
    it alone."""
    judge_again: bool = False
    """Envoy Gateway's report on the EnvoyExtensionPolicy is out of date, so it has to look again."""

    @property
    def pull_secrets(self) -> Object:
        """The part of a pod that names its pull secrets; empty without any."""
        given = dict.fromkeys((*self.defaults.pull_secrets, *self.spec.image_pull_secrets))
        return {"imagePullSecrets": [{"name": name} for name in given]} if given else {}

    @property
    def secrets(self) -> Chosen:
        """The secrets that its pods refer to."""
        return self.chosen or secrets.choose(self.name, self.uid, self.spec)

    @property
    def pod_security(self) -> Object:
        """The security context of a pod."""
        given = (
            {} if self.defaults.platform_user else {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
        )
        return {"runAsNonRoot": True, **given, "seccompProfile": {"type": "RuntimeDefault"}}

    @property
    def any_address(self) -> str:
        """The host by which a program listens at all of its pod's addresses."""
        return "[::]" if self.defaults.ipv6 else "0.0.0.0"

    @property
    def pod_host(self) -> str:
        """A pod's own address, in front of a port."""
        return "[$(POD_IP)]" if self.defaults.ipv6 else "$(POD_IP)"

    @property
    def replicas_now(self) -> int:
        """Replicas that the engines' workload should have now."""
        return self.spec.replicas if self.replicas is None else self.replicas

    def labels(self, component: names.Component) -> dict[str, str]:
        """Return the labels that select the pods of one component."""
        return {names.POOL_LABEL: self.name, names.COMPONENT_LABEL: component}

    def object(self, kind: str, name: str, component: names.Component, **body: Any) -> Object:
        """Return an object that belongs to the pool."""
        made: Object = {
            "apiVersion": KINDS[kind].api,
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": {**self.labels(component), MANAGED_BY: MANAGER},
            },
            **body,
        }
        owner = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.name, "uid": self.uid}}
        kopf.append_owner_reference(made, kopf.Body(cast(kopf.RawBody, owner)), block_owner_deletion=False)
        return made

    def has(self, kind: str) -> bool:
        """Return whether the cluster has an optional kind."""
        return full_name(kind) in self.kinds


def _lost_node(seconds: int) -> Sequence[Object]:
    """Return the tolerations by which a pod of a lost node is recreated elsewhere after this time."""
    return tuple(
        {
            "key": f"node.kubernetes.io/{why}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": seconds,
        }
        for why in ("not-ready", "unreachable")
    )


QUICK_EVICTION = _lost_node(10)
"""For gateways, which start in seconds."""
PATIENT_EVICTION = _lost_node(300)
"""For engines and the store's master. A node that comes back within that time still has the model in its
GPUs, and the store's blocks; a new engine would load for minutes. Meanwhile requests avoid it."""


def disruption_budget(selector: Object, share: int | str = 1) -> Object:
    """Return the spec of a budget that allows evicting so many ready pods at a time (0 for none), and any pod
    that is not ready. Kubernetes rounds a percentage up."""
    return {
        "maxUnavailable": share,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": selector,
    }


def container_security(*capabilities: str) -> Object:
    added = {"add": list(capabilities)} if capabilities else {}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **added},
    }


def resources(given: Resources, **more: str) -> Object:
    """Return a container's resources; `more`: extended resources, whose requests equal their limits."""
    limits = {**given.limits, **more}
    made = {"requests": dict(given.requests), "limits": limits}
    return {name: value for name, value in made.items() if value}


def with_memory(given: Resources, more_bytes: int) -> Resources:
    """Add memory to the request and to the limit. Without a request, Kubernetes takes the limit as
    request."""
    if not more_bytes:
        return given
    limit = given.limits.get("memory")
    request = given.requests.get("memory", limit if limit is not None else 0)
    limits = {} if limit is None else {"memory": size(int(quantity(limit)) + more_bytes)}
    return Resources(
        {**given.requests, "memory": size(int(quantity(request)) + more_bytes)}, {**given.limits, **limits}
    )


def size(number: int) -> str:
    """Return a quantity in the largest unit that divides the number of bytes."""
    fitting = ((unit, 2**bits) for unit, bits in (("Gi", 30), ("Mi", 20), ("Ki", 10)))
    unit, size = next(((unit, size) for unit, size in fitting if number % size == 0), ("", 1))
    return f"{number // size}{unit}"
