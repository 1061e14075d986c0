"""`status`: what a pool is, as the operator last saw it. Conditions and their reasons: `conditions.py`."""

from typing import Annotated

from msgspec import Meta

from perilune_api.conditions import Condition, Truth
from perilune_api.fields import Struct


class StatusCondition(Struct, frozen=True):
    """One fact about the pool, and since when it holds."""

    type: Condition
    """What the condition is about."""
    status: Truth
    """Whether it holds."""
    reason: str
    """One word why; also the reason of the event that told of it."""
    message: str
    """The same for people, with names and field paths."""
    last_transition_time: str
    """RFC 3339; when `status` last changed."""
    observed_generation: int
    """Generation of the pool that this was said of."""


class FabricStatus(Struct, frozen=True):
    """What nodes tell of their place."""

    nodes: int = 0
    """Nodes that have GPUs or run engines of this pool."""
    racks: int = 0
    """Racks that these nodes name."""
    spines: int = 0
    """Spines that these nodes name."""
    unlabelled: int = 0
    """Nodes of these that name no rack; they count as far from everything."""


class InferencePoolStatus(Struct, frozen=True):
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
