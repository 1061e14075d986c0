"""The settings of the simulated gateway."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from perilune_api.pool import Migration, MoveTrigger, Routing
from perilune_research.simulator.deployment import Deployment

PLANNER = "+planner"
"""A policy's name with this suffix also runs the migration planner, with every trigger on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The policy, its parameters, and how KV can get from one engine to another."""

    policy: str
    """A policy's name, optionally with the suffix PLANNER."""
    routing: Routing = Routing()
    """Parameters of policies, planner and limits. The policy name in it is ignored."""
    shortlist_above: int = 64
    """With more endpoints than this, a policy sees a shortlist of them (see `shortlist`)."""
    deployment: Deployment = Deployment.NONE
    """How KV gets from one engine to another."""
    gateways: int = 1
    """Gateways at which new sessions arrive in turn; only session admission distinguishes them."""
    tenants: int = 1
    """Tenants of the sessions, for session admission."""

    @property
    def migration(self) -> Migration:
        """The planner's settings. Its triggers depend on the suffix PLANNER alone."""
        triggers = tuple(MoveTrigger) if self.policy.endswith(PLANNER) else ()
        return replace(self.routing.migration, triggers=triggers)

    @property
    def policy_name(self) -> str:
        """The policy's name without the suffix PLANNER."""
        return self.policy.removesuffix(PLANNER)
