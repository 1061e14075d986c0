"""How the gateway of a simulation routes."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from perilune_api.pool import Migration, MoveTrigger, Routing

PLANNER = "+planner"
"""Behind a policy's name: with the migration planner beside it, every trigger on."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Policy, parameters, and what the gateway may do."""

    policy: str
    """A policy's name, perhaps with PLANNER behind it."""
    routing: Routing = Routing()
    """The parameters of all policies, the planner's and the limits; the name of its policy is not read."""
    shortlist_above: int = 64
    """Endpoints from which on a policy sees a shortlist."""
    pullable: bool = True
    """Engines can pull KV from each other."""

    @property
    def migration(self) -> Migration:
        triggers = tuple(MoveTrigger) if self.policy.endswith(PLANNER) else ()
        return replace(self.routing.migration, triggers=triggers)

    @property
    def policy_name(self) -> str:
        return self.policy.removesuffix(PLANNER)
