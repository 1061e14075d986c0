"""Agentic sessions whose bodies are hard to guess from their headers.

The sessions of the generator (traces/agentic.py) have growing prompts and compaction. This module adds:

- *reasoning*: some sessions leave the first part of every answer out of later prompts, as templates do;
- *sub-agents*: sessions of their own that name their parent; half of them begin with its whole context;
- *side requests*: short prompts of another kind under a session's own id, while the session goes on;
- *id reuse*: new sessions under the id of one that has ended.

A text consists of token ids and a length in bytes, both of which depend on the segment's key. The bytes per
token vary between segments, as they do between prose, code and JSON. Equal parameters, habits and seeds give
equal traffic.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from perilune_lab.traces.agentic import Agentic, sessions
from perilune_lab.traces.model import Role, Segment, Turn

MARKUP_TOKENS, MARKUP_BYTES = 5, 40
"""Overhead of a message: tokens in the prompt, bytes in the body."""
BODY_BYTES = 300
"""Bytes of a body besides its messages."""
BYTES_PER_TOKEN = (2.6, 5.2)
"""Lowest and highest bytes per token of a segment."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How often sessions do what makes bodies hard to guess. All values are 0–1."""

    reasoning_sessions: float = 0.3
    """Share of the sessions that leave reasoning out of later prompts."""
    reasoning_share: float = 0.6
    """Share of an answer that is reasoning."""
    sub_agent_turns: float = 0.04
    """Share of the turns after which a sub-agent begins."""
    side_turns: float = 0.04
    """Share of the turns with a side request."""
    reused_ids: float = 0.08
    """Share of the sessions that have the id of one that has ended."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn, ready to be sent."""

    prompt: tuple[Segment, ...]
    answer: Segment
    gap_s: float = 0.0
    """Seconds from the end of the previous request."""
    spawns: tuple[Conversation, ...] = ()
    """Conversations that begin when this turn ends."""
    side: Request | None = None
    """A side request that is sent together with this one, under the same id."""

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt."""
        ids: list[int] = []
        for segment in self.prompt:
            ids += ids_of(segment)
        return ids

    @property
    def body_bytes(self) -> int:
        """Length of the body, in bytes."""
        return BODY_BYTES + sum(bytes_of(segment) for segment in self.prompt)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests that are sent one after the other."""

    session_id: str
    requests: tuple[Request, ...]
    start_s: float = 0.0
    parent_id: str = ""


@lru_cache(maxsize=4096)
def ids_of(segment: Segment) -> list[int]:
    """Return the token ids of a segment's message: markup, then one id per token. Callers must not change the
    list."""
    raw = hashlib.shake_128(segment.key.encode()).digest(2 * segment.tokens)
    return [70_000 + len(segment.role), *range(70_100, 70_099 + MARKUP_TOKENS), *array("H", raw)]


@lru_cache(maxsize=65_536)
def bytes_of(segment: Segment) -> int:
    """Return the bytes of a segment's message in a body."""
    low, high = BYTES_PER_TOKEN
    return MARKUP_BYTES + int(segment.tokens * (low + (high - low) * Random(segment.key).random()))


def conversations(parameters: Agentic, habits: Habits, seed: int) -> Iterator[Conversation]:
    """Yield conversations in the order of their starts, without end."""
    rng = Random(seed)
    ended: list[str] = []
    for session in sessions(parameters, seed):
        session_id = session.session_id
        if ended and rng.random() < habits.reused_ids:
            session_id = rng.choice(ended[-50:])
        reasons = rng.random() < habits.reasoning_sessions
        requests = []
        for turn in session.turns:
            prompt = _without_reasoning(turn, habits.reasoning_share) if reasons else turn.prompt
            spawns: tuple[Conversation, ...] = ()
            if rng.random() < habits.sub_agent_turns:
                spawns = (_sub_agent(session_id, turn, prompt, rng),)
            side = _side(turn, rng) if rng.random() < habits.side_turns else None
            requests.append(Request(prompt, turn.answer, turn.gap_s, spawns, side))
        ended.append(session_id)
        yield Conversation(session_id, tuple(requests), session.start_s)


def _without_reasoning(turn: Turn, share: float) -> tuple[Segment, ...]:
    """Return the prompt without the first part of each answer."""
    return tuple(
        Segment(f"{s.key}/said", max(1, int(s.tokens * (1 - share))), s.role)
        if s.role is Role.ASSISTANT
        else s
        for s in turn.prompt
    )


def _sub_agent(parent: str, turn: Turn, prompt: tuple[Segment, ...], rng: Random) -> Conversation:
    name = f"{parent}/agent{turn.number}"
    task = Segment(f"{name}/task", rng.randrange(20, 600))
    now = (*prompt, task) if rng.random() < 0.5 else (prompt[0], task)
    requests = []
    for number in range(rng.randrange(2, 7)):
        answer = Segment(f"{name}/answer{number}", rng.randrange(5, 200), Role.ASSISTANT)
        requests.append(Request(now, answer, rng.expovariate(0.5)))
        now = (*now, answer, Segment(f"{name}/tool{number}", rng.randrange(20, 1500), Role.TOOL))
    return Conversation(name, tuple(requests), parent_id=parent)


def _side(turn: Turn, rng: Random) -> Request:
    """Return a side request, such as for a title or a summary, with a system prompt of its own."""
    name = f"{turn.session}/side{turn.number}"
    prompt = (Segment("side/system", 120, Role.SYSTEM), Segment(name, rng.randrange(10, 800)))
    return Request(prompt, Segment(f"{name}/answer", rng.randrange(3, 30), Role.ASSISTANT))
