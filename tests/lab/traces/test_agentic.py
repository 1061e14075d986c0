"""Generated agentic traces reach the measured workload."""

import pytest

from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic, gap_s, generate, sessions
from perilune_lab.traces.model import Role, Style, Turn
from perilune_lab.traces.stats import Stats, stats

TRACE = generate(Agentic(), seed=1, number=300)
TURNS = TRACE.turns()


def pairs() -> list[tuple[Turn, Turn]]:
    return [(a, b) for s in TRACE.sessions for a, b in zip(s.turns, s.turns[1:], strict=False)]


def test_equal_seeds_give_equal_traces():
    assert generate(Agentic(), 1, 300) == TRACE
    assert generate(Agentic(), 2, 300).sessions != TRACE.sessions


def test_generated_traffic_is_chat():
    assert TRACE.style is Style.CHAT
    assert TRACE.name == "agentic"
    assert TRACE.parameters["seed"] == 1


def test_prompts_grow_by_the_answer_and_a_tool_result():
    for before, after in pairs():
        if after.prompt[1].key != before.prompt[1].key:
            continue  # compacted
        *old, answer, tool = after.prompt
        assert tuple(old) == before.prompt
        assert answer == before.answer
        assert tool.role is Role.TOOL


def test_prompts_begin_with_a_shared_system_prompt_and_a_task():
    roles = {tuple(piece.role for piece in turn.prompt[:2]) for turn in TURNS}
    assert roles == {(Role.SYSTEM, Role.USER)}
    assert {turn.prompt[0].key for turn in TURNS} == {"system0", "system1", "system2"}


def test_prompts_and_answers_fit_the_context_with_the_templates_markup():
    longest = max(t.prompt_tokens + t.output_tokens + 20 * (len(t.prompt) + 2) for t in TURNS)
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


def test_a_session_that_would_outgrow_the_context_goes_on_with_a_summary():
    compacted = [(a, b) for a, b in pairs() if a.prompt[1].key != b.prompt[1].key]
    assert len(compacted) > 5
    for before, after in compacted:
        system, summary = after.prompt
        assert system == before.prompt[0]
        assert summary.key.startswith(f"{after.session}/summary")
        assert after.prompt_tokens == 13_107


def test_without_compaction_it_ends():
    for session in generate(Agentic(compacted_share=0.0), seed=1, number=300).sessions:
        assert len({turn.prompt[1] for turn in session.turns}) == 1


MEASURED = {
    "mean prompt": (33_600, 0.04, lambda s: s.input_tokens.mean),
    "p50 prompt": (20_000, 0.06, lambda s: s.input_tokens.p50),
    "p90 prompt": (88_000, 0.04, lambda s: s.input_tokens.p90),
    "mean output": (445, 0.04, lambda s: s.output_tokens.mean),
    "p50 output": (80, 0.04, lambda s: s.output_tokens.p50),
    "prompt : output": (75, 0.04, lambda s: s.input_per_output),
    "top 1 % share": (0.465, 0.04, lambda s: s.top_1_percent_share),
    "ceiling, any": (0.803, 0.02, lambda s: s.hit_rate.any),
    "ceiling, intra-session": (0.796, 0.02, lambda s: s.hit_rate.intra_session),
    "reuse, intra-session": (0.932, 0.01, lambda s: s.reuse.intra_session),
    "reuse, cross-session": (0.057, 0.10, lambda s: s.reuse.cross_session),
    "reuse, shared prefix": (0.011, 0.10, lambda s: s.reuse.shared_prefix),
    "prefill compute": (0.98, 0.01, lambda s: s.prefill_compute.no_cache),
    "p25 gap": (0.69, 0.05, lambda s: s.gap_s.p25),
    "p50 gap": (1.6, 0.05, lambda s: s.gap_s.p50),
    "p75 gap": (8.6, 0.05, lambda s: s.gap_s.p75),
    "p90 gap": (44, 0.05, lambda s: s.gap_s.p90),
    "p99 gap": (738, 0.15, lambda s: s.gap_s.p99),
}
"""Of a coding agent's traffic: (figure, relative tolerance, what of the trace)."""


@pytest.fixture(scope="module")
def generated() -> list[Stats]:
    return [stats(generate(Agentic(), seed, 4000)) for seed in range(1, 4)]


@pytest.mark.parametrize("name", MEASURED)
def test_the_defaults_reach_the_measured_workload(name: str, generated: list[Stats]):
    """Means over seeds: the heaviest sessions make one trace differ from the next."""
    figure, tolerance, of = MEASURED[name]
    assert sum(map(of, generated)) / len(generated) == pytest.approx(figure, rel=tolerance)


def test_lengths_scale_together_and_nothing_else_changes():
    small = generate(Agentic(length_scale=0.1), seed=1, number=50)
    whole = generate(Agentic(), seed=1, number=50)
    first = [
        (a.turns[0].prompt_tokens, b.turns[0].prompt_tokens)
        for a, b in zip(small.sessions, whole.sessions, strict=True)
    ]
    assert all(a == pytest.approx(b / 10, rel=0.01, abs=2) for a, b in first)


def test_gaps_follow_their_scale():
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
