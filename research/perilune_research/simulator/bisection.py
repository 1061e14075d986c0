"""The largest value for which something still holds, when testing one value is expensive.

From a first guess in steps of 2 until it is bracketed, then by halves on a logarithmic scale: 6 to 10 tests
for 2 to 3 %, guess and answer within a factor 4.
"""

from collections.abc import Callable
from math import inf, sqrt

_SPAN = 64.0


def last_that(holds: Callable[[float], bool], guess: float, tolerance: float) -> tuple[float, float]:
    """(largest x > 0 found for which `holds`, smallest found for which not), `tolerance` apart, for a test
    that holds below some x and not above. (0, x): it holds nowhere above guess / 64; (x, inf): it holds up to
    64 × guess."""
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
