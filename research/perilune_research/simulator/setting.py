"""How the gateway of a simulation routes."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from perilune_api.pool import Migration, MoveTrigger, Routing

PLANNER = "+planner"
"""Suffix of a policy's name: with the migration planner, every trigger on."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Policy, parameters, and what the gateway may do."""

    policy: str
    """A policy's name, optionally with the suffix PLANNER."""
    routing: Routing = Routing()
    """Parameters of policies and planner, and limits; the policy's name in it is not read."""
    shortlist_above: int = 64
    """Number of endpoints from which on a policy sees a shortlist."""
    pullable: bool = True
    """Whether engines can pull KV from each other."""

    @property
    def migration(self) -> Migration:
        triggers = tuple(MoveTrigger) if self.policy.endswith(PLANNER) else ()
        return replace(self.routing.migration, triggers=triggers)

    @property
    def policy_name(self) -> str:
        return self.policy.removesuffix(PLANNER)
