"""`spec.model`, `spec.engine`: what an endpoint runs, and on what hardware."""

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
    """What the engine loads: a Hugging Face id or a path inside the pod; empty: `name`."""


class EngineKind(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class EngineSpec(pool.Engine, frozen=True, kw_only=True):
    """The inference servers: which program, on what hardware, and what the gateway must know of them."""

    kind: EngineKind = EngineKind.VLLM
    """vllm, or simulated: the lab's engine, timed like an NVIDIA H20, needs no GPU and no model."""
    image: Image = ""
    """Container image; empty: the operator's default for the kind."""
    image_pull_policy: PullPolicy = "IfNotPresent"
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
