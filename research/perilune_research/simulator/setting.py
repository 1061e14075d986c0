"""How the gateway of a simulation routes."""

from __future__ import annotations

from dataclasses import dataclass

from perilune_api.pool import Limits, Migration, MoveTrigger, PolicyParams

PLANNER = "+planner"
"""Behind a policy's name: with the migration planner beside it, every trigger on."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Policy, parameters, and what it may do."""

    policy: str
    """A policy's name, perhaps with PLANNER behind it."""
    params: PolicyParams = PolicyParams()
    limits: Limits = Limits()
    shortlist_above: int = 64
    """Endpoints from which on a policy sees a shortlist."""
    pullable: bool = True
    """Engines can pull KV from each other."""

    @property
    def migration(self) -> Migration:
        return Migration(tuple(MoveTrigger) if self.policy.endswith(PLANNER) else ())

    @property
    def policy_name(self) -> str:
        return self.policy.removesuffix(PLANNER)
