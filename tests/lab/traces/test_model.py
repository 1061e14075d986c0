"""The model of a trace: sessions, their turns, and the segments of prompts."""

import pytest

from perilune_api.pool import SpecError
from perilune_lab.traces.model import Role, Segment, Session, Style, Trace, Turn, submitted_s


def turn(session: str, number: int, *, gap_s: float = 0.0, at_s: float | None = None) -> Turn:
    return Turn(
        session=session,
        number=number,
        prompt=(Segment("x", 3), Segment("y", 4)),
        output_tokens=5,
        gap_s=gap_s,
        timestamp_s=at_s,
    )


CLOSED = Trace(
    "t",
    Style.CHAT,
    (
        Session("a", 0.0, (turn("a", 0), turn("a", 1, gap_s=10.0))),
        Session("b", 5.0, (turn("b", 0), turn("b", 1, gap_s=1.0))),
    ),
)


def test_a_turn_counts_its_prompt():
    assert turn("a", 0).prompt_tokens == 7


def test_its_answer_is_a_segment_of_later_prompts():
    assert turn("a", 3).answer == Segment("a/answer3", 5, Role.ASSISTANT)


def test_turns_without_times_are_ordered_by_start_and_gaps():
    assert [(t.session, t.number) for t in CLOSED.turns()] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_turns_with_times_are_ordered_by_them():
    sessions = (
        Session("a", 0.0, (turn("a", 0, at_s=0.0), turn("a", 1, at_s=3.0, gap_s=99.0))),
        Session("b", 2.0, (turn("b", 0, at_s=2.0),)),
    )
    trace = Trace("t", Style.TEXT, sessions)
    assert [t.session for t in trace.turns()] == ["a", "b", "a"]
    assert trace.timed


def test_a_limit_keeps_the_first_requests_and_drops_empty_sessions():
    assert [(t.session, t.number) for t in CLOSED.limit(3).turns()] == [("a", 0), ("b", 0), ("b", 1)]
    assert [s.session_id for s in CLOSED.limit(1).sessions] == ["a"]
    assert CLOSED.limit(99) == CLOSED
    assert CLOSED.requests == 4
    assert not CLOSED.timed


def test_a_time_that_nobody_recorded():
    assert submitted_s(turn("a", 0, at_s=1.5)) == 1.5
    with pytest.raises(SpecError, match="turn 2 of session a has no timestamp"):
        submitted_s(turn("a", 2))
