"""What is: the facts of one pool's surroundings, cut to what a plan reads. Reads, never decides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perilune_api import names

Object = dict[str, Any]

MANAGER = "perilune-operator"
"""Our field manager, and the value of label app.kubernetes.io/managed-by."""
MANAGED_BY = "app.kubernetes.io/managed-by"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node."""

    name: str
    labels: Mapping[str, str]
    gpus: int = 0
    ready: bool = True


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod of the pool."""

    name: str
    component: str
    role: str
    node: str
    ready: bool
    terminating: bool


@dataclass(frozen=True, slots=True)
class GatewayStats:
    """What the gateways say together."""

    sessions: int
    hit_ratio: float | None


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


def key(obj: Object) -> Key:
    meta = obj["metadata"]
    return Key(obj["kind"], meta.get("namespace", ""), meta["name"])


def node(obj: Object, gpu_resources: Iterable[str] = ("nvidia.com/gpu",)) -> NodeFacts:
    allocatable = obj.get("status", {}).get("allocatable") or {}
    gpus = sum(int(allocatable.get(name, 0)) for name in gpu_resources)
    labels = obj["metadata"].get("labels") or {}
    return NodeFacts(obj["metadata"]["name"], dict(labels), gpus, _is(obj, "Ready"))


def pod(obj: Object) -> PodFacts:
    meta = obj["metadata"]
    labels = meta.get("labels") or {}
    return PodFacts(
        meta["name"],
        labels.get(names.COMPONENT_LABEL, ""),
        labels.get(names.ROLE_LABEL, ""),
        obj.get("spec", {}).get("nodeName", ""),
        _is(obj, "Ready"),
        "deletionTimestamp" in meta,
    )


def _is(obj: Object, condition: str) -> bool:
    conditions = obj.get("status", {}).get("conditions") or ()
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)
