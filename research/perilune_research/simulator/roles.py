"""Prefill and decode on separate endpoints, which only a simulation can carry out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perilune_gateway.model import Candidate, Endpoint


class Role(StrEnum):
    """The part of the work that an endpoint does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class SimulatedEndpoint(Endpoint):
    """An endpoint with a role."""

    role: Role = Role.BOTH


def role_of(candidate: Candidate) -> Role:
    endpoint = candidate.endpoint
    return endpoint.role if isinstance(endpoint, SimulatedEndpoint) else Role.BOTH


def is_split(candidates: Iterable[Candidate]) -> bool:
    """Whether prefill has endpoints of its own."""
    return any(role_of(c) is Role.PREFILL for c in candidates)


def with_role(candidates: Sequence[Candidate], role: Role) -> Sequence[Candidate]:
    """Endpoints of that role; all endpoints if none has it."""
    return [c for c in candidates if role_of(c) in (role, Role.BOTH)] or candidates
