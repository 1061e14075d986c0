"""The search of parameters, on functions whose lowest point is known."""

from collections.abc import Sequence

import pytest

from perilune_lab.terminal.policy_parameters import Parameter, parameters
from perilune_lab.tune.search import Point, best_of, neighbours, search


def number(name: str, default: float, low: float = 0.0, high: float = 1e6, kind: str = "float") -> Parameter:
    return Parameter(name=name, kind=kind, default=default, text="", low=low, high=high)


def chosen(kind: str, *choices: str) -> Parameter:
    return Parameter(name="x", kind=kind, default=choices[0], text="", choices=choices)


X, Y = number("x", 4.0), number("y", 16_384, low=1, kind="int")


def bowl(points: Sequence[Point]) -> list[float]:
    """Return how far points are from x = 1, y = 4096, as factors."""
    return [1 + abs(float(p["x"]) - 1) + abs(float(p["y"]) - 4096) / 4096 for p in points]


def test_it_finds_the_lowest_point_and_begins_where_the_pool_is() -> None:
    tried = list(search({"x": 4.0, "y": 16_384}, [X, Y], bowl, 60))
    assert tried[0].point == {"x": 4.0, "y": 16_384}
    assert best_of(tried).point == {"x": 1.0, "y": 4096}
    assert len({tuple(t.point.items()) for t in tried}) == len(tried) <= 60


def test_it_gets_away_from_where_nothing_changes() -> None:
    """A pool whose value is absurd: its neighbours are all alike."""

    def flat_far_away(points: Sequence[Point]) -> list[float]:
        return [2.0 if float(p["x"]) > 1e5 else 1.0 + float(p["x"]) / 1e5 for p in points]

    tried = list(search({"x": 1e6}, [number("x", 4.0, high=1e9)], flat_far_away, 12))
    assert float(best_of(tried).point["x"]) <= 4.0


def test_it_tries_no_more_than_it_may() -> None:
    assert len(list(search({"x": 4.0, "y": 16_384}, [X, Y], bowl, 4))) == 4


def test_what_is_hardly_better_changes_nothing() -> None:
    tried = list(search({"x": 4.0}, [X], lambda points: [1 - float(p["x"]) / 1e6 for p in points], 20))
    assert best_of(tried) is tried[0]


@pytest.mark.parametrize(
    ("parameter", "value", "others"),
    [
        (X, 4.0, [16.0, 1.0]),
        (X, 0.0, [4.0]),
        (number("x", 1.0, high=1.0), 1.0, [0.25]),
        (number("x", 3, low=1, kind="int"), 1, [4]),
        (chosen("choice", "a", "b", "c"), "a", ["b", "c"]),
        (chosen("bool", "false", "true"), False, ["true"]),
    ],
    ids=["both ways", "from 0", "at its bound", "whole", "choice", "switch"],
)
def test_neighbours_stay_in_range(parameter: Parameter, value: object, others: list[object]) -> None:
    assert [p["x"] for p in neighbours({"x": value}, [parameter], 4.0)] == others  # type: ignore[dict-item]


def test_the_ranges_are_those_of_the_pool_document() -> None:
    (hot, cooldown) = parameters("ear")
    assert (hot.name, hot.kind, hot.low, hot.default) == ("hotPendingTokens", "int", 1, 16_384)
    assert (cooldown.name, cooldown.kind, cooldown.low) == ("cooldownSeconds", "float", 0)
    assert parameters("conductor")[0].choices == ("no_scheduling", "cache_aware")
