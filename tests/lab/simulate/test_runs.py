"""Prompts as chains of runs of tokens."""

from random import Random

import pytest

from perilune_lab.simulate.runs import ROOT, Runs, build
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.model import Segment, Turn


def turn(number: int, *keys: str, output: int = 5, session: str = "s") -> Turn:
    return Turn(
        session=session, number=number, prompt=tuple(Segment(key, 10) for key in keys), output_tokens=output
    )


def test_a_session_alone_is_one_run():
    runs, ends = build([[turn(0, "a", "b"), turn(1, "a", "b", "c")]])
    assert ends[0][0][0] == (0, 20)
    assert runs.chain[ends[0][1][0][0]][0] == 0
    assert ends[0][1][0][1] == 30


def test_what_two_sessions_share_is_a_run_of_its_own():
    runs, ends = build([[turn(0, "sys", "a", session="x")], [turn(0, "sys", "b", session="y")]])
    (x, _), (y, _) = ends[0][0], ends[1][0]
    assert x != y
    assert runs.chain[x[0]][0] == runs.chain[y[0]][0]
    assert runs.end[runs.chain[x[0]][0]] == 10


def test_a_turn_that_extends_the_answer_stays_in_the_run():
    first = Turn(session="s", number=0, prompt=(Segment("a", 10),), output_tokens=5)
    second = Turn(
        session="s", number=1, prompt=(Segment("a", 10), first.answer, Segment("tool", 7)), output_tokens=5
    )
    runs, ends = build([[first, second]])
    assert list(ends[0]) == [((0, 10), (0, 15)), ((0, 22), (0, 27))]
    assert runs.end == [27]


@pytest.mark.parametrize("seed", range(3))
def test_positions_tell_common_prefixes(seed: int):
    """Tokens of the runs that two prompts both go through = tokens that they begin with in common."""
    sessions = [s.turns for s in generate(Agentic(same_task_share=0.5), seed, 30).sessions]
    runs, ends = build(sessions)
    turns = [t for s in sessions for t in s]
    positions = [prompt for s in ends for prompt, _ in s]
    rng = Random(seed)
    for _ in range(300):
        i, j = rng.randrange(len(turns)), rng.randrange(len(turns))
        common = 0
        for a, b in zip(turns[i].prompt, turns[j].prompt, strict=False):
            if a != b:
                break
            common += a.tokens
        assert shared(runs, positions[i], positions[j]) == common


def shared(runs: Runs, a: tuple[int, int], b: tuple[int, int]) -> int:
    both = set(runs.chain[a[0]]) & set(runs.chain[b[0]])
    return min(a[1], b[1], max((runs.end[r] for r in both), default=0))


def test_prompts_become_the_runs_that_one_makes_by_hand():
    runs = Runs()
    a = runs.add(ROOT, 10)
    b = runs.add(a, 5)
    assert (runs.start[b], runs.end[b], runs.chain[b]) == (10, 15, (a, b))
