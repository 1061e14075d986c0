"""An offline pass over a trace says what a cache of a given size would serve."""

import itertools

import pytest
from offline_pass import Hits, Visit, replay, total

from perilune_lab.traces.model import Segment


def visit(
    at: float, *prompt: tuple[str, int], out: int = 0, end: float | None = None, on: str = "e"
) -> Visit:
    segments = tuple(Segment(key, tokens) for key, tokens in prompt)
    return Visit(on, at, at if end is None else end, segments, Segment(f"out{at}", out))


def hits(*visits: Visit, pool: int = 1000, block: int = 4) -> list[int]:
    """Return the cached tokens of each visit, each found as the difference that it makes."""
    totals = [total(replay(visits[:n], block, pool)).cached_tokens for n in range(len(visits) + 1)]
    return [after - before for before, after in itertools.pairwise(totals)]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param([("a", 16)], [("a", 16), ("b", 4)], 16, id="whole-prefix"),
        pytest.param([("a", 18)], [("a", 18), ("b", 4)], 16, id="incomplete-block-is-lost"),
        pytest.param([("a", 16)], [("a", 16)], 12, id="the-last-token-is-always-computed"),
        pytest.param([("a", 16)], [("a", 17)], 16, id="a-longer-text-of-a-key-extends-it"),
        pytest.param([("a", 6), ("b", 6)], [("a", 6), ("b", 6), ("c", 1)], 12, id="blocks-span-segments"),
        pytest.param([("a", 6), ("b", 6)], [("a", 6), ("c", 7)], 4, id="a-shared-block-needs-all-of-it"),
        pytest.param([("a", 8), ("b", 8)], [("c", 8), ("b", 8)], 0, id="another-prefix"),
        pytest.param([("a", 3)], [("a", 3), ("b", 9)], 0, id="no-full-block"),
    ],
)
def test_a_prompt_hits_what_an_earlier_one_began_with(first: list, second: list, expected: int):
    assert hits(visit(0, *first), visit(1, *second)) == [0, expected]


def test_an_answer_is_cached_when_it_ends():
    prompt = visit(0, ("a", 8), out=8, end=2)
    follow = (("a", 8), ("out0", 8), ("b", 4))
    assert hits(prompt, visit(1, *follow)) == [0, 8]
    assert hits(prompt, visit(3, *follow)) == [0, 16]


def test_the_least_recently_used_goes_first():
    a, b, again = visit(0, ("a", 8)), visit(1, ("b", 8)), visit(2, ("a", 9))
    assert hits(a, b, again, visit(3, ("c", 8)), visit(4, ("b", 9)), pool=16) == [0, 0, 8, 0, 0]
    assert hits(a, b, again, visit(3, ("c", 8)), visit(4, ("a", 9)), pool=16) == [0, 0, 8, 0, 8]


def test_a_prompt_is_eaten_from_its_end():
    assert hits(visit(0, ("a", 16)), visit(1, ("b", 8)), visit(2, ("a", 17)), pool=16) == [0, 0, 8]


def test_what_is_in_use_stays():
    running = visit(0, ("a", 16), end=9)
    assert hits(running, visit(1, ("b", 16)), visit(2, ("c", 16)), visit(3, ("a", 17)), pool=16)[3] == 16


def test_endpoints_do_not_share():
    found = replay([visit(0, ("a", 8)), visit(1, ("a", 9), on="f"), visit(2, ("a", 9))], 4, 100)
    assert found == {"e": Hits(17, 8), "f": Hits(9, 0)}
    assert total(found).rate == 8 / 26


def test_nothing_has_rate_zero():
    assert total({}).rate == 0.0
