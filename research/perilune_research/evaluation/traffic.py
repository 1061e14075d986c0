"""Generated traffic that differs from the default: other parameters, tenants, bodies that are hard to guess.

`varied` changes parameters of agents' sessions by a factor. `tenants` makes the sessions of one tenant at its
share of a pool, and of one that sends `TIMES` its share; those of the first are the same with and without the
other. `hard_to_guess` lets sessions do what makes a body differ from what its headers let expect:

- *reasoning*: some leave the first part of every answer out of later prompts, as templates do;
- *side requests*: short prompts of another kind come under a session's own name, while the session goes on;
- *sub-agents*: sessions of their own, of which half begin with the whole context of another;
- *names used again*: new sessions have the name of an earlier one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import takewhile
from math import log
from random import Random
from typing import Any

from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.model import Role, Segment, Session, Style, Trace, Turn

QUIET, GREEDY = "quiet", "greedy"
TIMES = 10.0
"""How many times its share the greedy tenant sends."""
REASONING_SESSIONS, REASONING_SHARE = 0.3, 0.6
"""Share of the sessions that leave reasoning out, and share of an answer that is reasoning."""
SIDE_TURNS, SUB_AGENT_TURNS, NAMES_AGAIN = 0.04, 0.04, 0.08
"""Shares of the turns with a side request, and with a sub-agent after them; share of the sessions that have
the name of an earlier one."""


def varied(traffic: Agentic, factors: Sequence[tuple[str, float]]) -> Agentic:
    """Return the traffic with each of these parameters times its factor; of a log-normal draw, its median."""
    for parameter, factor in factors:
        value: Any = getattr(traffic, parameter)
        changed: Any
        if isinstance(value, tuple):
            mu, sigma = value
            changed = (mu + log(factor), sigma)
        else:
            changed = round(value * factor, None if isinstance(value, int) else 6)
        traffic = replace(traffic, **{parameter: changed})
    return traffic


def tenants(who: Collection[str], rate: float, seed: int, window_s: float) -> Trace:
    """Make the sessions of these tenants. `rate`: sessions per second of both, of which the quiet one has its
    share even if it is alone."""
    share = rate / (1.0 + TIMES)
    parts = {QUIET: _sessions(QUIET, share, seed, window_s)}
    parts[GREEDY] = _sessions(GREEDY, TIMES * share, seed + 1_000, window_s)
    mixed = merge(*(parts[name] for name in who), key=lambda session: session.start_s)
    return Trace("tenants", Style.CHAT, tuple(mixed))


def _sessions(tenant: str, rate: float, seed: int, window_s: float) -> Iterator[Session]:
    made = agentic.sessions(Agentic(sessions_per_s=rate), seed)
    return (replace(s, tenant=tenant) for s in takewhile(lambda s: s.start_s < window_s, made))


def hard_to_guess(plain: Iterable[Session], seed: int) -> list[Session]:
    """Return the sessions with what makes their bodies hard to guess, by start. What comes while a session
    goes on comes when an unloaded system would be there."""
    rng, names = Random(f"{seed} habits"), list[str]()
    found: list[Session] = []
    for session in plain:
        again = bool(names) and rng.random() < NAMES_AGAIN
        name = rng.choice(names[-50:]) if again else session.session_id
        names.append(name)
        reasons, at_s, turns = rng.random() < REASONING_SESSIONS, session.start_s, list[Turn]()
        for turn in session.turns:
            at_s += turn.gap_s
            turns.append(replace(turn, prompt=_without_reasoning(turn.prompt)) if reasons else turn)
            if rng.random() < SIDE_TURNS:
                found.append(Session(name, at_s, (_side(turn, rng),)))
            if rng.random() < SUB_AGENT_TURNS:
                found.append(_sub_agent(turns[-1], at_s, rng))
        found.append(Session(name, session.start_s, tuple(turns)))
    return sorted(found, key=lambda session: session.start_s)


def _without_reasoning(prompt: Sequence[Segment]) -> tuple[Segment, ...]:
    return tuple(
        Segment(f"{s.key}/said", max(1, int(s.tokens * (1 - REASONING_SHARE))), s.role)
        if s.role is Role.ASSISTANT
        else s
        for s in prompt
    )


def _side(turn: Turn, rng: Random) -> Turn:
    """Return a side request, such as for a title or a summary, with a system prompt of its own."""
    name = f"{turn.session}/side{turn.number}"
    prompt = (Segment("side/system", 120, Role.SYSTEM), Segment(name, rng.randrange(10, 800)))
    return Turn(session=name, number=0, prompt=prompt, output_tokens=rng.randrange(3, 30))


def _sub_agent(turn: Turn, at_s: float, rng: Random) -> Session:
    name = f"{turn.session}/agent{turn.number}"
    now = (*(turn.prompt if rng.random() < 0.5 else turn.prompt[:1]), Segment(f"{name}/task", 300))
    turns: list[Turn] = []
    for number in range(rng.randrange(2, 7)):
        gap_s = rng.expovariate(0.5) if number else 0.0
        turns.append(
            Turn(session=name, number=number, prompt=now, output_tokens=rng.randrange(5, 200), gap_s=gap_s)
        )
        now = (*now, turns[-1].answer, Segment(f"{name}/tool{number}", rng.randrange(20, 1500), Role.TOOL))
    return Session(name, at_s, tuple(turns))
