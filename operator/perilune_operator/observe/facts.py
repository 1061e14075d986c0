"""The facts about a pool and its surroundings that a plan reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from perilune_api import names
from perilune_api.trial import Sums

Object = dict[str, Any]
"""A Kubernetes object as JSON."""
PoolName = tuple[str, str]
"""Namespace and name of a pool. An empty name stands for objects that the namespace's pools share."""

MANAGER = "perilune-operator"
"""The operator's field manager, and its value of the label MANAGED_BY."""
MANAGED_BY = "app.kubernetes.io/managed-by"


@dataclass(frozen=True, slots=True)
class Key:
    """The identity of an object in the cluster."""

    kind: str
    namespace: str
    name: str


def key(obj: Object) -> Key:
    meta = obj["metadata"]
    return Key(obj["kind"], meta.get("namespace", ""), meta["name"])


def version(obj: Object) -> int:
    """Return the resourceVersion; a later version of the same object is a greater number."""
    return int(obj["metadata"]["resourceVersion"])


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node."""

    name: str
    labels: Mapping[str, str]
    gpus: int = 0
    ready: bool = True
    leaving: bool = False
    """The node is cordoned or about to be removed, so it takes no new pods."""


HOME: dict[str, names.Duty] = {"engine": "serve", "prefill": "prefill"}
"""The duty with which the pods of a workload begin, by their component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """A pod of the pool."""

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
    """The value of its draining mark; empty without one."""
    drained_by: frozenset[str] = frozenset()
    """Gateways that have answered this draining mark, because they run nothing on this pod any more."""
    sessions: int = 0
    """Sessions whose host it is, as the gateways said last."""
    recent_hits_tokens: float = 0.0
    """Prompt tokens that its prefix cache has saved lately, as the gateways said last."""
    template: str = ""
    """Hash of the template that it was made by; empty if it carries none."""
    superseded: bool = False
    """It carries the mark of pods that a rolling update will replace."""
    asleep: bool = False
    """It carries the mark of engines that are to sleep."""
    chosen: bool = False
    """The pod carries the deletion cost by which a ReplicaSet removes it first."""
    ip: str = ""
    duty: str = ""
    """The Duty of an endpoint's pod; empty for other pods."""
    labelled: bool = False
    """The pod carries its duty as a label."""
    server: str = ""
    """The pool that its label names.SERVER_LABEL names; empty without the label."""
    next_duty: str = ""
    """The Duty that it takes over once its sessions have left; empty when it keeps its own."""
    group: int = -1
    """Index of its LeaderWorkerSet group; -1 for any other pod."""
    trouble: str = ""
    """Why the pod does not run, in Kubernetes' words; empty when it runs or no reason is known."""
    stuck: bool = False
    """Whether the trouble lasts until a person acts."""
    restarts: int = 0
    """Times that its containers were started again."""

    @property
    def serves(self) -> bool:
        return self.ready and not self.terminating and not self.asleep


class Drained(NamedTuple):
    """A gateway's word that it runs nothing any more on a draining engine."""

    gateway: str
    pod: str
    mark: str
    """The draining mark that the pod carries."""


class Behind(NamedTuple):
    """A gateway cannot follow the engines' KV events."""

    fit: int
    """Number of endpoints that half of its core follows; all, if it is late for another cause."""
    endpoints: int


FirstTokens = Mapping[float, int]
"""Seconds → how many requests have had their first token within them, since the gateway started."""


class Missing(StrEnum):
    """Why a gateway's page is missing."""

    NO_ANSWER = "it did not come in time"
    REFUSED = "its status is not 200"
    TOO_LONG = "it is too long"
    UNREADABLE = "a sample is not a number"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStats:
    """What the pool's gateways report together."""

    sessions: int
    hit_ratio: float | None
    drained: frozenset[Drained] = frozenset()
    behind: Mapping[str, Behind] = field(default_factory=dict)
    """Gateways, by pod, that cannot follow the engines' KV events."""
    missing: Mapping[str, Missing] = field(default_factory=dict, compare=False)
    """Gateways, by pod, whose page is missing."""
    whole: bool = field(default=True, compare=False)
    """The pages tell the queued prefill of all gateways: none is missing, or one is of a gateway that shares
    its state with all others."""
    sessions_at: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Sessions by the IP address of their host."""
    recent_hits_tokens_at: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Prompt tokens found lately in the prefix caches, by the endpoint's IP address."""
    queue_s_at: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds of queued prefill by the endpoint's IP address, summed over the gateways."""
    kv_in_use_at: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Share of the KV cache that is in use, by the endpoint's IP address."""
    ready_at: Mapping[str, float] = field(default_factory=dict, compare=False)
    """1 for each endpoint that may be chosen, 0 for each other one, by its IP address."""
    findings: Mapping[str, int] = field(default_factory=dict)
    """Finding (perilune_api.findings) → number of selected engines that have it."""
    first_tokens: Mapping[str, FirstTokens] = field(default_factory=dict, compare=False)
    """Gateway, by pod → its requests and those whose first token came in time."""
    routed: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Gateway, by pod → the prompts to which it has given an endpoint since it started."""
    unserved: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Gateway, by pod → the requests that it has refused since it started because the pool's first endpoint
    was not ready."""
    waiting: int = field(default=0, compare=False)
    """Number of new sessions that wait to begin."""
    under_way: int = field(default=0, compare=False)
    """Number of requests that were sent to endpoints and have not ended."""
    canaries: tuple[Sums, ...] = ()
    """What each gateway knows of the trial of the pool's canary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the gateways' pages say at one time of the work of all endpoints of one duty."""

    at: float
    """Seconds since the epoch."""
    queue_s: float
    """Seconds of queued prefill of these endpoints."""
    kv_in_use: float
    """Sum over them of the share of their KV cache that is in use."""
    starting: int = 0
    """Number of them that the pool should have and that are not ready."""
    first_tokens: int = 0
    """Number of the pool's requests whose first token came since the reading before."""
    in_time: int = 0
    """How many of them came within the duty's ttftSeconds."""
    prefilling: int = 0
    """Number of endpoints that have prompts to prefill."""
    wanted: int = 0
    """Number of endpoints of the duty that the pool should have at this time."""
    requests: int = 0
    """Number of the pool's requests that came since the reading before, that wait or that are under way."""
    unserved: int = 0
    """How many of them no endpoint could take, or wait."""
    missing: int = 0
    """Number of gateways whose page was missing, so that their requests count at a later reading."""


Demands = Mapping[names.Duty, Sequence[Demand]]
"""The readings of the endpoints of each duty, in order."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition that another controller wrote on an object."""

    status: str
    reason: str
    message: str
    pending: bool
    """The condition describes an earlier generation of the object."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listener of a Gateway: the host that it serves and the namespaces whose routes it takes."""

    host: str = ""
    """Empty for any host."""
    namespaces: frozenset[str] | None = None
    """None for all namespaces. A selector by labels that the operator cannot look up yields the empty set."""


@dataclass(frozen=True, slots=True)
class ParentFacts:
    """The Gateway (gateway.networking.k8s.io) that a pool's route is attached to."""

    exists: bool = False
    programmed: Verdict | None = None
    """None if no controller has reported yet."""
    listeners: Mapping[str, Verdict] = field(default_factory=dict)
    """Whether each listener is programmed, by name, as far as a controller has reported it."""
    given: Mapping[str, Listener] = field(default_factory=dict)
    """The listeners that speak HTTP, by name."""


@dataclass(frozen=True, slots=True)
class Rival:
    """An older pool whose route already has requests that this pool's route claims."""

    pool: PoolName
    hosts: tuple[str, ...]
    """Empty for any host."""


@dataclass(frozen=True, slots=True)
class OtherPool:
    """Another pool of the namespace."""

    served_by: str = ""
    """The pool whose gateway serves it; empty when it has its own."""
    serves: frozenset[str] = frozenset()
    """The pools that its gateway serves in addition."""
    engine_tls: bool = False
    """Whether its engines have `engine.tls`."""
    said: Mapping[str, Verdict] = field(default_factory=dict)
    """What the operator wrote about it last, by the type of the condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that a plan may depend on besides the spec."""

    uid: str
    generation: int
    status: Object = field(default_factory=dict)
    """The pool's status as stored."""
    nodes: tuple[NodeFacts, ...] = ()
    pods: tuple[PodFacts, ...] = ()
    children: Mapping[Key, Object] = field(default_factory=dict)
    """The pool's objects, and those that it may share with other pools of its namespace."""
    kinds: frozenset[str] = frozenset()
    """`group/Kind` of the optional APIs that the cluster has."""
    gateway: GatewayStats | None = None
    parent: ParentFacts | None = None
    """The Gateway that the spec names; None when it names none, or one outside the watched namespace."""
    rival: Rival | None = None
    others: Mapping[str, OtherPool] = field(default_factory=dict)
    """The other pools of the namespace that the pool names, or that name it, by name."""
    served_pods: tuple[PodFacts, ...] = ()
    """The pods of the other pools that the pool's gateway serves."""
    demands: Demands = field(default_factory=dict)
    """What the gateways reported of the endpoints of each duty since their number last changed."""
    overwritten_by: str = ""
    """Others that have lately changed the pool's number of replicas, which the operator sets."""
    is_turn: bool = True
    """Few enough other pools follow a new version of the operator at present that this one may, too."""
