"""A planned move of a session, or a planned copy of a prefix, with the numbers behind it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum


class MoveReason(StrEnum):
    """Why a session moves or a prefix is copied, or why not."""

    DRAIN = "drain"
    HOT_HOST = "hot_host"
    RACK_PRESSURE = "rack_pressure"
    REPLICATE = "replicate"
    PREFILL = "prefill"
    """A request's prompt is prefilled on another endpoint; no plan is made for it."""
    PULL = "pull"
    """A request's endpoint fetches what another one caches of the prompt; no plan is made for it."""
    COOLDOWN = "cooldown"
    """The session moved too recently."""
    NOWHERE = "nowhere"
    """No endpoint has KV room and a shorter queue."""
    NOT_WORTH = "not_worth"
    """The benefit is not above worth × cost."""
    CHAINED = "chained"
    """The session's requests name earlier responses, which only the host's process has."""
    RELIEVED = "relieved"
    """Other moves of the same plan relieve the host enough."""
    NOT_HOT = "not_hot"
    """The prefix is not used often enough."""
    BUDGET_MOVES = "budget_moves"
    """The pool's moves per minute are used up."""
    BUDGET_BYTES = "budget_bytes"
    """The transfer would exceed the bytes that may be on their way over the link."""
    BUDGET_SECONDS = "budget_seconds"
    """Moves from busy endpoints have already cost the share of the pool's time that they may."""


Subject = Hashable
"""Identifies the session or the prefix."""
APPROVED = frozenset({MoveReason.DRAIN, MoveReason.HOT_HOST, MoveReason.RACK_PRESSURE, MoveReason.REPLICATE})
"""Reasons for a planned move."""
UNPLANNED = frozenset({MoveReason.PREFILL, MoveReason.PULL})
"""Reasons for KV that goes with a request; all others are reasons against a move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The planner's verdict about one session or prefix, with its numbers."""

    subject: Subject
    reason: MoveReason
    source: str
    target: str = ""
    """Address of the target; empty if none was found."""
    transfer_bytes: int = 0
    """Bytes that the target pulls from the source; 0 if it reads the store or recomputes."""
    cost_s: float = 0.0
    """Predicted seconds until the target has the KV."""
    benefit_s: float = 0.0
    """Predicted seconds that the move saves."""
    worth: float = 1.0
    """The benefit must be above worth × cost."""
    turns: float = 0.0
    """Number of turns over which the benefit was summed."""
    release: bool = False
    """Whether the source's copy is no longer needed once the target has the KV."""
    stored_tokens: int = 0
    """Number of tokens that the target reads from the store before the session switches; 0 if the session's
    request reads them."""

    @property
    def approved(self) -> bool:
        """Whether the move should happen."""
        return self.reason in APPROVED

    @property
    def value_s(self) -> float:
        """Seconds by which the benefit exceeds worth × cost."""
        return self.benefit_s - self.worth * self.cost_s
