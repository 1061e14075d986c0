"""Finds the largest value for which a condition holds, with few tests, since each one is expensive.

The search doubles or halves the first guess until it has bracketed the value, then bisects on a logarithmic
scale. It takes 6 to 10 tests for a tolerance of 2 to 3 % if the guess is right within a factor of 4.
"""

from collections.abc import Callable
from math import inf, sqrt

_SPAN = 64.0
"""The search goes from guess / this to guess × this."""


def last_that(holds: Callable[[float], bool], guess: float, tolerance: float) -> tuple[float, float]:
    """Return (the largest x found for which `holds` is true, the smallest for which it is false), whose
    ratio is at most 1 + `tolerance`. `holds` must be true below some x and false above it. (0, x) means that
    it is false down to guess / 64, (x, inf) that it is true up to 64 × guess."""
    low, high = 0.0, inf
    x = guess
    while not low and x >= guess / _SPAN:
        if holds(x):
            low = x
        else:
            high, x = x, x / 2
    if not low:
        return 0.0, high
    while high == inf:
        x = low * 2
        if x > guess * _SPAN:
            return low, inf
        if holds(x):
            low = x
        else:
            high = x
    while high / low > 1.0 + tolerance:
        middle = sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high
