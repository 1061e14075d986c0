"""A trace becomes the work of a simulation."""

import pytest

from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.workload import prepare
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.model import Mode, Segment, Session, Style, Trace, Turn
from perilune_lab.traces.reuse import ideal_turn_s, reuse


def test_reuse_and_ideal_times_are_those_of_the_trace():
    trace = generate(Agentic(gap_scale=0.0, sessions_per_s=1e-9, same_task_share=0.3), 5, 60)
    workload = prepare(trace, H20.engine)
    turns = trace.turns()
    expected = {(t.session, t.number): (t, r) for t, r in zip(turns, reuse(turns), strict=True)}
    for job in workload.jobs:
        for task in job.tasks:
            turn, found = expected[job.name, task.number]
            assert (task.any_tokens, task.own_tokens) == (found.any_tokens, found.own_tokens)
            assert task.prompt_tokens == turn.prompt_tokens
            assert task.ideal_s == pytest.approx(ideal_turn_s(H20.engine, turn, found.own_tokens))


def two_turns(*timestamps: float) -> Trace:
    first = Turn(
        session="s",
        number=0,
        prompt=(Segment("a", 1000),),
        output_tokens=10,
        gap_s=0.0,
        timestamp_s=timestamps[0],
    )
    second = Turn(
        session="s",
        number=1,
        prompt=(Segment("a", 1000), first.answer),
        output_tokens=10,
        gap_s=5.0,
        timestamp_s=timestamps[1],
    )
    return Trace("t", Style.TEXT, (Session("s", timestamps[0], (first, second)),))


@pytest.mark.parametrize(
    ("mode", "at_s"), [(Mode.THINKTIME, 5.0), (Mode.TIMESTAMPS, 2.0), (Mode.MAX, 2.0)], ids=str
)
def test_when_an_unloaded_system_sees_a_turn(mode: Mode, at_s: float):
    first, second = prepare(two_turns(100.0, 102.0), H20.engine, mode).jobs[0].tasks
    assert first.ideal_at_s == 0.0
    expected = at_s + first.ideal_s if mode is Mode.THINKTIME else at_s
    assert second.ideal_at_s == pytest.approx(expected)


def test_speed_brings_sessions_and_timestamps_closer():
    job = prepare(two_turns(100.0, 102.0), H20.engine, Mode.TIMESTAMPS, speed=2.0).jobs[0]
    assert [task.timestamp_s for task in job.tasks] == [0.0, 1.0]


def test_what_lies_beyond_the_window_is_left_out_and_the_warm_up_is_not_measured():
    trace = generate(Agentic(), 1, 200)
    whole = prepare(trace, H20.engine)
    cut = prepare(trace, H20.engine, window_s=400.0, warmup_s=100.0)
    at_s = [task.ideal_at_s for job in cut.jobs for task in job.tasks]
    assert 0 < cut.requests < whole.requests
    assert max(at_s) < 400.0
    assert len(cut.measured) == sum(at >= 100.0 for at in at_s) < cut.requests
