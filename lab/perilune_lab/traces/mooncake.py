"""Loads Mooncake's traces: JSON lines of `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`, one id per 512 tokens of the prompt, equal ids for equal prefixes (kvcache-ai/Mooncake, FAST'25).

Each id becomes a segment, so equal ids give equal text; the last one is shorter where the length is no
multiple of 512. The traces name no sessions; they follow from the chains of ids:

    a request continues the deepest earlier one whose last full block its prefix contains,
    unless another request has continued that one already: then it begins a session.

So a session is a chain, as a closed loop needs it, and a system prompt that everyone begins with does not
join all of them into one session. Gaps are guessed (recorded.py).

Cost: a look-up per id; 12,031 requests in about half a second.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from perilune_api.pool import SpecError
from perilune_gateway.model import H20_30B, EngineModel
from perilune_lab.traces.files import read_lines
from perilune_lab.traces.model import Segment, Trace, Turn
from perilune_lab.traces.recorded import recorded

BLOCK_TOKENS = 512


class Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[int, ...]


def load(path: Path, limit: int | None = None, engine: EngineModel = H20_30B) -> Trace:
    """Return the trace, or its first `limit` requests. Raises SpecError naming line and field."""
    turns: list[Turn] = []
    sessions = _Sessions()
    earliest_ms = 0.0
    for number, line in islice(read_lines(path, Line), limit):
        blocks = -(-line.input_length // BLOCK_TOKENS)
        if len(line.hash_ids) != blocks:
            raise SpecError(
                f"{path}:{number}: {line.input_length} tokens need {blocks} ids, got {len(line.hash_ids)} "
                "- at `$.hash_ids`"
            )
        if line.timestamp < earliest_ms:
            raise SpecError(f"{path}:{number}: earlier than the line before - at `$.timestamp`")
        earliest_ms = line.timestamp
        session, turn_number = sessions.place(line.hash_ids[: line.input_length // BLOCK_TOKENS])
        turns.append(
            Turn(
                session=session,
                number=turn_number,
                prompt=_segments(line),
                output_tokens=max(1, line.output_length),
                timestamp_s=line.timestamp / 1000,
            )
        )
    return recorded(path, turns, engine)


class _Sessions:
    """Finds the session that a request continues, by the last full block of the session's last request."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[str, int]] = {}
        self._begun = 0

    def place(self, full: tuple[int, ...]) -> tuple[str, int]:
        """Return (session, number of the turn) of a request with these full blocks."""
        for block in reversed(full):
            if block in self._ends:
                session, last = self._ends.pop(block)
                place = session, last + 1
                break
        else:
            place = f"m{self._begun}", 0
            self._begun += 1
        if full:
            self._ends[full[-1]] = place
        return place


def _segments(line: Line) -> tuple[Segment, ...]:
    rest = line.input_length - BLOCK_TOKENS * (len(line.hash_ids) - 1)
    *full, last = line.hash_ids
    return (*(Segment(f"block{i}", BLOCK_TOKENS) for i in full), Segment(f"block{last}", rest))
