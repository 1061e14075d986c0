"""What overload did: sessions count from their arrival, and refusals do not look like speed."""

from io import StringIO

import pytest
from rich.console import Console

from perilune_lab.demo.overload import outcome, table
from perilune_lab.load.result import Result
from perilune_lab.traces.model import Role, Segment, Session, Turn

PROMPT = (Segment("task", 3, Role.USER),)


def session(name: str, start_s: float, turns: int) -> Session:
    return Session(
        name,
        start_s,
        tuple(Turn(session=name, number=number, prompt=PROMPT, output_tokens=3) for number in range(turns)),
    )


def answered(name: str, turn: int, at_s: float, ttft_s: float, took_s: float) -> Result:
    return Result(
        session=name,
        turn=turn,
        request_id="r",
        submitted_at_s=at_s,
        finished_at_s=at_s + took_s,
        due_at_s=at_s,
        status=200,
        ttft_s=ttft_s,
        output_tokens=10,
    )


def refused(name: str, at_s: float) -> Result:
    return Result(
        session=name,
        turn=0,
        request_id="r",
        submitted_at_s=at_s,
        finished_at_s=at_s,
        due_at_s=at_s,
        status=429,
        error="429: no room",
    )


SESSIONS = (session("quick", 0.0, 2), session("refused once", 2.0, 1), session("lost", 4.0, 1))
RESULTS = (
    answered("quick", 0, 0.0, 0.5, 1.0),
    refused("refused once", 1.0),
    answered("quick", 1, 2.0, 0.25, 1.0),
    refused("lost", 2.0),
    answered("refused once", 0, 3.0, 0.5, 1.0),
    refused("lost", 6.0),
    answered("quick", 2, 11.0, 0.75, 1.0),
)
"""At time scale 2 over 10 wall seconds; the last answer comes after the end."""


def test_throughput_counts_what_was_answered_before_the_end() -> None:
    found = outcome(RESULTS, SESSIONS, 10.0, 2.0)
    assert found.requests_per_s == 3 / 20
    assert found.output_tokens_per_s == 30 / 20
    assert found.completed == 2


def test_waiting_counts_from_a_sessions_arrival_and_a_lost_session_waits_until_the_last_answer() -> None:
    found = outcome(RESULTS, SESSIONS, 10.0, 2.0)
    assert found.arrival_s == (0.5 * 2, (3.5 - 1.0) * 2, (12.0 - 2.0) * 2)
    assert found.inside_s == (0.25 * 2, 0.75 * 2)


def test_refusals_count_by_attempt_and_sessions_are_lost_once() -> None:
    found = outcome(RESULTS, SESSIONS, 10.0, 2.0)
    assert (found.refused, found.given_up) == (3, 1)


@pytest.mark.parametrize("results", [(), RESULTS], ids=["nothing was answered", "something was"])
def test_runs_stand_side_by_side(results: tuple[Result, ...]) -> None:
    console = Console(width=100, file=StringIO())
    console.print(
        table(
            {"without": outcome(results, SESSIONS, 10.0, 2.0), "with": outcome(RESULTS, SESSIONS, 10.0, 2.0)}
        )
    )
    (row,) = [line.split() for line in console.file.getvalue().splitlines() if "completed" in line]
    assert row == ["sessions", "completed", "2" if results else "0", "2"]
