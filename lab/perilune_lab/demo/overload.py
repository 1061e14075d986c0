"""What overload did to a run, and runs side by side: `outcome(…) → Outcome`, `table(…)`. Pure.

A session counts from its arrival: waiting for a refused client's next attempt is waiting. What is answered
after the run's end counts in times, not in throughput. A session without any answer has waited until the last
answer of the run; it counts with that time, so that turning sessions away never looks like speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from perilune_lab.load.result import Result
from perilune_lab.quantiles import quantile
from perilune_lab.traces.model import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the sessions of a run. Seconds are engine seconds."""

    requests_per_s: float
    """Answered before the run's end."""
    output_tokens_per_s: float
    completed: int
    """Sessions with an answer to every turn before the run's end."""
    inside_s: tuple[float, ...]
    """TTFT of turns after a session's first, ascending."""
    arrival_s: tuple[float, ...]
    """Seconds from each session's arrival to its first token, ascending."""
    refused: int
    """Requests that were answered 429."""
    given_up: int
    """Sessions that ended because a request failed at every attempt, or might not be sent again."""


def outcome(
    results: Sequence[Result], sessions: Sequence[Session], seconds: float, time_scale: float
) -> Outcome:
    """Sum up the `results` of `sessions` that were played for `seconds` wall seconds, at all attempts."""
    good = [r for r in results if r.succeeded]
    in_time = [r for r in good if r.finished_at_s <= seconds]
    turns = {session.session_id: len(session.turns) for session in sessions}
    answered = Counter(r.session for r in in_time)
    end_s = max((r.finished_at_s for r in results), default=0.0)
    arrived_s = {s.session_id: (s.start_s - sessions[0].start_s) / time_scale for s in sessions}
    first_token_s = {
        r.session: r.submitted_at_s + r.ttft_s for r in good if r.turn == 0 and r.ttft_s is not None
    }
    last = {r.session: r for r in results}
    return Outcome(
        requests_per_s=len(in_time) / (seconds * time_scale),
        output_tokens_per_s=sum(r.output_tokens for r in in_time) / (seconds * time_scale),
        completed=sum(count == turns.get(session) for session, count in answered.items()),
        inside_s=tuple(sorted(r.ttft_s * time_scale for r in good if r.turn and r.ttft_s is not None)),
        arrival_s=tuple(
            sorted((first_token_s.get(s, end_s) - at) * time_scale for s, at in arrived_s.items())
        ),
        refused=sum(r.rejected for r in results),
        given_up=sum(not r.succeeded for r in last.values()),
    )


def _at(q: float, values: Sequence[float]) -> str:
    return f"{quantile(values, q):.2f} s" if values else "–"


ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("answers per second", lambda o: f"{o.requests_per_s:.2f}"),
    ("output tokens per second", lambda o: f"{o.output_tokens_per_s:,.0f}"),
    ("sessions completed", lambda o: f"{o.completed}"),
    ("TTFT inside a session, p50", lambda o: _at(0.5, o.inside_s)),
    ("TTFT inside a session, p90", lambda o: _at(0.9, o.inside_s)),
    ("first token from arrival, p50", lambda o: _at(0.5, o.arrival_s)),
    ("first token from arrival, p90", lambda o: _at(0.9, o.arrival_s)),
    ("requests refused (429)", lambda o: f"{o.refused}"),
    ("sessions given up", lambda o: f"{o.given_up}"),
)


def table(outcomes: Mapping[str, Outcome]) -> Group:
    """Return a table with a column for each run."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 2, 0, 0))
    shown.add_column("beyond saturation", no_wrap=True)
    for name in outcomes:
        shown.add_column(name, justify="right", no_wrap=True)
    for label, value in ROWS:
        shown.add_row(label, *(value(outcome) for outcome in outcomes.values()))
    return Group(
        shown,
        Text(
            "A session without a first token counts with its time until the last answer of the run.",
            style="dim",
        ),
    )
