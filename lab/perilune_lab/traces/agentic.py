"""Generated agentic traffic: closed-loop sessions whose prompts only grow.

A session is a coding agent at work: a system prompt, a task, then turns of answer and tool result, each
submitted a short gap after the previous answer. Steps for one session:

1. it starts at a Poisson time, with one of a few system prompts that many sessions share;
2. its task is new, or (seldom) one that another session has begun with: the same task started again;
3. it has a heavy-tailed number of turns; L_k = L_{k−1} + answer_{k−1} + tool result_k; where the next prompt
   would pass the context limit, the context is compacted to a new summary (or the session ends);
4. gaps follow measured quantiles: most below 2 s, a tail of minutes.

The defaults are fitted to a coding agent's measured traffic (a test holds the moments); `stats` reports what
a trace reaches. Everything follows from (parameters, seed). Cost: microseconds per turn.

Not modelled: sub-agents, parallel tool calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from math import ceil, exp, log
from random import Random

from perilune_lab.traces.model import Role, Segment, Session, Style, Trace, Turn

GAP_QUANTILES_S = (
    (0.0, 0.1),
    (0.25, 0.69),
    (0.39, 1.0),
    (0.50, 1.6),
    (0.75, 8.6),
    (0.87, 30.0),
    (0.90, 44.0),
    (0.99, 738.0),
    (1.0, 1800.0),
)
"""(probability, seconds) of tool gaps, measured on a coding agent's traffic; between them log-linear."""

_RECENT_TASKS = 64
_MARKUP_TOKENS = 20
"""Allowance for what a chat template adds to a message, a call of a tool to every second one included."""
_RANKS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Agentic:
    """Parameters. Log-normal draws are (μ, σ) of the logarithm, in tokens."""

    sessions_per_s: float = 0.25
    """Poisson rate of session starts."""
    turns_alpha: float = 1.35
    """Pareto shape of the number of turns."""
    turns_min: int = 1
    turns_max: int = 250
    first_prompt: tuple[float, float] = (9.05, 1.1)
    tool_result: tuple[float, float] = (6.8, 1.5)
    answer: tuple[float, float] = (4.38, 1.89)
    answer_max_tokens: int = 16_384
    context_tokens: int = 131_072
    """No prompt with its answer is longer: the session is compacted, or ends."""
    compacted_share: float = 0.10
    """Share of the context limit that system prompt and summary take after compaction; 0 ends the session
    instead."""
    system_prompts: int = 3
    system_tokens: int = 300
    """Length of a system prompt; part of the first prompt."""
    same_task_share: float = 0.115
    """Share of the sessions that begin with a task that a recent session began with."""
    zipf_alpha: float = 0.0
    """Skew of the sessions' weights: a session's turns are multiplied by rank^−α over the mean, its rank
    drawn from 1 … 1000; 0 for equal weights."""
    length_scale: float = 1.0
    """Multiplies every length in tokens, the context limit included."""
    gap_scale: float = 1.0
    """Multiplies every gap."""


def sessions(parameters: Agentic, seed: int) -> Iterator[Session]:
    """Yield the sessions without end, by start. Equal (parameters, seed) give equal sessions."""
    draw = _Draw(parameters)
    rng = Random(seed)
    start_s = 0.0
    for number in count():
        start_s += rng.expovariate(parameters.sessions_per_s)
        yield draw.session(f"s{seed}-{number}", start_s, rng.getrandbits(64))


def generate(parameters: Agentic, seed: int, number: int) -> Trace:
    """Return the first `number` sessions as a trace."""
    return Trace(
        name="agentic",
        style=Style.CHAT,
        sessions=tuple(islice(sessions(parameters, seed), number)),
        parameters={"seed": seed, "sessions": number} | describe(parameters),
    )


def describe(parameters: Agentic) -> dict[str, float | int | str]:
    """Return the parameters as they are printed and reported."""
    return {
        name: "log-normal({}, {})".format(*value) if isinstance(value, tuple) else value
        for name, value in asdict(parameters).items()
    }


def gap_s(u: float) -> float:
    """Return the inverse of the gaps' distribution: `u` uniform in [0, 1)."""
    i = bisect_right(GAP_QUANTILES_S, (u, float("inf"))) - 1
    (p0, s0), (p1, s1) = GAP_QUANTILES_S[i], GAP_QUANTILES_S[i + 1]
    return s0 * exp((u - p0) / (p1 - p0) * log(s1 / s0))


class _Draw:
    """Draws sessions. Keeps the recent tasks and the random generator of the session that is being drawn."""

    def __init__(self, parameters: Agentic) -> None:
        self.p = parameters
        self.rng = Random()
        self._tasks: list[tuple[Segment, ...]] = []
        self._mean_weight = sum(self._weight(rank) for rank in range(1, _RANKS + 1)) / _RANKS

    def session(self, session_id: str, start_s: float, seed: int) -> Session:
        """Draw a session by a random seed of its own: another scale changes its lengths, not later
        sessions."""
        p, rng = self.p, Random(seed)
        self.rng = rng
        prompt = self._task(session_id)
        length = sum(segment.tokens for segment in prompt)
        turns: list[Turn] = []
        wanted = self._turns()
        while len(turns) < wanted:
            answer_tokens = min(self._tokens(p.answer), self._scaled(p.answer_max_tokens))
            markup_tokens = _MARKUP_TOKENS * (len(prompt) + 2)
            if length + answer_tokens + markup_tokens > self._scaled(p.context_tokens):
                if not p.compacted_share or not turns:
                    break
                prompt = self._compacted(prompt[0], session_id, len(turns))
                length = sum(segment.tokens for segment in prompt)
            gap = gap_s(rng.random()) * p.gap_scale if turns else 0.0
            turn = Turn(
                session=session_id, number=len(turns), prompt=prompt, output_tokens=answer_tokens, gap_s=gap
            )
            turns.append(turn)
            tool = Segment(f"{session_id}/tool{len(turns)}", self._tokens(p.tool_result), Role.TOOL)
            prompt = (*prompt, turn.answer, tool)
            length += answer_tokens + tool.tokens
        return Session(session_id, start_s, tuple(turns))

    def _task(self, session_id: str) -> tuple[Segment, ...]:
        """Draw system prompt and task, together at most three quarters of the context, so that a first turn
        fits."""
        p, rng = self.p, self.rng
        system = Segment(
            f"system{rng.randrange(p.system_prompts)}", self._scaled(p.system_tokens), Role.SYSTEM
        )
        if self._tasks and rng.random() < p.same_task_share:
            return rng.choice(self._tasks)
        room = self._scaled(p.context_tokens) * 3 // 4
        tokens = max(1, min(self._tokens(p.first_prompt), room) - system.tokens)
        task = (system, Segment(f"{session_id}/task", tokens, Role.USER))
        self._tasks = [*self._tasks[1 - _RECENT_TASKS :], task]
        return task

    def _compacted(self, system: Segment, session_id: str, turn: int) -> tuple[Segment, ...]:
        """Return the context after compaction: the system prompt and a summary."""
        tokens = int(self.p.compacted_share * self._scaled(self.p.context_tokens))
        summary = Segment(f"{session_id}/summary{turn}", max(1, tokens - system.tokens), Role.USER)
        return (system, summary)

    def _turns(self) -> int:
        p = self.p
        weight = self._weight(self.rng.randint(1, _RANKS)) / self._mean_weight
        turns = int(p.turns_min * self.rng.paretovariate(p.turns_alpha) * weight)
        return max(1, min(p.turns_max, turns))

    def _weight(self, rank: int) -> float:
        return float(rank**-self.p.zipf_alpha)

    def _tokens(self, lognormal: tuple[float, float]) -> int:
        return self._scaled(self.rng.lognormvariate(*lognormal))

    def _scaled(self, tokens: float) -> int:
        return max(1, ceil(tokens * self.p.length_scale))
