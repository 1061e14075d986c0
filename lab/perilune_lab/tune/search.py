"""Searches parameters: from where the pool is, each one up and down by a factor that becomes smaller.

    1. Score all neighbours of the best point so far: one parameter changed, the others as they are.
    2. The best neighbour takes its place if it is better by LEAST_GAIN; otherwise the factor shrinks.
    3. End when the factor is small, or so many points were scored.

Pure but for `score`, which gets all neighbours at once, so that it can work in parallel. A point that is
tried once is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perilune_lab.terminal.policy_parameters import NUMBERS, Parameter

Value = float | str
"""A number, a choice, or a switch, which is a number too."""
Point = Mapping[str, Value]
Score = Callable[[Sequence[Point]], Sequence[float]]

LEAST_GAIN = 0.005
"""Share by which a point must be better to be worth a change."""
FACTOR, LAST_FACTOR = 4.0, 1.3


@dataclass(frozen=True, slots=True)
class Tried:
    """A point and its score; lower is better."""

    point: Point
    score: float


def search(start: Point, parameters: Sequence[Parameter], score: Score, most: int) -> Iterator[Tried]:
    """Yield each point as it is scored, the start first, at most `most` of them."""
    (first,) = score([start])
    best = Tried(start, first)
    yield best
    seen, factor = [dict(start)], FACTOR
    while factor >= LAST_FACTOR and len(seen) < most:
        new = [point for point in neighbours(best.point, parameters, factor) if dict(point) not in seen]
        new = new[: most - len(seen)]
        if not new:
            factor **= 0.5
            continue
        seen += map(dict, new)
        tried = [Tried(point, value) for point, value in zip(new, score(new), strict=True)]
        yield from tried
        better = min(tried, key=lambda t: t.score)
        if better.score < best.score * (1 - LEAST_GAIN):
            best = better
        else:
            factor **= 0.5


def best_of(tried: Sequence[Tried]) -> Tried:
    """Return the best point; the first one, where none is better by LEAST_GAIN."""
    found = min(tried, key=lambda t: t.score)
    return found if found.score < tried[0].score * (1 - LEAST_GAIN) else tried[0]


def neighbours(point: Point, parameters: Sequence[Parameter], factor: float) -> Iterator[Point]:
    """Yield the points with one parameter changed."""
    for parameter in parameters:
        for value in _others(parameter, point[parameter.name], factor):
            yield {**point, parameter.name: value}


def _others(parameter: Parameter, value: Value, factor: float) -> Iterator[Value]:
    if parameter.kind not in NUMBERS:
        now = str(value).lower() if isinstance(value, bool) else value
        yield from (choice for choice in parameter.choices if choice != now)
        return
    assert isinstance(value, int | float)
    unit = parameter.default if isinstance(parameter.default, int | float) and parameter.default else 1.0
    wanted = (value * factor, value / factor) if value else (unit * factor / FACTOR,)
    for number in wanted:
        made = _within(parameter, number)
        if made != value:
            yield made


def _within(parameter: Parameter, number: float) -> float | int:
    """Return the number in the parameter's range, in three digits."""
    held = min(max(number, parameter.low), parameter.high)
    if parameter.kind == "int":
        return round(held)
    return float(f"{held:.3g}")
