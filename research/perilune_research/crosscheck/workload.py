"""What a crosscheck plays: generated agentic sessions, cut to a window, and the same under other names.

Sessions are short ones (`SHORT`), so that half a minute holds hundreds of turns, enough for a hit rate to one
point. Prompts are sent as plain text, so
that live and simulated plays count the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from random import Random

from perilune_gateway.model import H20_30B
from perilune_lab.simulate.workload import prepare
from perilune_lab.traces.agentic import Agentic, describe, sessions
from perilune_lab.traces.model import Style, Trace, Turn

JITTER_S = 0.01
"""Most seconds by which `jittered` makes a start or a think time longer."""
SHORT = Agentic(
    turns_alpha=8.0,
    turns_min=9,
    turns_max=14,
    first_prompt=(9.6, 0.4),
    tool_result=(6.9, 0.5),
    answer=(3.9, 0.5),
    compacted_share=0.0,
    length_scale=0.25,
    gap_scale=0.05,
)
"""Sessions of coding agents that are similar to each other, with a quarter of the usual lengths and a
twentieth of the gaps."""
POLICIES = ("round_robin", "lmetric_plus_one", "sticky", "ear", "perilune", "dynamo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line, and what it does not change."""

    policies: tuple[str, ...] = POLICIES
    endpoints: int = 3
    seconds: float = 33.0
    """Seconds of traffic; the last turns end a little later."""
    rate: float = 0.5
    """Sessions per second and endpoint."""
    seed: int = 1
    plays: int = 1
    """Number of live plays of each policy."""
    json: Path | None = None
    kv_tokens: int = 100_000
    context_tokens: int = 32_768

    def trace(self) -> Trace:
        """Return the sessions with the turns that an unloaded system would see within the window."""
        p = replace(SHORT, sessions_per_s=self.rate * self.endpoints)
        started = takewhile(lambda s: s.start_s < self.seconds, sessions(p, self.seed))
        whole = Trace("agentic", Style.TEXT, tuple(started), {"seed": self.seed, **describe(p)})
        jobs = prepare(whole, H20_30B, window_s=self.seconds).jobs
        cut = (
            replace(session, turns=session.turns[: len(job.tasks)])
            for session, job in zip(whole.sessions, jobs, strict=True)
        )
        return replace(whole, sessions=tuple(session for session in cut if session.turns))


def renamed(trace: Trace, prefix: str) -> Trace:
    """Return the same trace with other session names and other texts of the same lengths."""

    def turn(t: Turn) -> Turn:
        prompt = tuple(segment._replace(key=f"{prefix}{segment.key}") for segment in t.prompt)
        return replace(t, session=prefix + t.session, prompt=prompt)

    sessions = (
        replace(s, session_id=prefix + s.session_id, turns=tuple(map(turn, s.turns))) for s in trace.sessions
    )
    return replace(trace, sessions=tuple(sessions))


def jittered(trace: Trace, rng: Random) -> Trace:
    """Return the same trace with every start and think time longer by up to `JITTER_S`."""
    return replace(
        trace,
        sessions=tuple(
            replace(
                s,
                start_s=s.start_s + rng.uniform(0, JITTER_S),
                turns=tuple(replace(t, gap_s=t.gap_s + rng.uniform(0, JITTER_S)) for t in s.turns),
            )
            for s in trace.sessions
        ),
    )
