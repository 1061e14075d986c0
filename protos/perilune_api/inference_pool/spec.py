"""`spec`: what a pool should be, all of it; and how a change of it reaches engines that run."""

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
    """How a change reaches running engines."""

    max_unavailable: Share = 0
    """Engines that may be missing while new ones start: a number, or a percentage of replicas."""
    max_surge: Share = 1
    """Engines that may be there in excess meanwhile, likewise; 0 where there are no spare GPUs."""
    session_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 30
    """How long an engine that is to go (scale-down, for example) keeps its sessions, in seconds; it gets no
    new ones, and goes earlier once all have left."""
    drain_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 120
    """How long an engine that is being stopped may finish the requests that it runs, in seconds."""


class Scaling(Struct, frozen=True):
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


class InferencePoolSpec(Struct, frozen=True):
    """What the pool should be."""

    model: ModelSpec
    replicas: Count = 1
    """Endpoints; what kubectl scale writes."""
    engine: EngineSpec = EngineSpec()
    mooncake: Mooncake = Mooncake()
    topology: TopologySpec = TopologySpec()
    routing: Routing = Routing()
    gateway: GatewaySpec = GatewaySpec()
    rollout: Rollout = Rollout()
    scaling: Scaling | None = None
