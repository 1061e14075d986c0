"""One condition, before it is compared with what was."""

from collections.abc import Sequence
from dataclasses import dataclass

from perilune_api.conditions import Condition, Reason, Truth

MOST_NAMES = 5
"""Names that a message lists before it counts."""


@dataclass(frozen=True, slots=True)
class Fact:
    """`status.py` adds since when."""

    type: Condition
    status: Truth
    reason: Reason
    message: str


def listed(names: Sequence[str]) -> str:
    """The first of them by name, and how many more."""
    shown = ", ".join(sorted(names)[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
