"""`spec.model` and `spec.engine`: the program that each endpoint runs, and its hardware."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from perilune_api import pool
from perilune_api.inference_pool.types import (
    Arguments,
    EnvVar,
    Image,
    LabelKey,
    OptionalKey,
    PullPolicy,
    Raw,
    Resources,
)


class ModelSpec(pool.Model, frozen=True, kw_only=True):
    """The model that the pool serves."""

    source: Annotated[str, Meta(max_length=512)] = ""
    """Model that the engine loads: a Hugging Face id, or a path inside the pod. Empty: `name`."""


class EngineKind(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class EngineSpec(pool.Engine, frozen=True, kw_only=True):
    """The inference servers: their program, their hardware, and what the gateway must know about them."""

    kind: EngineKind = EngineKind.VLLM
    """Program that each endpoint runs. vllm: vLLM. simulated: an engine without GPU and model that answers
    with the timing of an NVIDIA H20."""
    image: Image = ""
    """Container image of the engine. Empty: the operator's default for this kind."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When the image is pulled, as in a Kubernetes container."""
    args: Arguments = ()
    """Further command-line arguments of the engine. Arguments that the operator sets are refused."""
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=128)] = ()
    """Further environment variables of the engine."""
    resources: Resources = Resources()
    """Resources that the engine's container requests. The operator adds the GPUs (see tensorParallel,
    pipelineParallel and gpuResource), and the memory of mooncake.store or mooncake.offloadSize."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of GPUs over which each layer is split (vLLM --tensor-parallel-size)."""
    pipeline_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of pipeline stages, each on its own GPUs (vLLM --pipeline-parallel-size)."""
    gpus_per_node: Annotated[int, Meta(ge=1, le=64)] = 8
    """Number of GPUs that a node has. An endpoint that needs more (tensorParallel x pipelineParallel) spans
    several nodes and runs as a LeaderWorkerSet. Every one of these nodes runs the same number of pipeline
    stages, so 3 stages need three nodes, while 4 stages can share two."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """Resource name of the nodes' GPUs."""
    rdma_resource: OptionalKey = ""
    """Resource name of the nodes' RDMA devices, such as rdma/hca. Empty: pods request none. The nodes must
    allow users other than root to pin memory (LimitMEMLOCK=infinity in containerd's unit), or podTemplate
    must run the engine as root."""
    startup_seconds: Annotated[int, Meta(ge=1, le=86_400)] = 1800
    """Maximum seconds that the engine may take to load the model before it is restarted."""
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Metadata and spec that are merged over the engine's pod template. Containers are merged by name (the
    engine's is called engine), volumes and environment variables are replaced by name, mounts by path, and
    any other list as a whole."""
