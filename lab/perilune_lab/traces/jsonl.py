"""Our own trace schema: one request per line, plain or gzip, in the order of submission.

    {"session": "a", "turn": 0, "start_s": 0.0, "output_tokens": 80,
     "prompt": [["system0", 300, "system"], ["a/task", 9000, "user"]]}
    {"session": "a", "turn": 1, "gap_s": 1.6, "output_tokens": 45,
     "extend": [["a/answer0", 80, "assistant"], ["a/tool1", 1340, "tool"]]}

| field | |
|---|---|
| `session` | any string; a session's lines come in order |
| `turn` | from 0, without holes; optional |
| `start_s` | of the session, seconds, on its first line; default 0 |
| `gap_s` | seconds from the previous turn's finish to this submission; default 0 |
| `timestamp_s` | when it was submitted, where known: modes `timestamps` and `max` need it on every line |
| `prompt` | the whole prompt: [key, tokens] or [key, tokens, role]; equal keys are equal text |
| `extend` | instead of `prompt`: what follows the previous turn's prompt |
| `input_tokens` | instead of both, when only counts are known: the prompt grows from the previous one to this length; a shorter one starts over |
| `output_tokens` | at least 1 |
| `tenant` | optional, on a session's first line |

Roles: system, user (default), assistant, tool. A trace with other roles than user is sent as chat, one
message a piece, and so is one whose prompts grow by `input_tokens` (its answers are assistant's); any other
is sent as plain text, so that its counts are exact.
"""  # noqa: E501 – a table row cannot be broken

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from perilune_api.pool import SpecError
from perilune_lab.traces.files import read_lines
from perilune_lab.traces.model import Role, Segment, Session, Style, Trace, Turn

Tokens = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class _Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    tokens: Tokens
    role: Role = Role.USER


class Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    session: str
    output_tokens: Tokens
    turn: int | None = None
    start_s: Seconds = 0.0
    gap_s: Seconds = 0.0
    timestamp_s: Seconds | None = None
    prompt: tuple[_Piece, ...] | None = None
    extend: tuple[_Piece, ...] | None = None
    input_tokens: Tokens | None = None
    tenant: str = ""


@dataclass(slots=True)
class _Growing:
    start_s: float
    tenant: str
    turns: list[Turn] = field(default_factory=list)


def read(path: Path, limit: int | None = None) -> Trace:
    """Read a trace. Raises SpecError naming line and field."""
    growing: dict[str, _Growing] = {}
    for number, line in islice(read_lines(path, Line), limit):
        start_s = line.start_s if line.timestamp_s is None else line.timestamp_s
        session = growing.setdefault(line.session, _Growing(start_s, line.tenant))
        expected = len(session.turns)
        if line.turn not in (None, expected):
            raise SpecError(
                f"{path}:{number}: turn {line.turn} of session {line.session!r}, expected {expected} "
                "- at `$.turn`"
            )
        try:
            prompt = _prompt(line, session.turns[-1] if session.turns else None)
        except SpecError as error:
            raise SpecError(f"{path}:{number}: {error}") from None
        session.turns.append(
            Turn(
                session=line.session,
                number=expected,
                prompt=prompt,
                output_tokens=line.output_tokens,
                gap_s=line.gap_s,
                timestamp_s=line.timestamp_s,
            )
        )
    if not growing:
        raise SpecError(f"{path}: no requests")
    sessions = [Session(name, g.start_s, tuple(g.turns), g.tenant) for name, g in growing.items()]
    sessions.sort(key=lambda session: session.start_s)
    roles = {piece.role for s in sessions for turn in s.turns for piece in turn.prompt}
    style = Style.TEXT if roles == {Role.USER} else Style.CHAT
    return Trace(path.name, style, tuple(sessions), {"file": path.name})


def write(trace: Trace, path: Path) -> None:
    """Write the turns as submitted; of a prompt that extends the last one, only the new part."""
    last: dict[str, Turn] = {}
    sessions = {session.session_id: session for session in trace.sessions}
    with path.open("wb") as file:
        for turn in trace.turns():
            before = last.get(turn.session)
            last[turn.session] = turn
            session = sessions[turn.session]
            old = before.prompt if before else ()
            extends = before is not None and turn.prompt[: len(old)] == old
            pieces = tuple(_Piece(*segment) for segment in turn.prompt[len(old) if extends else 0 :])
            line = Line(
                session=turn.session,
                output_tokens=turn.output_tokens,
                turn=turn.number,
                start_s=session.start_s if before is None else 0.0,
                gap_s=turn.gap_s,
                timestamp_s=turn.timestamp_s,
                prompt=None if extends else pieces,
                extend=pieces if extends else None,
                tenant=session.tenant if before is None else "",
            )
            file.write(msgspec.json.encode(line) + b"\n")


def _prompt(line: Line, before: Turn | None) -> tuple[Segment, ...]:
    given = [name for name in ("prompt", "extend", "input_tokens") if getattr(line, name) is not None]
    if len(given) != 1:
        raise SpecError(
            f"Exactly one of `prompt`, `extend`, `input_tokens` is needed, got {given or 'none'} - at `$`"
        )
    if line.input_tokens is not None:
        return _grown(line.input_tokens, line.session, before)
    if line.prompt is not None:
        return _segments(line.prompt)
    if before is None:
        raise SpecError("The first turn of a session has nothing to extend - at `$.extend`")
    return before.prompt + _segments(line.extend or ())


def _grown(tokens: int, session: str, before: Turn | None) -> tuple[Segment, ...]:
    """Return the previous prompt, its answer, and new text up to `tokens`."""
    number = before.number + 1 if before else 0
    old = before.prompt if before else ()
    answer = before.answer if before else None
    left = tokens - sum(segment.tokens for segment in old) - (answer.tokens if answer else 0)
    new = f"{session}/input{number}"
    if left < 0 or answer is None:
        return (Segment(new, tokens),)
    return (*old, answer, Segment(new, left)) if left else (*old, answer)


def _segments(pieces: Iterable[_Piece]) -> tuple[Segment, ...]:
    return tuple(Segment(piece.key, piece.tokens, piece.role) for piece in pieces)
