"""The contract of policies: what a policy of a package may build on, and what its package declares.

    from perilune_gateway.policy.contract import Candidate, Decision, OutsidePolicy, Parameters, Reason

A policy is a pure function: `(request, candidates, parameters, rng) -> Decision | Refusal | NEED_BODY`. Our
own policies use the same values and helpers, so nothing here is for packages alone. Everything in `__all__`
keeps its meaning within a version of the contract; fields and helpers may be added. A package's entry point,
in the group `perilune.policies`, names an `OutsidePolicy` with the version that it was written for.
docs/policies.md explains it by an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from perilune_api.fields import Struct
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    Endpoint,
    EngineModel,
    Load,
    Location,
    NeedBody,
    Overlap,
    Phase,
    Prefix,
    Reason,
    Refusal,
    RefuseReason,
    RequestView,
    SessionView,
    Verdict,
)
from perilune_gateway.policy.cost import (
    Seconds,
    blocks,
    cheapest,
    draw,
    find,
    has_kv_room,
    held_tokens,
    host_of,
    least_pending,
    lowest,
    lowest_cost,
    near,
    nearly_cheapest,
    pending_costs,
    seconds,
)

VERSION = 1
"""Version of the contract. It changes when a policy that was right may become wrong."""
GROUP = "perilune.policies"
"""Group of the entry points by which packages bring policies."""


class Parameters(Struct, frozen=True):
    """The base of a policy's parameters, a frozen struct whose fields all have a default. A pool document
    spells `gain_seconds` as `gainSeconds`, and the string under a field says what it means."""


Decide = Callable[[RequestView, Sequence[Candidate], Parameters, Random], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsidePolicy:
    """A policy as its package declares it; an entry point of the group `perilune.policies` names it."""

    decide: Callable[..., Verdict]
    """The policy: `(request, candidates, parameters, rng) -> Decision | Refusal | NEED_BODY`. The first line
    of its docstring is shown as its summary."""
    contract: int
    """Version of the contract that it was written for: 1."""
    parameters: type[Parameters] = Parameters
    """Type of its parameters."""
    moves_sessions: bool = False
    """Whether it moves sessions away from hot endpoints itself. The migration planner then leaves that to
    it."""
    all_holders: bool = False
    """Whether it asks for all endpoints that hold the prompt's prefix. Otherwise those that hold the most are
    among its locations; with very many holders, all of them cost time."""


__all__ = [
    "GROUP",
    "NEED_BODY",
    "VERSION",
    "Candidate",
    "Cost",
    "Decide",
    "Decision",
    "Endpoint",
    "EngineModel",
    "Load",
    "Location",
    "NeedBody",
    "OutsidePolicy",
    "Overlap",
    "Parameters",
    "Phase",
    "Prefix",
    "Reason",
    "Refusal",
    "RefuseReason",
    "RequestView",
    "Seconds",
    "SessionView",
    "Verdict",
    "blocks",
    "cheapest",
    "draw",
    "find",
    "has_kv_room",
    "held_tokens",
    "host_of",
    "least_pending",
    "lowest",
    "lowest_cost",
    "near",
    "nearly_cheapest",
    "pending_costs",
    "seconds",
]
