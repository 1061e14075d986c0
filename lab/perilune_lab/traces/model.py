"""What a trace is: sessions of turns, each prompt made of named segments of text.

A segment is a key and a token count; equal keys are equal text, so two prompts share exactly the tokens
of the segments that they begin with in common. The same value describes a recorded trace of hashed blocks
(one segment per block) and generated agentic traffic (one segment per message).

Times are seconds of the trace, as recorded or drawn; a replay may run faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from perilune_api.pool import SpecError


class Mode(StrEnum):
    """When a turn is submitted. The modes give different answers: always say which one ran."""

    THINKTIME = "thinktime"
    """Closed loop: `gap_s` after the previous turn of its session finished."""
    TIMESTAMPS = "timestamps"
    """Open loop: at its recorded time, independent of other turns."""
    MAX = "max"
    """At its recorded time, but not before the previous turn of its session finished."""


class Style(StrEnum):
    """How a prompt is sent."""

    CHAT = "chat"
    """/v1/chat/completions, one message per segment; answers are the model's own."""
    TEXT = "text"
    """/v1/completions, the segments' text as one prompt: token counts are exact."""


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    """An answer: in a closed loop the model's own text takes its place."""
    TOOL = "tool"


class Segment(NamedTuple):
    """A run of text. Equal keys are equal text."""

    key: str
    tokens: int
    role: Role = Role.USER


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request."""

    session: str
    number: int
    """Counts the session's turns from 0."""
    prompt: tuple[Segment, ...]
    output_tokens: int
    gap_s: float = 0.0
    """Time from the previous turn's finish to this one's submission."""
    timestamp_s: float | None = None
    """Recorded time of submission; None if the trace has none."""

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)

    @property
    def answer(self) -> Segment:
        """The segment that stands for this turn's answer in later prompts."""
        return Segment(f"{self.session}/answer{self.number}", self.output_tokens, Role.ASSISTANT)


def submitted_s(turn: Turn) -> float:
    """Return a turn's recorded time of submission. Raises SpecError if the trace has none."""
    if turn.timestamp_s is None:
        raise SpecError(
            f"turn {turn.number} of session {turn.session} has no timestamp: only the mode "
            f"{Mode.THINKTIME} can play this trace"
        )
    return turn.timestamp_s


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other, each prompt usually extending the one before."""

    session_id: str
    start_s: float
    """When the first turn is submitted."""
    turns: tuple[Turn, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A finite trace."""

    name: str
    style: Style
    sessions: tuple[Session, ...]
    """Ordered by start."""
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    """Parameters of its generation; printed and reported."""

    def turns(self) -> list[Turn]:
        """Return every turn, in the order in which an unloaded system would see them: by timestamp where
        recorded, else by the session's start plus its gaps."""
        order: list[tuple[float, int, Turn]] = []
        for session in self.sessions:
            at = session.start_s
            for turn in session.turns:
                at = turn.timestamp_s if turn.timestamp_s is not None else at + turn.gap_s
                order.append((at, len(order), turn))
        return [turn for _, _, turn in sorted(order)]

    def limit(self, requests: int) -> Trace:
        """Return the trace's first `requests` requests."""
        kept = {(turn.session, turn.number) for turn in self.turns()[:requests]}
        sessions = (
            replace(s, turns=tuple(t for t in s.turns if (t.session, t.number) in kept))
            for s in self.sessions
        )
        return replace(self, sessions=tuple(s for s in sessions if s.turns))

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def timed(self) -> bool:
        """Every turn has a recorded time."""
        return all(t.timestamp_s is not None for t in chain.from_iterable(s.turns for s in self.sessions))
