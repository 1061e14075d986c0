"""`status`: the state of a pool as the operator last observed it. `conditions.py` lists all conditions."""

from typing import Annotated

from msgspec import Meta

from perilune_api.conditions import Condition, Truth
from perilune_api.fields import Struct
from perilune_api.trial import State


class StatusCondition(Struct, frozen=True, kw_only=True):
    """One aspect of the pool's state."""

    type: Condition
    """Name of the condition."""
    status: Truth
    """Whether the condition holds."""
    reason: str
    """Reason for the status in one word. The event about the change has the same reason."""
    message: str
    """Reason for the status as a sentence, with names and field paths."""
    last_transition_time: str
    """Time at which `status` last changed, in RFC 3339."""
    observed_generation: int
    """Generation of the pool that the condition was computed from."""


class FabricStatus(Struct, frozen=True):
    """The fabric as the labels of the nodes describe it."""

    nodes: int = 0
    """Number of nodes that have GPUs or run engines of this pool."""
    racks: int = 0
    """Number of racks that the labels of these nodes name."""
    spines: int = 0
    """Number of spines that the labels of these nodes name."""
    unlabelled: int = 0
    """Number of these nodes whose labels name no rack. They count as far from every other node."""


class CanaryStatus(Struct, frozen=True, kw_only=True):
    """What has become of routing.canary."""

    policy: str
    """Name of the canary's policy."""
    state: State
    """Running, Promoted or RolledBack."""
    policy_in_force: str
    """Name of the policy that decides for the sessions that are not the canary's: all, when it is over."""
    trial: str
    """Name of the comparison. Another policy, other parameters or another share begin another one."""
    reason: str
    """Reason of condition CanaryPromoted."""
    message: str
    """Message of condition CanaryPromoted."""
    restarts: int = 0
    """Restarts of the gateways' containers when the comparison began."""


class InferencePoolStatus(Struct, frozen=True, kw_only=True):
    """The state of the pool as the operator last observed it."""

    observed_generation: int = 0
    """Generation of the spec that this status was computed from."""
    replicas: int = 0
    """Number of endpoints that exist."""
    ready_replicas: int = 0
    """Number of endpoints that are ready to serve."""
    ready: str = ""
    """Number of ready endpoints / number of desired endpoints."""
    ranks: int | None = None
    """Number of data-parallel ranks of each endpoint, if it has several. The gateway's pages and metrics name
    each of them, as ADDRESS#RANK."""
    selector: str = ""
    """Label selector of the endpoints' pods."""
    sessions: int | None = None
    """Number of sessions bound to an endpoint, summed over the gateways."""
    hit_ratio: str | None = None
    """Share of prompt tokens of about the last minute that were cached, as the gateways report it."""
    revision: str = ""
    """Revision of the operator (its version and default images) that the engines' pods are made by."""
    available_revision: str | None = None
    """Revision of the running operator, if some pods of the pool are made by another. They stay as they are
    until rollout.revision asks for it, or a change of the spec replaces them."""
    fabric: FabricStatus = FabricStatus()
    canary: CanaryStatus | None = None
    conditions: Annotated[tuple[StatusCondition, ...], Meta(max_length=16)] = ()
    """Aspects of the pool's state. Ready summarises those that requests depend on."""
