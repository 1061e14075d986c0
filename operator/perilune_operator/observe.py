"""What is: the facts of one pool's surroundings, cut to what a plan reads. Reads, never decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune_api import names

Object = dict[str, Any]

MANAGER = "perilune-operator"
"""Our field manager, and the value of label app.kubernetes.io/managed-by."""
MANAGED_BY = "app.kubernetes.io/managed-by"


LEAVING_TAINTS = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "node.cloudprovider.kubernetes.io/shutdown",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
    }
)
"""Of nodes that somebody is about to remove. A cordon sets `unschedulable`."""
CHOSEN_COST = "-1"
"""Deletion cost of an engine that is to go; every other has 0."""
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node."""

    name: str
    labels: Mapping[str, str]
    gpus: int = 0
    ready: bool = True
    leaving: bool = False
    """Cordoned, or about to be removed: takes no new pods."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod of the pool."""

    name: str
    component: str
    role: str
    node: str
    ready: bool
    terminating: bool
    uid: str = ""
    created: str = ""
    """RFC 3339."""
    draining: str = ""
    """Since when; empty: it is not."""
    drained_by: frozenset[str] = frozenset()
    """Gateways that have nothing there any more, of this very draining."""
    chosen: bool = False
    """Marked as the one that a ReplicaSet takes first."""
    group: int = -1
    """Of a LeaderWorkerSet's; -1: of none."""
    trouble: str = ""
    """Why it does not run, in Kubernetes' words; empty: it runs, or nobody says."""

    @property
    def serves(self) -> bool:
        return self.ready and not self.terminating


@dataclass(frozen=True, slots=True)
class GatewayStats:
    """What the gateways say together."""

    sessions: int
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a controller says of an object."""

    status: str
    reason: str
    message: str
    pending: bool
    """It was said of an earlier version of the object."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Of a Gateway: whose routes it takes, and for which host."""

    host: str = ""
    """Empty: any."""
    namespaces: frozenset[str] | None = None
    """None: all. By labels that only the API server could look up: none, as far as can be seen."""


@dataclass(frozen=True, slots=True)
class ParentFacts:
    """A Gateway (gateway.networking.k8s.io)."""

    exists: bool = False
    programmed: Verdict | None = None
    """None: nobody has said."""
    listeners: Mapping[str, Verdict] = field(default_factory=dict)
    """Whether each of them is programmed, by name; only those of which somebody says so."""
    given: Mapping[str, Listener] = field(default_factory=dict)
    """Listeners that speak HTTP, by name."""


PoolName = tuple[str, str]
"""Namespace, name; without a name: what the namespace's pools share."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Who has what a pool's route wants."""

    pool: PoolName
    hosts: tuple[str, ...]
    """Empty: any."""


@dataclass(frozen=True, slots=True)
class Key:
    """An object's name in the cluster."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a plan may depend on beside the spec."""

    uid: str
    generation: int
    status: Object = field(default_factory=dict)
    """The pool's own status, as stored."""
    nodes: tuple[NodeFacts, ...] = ()
    pods: tuple[PodFacts, ...] = ()
    children: Mapping[Key, Object] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    """`group/Kind` of optional APIs that the cluster has."""
    gateway: GatewayStats | None = None
    parent: ParentFacts | None = None
    """The Gateway that the spec names; None: there is none, or it cannot be seen from here."""
    rival: Rival | None = None
    """An older pool whose route has what this one's wants."""


def key(obj: Object) -> Key:
    meta = obj["metadata"]
    return Key(obj["kind"], meta.get("namespace", ""), meta["name"])


def version(obj: Object) -> int:
    """A later one of the same object is a greater number."""
    return int(obj["metadata"]["resourceVersion"])


def verdicts(conditions: Sequence[Object] | None, generation: int, *types: str) -> list[Verdict]:
    """Of these types. `generation`: the object's own; who says nothing of generations is believed."""
    return [
        Verdict(
            c["status"],
            c.get("reason", ""),
            c.get("message", ""),
            (c.get("observedGeneration") or generation) < generation,
        )
        for c in conditions or ()
        if c["type"] in types
    ]


def parent(obj: Object) -> ParentFacts:
    status, generation = obj.get("status") or {}, obj["metadata"].get("generation", 0)

    def programmed(of: Object) -> Verdict | None:
        return next(iter(verdicts(of.get("conditions"), generation, "Programmed")), None)

    told = {listener["name"]: programmed(listener) for listener in status.get("listeners") or ()}
    listeners = (obj.get("spec") or {}).get("listeners") or ()
    return ParentFacts(
        True,
        programmed(status),
        {name: v for name, v in told.items() if v is not None},
        {
            made["name"]: _listener(made, obj["metadata"].get("namespace", ""))
            for made in listeners
            if made.get("protocol") in ("HTTP", "HTTPS")
        },
    )


NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label of every namespace."""


def _listener(listener: Object, here: str) -> Listener:
    allowed = (listener.get("allowedRoutes") or {}).get("namespaces") or {}
    host: str = listener.get("hostname", "")
    if allowed.get("from") == "All":
        return Listener(host)
    if allowed.get("from") != "Selector":
        return Listener(host, frozenset({here}))
    selector = allowed.get("selector") or {}
    named = [{value} for key, value in (selector.get("matchLabels") or {}).items() if key == NAMESPACE_NAME]
    rules = selector.get("matchExpressions") or ()
    is_in = [rule for rule in rules if (rule["key"], rule["operator"]) == (NAMESPACE_NAME, "In")]
    named += [set(rule.get("values") or ()) for rule in is_in]
    asked = len(selector.get("matchLabels") or ()) + len(rules)
    if not asked:
        return Listener(host)
    return Listener(host, frozenset(set.intersection(*named) if len(named) == asked else ()))


def node(obj: Object) -> NodeFacts:
    """A GPU is what its vendor calls one: nvidia.com/gpu, amd.com/gpu."""
    allocatable = obj.get("status", {}).get("allocatable") or {}
    gpus = sum(int(number) for name, number in allocatable.items() if name.endswith("/gpu"))
    labels = obj["metadata"].get("labels") or {}
    spec = obj.get("spec") or {}
    taints = {taint.get("key") for taint in spec.get("taints") or ()}
    leaving = bool(spec.get("unschedulable") or taints & LEAVING_TAINTS)
    return NodeFacts(obj["metadata"]["name"], dict(labels), gpus, _is(obj, "Ready"), leaving)


def pod(obj: Object) -> PodFacts:
    meta = obj["metadata"]
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    draining, group = annotations.get(names.DRAINING, ""), labels.get(GROUP_INDEX, "")
    answers = {
        k.removeprefix(names.DRAINED): v for k, v in annotations.items() if k.startswith(names.DRAINED)
    }
    return PodFacts(
        meta["name"],
        labels.get(names.COMPONENT_LABEL, ""),
        labels.get(names.ROLE_LABEL, ""),
        obj.get("spec", {}).get("nodeName", ""),
        _is(obj, "Ready"),
        "deletionTimestamp" in meta,
        meta.get("uid", ""),
        meta.get("creationTimestamp", ""),
        draining,
        frozenset(gateway for gateway, answered in answers.items() if draining and answered == draining),
        annotations.get(names.DELETION_COST) == CHOSEN_COST,
        int(group) if group.isdigit() else -1,
        _trouble(obj.get("status") or {}),
    )


def _trouble(status: Object) -> str:
    """Reasons only where the words change all the time (a back-off counts its seconds)."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"[:160]
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    for container in containers:
        why = (container.get("state", {}).get("waiting") or {}).get("reason", "")
        if why not in ("", "ContainerCreating", "PodInitializing"):
            return f"{why} ({container.get('image', '')})"
    return ""


def _is(obj: Object, condition: str) -> bool:
    conditions = obj.get("status", {}).get("conditions") or ()
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)
