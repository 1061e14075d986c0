"""A planned move of a session, or a planned copy of a prefix, with the numbers it was weighed by."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum


class MoveReason(StrEnum):
    """Why something moves, or why not."""

    DRAIN = "drain"
    HOT_HOST = "hot_host"
    RACK_PRESSURE = "rack_pressure"
    REPLICATE = "replicate"
    COOLDOWN = "cooldown"
    """It moved too recently."""
    NOWHERE = "nowhere"
    """No endpoint has KV room and less to do."""
    NOT_WORTH = "not_worth"
    """Benefit is not above worth × cost."""
    RELIEVED = "relieved"
    """The moves planned before it suffice for its host."""
    NOT_HOT = "not_hot"
    """The prefix is not used often enough."""
    BUDGET_MOVES = "budget_moves"
    BUDGET_BYTES = "budget_bytes"


Subject = Hashable
"""Names a session or a prefix to the caller that asked about it."""
APPROVED = frozenset({MoveReason.DRAIN, MoveReason.HOT_HOST, MoveReason.RACK_PRESSURE, MoveReason.REPLICATE})
"""Reasons for a move; the others are reasons against one."""


@dataclass(frozen=True, slots=True)
class Move:
    """A decision about one session or prefix, and its numbers."""

    subject: Subject
    reason: MoveReason
    source: str
    target: str = ""
    """Empty: none was found."""
    transfer_bytes: int = 0
    """Pulled from the source; 0: from the store, or recomputed."""
    cost_s: float = 0.0
    benefit_s: float = 0.0
    worth: float = 1.0
    """Benefit must be above worth × cost."""
    turns: float = 0.0
    """Over how many the benefit was counted."""
    release: bool = False

    @property
    def approved(self) -> bool:
        return self.reason in APPROVED

    @property
    def value_s(self) -> float:
        return self.benefit_s - self.worth * self.cost_s
