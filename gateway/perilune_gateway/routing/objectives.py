"""What a request's headers say of its priority and of the times that it should be answered within. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan
from typing import NamedTuple

from perilune_api import names
from perilune_api.pool import Limits


class Objectives(NamedTuple):
    """A request's priority level, and its SLOs. An SLO is 0 if it has none."""

    level: int
    slo_ttft_s: float
    slo_tpot_s: float


def objectives(headers: Mapping[str, str], limits: Limits) -> Objectives:
    """Return the request's own objectives, or else the pool's."""
    named = next((headers[name] for name in names.OBJECTIVE_HEADERS if name in headers), "")
    return Objectives(
        limits.objectives.get(named, 0),
        _seconds(headers.get(names.SLO_TTFT_HEADER, "")) or limits.ttft_slo_seconds,
        _seconds(headers.get(names.SLO_TPOT_HEADER, "")) or limits.tpot_slo_seconds,
    )


def wrong_slo(headers: Mapping[str, str]) -> str:
    """Return why a request's SLO cannot be read; empty if it can, or if there is none."""
    for name in (names.SLO_TTFT_HEADER, names.SLO_TPOT_HEADER):
        if text := headers.get(name):
            try:
                wrong = isnan(float(text))
            except ValueError:
                wrong = True
            if wrong:
                return f"{text[:100]!r} is not a number of milliseconds - in {name}"
    return ""


def _seconds(milliseconds: str) -> float:
    """Return a header's value in seconds; 0 for the empty text and for values that are not above 0."""
    value = float(milliseconds or 0)
    return value / 1000.0 if 0.0 < value < inf else 0.0
