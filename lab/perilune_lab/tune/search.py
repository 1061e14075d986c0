"""Searches parameters: from where the pool is, each one up and down by a factor that becomes smaller.

    1. Score the pool's own point, then each parameter at its default, and far above and below that.
    2. Score all neighbours of the best point so far: one parameter changed, the others as they are.
    3. The best neighbour takes its place if it is better by LEAST_GAIN; otherwise the factor shrinks.
    4. End when the factor is small, or so many points were scored.

Pure but for `score`, which gets all neighbours at once, so that it can work in parallel. A point that is
tried once is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perilune_lab.terminal.policy_parameters import NUMBERS, Parameter

Value = float | str
"""A number, a choice, or a switch, which is a number too."""
Point = Mapping[str, Value]
Score = Callable[[Sequence[Point]], Sequence[float]]

LEAST_GAIN = 0.005
"""Share by which a point must be better to be worth a change."""
FAR, FACTOR, LAST_FACTOR = 16.0, 4.0, 1.3


@dataclass(frozen=True, slots=True)
class Tried:
    """A point and its score; lower is better."""

    point: Point
    score: float


def search(start: Point, parameters: Sequence[Parameter], score: Score, most: int) -> Iterator[Tried]:
    """Yield each point as it is scored, the start first, at most `most` of them."""
    seen: list[Point] = []

    def tried(points: Iterable[Point]) -> list[Tried]:
        new: list[Point] = []
        for point in points:
            if point not in seen and len(seen) < most:
                seen.append(point)
                new.append(point)
        return [Tried(*each) for each in zip(new, score(new), strict=True)] if new else []

    (best,) = found = tried([start])
    yield from found
    yield from (found := tried(far(start, parameters)))
    best, factor = _better(best, found), FACTOR
    while factor >= LAST_FACTOR and len(seen) < most:
        yield from (found := tried(neighbours(best.point, parameters, factor)))
        better = _better(best, found)
        if better is best:
            factor **= 0.5
        best = better


def _better(best: Tried, found: Sequence[Tried]) -> Tried:
    """Return the best of what was found if it is better by LEAST_GAIN, else what was best before."""
    lowest = min(found, key=lambda t: t.score, default=best)
    return lowest if lowest.score < best.score * (1 - LEAST_GAIN) else best


def far(start: Point, parameters: Sequence[Parameter]) -> Iterator[Point]:
    """Yield the points with one number at its default, or FAR above or below it."""
    for parameter in parameters:
        if parameter.kind in NUMBERS:
            usual = parameter.default or 1
            for value in (parameter.default, usual * FAR, usual / FAR):
                yield {**start, parameter.name: _within(parameter, value)}


def best_of(tried: Sequence[Tried]) -> Tried:
    """Return the best point; the first one, where none is better by LEAST_GAIN."""
    return _better(tried[0], tried)


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
