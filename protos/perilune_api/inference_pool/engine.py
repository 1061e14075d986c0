"""`spec.model` and `spec.engine`: the program that each endpoint runs, and its hardware."""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from perilune_api import pool
from perilune_api.fields import LabelKey, Struct
from perilune_api.inference_pool.types import (
    Arguments,
    EnvVar,
    Image,
    ObjectName,
    OptionalKey,
    OptionalMemory,
    OptionalObject,
    PullPolicy,
    Raw,
    Resources,
)


class Cache(Struct, frozen=True):
    """Where engines keep or find the model. Give one of the three."""

    claim: OptionalObject = ""
    """Name of a PersistentVolumeClaim in the pool's namespace, which becomes Hugging Face's cache (HF_HOME).
    Engines on several nodes need one with access mode ReadWriteMany. The model is downloaded once."""
    host_path: Annotated[str, Meta(max_length=512, pattern=r"^(/.*)?$")] = ""
    """Folder of the nodes, which becomes Hugging Face's cache. Each node downloads the model once. The folder
    is created if it is missing, and made to belong to the engine's user, for which a container runs as root
    first: the namespace has to allow the privileged pod security level."""
    image: Image = ""
    """OCI image that holds the model's files, mounted at /model as an image volume (Kubernetes 1.33 and
    newer). Each node pulls it once. model.source may name a folder below /model."""


class ModelSpec(pool.Model, frozen=True, kw_only=True):
    """The model that the pool serves."""

    source: Annotated[str, Meta(max_length=512)] = ""
    """Model that the engine loads: a Hugging Face id, or a path inside the pod. The default is `name`."""
    weights_size: OptionalMemory = ""
    """Size of the model's weights, by which the operator chooses the engine's resources and startupSeconds.
    If empty, it follows from the number of parameters in the model's name (30B: 60 GB, half of it with FP8, a
    quarter with FP4, INT4, AWQ or GPTQ); 60 GB for a name without one."""
    cache: Cache | None = None
    """Cache of the model on the nodes or in the cluster. Without it, each engine downloads the model into its
    own disk at every start."""


class EngineKind(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class ApiKey(Struct, frozen=True):
    """A key that engines demand of every request."""

    secret: ObjectName
    """Name of a Secret in the pool's namespace."""
    key: Annotated[str, Meta(max_length=253, pattern=r"^[-._A-Za-z0-9]+$")] = "api-key"
    """Key in the Secret that holds it, as visible ASCII characters without blanks or the end of a line."""


class EngineTlsSpec(pool.EngineTls, frozen=True, kw_only=True):
    """TLS from Envoy and the gateway to engines. Give a Secret, or an issuer of cert-manager, which writes
    one; with engine.selector caSecret alone. What engines say to each other (KV hand-offs, reads of memory,
    the store) and their KV events stay in plain text, and so does the port that has metrics alone."""

    hostname: Annotated[str, Meta(max_length=253, pattern=r"^[-.A-Za-z0-9]*$")] = ""
    """Name for which the engines' certificate is issued. The default is POOL.NAMESPACE.svc, and with
    gateway.servedBy SERVEDBY.NAMESPACE.svc; set it too if that pool sets its own."""
    secret: OptionalObject = ""
    """Name of a Secret in the pool's namespace with tls.crt, tls.key and ca.crt, which all engines mount. If
    empty, it is POOL-engine-tls, which the issuer writes."""
    issuer: OptionalObject = ""
    """Name of an issuer of cert-manager, which writes and renews the Secret. If empty, you write it."""
    issuer_kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """Kind of that issuer. An Issuer is in the pool's namespace."""
    ca_secret: OptionalObject = ""
    """Name of a Secret in the pool's namespace whose ca.crt has the CA certificates by which Envoy and the
    gateway trust engines. While a CA is replaced it has the old one and the new one. If empty, it is the
    Secret with the certificate. Pools that share a gateway (gateway.serves) need the same caSecret."""


class EngineSpec(pool.Engine, frozen=True, kw_only=True):
    """The inference servers: their program, their hardware, and what the gateway must know about them."""

    kind: EngineKind = EngineKind.VLLM
    """Program that each endpoint runs. vllm: vLLM. simulated: an engine without GPU and model that answers
    with the timing of an NVIDIA H20."""
    image: Image = ""
    """Container image of the engine. If empty, the operator's default for this kind is used."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When the image is pulled, as in a Kubernetes container."""
    args: Arguments = ()
    """Further command-line arguments of the engine. Arguments that the operator sets are refused."""
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=128)] = ()
    """Further environment variables of the engine."""
    resources: Resources = Resources()
    """Resources that the engine's container requests. What is not given here, the operator chooses for vLLM
    by model.weightsSize: cpu, memory (request and limit), and ephemeral-storage for a download without
    model.cache. It adds the GPUs (see tensorParallel, pipelineParallel and gpuResource), and the memory of
    mooncake.store or mooncake.offloadSize."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of GPUs over which each layer is split (vLLM --tensor-parallel-size)."""
    pipeline_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of pipeline stages, each on its own GPUs (vLLM --pipeline-parallel-size)."""
    data_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of data-parallel ranks of an endpoint (vLLM --data-parallel-size), each of which has
    tensorParallel x pipelineParallel GPUs, its own KV cache and its own queue. The gateway chooses the rank
    of each request too. Ranks that do not fit on one node (gpusPerNode) are spread evenly over several, whole
    ranks on each, and the endpoint runs as a LeaderWorkerSet. --enable-expert-parallel is one of args."""
    gpus_per_node: Annotated[int, Meta(ge=1, le=64)] = 8
    """Number of GPUs that a node has. An endpoint that needs more (tensorParallel x pipelineParallel x
    dataParallel) spans several nodes and runs as a LeaderWorkerSet. Every one of these nodes runs the same
    number of data-parallel ranks, or of pipeline stages, so 3 stages need three nodes, while 4 stages can
    share two."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """Resource name of the nodes' GPUs."""
    rdma_resource: OptionalKey = ""
    """Resource name of the nodes' RDMA devices, such as rdma/hca. If empty, pods request none. The nodes must
    allow users other than root to pin memory (LimitMEMLOCK=infinity in containerd's unit), or podTemplate
    must run the engine as root."""
    rdma_devices: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of RDMA devices that each pod requests. One is enough where the device plugin shares them."""
    api_key: ApiKey | None = None
    """Key that engines demand of every request (vLLM's --api-key). Gateways send it in place of the client's
    Authorization, so clients do not have it. A request that no gateway routed is answered with 401, so
    gateway.failOpen no longer helps. Pools that share a gateway (gateway.serves) need the same key."""
    tls: EngineTlsSpec | None = None
    """TLS from Envoy and the gateway to the engines. Without it prompts and answers cross the cluster's
    network in plain text. Only with gateway.mode envoyGateway, or none and an Envoy of yours. All pools that
    share a gateway have it, or none. It cannot be changed later: make another pool."""
    startup_seconds: Annotated[int, Meta(ge=1, le=86_400)] | None = None
    """Maximum seconds that the engine may take to load the model before it is restarted. If empty, it is 600,
    and one more for every 50 MB of model.weightsSize, so 1800 for 60 GB."""
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Metadata and spec that are merged over the engine's pod template. Containers are merged by name (the
    engine's is called engine), volumes and environment variables are replaced by name, mounts by path, and
    any other list as a whole."""
