from itertools import islice

import pytest

from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic, demo_workload, gap_s, generate, sessions
from perilune_lab.traces.model import Role, Style, Turn
from perilune_lab.traces.stats import stats

TRACE = generate(Agentic(), seed=1, number=300)
TURNS = TRACE.turns()


def pairs() -> list[tuple[Turn, Turn]]:
    return [(a, b) for s in TRACE.sessions for a, b in zip(s.turns, s.turns[1:], strict=False)]


def test_equal_seeds_give_equal_traces():
    assert generate(Agentic(), 1, 300) == TRACE
    assert generate(Agentic(), 2, 300).sessions != TRACE.sessions


def test_it_is_chat():
    assert TRACE.style is Style.CHAT
    assert TRACE.name == "agentic"
    assert TRACE.parameters["seed"] == 1


def test_prompts_grow_by_the_answer_and_a_tool_result():
    for before, after in pairs():
        *old, answer, tool = after.prompt
        assert tuple(old) == before.prompt
        assert answer == before.answer
        assert tool.role is Role.TOOL


def test_prompts_begin_with_a_shared_system_prompt_and_a_task():
    roles = {tuple(piece.role for piece in turn.prompt[:2]) for turn in TURNS}
    assert roles == {(Role.SYSTEM, Role.USER)}
    assert {turn.prompt[0].key for turn in TURNS} == {"system0", "system1", "system2"}


def test_prompts_and_answers_fit_the_context_with_the_templates_markup():
    longest = max(t.prompt_tokens + t.output_tokens + 8 * (len(t.prompt) + 2) for t in TURNS)
    assert longest <= 131_072
    assert longest > 120_000


def test_sessions_start_in_order_and_at_the_rate():
    starts = [s.start_s for s in TRACE.sessions]
    assert starts == sorted(starts)
    assert 300 / starts[-1] == pytest.approx(0.25, rel=0.2)


def test_the_first_turn_has_no_gap():
    assert {s.turns[0].gap_s for s in TRACE.sessions} == {0.0}


@pytest.mark.parametrize(("p", "seconds"), agentic.GAP_QUANTILES_S[:-1])
def test_gaps_have_the_measured_quantiles(p: float, seconds: float):
    assert gap_s(p) == pytest.approx(seconds)


def test_gaps_between_quantiles_are_log_linear():
    assert gap_s(0.999999) == pytest.approx(1800.0, rel=1e-3)
    assert gap_s(0.625) == pytest.approx((1.6 * 8.6) ** 0.5)


def test_some_sessions_begin_with_the_same_task():
    tasks = [s.turns[0].prompt[1].key for s in TRACE.sessions]
    assert 0.06 < 1 - len(set(tasks)) / len(tasks) < 0.17
    assert len({s.turns[0].prompt[1].key for s in generate(Agentic(same_task_share=0), 1, 50).sessions}) == 50


def test_the_starting_draws_reach_their_moments():
    """Figures of the measured workload that the starting values are near to; a fit is not claimed."""
    found = stats(generate(Agentic(), seed=3, number=2000))
    assert found.input_tokens.mean == pytest.approx(33_600, rel=0.20)
    assert found.input_tokens.p90 == pytest.approx(88_000, rel=0.10)
    assert found.output_tokens.mean == pytest.approx(445, rel=0.15)
    assert found.output_tokens.p50 == pytest.approx(80, rel=0.15)
    assert found.hit_rate.any == pytest.approx(0.803, abs=0.04)
    assert found.reuse
    assert found.reuse.intra_session == pytest.approx(0.932, abs=0.02)
    assert found.reuse.cross_session == pytest.approx(0.057, abs=0.015)
    assert found.reuse.shared_prefix == pytest.approx(0.011, abs=0.003)
    assert found.prefill_compute.no_cache == pytest.approx(0.98, abs=0.01)


def test_lengths_scale_together_and_nothing_else_changes():
    small = generate(Agentic(length_scale=0.1), seed=1, number=50)
    whole = generate(Agentic(), seed=1, number=50)
    first = [
        (a.turns[0].prompt_tokens, b.turns[0].prompt_tokens)
        for a, b in zip(small.sessions, whole.sessions, strict=True)
    ]
    assert all(a == pytest.approx(b / 10, rel=0.01, abs=2) for a, b in first)


def test_gaps_scale():
    small = next(sessions(Agentic(gap_scale=0.5, turns_min=5), 7))
    whole = next(sessions(Agentic(turns_min=5), 7))
    assert [t.gap_s * 2 for t in small.turns] == pytest.approx([t.gap_s for t in whole.turns])


def test_turns_are_bounded_and_never_none():
    counts = {len(s.turns) for s in generate(Agentic(turns_max=5), 1, 200).sessions}
    assert counts == {1, 2, 3, 4, 5}


def test_skew_makes_few_sessions_heavy():
    even = stats(generate(Agentic(), 1, 500)).top_1_percent_share
    skewed = stats(generate(Agentic(zipf_alpha=1.0), 1, 500)).top_1_percent_share
    assert skewed > even


def test_the_demo_begins_anew_for_every_policy():
    load = demo_workload(endpoints=4, seed=1, seconds=20, time_scale=5)
    assert list(islice(load.sessions(), 20)) == list(islice(load.sessions(), 20))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("endpoints", "seconds", "time_scale"), [(4, 20, 5), (8, 60, 2.5), (2, 20, 10)])
def test_the_demos_sessions_outlive_one_kv_pool(endpoints: int, seconds: float, time_scale: float, seed: int):
    load = demo_workload(endpoints, seed, seconds, time_scale)
    started = [s for s in islice(load.sessions(), 500) if s.start_s < seconds * time_scale]
    contexts = sum(s.turns[-1].prompt_tokens for s in started)
    assert contexts / endpoints > 1.5 * load.kv_tokens
    assert sum(len(s.turns) for s in started) > 150
    longest = max(t.prompt_tokens + t.output_tokens for s in started for t in s.turns)
    assert longest <= load.context_tokens < load.kv_tokens
    assert load.describe()["kv_tokens"] == 50_000
