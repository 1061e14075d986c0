"""`InferencePool` as users write it: everything that turns a model's name into served requests.

A superset of the pool document (`perilune_api.pool`): the gateway's parts are its structs, extended. The
operator resolves one into the other (`pool_document`). The smallest useful pool is ten lines,
`examples/smallest.yaml`.

Who refuses what: types, ranges, enums and the rules of `RULES` (CEL) are the API server's, before anything is
stored; what those cannot know (`check`) the operator shows as condition Accepted=False with the field's path.
`perilune_api.crdgen` makes the CustomResourceDefinition of this file: the docstrings here are what
`kubectl explain ipool.spec` prints.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from perilune_api import names, pool, quantities
from perilune_api.conditions import Condition
from perilune_api.pool import Bandwidth, Name, SpecError, Weight

PLURAL = "inferencepools"
KIND = "InferencePool"
VERSION = "v1alpha1"
SHORT_NAME = "ipool"


class _Struct(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A part of the document; subclasses repeat `frozen` for the type checker."""


Count = Annotated[int, Meta(ge=0, le=10_000)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
"""A Kubernetes quantity."""
Memory = Annotated[str, Meta(pattern=r"^([0-9]+|[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti))$")]
"""The same in bytes, of which there are no thousandths (m)."""
Share = Annotated[int | str, Meta(extra_json_schema={"pattern": r"^[0-9]+%?$"})]
"""A number or a percentage."""
Arguments = Annotated[tuple[str, ...], Meta(max_length=64)]
_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
LabelKey = Annotated[str, Meta(min_length=1, max_length=317, pattern=rf"^{_KEY}$")]
"""Of a label or a resource: prefix/name."""
OptionalKey = Annotated[str, Meta(max_length=317, pattern=rf"^({_KEY})?$")]
"""The same, or empty."""
_LEVEL = r"([A-Za-z_][A-Za-z0-9_.]*=)?(debug|info|warning|error)"
LogLevels = Annotated[str, Meta(pattern=rf"^{_LEVEL}(,{_LEVEL})*$")]
"""perilune_gateway.logs: level[,module=level…]."""
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
GatewayName = Annotated[str, Meta(max_length=244, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
"""Of an object; shorter by what a policy for it has behind its name."""
OptionalNamespace = Annotated[str, Meta(max_length=63, pattern=rf"^({_LABEL})?$")]
OptionalSection = Annotated[str, Meta(max_length=253, pattern=rf"^({_LABEL}(\.{_LABEL})*)?$")]
Host = Annotated[str, Meta(min_length=1, max_length=253, pattern=rf"^(\*\.)?{_LABEL}(\.{_LABEL})*$")]
"""Of Gateway API: a wildcard stands for its first label."""
Raw = dict[str, Any]
"""A piece of a Kubernetes object, passed on as it is."""


class Policy(StrEnum):
    """Routing policies that a gateway can carry out."""

    CONDUCTOR = "conductor"
    """a holder of the prefix with a short queue, else near one by distance and queue."""
    DYNAMO = "dynamo"
    """prefill and decode blocks added, less what is cached."""
    DYNAMO_PRODUCT = "dynamo_product"
    """the same multiplied."""
    DYNAMO_V1 = "dynamo_v1"
    """overlap against usage and waiting."""
    EAR = "ear"
    """the session's host, unless it is hot and the session may move."""
    KV_LINEAR = "kv_linear"
    """hit ratio less load, both weighed."""
    LEAST_LOADED = "least_loaded"
    """fewest pending prefill tokens."""
    LMETRIC = "lmetric"
    """pending tokens times requests running."""
    LMETRIC_PLUS_ONE = "lmetric_plus_one"
    """the same with one request more."""
    MOONCAKE = "mooncake"
    """lowest predicted time to the first token (Mooncake's Algorithm 1)."""
    PERILUNE = "perilune"
    """lowest cost in seconds over all tiers; a session leaves its host only where that pays."""
    POWER_OF_TWO = "power_of_two"
    """fewest pending prefill tokens of two."""
    RANDOM = "random"
    """any endpoint."""
    ROUND_ROBIN = "round_robin"
    """each endpoint in turn."""
    STICKY = "sticky"
    """the session's host, always."""


class ModelSpec(pool.Model, frozen=True, kw_only=True):
    """The model that the pool serves."""

    source: Annotated[str, Meta(max_length=512)] = ""
    """What the engine loads: a Hugging Face id or a path inside the pod; empty: `name`."""


class EngineKind(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class EnvVar(_Struct, frozen=True):
    """An environment variable, as in a container."""

    name: Name
    """Name of the variable."""
    value: str = ""
    """Its value; or use valueFrom."""
    value_from: Raw | None = None
    """A reference to a Secret, ConfigMap or field, as in a container."""


class Resources(_Struct, frozen=True):
    """Requests and limits, as in a container."""

    requests: dict[str, int | str] = {}
    """What a pod is sure to get, by resource name (cpu, memory)."""
    limits: dict[str, int | str] = {}
    """What a pod may use at most, by resource name."""


class EngineSpec(pool.Engine, frozen=True, kw_only=True):
    """The inference servers: which program, on what hardware, and what the gateway must know of them."""

    kind: EngineKind = EngineKind.VLLM
    """vllm, or simulated: the lab's engine, timed like an NVIDIA H20, needs no GPU and no model."""
    image: Annotated[str, Meta(max_length=512)] = ""
    """Container image; empty: the operator's default for the kind."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled, as in a container."""
    args: Arguments = ()
    """Further arguments of the engine. Those that the operator sets itself are refused."""
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=128)] = ()
    """Further environment variables."""
    resources: Resources = Resources()
    """What the engine itself needs. GPUs are added by the operator (see tensorParallel, pipelineParallel and
    gpuResource), and the memory that it gives to mooncake.store or mooncake.offloadSize."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """GPUs over which each layer is split (vLLM --tensor-parallel-size)."""
    pipeline_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Groups of layers, each on GPUs of its own (vLLM --pipeline-parallel-size)."""
    gpus_per_node: Annotated[int, Meta(ge=1, le=64)] = 8
    """An endpoint that needs more than these spans several nodes: a LeaderWorkerSet then runs it. Each node
    gets as many stages of the pipeline as every other: pipelineParallel 3 takes three, 4 may take two."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """Resource name under which nodes offer GPUs."""
    rdma_resource: OptionalKey = ""
    """Resource name under which nodes offer RDMA devices, such as rdma/hca; empty: none is asked for. Nodes
    have to let others than root pin memory (LimitMEMLOCK=infinity of containerd), or podTemplate asks for
    root."""
    startup_seconds: Annotated[int, Meta(ge=1, le=86_400)] = 1800
    """How long loading the model may take before the engine is restarted, in seconds."""
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Merged over the pod template that the operator renders: metadata and spec; containers by name (the
    engine's is called engine), volumes and variables replaced by name, mounts by path, any other list as a
    whole."""


class RoleSpec(_Struct, frozen=True):
    """The endpoints of one role."""

    replicas: Count = 1
    """Endpoints of this role."""
    args: Arguments = ()
    """Further arguments of this role's engines, after the engine's own."""
    resources: Resources | None = None
    """Requests and limits of this role's engines, instead of spec.engine.resources."""


class Roles(_Struct, frozen=True):
    """Prefill and decode on endpoints of their own. Both are needed. The gateway does not send a prompt to
    prefill endpoints yet: a proxy of yours has to, and what comes through Perilune runs on decode endpoints
    alone."""

    prefill: RoleSpec | None = None
    """Endpoints that compute the KV of prompts."""
    decode: RoleSpec | None = None
    """Endpoints that write the answers."""


class Transfer(StrEnum):
    """How an engine gets a prefix's KV from another one."""

    NONE = "none"
    CONNECTOR = "connector"
    OFFLOAD = "offload"


class Store(_Struct, frozen=True):
    """Mooncake Store: a KV pool in the hosts' memory that all engines share."""

    enabled: bool = False
    """true: a master runs, and every engine gives memory to the pool."""
    segment_size: Memory = "80Gi"
    """Host memory that each GPU's engine process gives to the pool. The scheduler is asked for it: it is
    added to the engine's requests, and to its limit if it has one."""
    local_buffer_size: Memory = "4Gi"
    """Host memory for transfers, of each GPU's engine process; asked for likewise."""
    save_decode_cache: bool = True
    """Store the KV of answers too: an agent's next turn repeats them."""


class Allocation(StrEnum):
    """mooncake_master --allocation_strategy."""

    LOCAL_FIRST = "local_first"
    RANDOM = "random"
    FREE_RATIO_FIRST = "free_ratio_first"


class Master(_Struct, frozen=True):
    """mooncake_master: knows where the store's blocks lie."""

    image: Annotated[str, Meta(max_length=512)] = ""
    """Container image with mooncake_master; empty: the operator's default."""
    command: Arguments = ("mooncake_master",)
    """The master's program in that image."""
    args: Arguments = ()
    """Further arguments of it."""
    allocation: Allocation = Allocation.LOCAL_FIRST
    """local_first keeps a session's blocks on its host, which is what routing by place needs."""
    eviction_high_watermark: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the pool in use from which blocks are evicted."""
    lease_seconds: Annotated[int, Meta(ge=1, le=3600)] = 10
    """A block that was just read is not evicted for so long, in seconds."""
    resources: Resources = Resources(requests={"cpu": "1", "memory": "2Gi"})
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Merged over the master's pod template like engine.podTemplate; its container is called master."""


class Mooncake(_Struct, frozen=True):
    """How KV moves between engines."""

    transfer: Transfer = Transfer.NONE
    """connector: engine to engine (MooncakeConnector), what prefill and decode roles need. offload: a tier in
    host memory that other engines may pull from (OffloadingConnector with its peer tier), if a request asks
    for it: the gateway writes no such wish yet. none: a moved session's prefix comes from the store or is
    computed again."""
    protocol: Literal["rdma", "tcp"] = "tcp"
    """What carries KV between hosts: rdma needs RDMA devices, tcp works everywhere."""
    devices: str = ""
    """RDMA devices, comma-separated (mlx5_0,mlx5_1); empty: Mooncake looks for them itself."""
    offload_size: Memory = "64Gi"
    """Host memory of each engine's tier, with transfer: offload. The scheduler is asked for it: it is added
    to the engine's requests, and to its limit if it has one."""
    store: Store = Store()
    master: Master = Master()


class LevelName(StrEnum):
    """From narrow to wide."""

    RACK = "rack"
    SPINE = "spine"
    ZONE = "zone"
    REGION = "region"


class LevelSpec(_Struct, frozen=True):
    """One level of the fabric above the node."""

    name: LevelName
    """Which level, from narrow (rack) to wide (region)."""
    labels: Annotated[tuple[LabelKey, ...], Meta(min_length=1, max_length=16)]
    """Node labels that name it; the first that a node carries counts."""


class Placement(_Struct, frozen=True):
    """Where engines go, by one level of the fabric."""

    level: Literal["node", "rack", "spine", "zone", "region"]
    """Level of the fabric whose domains count: node, rack, spine, zone, region."""
    mode: Literal["pack", "spread"]
    """pack: near each other. spread: evenly over the level's domains."""
    required: bool = False
    """false: as far as possible. true: a pod that cannot go where it should stays pending. With spread, racks
    whose nodes could never run an engine count too: then give a nodeSelector in engine.podTemplate."""


# Sources: NVIDIA Topograph (docs.nvidia.com/topograph, labels of 1.x and before); node labels of Amazon EKS,
# Google GKE, Oracle OKE, CoreWeave, Alibaba ACK.
DEFAULT_LEVELS = (
    LevelSpec(
        LevelName.RACK,
        (
            "topology.kubernetes.io/rack",
            "fabric.topograph.run/tier-0",
            "network.topology.nvidia.com/leaf",
            "topology.k8s.aws/network-node-layer-3",
            "cloud.google.com/gce-topology-subblock",
            "oci.oraclecloud.com/rdma.local_block_id",
            "ib.coreweave.cloud/leafgroup",
            "alibabacloud.com/asw-id",
            "rack",
        ),
    ),
    LevelSpec(
        LevelName.SPINE,
        (
            "topology.kubernetes.io/spine",
            "fabric.topograph.run/tier-1",
            "network.topology.nvidia.com/spine",
            "topology.k8s.aws/network-node-layer-2",
            "cloud.google.com/gce-topology-block",
            "oci.oraclecloud.com/rdma.network_block_id",
            "ib.coreweave.cloud/superpod",
            "alibabacloud.com/psw-id",
            "spine",
        ),
    ),
    LevelSpec(LevelName.ZONE, ("topology.kubernetes.io/zone",)),
    LevelSpec(LevelName.REGION, ("topology.kubernetes.io/region",)),
)


class TopologySpec(_Struct, frozen=True):
    """The fabric: how nodes tell their place, how fast it is, where engines go in it."""

    levels: Annotated[tuple[LevelSpec, ...], Meta(max_length=4)] = ()
    """From narrow to wide; empty: Kubernetes', NVIDIA Topograph's and the usual clouds' labels. A list stands
    for all of them: a level that it leaves out is not known."""
    bandwidth: Bandwidth = Bandwidth()
    """Bytes per second of one transfer, by the narrowest level that holds both ends."""
    nic_gbits: Weight = 0.0
    """Speed of the network cards that bandwidth is for, in Gbit/s: links of nodes whose label
    names.NIC_GBITS tells another are scaled; nodes without the label have this one. 0: 200 for the default
    bandwidths, and bandwidths of your own hold for every node."""
    placement: Annotated[tuple[Placement, ...], Meta(max_length=5)] = ()
    """Where engines go; empty: where the scheduler likes."""


class RoutingSpec(pool.Routing, frozen=True, kw_only=True):
    """Which endpoint gets a request: policy, its parameters, sessions, migration, admission."""

    policy: Policy = Policy.EAR
    """The rule by which an endpoint is chosen."""


class GatewayMode(StrEnum):
    """How Envoy is told to ask our gateway."""

    AUTO = "auto"
    ENVOY_GATEWAY = "envoyGateway"
    INFERENCE_EXTENSION = "inferenceExtension"
    NONE = "none"


class ParentRef(_Struct, frozen=True):
    """The Gateway (gateway.networking.k8s.io) that takes the clients' requests."""

    name: GatewayName
    """Name of the Gateway."""
    namespace: OptionalNamespace = ""
    """Namespace of the Gateway; empty: the pool's."""
    section_name: OptionalSection = ""
    """One listener of the Gateway; empty: all."""


class GatewaySpec(_Struct, frozen=True):
    """The external processor that decides, and how requests come to it."""

    mode: GatewayMode = GatewayMode.AUTO
    """auto: what the cluster has: Envoy Gateway's objects where its CRDs are, else an InferencePool of the
    Gateway API inference extension where those are, else neither. none: only the gateway itself."""
    parent: ParentRef | None = None
    """Gateway that the pool's route is attached to; without one the gateway runs and no route is made."""
    hostnames: Annotated[tuple[Host, ...], Meta(max_length=16)] = ()
    """Hosts whose requests belong to this pool; needed where two pools share a Gateway."""
    replicas: Annotated[int, Meta(ge=0, le=100)] = 1
    """Gateway pods; each knows the sessions that it routed itself. 0: nobody decides, and failOpen counts."""
    fail_open: bool = True
    """true: without a gateway, requests go to any ready endpoint. false: they get 503."""
    image: Annotated[str, Meta(max_length=512)] = ""
    """Container image of the gateway; empty: the operator's own."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled, as in a container."""
    log_level: LogLevels = "info"
    """Log level, and levels of single modules: level[,module=level…]."""
    args: Arguments = ()
    """Further arguments of perilune-gateway (see its --help), such as --transport=grpc or
    --decision-log=/data/$(POD_NAME).jsonl. Those that the operator sets itself are refused."""
    resources: Resources = Resources(requests={"cpu": "1", "memory": "1Gi"}, limits={"memory": "4Gi"})
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Merged over the gateway's pod template like engine.podTemplate; its container is called gateway. For a
    volume with model.tokenizer's folder or for the decision log, imagePullSecrets, a nodeSelector."""
    min_replicas: Annotated[int, Meta(ge=1, le=100)] | None = None
    """With maxReplicas: fewest gateways."""
    max_replicas: Annotated[int, Meta(ge=1, le=100)] | None = None
    """With minReplicas: a HorizontalPodAutoscaler by CPU sets the number of gateways."""


class Rollout(_Struct, frozen=True):
    """How a change reaches running engines."""

    max_unavailable: Share = 0
    """Engines that may be missing while new ones start: a number, or a percentage of replicas."""
    max_surge: Share = 1
    """Engines that may be there in excess meanwhile, likewise; 0 where there are no spare GPUs."""
    session_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 30
    """How long an engine that is to go (scale-down, other roles) keeps its sessions, in seconds; it gets no
    new ones, and goes earlier once all have left."""
    drain_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 120
    """How long an engine that is being stopped may finish the requests that it runs, in seconds."""


class Scaling(_Struct, frozen=True):
    """A HorizontalPodAutoscaler sets `replicas`, beginning with as many endpoints as there are. Needs an
    adapter that serves the metric (prometheus-adapter, for example)."""

    min_replicas: Annotated[int, Meta(ge=1, le=10_000)]
    """Fewest endpoints that the autoscaler leaves."""
    max_replicas: Annotated[int, Meta(ge=1, le=10_000)]
    """Most endpoints that the autoscaler asks for."""
    metric: Name = "perilune_endpoint_pending_prefill_seconds"
    """Metric of the gateway's Service, summed over its endpoints: the adapter serves it for that object."""
    target: Quantity = "2"
    """Value that is aimed at, per endpoint: the metric divided by replicas."""


class InferencePoolSpec(_Struct, frozen=True):
    """What the pool should be."""

    model: ModelSpec
    replicas: Count = 1
    """Endpoints of a pool without roles; what kubectl scale writes. With roles, each role has its own number,
    and this one stays away."""
    engine: EngineSpec = EngineSpec()
    roles: Roles | None = None
    mooncake: Mooncake = Mooncake()
    topology: TopologySpec = TopologySpec()
    routing: RoutingSpec = RoutingSpec()
    gateway: GatewaySpec = GatewaySpec()
    rollout: Rollout = Rollout()
    scaling: Scaling | None = None


class StatusCondition(_Struct, frozen=True):
    """One fact about the pool, and since when it holds."""

    type: Condition
    """What the condition is about."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """One word why; also the reason of the event that told of it."""
    message: str
    """The same for people, with names and field paths."""
    last_transition_time: str
    """RFC 3339; when `status` last changed."""
    observed_generation: int
    """Generation of the pool that this was said of."""


class FabricStatus(_Struct, frozen=True):
    """What nodes tell of their place."""

    nodes: int = 0
    """Nodes that have GPUs or run engines of this pool."""
    racks: int = 0
    """Racks that these nodes name."""
    spines: int = 0
    """Spines that these nodes name."""
    unlabelled: int = 0
    """Nodes of these that name no rack; they count as far from everything."""


class InferencePoolStatus(_Struct, frozen=True):
    """What the pool is, as last seen. Written by the operator."""

    observed_generation: int = 0
    """Generation of the spec that everything below is about."""
    replicas: int = 0
    """Endpoints that exist."""
    ready_replicas: int = 0
    """Of these, how many serve."""
    ready: str = ""
    """Ready / wanted endpoints."""
    selector: str = ""
    """Label selector of the endpoints' pods."""
    sessions: int | None = None
    """Sessions bound to an endpoint, as the gateways say."""
    hit_ratio: str | None = None
    """Cached share of the prompt tokens of about the last minute, as the gateways say."""
    fabric: FabricStatus = FabricStatus()
    conditions: Annotated[tuple[StatusCondition, ...], Meta(max_length=16)] = ()
    """Facts about the pool; Ready sums up those that requests depend on."""


class Rule(NamedTuple):
    """One CEL rule and what a user reads when it is broken."""

    rule: str
    message: str
    field: str = ""
    """Path of the field to blame, relative to where the rule stands."""


RULES: Mapping[type, Sequence[Rule]] = {
    InferencePoolSpec: (
        Rule(
            "!has(self.roles) || self.mooncake.transfer == 'connector'",
            "roles need mooncake.transfer: connector, by which decode endpoints get the prefill's KV",
            ".mooncake.transfer",
        ),
        Rule(
            "!has(self.roles) || !has(self.scaling)",
            "scaling sets replicas, which a pool with roles does not use: scale each role by its own",
            ".scaling",
        ),
        Rule(
            "!has(self.roles) || self.replicas == 1",
            "a pool with roles has a number for each: set roles.prefill.replicas or roles.decode.replicas",
            ".replicas",
        ),
        Rule(
            "!has(self.scaling) || self.engine.kind != 'simulated' || self.scaling.maxReplicas <= 1000",
            "at most 1000 simulated endpoints",
            ".scaling.maxReplicas",
        ),
        Rule(
            "self.engine.kind != 'simulated' || (self.mooncake.transfer == 'none' && "
            "!(has(self.mooncake.store) && self.mooncake.store.enabled))",
            "simulated engines have no Mooncake: leave mooncake out",
            ".mooncake",
        ),
        Rule(
            "self.model.name == oldSelf.model.name",
            "the model's name cannot change: sessions, caches and dashboards hang on it; make another pool",
            ".model.name",
        ),
    ),
    Roles: (
        Rule("has(self.prefill)", "roles: decode needs prefill endpoints beside it", ".prefill"),
        Rule("has(self.decode)", "roles: prefill needs decode endpoints beside it", ".decode"),
    ),
    EngineSpec: (
        Rule(
            "self.kind != 'vllm' || self.blockSize % 8 == 0",
            "blockSize must be a multiple of 8, as vLLM's attention kernels need (16 is usual)",
            ".blockSize",
        ),
        Rule(
            "self.tensorParallel <= self.gpusPerNode || self.tensorParallel % self.gpusPerNode == 0",
            "tensorParallel must fit into one node or fill whole nodes",
            ".tensorParallel",
        ),
        Rule(
            "!has(self.hashing) || !self.hashing.algorithm.startsWith('xxhash') || "
            "(has(self.hashing.seed) && self.hashing.seed != '')",
            "hashing.seed is needed with xxhash: without it every engine hashes differently",
            ".hashing",
        ),
        Rule(
            "self.blockSize == oldSelf.blockSize", "blockSize cannot change: make another pool", ".blockSize"
        ),
        Rule("self.kind == oldSelf.kind", "the kind of engine cannot change: make another pool", ".kind"),
    ),
    TopologySpec: (
        Rule(
            "!has(self.levels) || self.levels.all(a, self.levels.filter(b, b.name == a.name).size() == 1)",
            "a level may be given once",
            ".levels",
        ),
        Rule(
            "!has(self.levels) || self.levels.map(l, l.name) == "
            "['rack', 'spine', 'zone', 'region'].filter(n, self.levels.exists(l, l.name == n))",
            "levels go from narrow to wide: rack, spine, zone, region",
            ".levels",
        ),
        Rule(
            "!has(self.bandwidth) || (self.bandwidth.node >= self.bandwidth.rack && "
            "self.bandwidth.rack >= self.bandwidth.spine && self.bandwidth.spine >= self.bandwidth.fabric)",
            "bandwidth must not grow with distance: node >= rack >= spine >= fabric",
            ".bandwidth",
        ),
        Rule(
            "!has(self.placement) || "
            "self.placement.all(a, self.placement.filter(b, b.level == a.level).size() == 1)",
            "a level may be placed by once",
            ".placement",
        ),
        Rule(
            "!has(self.placement) || !has(self.levels) || self.levels.size() == 0 || "
            "self.placement.all(p, p.level == 'node' || self.levels.exists(l, l.name == p.level))",
            "placement by a level that levels do not name: give its labels too",
            ".placement",
        ),
    ),
    GatewaySpec: (
        Rule(
            "has(self.minReplicas) == has(self.maxReplicas)",
            "minReplicas and maxReplicas go together",
            ".minReplicas",
        ),
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas must not be above maxReplicas",
            ".minReplicas",
        ),
    ),
    Scaling: (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas must not be above maxReplicas",
            ".minReplicas",
        ),
    ),
    Rollout: (
        Rule(
            "!(string(self.maxUnavailable) in ['0', '0%'] && string(self.maxSurge) in ['0', '0%'])",
            "maxUnavailable and maxSurge cannot both be 0: nothing could ever be replaced",
            ".maxUnavailable",
        ),
    ),
}
"""By the struct at whose place they stand."""

NAME_RULE = Rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$')",
    "a pool's name begins those of its Services and pods: a small letter, then at most 44 more, digits or -",
)
"""Of the whole object."""

DERIVED: Mapping[type, frozenset[str]] = {EngineSpec: frozenset({"store"})}
"""Fields that the operator fills in: not part of what users write."""

OPERATOR_ARGS = frozenset(
    {
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--block-size",
        "--enable-prefix-caching",
        "--kv-events-config",
        "--kv-transfer-config",
        "--prefix-caching-hash-algo",
        "--tensor-parallel-size",
        "-tp",
        "--pipeline-parallel-size",
        "-pp",
        "--distributed-executor-backend",
        "--scheduling-policy",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--max-model-len",
        "--enable-lora",
        "--lora-modules",
        "--api-key",
    }
)
"""vLLM's flags that follow from the spec: giving them in args is refused."""

SIMULATED_ARGS = frozenset(
    {
        "--listen",
        "--name",
        "--model",
        "--alias",
        "--lora",
        "--block-size",
        "--kv-tokens",
        "--context-tokens",
        "--hash-algorithm",
        "--hash-seed",
        "--scheduling",
        "--events",
        "--replay",
    }
)
"""The same of `perilune engine`."""

FORBIDDEN_ARGS: Mapping[str, str] = {
    "--disable-log-stats": "without metrics gateways know no engine's load, and engines never drain",
    "--uds": "Envoy, gateways and probes reach an engine by its port",
    "--headless": "Envoy, gateways and probes reach an engine by its port",
    **{
        f"--{name}": "Envoy, gateways and probes speak plain HTTP to engines: end TLS at the Gateway"
        for name in (
            "ssl-keyfile",
            "ssl-certfile",
            "ssl-ca-certs",
            "ssl-cert-reqs",
            "ssl-ciphers",
            "enable-ssl-refresh",
        )
    },
    **dict.fromkeys(
        ("--prefill-context-parallel-size", "-pcp"),
        "an engine gets tensorParallel x pipelineParallel GPUs: more contexts need more of them",
    ),
    **dict.fromkeys(
        ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"),
        "the operator makes the group of an endpoint that spans nodes: set engine.pipelineParallel",
    ),
}
"""vLLM's flags with which an engine would not serve as the pool expects, and why or what to do."""

OPERATOR_LABELS = frozenset({names.POOL_LABEL, names.COMPONENT_LABEL, names.ROLE_LABEL})
"""By which pods are known."""

GATEWAY_ARGS = frozenset(
    {
        "--kubernetes",
        "--pool",
        "--listen",
        "--admin",
        "--grace-seconds",
        "--drain-seconds",
        "--log-level",
        "--log-format",
    }
)
"""The same of perilune-gateway. (A pod drains by its preStop hook.)"""

DATA_PARALLEL = ("--data-parallel", "-dp")
"""How vLLM's flags begin that make several engines one server."""


def convert(spec: object) -> InferencePoolSpec:
    """An object's `spec` as the API server gives it → checked structs. Raises SpecError with the path."""
    try:
        made = msgspec.convert(spec, InferencePoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(str(error).replace("`$", "`$.spec", 1)) from None
    check(made)
    return made


def check(spec: InferencePoolSpec) -> None:
    """What the schema and its rules cannot know. Raises SpecError with the field's path."""
    if spec.roles is not None:
        for name in ("prefill", "decode"):
            if getattr(spec.roles, name) is None:
                raise SpecError(f"Roles need prefill and decode - at `$.spec.roles.{name}`")
    for args, path in _engine_args(spec):
        if spec.engine.kind is EngineKind.VLLM:
            _check_vllm_args(args, path)
        else:
            _check_args(args, path, SIMULATED_ARGS)
    if spec.engine.kind is EngineKind.VLLM:
        _check_vllm(spec)
    _check_args(spec.gateway.args, "$.spec.gateway.args", GATEWAY_ARGS)
    attached = (GatewayMode.ENVOY_GATEWAY, GatewayMode.INFERENCE_EXTENSION)
    if spec.gateway.mode in attached and spec.gateway.parent is None:
        raise SpecError(f"Mode {spec.gateway.mode} needs a Gateway - at `$.spec.gateway.parent`")
    for i, variable in enumerate(spec.engine.env):
        if variable.value and variable.value_from is not None:
            raise SpecError(f"Either value or valueFrom - at `$.spec.engine.env[{i}]`")
        if variable.name in {earlier.name for earlier in spec.engine.env[:i]}:
            raise SpecError(f"{variable.name} is given twice - at `$.spec.engine.env[{i}]`")
        if variable.name == "PYTHONHASHSEED":
            raise SpecError(f"Give engine.hashing.seed instead - at `$.spec.engine.env[{i}]`")
    _check_pods(spec)
    pool.check(pool_document("check", "default", spec, pool.Topology(bandwidth=spec.topology.bandwidth)))


def _check_vllm(spec: InferencePoolSpec) -> None:
    """What its engines would not start with."""
    seed = spec.engine.hashing.seed
    if seed and not (seed.isascii() and seed.isdigit() and int(seed) < 2**32):
        raise SpecError(
            f"{seed!r} is no seed: Python takes 0 to 4294967295 - at `$.spec.engine.hashing.seed`"
        )
    spans = spec.engine.tensor_parallel * spec.engine.pipeline_parallel > spec.engine.gpus_per_node
    for args, path in _engine_args(spec) if spans else ():
        for i, arg in enumerate(args):
            if _meant(_flag(arg), _SERVERS):
                words = "An endpoint that spans nodes has one API server"
                raise SpecError(f"{words} - at `{path}[{i}]`")
    named = [(spec.model.source, ".source"), (spec.model.name, ".name")]
    named += [(alias, f".aliases[{i}]") for i, alias in enumerate(spec.model.aliases)]
    for name, path in named:
        if name.startswith("-"):
            raise SpecError(f"vLLM would take {name!r} for a flag - at `$.spec.model{path}`")
    for i, lora in enumerate(spec.model.loras):
        if "=" in lora.name or lora.name.startswith("-"):
            raise SpecError(f"vLLM cannot tell {lora.name!r} from a path - at `$.spec.model.loras[{i}].name`")
        if not lora.path:
            raise SpecError(f"vLLM needs the path of {lora.name} - at `$.spec.model.loras[{i}].path`")
    gpu = spec.engine.gpu_resource
    for resources, path in _engine_resources(spec):
        for part, amounts in (("requests", resources.requests), ("limits", resources.limits)):
            if gpu in amounts:
                words = "An engine gets tensorParallel x pipelineParallel GPUs, none are given here"
                raise SpecError(f"{words} - at `{path}.{part}.{gpu}`")


_SERVERS = frozenset({"--api-server-count", "-asc"})
"""Flags that workers of an endpoint that spans nodes would not start with: they serve nothing."""


def _engine_args(spec: InferencePoolSpec) -> list[tuple[Arguments, str]]:
    """Each with its path."""
    found = [(spec.engine.args, "$.spec.engine.args")]
    for name in ("prefill", "decode"):
        role = getattr(spec.roles, name, None)
        if role is not None:
            found.append((role.args, f"$.spec.roles.{name}.args"))
    return found


def _engine_resources(spec: InferencePoolSpec) -> list[tuple[Resources, str]]:
    """Each with its path."""
    found = [(spec.engine.resources, "$.spec.engine.resources")]
    for name in ("prefill", "decode"):
        role = getattr(spec.roles, name, None)
        if role is not None and role.resources is not None:
            found.append((role.resources, f"$.spec.roles.{name}.resources"))
    return found


def _check_pods(spec: InferencePoolSpec) -> None:
    """What goes into pods as it is."""
    given = [
        *_engine_resources(spec),
        (spec.gateway.resources, "$.spec.gateway.resources"),
        (spec.mooncake.master.resources, "$.spec.mooncake.master.resources"),
    ]
    for resources, path in given:
        quantities.check_resources(resources.requests, f"{path}.requests")
        quantities.check_resources(resources.limits, f"{path}.limits")
    for template, path in (
        (spec.engine.pod_template, "$.spec.engine.podTemplate"),
        (spec.gateway.pod_template, "$.spec.gateway.podTemplate"),
        (spec.mooncake.master.pod_template, "$.spec.mooncake.master.podTemplate"),
    ):
        quantities.check_template(template, path, OPERATOR_LABELS)


def _check_args(args: Sequence[str], path: str, ours: frozenset[str]) -> None:
    for i, arg in enumerate(args):
        flag = _flag(arg)
        if meant := _meant(flag, ours) or _meant(flag.replace("--no-", "--", 1), ours):
            raise SpecError(f"The operator sets {meant} itself, from the spec - at `{path}[{i}]`")


def _check_vllm_args(args: Sequence[str], path: str) -> None:
    _check_args(args, path, OPERATOR_ARGS)
    for i, arg in enumerate(args):
        flag = _flag(arg)
        if flag.startswith(DATA_PARALLEL):
            raise SpecError(f"An endpoint is one engine, more replicas are more - at `{path}[{i}]`")
        if meant := _meant(flag, FORBIDDEN_ARGS):
            raise SpecError(f"{meant} is not possible: {FORBIDDEN_ARGS[meant]} - at `{path}[{i}]`")


def _flag(arg: str) -> str:
    """vLLM also takes `--block_size` and `--kv-events-config.endpoint`, and `-n2` for `-n 2`."""
    flag = arg.split("=", 1)[0].split(".", 1)[0]
    return flag.replace("_", "-") if flag.startswith("--") else flag.rstrip("0123456789")


def _meant(flag: str, known: Collection[str]) -> str:
    """The one of these that it is, or may abbreviate: argparse takes `--disable-log-stat`, and refuses what
    could be one of several. Empty: none. (No other flag of vLLM's is the beginning of one of ours.)"""
    if flag in known:
        return flag
    return min((name for name in known if name.startswith(flag)), default="") if flag.strip("-") else ""


def pool_document(
    name: str,
    namespace: str,
    spec: InferencePoolSpec,
    topology: pool.Topology,
    endpoints: Sequence[pool.EndpointSpec] = (),
) -> pool.Pool:
    """What the gateway of this pool must know."""
    engine = {**_fields(spec.engine, pool.Engine), "store": spec.mooncake.store.enabled}
    return pool.Pool(
        pool.Metadata(name, namespace),
        pool.Spec(
            pool.Model(**_fields(spec.model, pool.Model)),
            pool.Engine(**engine),
            pool.Routing(**{**_fields(spec.routing, pool.Routing), "policy": str(spec.routing.policy)}),
            topology,
            tuple(endpoints),
        ),
    )


def _fields(value: msgspec.Struct, of: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in of.__struct_fields__}
