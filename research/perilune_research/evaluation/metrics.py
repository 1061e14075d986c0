"""The figures of the evaluation: what they are called, where they stand in a result, how they are written."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from msgspec import UNSET

from perilune_lab.terminal.formats import as_number, as_percent
from perilune_research.evaluation.cells import Result
from perilune_research.table import percent


class Metric(NamedTuple):
    """A figure."""

    name: str
    path: str
    """Where it stands in the result's run, or in the result; or the quotient of two such paths."""
    form: Callable[[float], str] = as_number
    more_is_better: bool = False
    without: float | None = None
    """The figure of a result that does not have it. None: then it is not shown."""


def _milliseconds(seconds: float) -> str:
    return as_number(1e3 * seconds)


def _seconds_or_never(seconds: float) -> str:
    return as_number(seconds) if seconds < inf else "never"


def _precise(share: float) -> str:
    return as_percent(share, 2).replace("%", " %")


TTFT_MEAN = Metric("TTFT mean s", "ttft_s.mean")
TTFT_P50 = Metric("TTFT p50 s", "ttft_s.p50")
TTFT_P90 = Metric("TTFT p90 s", "ttft_s.p90")
TTFT_P99 = Metric("TTFT p99 s", "ttft_s.p99")
E2E_P90 = Metric("E2E p90 s", "e2e_s.p90")
TPOT_P99 = Metric("TPOT p99 ms", "tpot_s.p99", _milliseconds)
APC = Metric("APC", "apc", percent, more_is_better=True)
OUTPUT = Metric("output tokens/s", "output_tokens_per_s", more_is_better=True)
WORST = Metric("worst endpoint s", "hotspot.ttft_p90_max_s")
WALL_CLOCK = Metric("wall-clock factor", "wall_clock_factor")
VARIANCE = Metric("variance of queues", "node_load_variance")
REGRET = Metric("TTFT p90 / floor", "regret")
INTERFERENCE = Metric("interference", "interference")
MOVED = Metric("moved turns", "migrations.per_request", percent)
ACCURACY = Metric("moves to where it stays cool", "migrations.accuracy", percent, more_is_better=True)
THRASH = Metric("moves again within 30 s", "migrations.thrash_rate", percent)
CEILING = Metric("APC / ceiling", "apc / apc_ceiling.intra_session", percent, more_is_better=True)
TURN_MEAN = Metric("mean turn s", "turn_s.mean")
IN_FLIGHT = Metric("turns in flight", "in_flight")
HOT = Metric("host was hot", "hot_share", percent)
CLOSED = Metric("requests closed", "abandoned")
LOST = Metric("sessions lost", "sessions.lost")
REFUSED = Metric("refusals", "refused")
SESSION_P90 = Metric("session p90 s", "session_p90_s", _seconds_or_never, without=inf)
SESSION_P99 = Metric("session p99 s", "session_p99_s", _seconds_or_never, without=inf)
LATER_TTFT_P90 = Metric("TTFT p90 s of later turns", "sessions.later_ttft_s.p90")
ANSWERED = Metric("answered", "answered", percent, more_is_better=True)
TTFT_P90_OF_ALL = Metric("TTFT p90 of all s", "all_ttft_s.p90")
WAITS_FOR_KV = Metric("waits for KV s", "migrations.transfer_s.mean")
QUIET_TTFT_P90 = Metric("TTFT p90 s of the smaller tenant", "quiet_ttft_p90_s")
CAPACITY = Metric("sessions/s", "sessions_per_s")
DECIDED = Metric("turns of known sessions", "twice.turns")
READ = Metric("body read in spite of the header", "twice.read_share", percent)
EQUAL = Metric("by headers: the same endpoint", "twice.equal_share", _precise)
SAME = Metric("of all turns", "twice.same_share", _precise)

MAIN = (TTFT_P50, TTFT_P90, TTFT_P99, E2E_P90, TPOT_P99, APC, OUTPUT, WORST)
"""Figures in which policies are compared."""
GOALS = (REGRET, CEILING, WALL_CLOCK, MOVED, ACCURACY, THRASH)
"""Figures of the default policy for which there are goals."""
_RANKS = {"hottest": 0, "second": 1, "fifth": 4, "coolest": 7}
HEAT = tuple(
    Metric(f"{name}: {what}", f"heat.{rank}.{path}", form)
    for what, path, form in (
        ("pending tokens", "pending_tokens", as_number),
        ("time hot", "hot_share", percent),
    )
    for name, rank in _RANKS.items()
)
"""What waits at the eight endpoints, by rank."""


def value(result: Result, path: str) -> float | None:
    """Return the figure of this path, or the quotient of two; None if the result does not have it."""
    path, _, by = path.partition(" / ")
    if by:
        above, below = value(result, path), value(result, by)
        return above / below if above is not None and below else None
    first, *_ = path.split(".")
    found: object = result.run if hasattr(result.run, first) else result
    for part in path.split("."):
        if isinstance(found, tuple):
            found = found[int(part)] if int(part) < len(found) else UNSET
        else:
            found = getattr(found, part, UNSET)
    return float(found) if isinstance(found, int | float) else None
