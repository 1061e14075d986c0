"""Prefill and decode on separate endpoints: the endpoints of a role."""

from collections.abc import Iterable, Sequence

from perilune_api.pool import Role
from perilune_gateway.model import Candidate


def is_split(candidates: Iterable[Candidate]) -> bool:
    """Whether prefill has endpoints of its own."""
    return any(c.endpoint.role is Role.PREFILL for c in candidates)


def with_role(candidates: Sequence[Candidate], role: Role) -> Sequence[Candidate]:
    """Endpoints of that role; all endpoints if none has it."""
    return [c for c in candidates if c.endpoint.role in (role, Role.BOTH)] or candidates
