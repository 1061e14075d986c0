"""How much of a trace could be served from cache."""

import pytest

from perilune_gateway.model import H20_30B
from perilune_lab.traces.model import Segment, Turn
from perilune_lab.traces.reuse import Reuse, ideal_decode_s, ideal_ttft_s, ideal_turn_s, reuse

SYSTEM, A, B, C = (Segment(name, tokens) for name, tokens in (("sys", 10), ("a", 20), ("b", 30), ("c", 40)))


def turn(session: str, number: int, *prompt: Segment, out: int = 5) -> Turn:
    return Turn(session=session, number=number, prompt=prompt, output_tokens=out)


def test_a_session_reuses_its_own_prompt_and_answer():
    first = turn("s", 0, A)
    second = turn("s", 1, A, first.answer, B)
    assert reuse([first, second]) == [Reuse(), Reuse(intra_tokens=25, own_tokens=25)]


def test_a_match_ends_at_the_first_unknown_segment():
    assert reuse([turn("s", 0, A, B, C), turn("s", 1, A, C, B)])[1] == Reuse(intra_tokens=20, own_tokens=20)


def test_the_same_segment_behind_another_prefix_is_another():
    assert reuse([turn("s", 0, A, B), turn("s", 1, C, B)])[1] == Reuse()


def test_what_another_session_computed_is_cross_session():
    found = reuse([turn("s", 0, SYSTEM, A), turn("t", 0, SYSTEM, A, B)])
    assert found[1] == Reuse(cross_tokens=30)


def test_a_prefix_that_many_sessions_begin_with_is_shared():
    turns = [turn(name, 0, SYSTEM, Segment(name, 7)) for name in "stuv"]
    assert reuse(turns)[3] == Reuse(shared_tokens=10)
    assert reuse(turns, many=5)[3] == Reuse(cross_tokens=10)


def test_who_computed_first_decides_and_own_counts_what_came_again():
    turns = [turn("s", 0, SYSTEM), turn("t", 0, SYSTEM, A), turn("t", 1, SYSTEM, A, B)]
    assert reuse(turns)[2] == Reuse(intra_tokens=20, cross_tokens=10, own_tokens=30)


def test_an_answer_is_known_only_behind_its_prompt():
    first = turn("s", 0, A)
    assert reuse([first, turn("s", 1, B, first.answer)])[1] == Reuse()


def test_ideal_times_are_the_engine_models():
    e = H20_30B
    assert ideal_ttft_s(e, 1000, 0) == e.request_overhead_s(1000) + e.prefill_s(1000)
    assert ideal_ttft_s(e, 1000, 600) == e.request_overhead_s(1000) + e.prefill_s(400, 600)
    assert ideal_ttft_s(e, 1000, 1000) == e.request_overhead_s(1000) + e.prefill_s(1, 999)
    assert ideal_decode_s(e, 1000, 1) == 0.0
    assert ideal_decode_s(e, 1000, 101) == pytest.approx(100 * e.decode_step_s(1, 1050))
    whole = ideal_turn_s(e, turn("s", 0, Segment("x", 1000), out=101), 600)
    assert whole == ideal_ttft_s(e, 1000, 600) + ideal_decode_s(e, 1000, 101)
