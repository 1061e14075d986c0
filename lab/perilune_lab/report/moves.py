"""How often sessions moved, and whether that was right: of what a client saw, and of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import UNSET

from perilune_lab.report.document import Migrations

SUCCESSOR_TURNS = 3
"""A move was accurate if its target was not hot for this many further turns."""


class PlayedTurn(NamedTuple):
    """A turn that succeeded."""

    moved: bool
    """Whether the session left its host with this turn."""
    calm: bool
    """Whether the host was not hot when the turn was submitted."""
    submitted_s: float


def migrations(sessions: Iterable[Sequence[PlayedTurn]], span_s: float, cooldown_s: float) -> Migrations:
    """Count moves. `sessions` are the turns of each session in order, at least one turn in all. A session
    that moves twice within `cooldown_s` thrashes."""
    turns, moves, accurate, judged, thrash = 0, 0, 0, 0, 0
    for rows in sessions:
        turns += len(rows)
        at = [i for i, row in enumerate(rows) if row.moved]
        moves += len(at)
        for i in at:
            after = rows[i + 1 : i + 1 + SUCCESSOR_TURNS]
            judged += bool(after)
            accurate += bool(after) and all(row.calm for row in after)
        thrash += sum(rows[b].submitted_s - rows[a].submitted_s < cooldown_s for a, b in pairwise(at))
    return Migrations(
        total=moves,
        per_minute=moves / span_s * 60,
        per_request=moves / turns,
        accuracy=accurate / judged if judged else UNSET,
        thrash_rate=thrash / moves if moves else UNSET,
    )
