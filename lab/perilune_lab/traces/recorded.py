"""Requests with the times of their submission, as production traces record them, made a trace.

Such traces do not record when an answer ended: a gap is the time between two submissions less what the
earlier turn takes alone on an H20, its session's prefix cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from perilune_api.pool import SpecError
from perilune_gateway.model import EngineModel
from perilune_lab.traces.model import Session, Style, Trace, Turn
from perilune_lab.traces.reuse import ideal_turn_s, reuse


def recorded(path: Path, turns: list[Turn], engine: EngineModel) -> Trace:
    """Return the trace of `turns`, given for all sessions in the order of submission. Raises SpecError
    without turns."""
    if not turns:
        raise SpecError(f"{path}: no requests")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Trace(name, Style.TEXT, tuple(_sessions(turns, engine)), {"file": path.name})


def _sessions(turns: list[Turn], engine: EngineModel) -> Iterable[Session]:
    """Yield the sessions ordered by start, with gaps between their turns."""
    by_session: dict[str, list[Turn]] = {}
    free_at_s: dict[str, float] = {}
    for turn, found in zip(turns, reuse(turns), strict=True):
        at_s = turn.timestamp_s or 0.0
        gap_s = max(0.0, at_s - free_at_s.get(turn.session, at_s))
        by_session.setdefault(turn.session, []).append(replace(turn, gap_s=gap_s))
        free_at_s[turn.session] = at_s + ideal_turn_s(engine, turn, found.own_tokens)
    for session, rows in by_session.items():
        yield Session(session, rows[0].timestamp_s or 0.0, tuple(rows))
