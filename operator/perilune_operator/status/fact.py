"""One condition, without its transition time."""

from collections.abc import Sequence
from dataclasses import dataclass

from perilune_api.conditions import Condition, Reason, Truth

MOST_NAMES = 5
"""The most names that a message lists."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A condition without its transition time, which summary.py adds."""

    type: Condition
    status: Truth
    reason: Reason
    message: str


def listed(names: Sequence[str]) -> str:
    """Return the first names in alphabetical order, and how many more there are."""
    shown = ", ".join(sorted(names)[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
