"""Agents' sessions as load: prompts of token ids that grow by turns, and what each turn found cached.

with agents(client, 8, "calm") as turns:
    … whatever happens to the pool …
shares(turns.done[…])
"""

import http.client
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from testbed.http import Client, eventually

FIRST_TOKENS, MORE_TOKENS, TURNS = 3_000, 1_000, 10
"""Tokens of a session's first prompt, tokens that each turn adds, and turns until another session begins."""
PAUSE_S = 2.0
"""Mean seconds between an answer and the session's next turn."""
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn; times by time.monotonic()."""

    session: str
    number: int
    """Position in the session, from 0. No cache holds the prompt of turn 0."""
    began: float
    seconds: float
    """Time from sending the prompt to the whole answer, which is one token."""
    engine: str
    reason: str
    """Why the gateway chose it; empty if Envoy did not ask it."""
    before: str
    """The engine of the session's turn before."""
    sent: int
    """Tokens of the session's prompt before, in whole blocks: what its engine holds."""
    cached: int
    """Tokens of the prompt that the engine had cached, by its own count."""

    @property
    def found(self) -> bool:
        """Whether nearly all was there that the session's engine had."""
        return self.cached >= 0.95 * self.sent

    @property
    def moved(self) -> bool:
        return self.engine != self.before


@dataclass(slots=True)
class Turns:
    done: list[Turn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def since(self, at: float) -> list[Turn]:
        """Return the turns that began since then, without the first turn of each session."""
        return [turn for turn in self.done if turn.number and turn.began >= at]

    def goes_on(self, count: int) -> None:
        """Wait for so many more turns."""
        wanted = len(self.done) + count

        def enough() -> None:
            assert len(self.done) >= wanted

        eventually(enough)


@dataclass(frozen=True, slots=True)
class Habits:
    """How agents work."""

    turns: int = TURNS
    """Turns until another session begins."""
    pause_s: float = PAUSE_S
    """Mean seconds between an answer and the session's next turn."""


@contextmanager
def agents(client: Client, count: int, name: str, habits: Habits = Habits()) -> Iterator[Turns]:
    """While inside, so many agents work on one session after the other. Sessions and prompts differ from
    those of other names."""
    turns, stop = Turns(), threading.Event()

    def agent(number: int) -> None:
        rng, session = Random(f"{name} {number}"), 0
        stop.wait(rng.uniform(0, habits.pause_s))
        while not stop.is_set():
            _play(client, f"{name}-{number}-{session}", rng, turns, stop, habits)
            session += 1

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield turns
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _play(
    client: Client, name: str, rng: Random, turns: Turns, stop: threading.Event, habits: Habits
) -> None:
    """Play one session to its end."""
    ids = [rng.randrange(5, 300) for _ in range(FIRST_TOKENS)]
    sent, engine = 0, ""
    for number in range(habits.turns):
        began = time.monotonic()
        try:
            # the client's document has room for a list of token ids in the place of a text
            answer = client.complete(ids, session=name, max_tokens=1)  # type: ignore[arg-type]
        except (OSError, http.client.HTTPException) as error:
            turns.failures.append(f"{name} turn {number} {error!r}")
            return
        if answer.status != 200:
            turns.failures.append(f"{name} turn {number} {answer.status} {answer.body[:200]!r}")
            return
        cached = (answer.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        turns.done.append(
            Turn(name, number, began, answer.seconds, answer.served, answer.reason, engine, sent, cached)
        )
        sent, engine = len(ids) // BLOCK * BLOCK, answer.served
        ids = [*ids, *(rng.randrange(5, 300) for _ in range(MORE_TOKENS))]
        if stop.wait(rng.uniform(0.5, 1.5) * habits.pause_s):
            return


def p90(turns: Sequence[Turn]) -> float:
    """Seconds."""
    ordered = sorted(turn.seconds for turn in turns)
    return ordered[int(0.9 * (len(ordered) - 1))]


def share(turns: Sequence[bool]) -> float:
    return sum(turns) / len(turns)
