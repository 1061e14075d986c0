"""The generated traffic, apart from any policy: the lengths of its sessions, and its possible reuse."""

from __future__ import annotations

from typing import NamedTuple

from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.stats import Stats, stats

SESSIONS = 4_000


class Traffic(NamedTuple):
    """Statistics of generated traffic."""

    stats: Stats
    session_tokens: list[int]
    """Prompt tokens of all turns of each session, ascending."""


def traffic(seed: int, sessions: int = SESSIONS) -> Traffic:
    """Generate whole sessions and compare them with an infinite cache. Take a millisecond per session."""
    trace = generate(Agentic(), seed, sessions)
    tokens = sorted(sum(t.prompt_tokens for t in s.turns) for s in trace.sessions)
    return Traffic(stats(trace), tokens)
