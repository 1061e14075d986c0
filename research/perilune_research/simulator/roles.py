"""Selects endpoints by role, for policies that prefill on one endpoint and decode on another."""

from collections.abc import Iterable, Sequence

from perilune_api.pool import Role
from perilune_gateway.model import Candidate


def is_split(candidates: Iterable[Candidate]) -> bool:
    """Return whether some endpoint only prefills."""
    return any(c.endpoint.role is Role.PREFILL for c in candidates)


def with_role(candidates: Sequence[Candidate], role: Role) -> Sequence[Candidate]:
    """Return the candidates that can play this role, or all candidates if none can."""
    return [c for c in candidates if c.endpoint.role in (role, Role.BOTH)] or candidates
