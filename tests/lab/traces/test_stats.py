"""Statistics of a trace."""

import msgspec
import pytest

from perilune_lab.traces.model import Role, Segment, Session, Style, Trace, Turn
from perilune_lab.traces.stats import Spread, stats


def session(name: str, *lengths: int, at_s: float | None = None) -> Session:
    """Return a session whose prompts grow to these lengths, with ten output tokens each."""
    prompt: tuple[Segment, ...] = ()
    turns: list[Turn] = []
    for number, length in enumerate(lengths):
        if turns:
            prompt = (*prompt, turns[-1].answer)
        grown = length - sum(segment.tokens for segment in prompt)
        prompt = (*prompt, Segment(f"{name}{number}", grown, Role.USER))
        turns.append(
            Turn(
                session=name,
                number=number,
                prompt=prompt,
                output_tokens=10,
                gap_s=2.0 * number,
                timestamp_s=None if at_s is None else at_s + number,
            )
        )
    return Session(name, at_s or 0.0, tuple(turns))


def trace(*sessions: Session) -> Trace:
    return Trace("t", Style.TEXT, sessions)


def test_a_small_trace_has_the_numbers_computed_by_hand():
    found = stats(trace(session("a", 100, 200, 300), session("b", 400)))
    assert (found.name, found.requests, found.sessions) == ("t", 4, 2)
    assert found.input_tokens == Spread(
        mean=250, p25=175, p50=250, p75=325, p90=pytest.approx(370), p99=pytest.approx(397), max=400
    )
    assert found.turns_per_session == Spread(mean=2, p25=1.5, p50=2, p75=2.5, p90=2.8, p99=2.98, max=3)
    assert found.tokens_per_session.max == 600
    assert found.input_per_output == 25.0
    assert found.gap_s == Spread(mean=3, p25=2.5, p50=3, p75=3.5, p90=3.8, p99=3.98, max=4)
    assert found.top_1_percent_share == 0.6
    assert found.hit_rate.any == found.hit_rate.intra_session == (110 + 210) / 1000
    assert found.reuse
    assert (found.reuse.intra_session, found.reuse.cross_session, found.reuse.shared_prefix) == (1, 0, 0)


def test_what_is_not_known_is_absent():
    document = msgspec.to_builtins(stats(trace(session("a", 100))))
    assert not {"gap_s", "reuse", "span_s"} & set(document)


def test_the_span_is_that_of_the_recorded_times():
    assert stats(trace(session("a", 10, 20, at_s=5.0), session("b", 10, at_s=9.0))).span_s == 4.0


def test_a_cache_lowers_the_share_of_prefill():
    share = stats(trace(session("a", 1000, 2000, 3000))).prefill_compute
    assert 0.9 < share.infinite_cache < share.no_cache < 1
