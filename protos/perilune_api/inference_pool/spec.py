"""`spec`: the desired state of a pool, and how the operator applies a change to running engines."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from perilune_api.fields import Name, Struct
from perilune_api.inference_pool.engine import EngineSpec, ModelSpec
from perilune_api.inference_pool.gateway import GatewaySpec
from perilune_api.inference_pool.mooncake import Mooncake
from perilune_api.inference_pool.topology import TopologySpec
from perilune_api.inference_pool.types import Count, Quantity, Share
from perilune_api.pool import Routing


class Rollout(Struct, frozen=True):
    """How the operator replaces and removes running engines."""

    max_unavailable: Share = 0
    """Maximum number of engines that may be missing while new ones start, as a number or as a percentage of
    replicas."""
    max_surge: Share = 1
    """Maximum number of engines that may exist beyond replicas during a change, as a number or as a
    percentage of replicas. Use 0 where there are no spare GPUs."""
    session_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 30
    """Maximum seconds for which an engine that will be removed, by a scale-down for example, keeps its
    sessions. It gets no new sessions, and is removed earlier once all have left."""
    drain_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 120
    """Maximum seconds for which an engine that is being stopped may finish its running requests."""
    revision: Annotated[str, Meta(max_length=128)] = ""
    """Revision of the operator (its version and default images) that the pool's pods should be made by.
    Empty: pods stay as they are when the operator is upgraded, until a change of the spec replaces them
    anyway. latest: they follow the operator, a few pools at a time. A revision, as status.availableRevision
    names it: they follow an operator of this revision only."""


class Signal(StrEnum):
    """What the number of endpoints follows."""

    METRIC = "metric"
    QUEUE_SECONDS = "queueSeconds"
    KV_USAGE = "kvUsage"


class Scaling(Struct, frozen=True):
    """Sets `replicas` by the load, starting from the present number of endpoints. An endpoint that leaves
    first lets its sessions leave (rollout.sessionSeconds)."""

    min_replicas: Annotated[int, Meta(ge=1, le=10_000)]
    """Minimum number of endpoints."""
    max_replicas: Annotated[int, Meta(ge=1, le=10_000)]
    """Maximum number of endpoints."""
    signal: Signal = Signal.METRIC
    """What the number of endpoints follows. queueSeconds: seconds of queued prefill per endpoint, without
    what caches save. kvUsage: share of the KV caches in use, 0 to 1. For these two the operator reads the
    gateways' pages, and nothing else is needed. metric: a HorizontalPodAutoscaler follows `metric`, for which
    it needs a metrics adapter, such as prometheus-adapter."""
    metric: Name = "perilune_endpoint_pending_prefill_seconds"
    """Metric to scale by, for signal: metric. The adapter must serve it for the gateway's Service, summed
    over all endpoints."""
    target: Quantity = "2"
    """Target value of the signal per endpoint: the sum over all endpoints is divided by it. For kvUsage at
    most 1, such as 0.7."""
    up_seconds: Annotated[int, Meta(ge=0, le=3600)] = 30
    """Seconds for which the load must ask for more endpoints before they are added. signal: metric
    ignores it."""
    down_seconds: Annotated[int, Meta(ge=0, le=3600)] = 600
    """Seconds for which the load must need fewer endpoints before one leaves. signal: metric ignores
    it."""


class InferencePoolSpec(Struct, frozen=True):
    """The desired state of the pool."""

    model: ModelSpec
    replicas: Count = 1
    """Number of endpoints that get requests. `kubectl scale` sets it."""
    prefill_replicas: Count = 0
    """Number of further endpoints that only prefill long prompts for those that get requests. Needs
    `mooncake.transfer: handoff`; `routing.disaggregation` says which prompts are long. 0: every endpoint
    prefills its prompts itself."""
    engine: EngineSpec = EngineSpec()
    mooncake: Mooncake = Mooncake()
    topology: TopologySpec = TopologySpec()
    routing: Routing = Routing()
    gateway: GatewaySpec = GatewaySpec()
    rollout: Rollout = Rollout()
    scaling: Scaling | None = None
    image_pull_secrets: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Secrets of the pool's namespace with which all of its pods pull their images, besides those that the
    operator names for all pools."""
