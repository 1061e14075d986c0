"""Quantiles and means for everything that the lab prints; quantiles are linear between closest ranks."""

from collections.abc import Iterable, Sequence


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile (0–1) of values in ascending order. Raises ValueError without values."""
    if not ordered:
        raise ValueError("no values")
    at = q * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean. Raises ValueError without values."""
    kept = list(values)
    if not kept:
        raise ValueError("no values")
    return sum(kept) / len(kept)
