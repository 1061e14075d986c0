"""What both sets of rules derive from the readings."""

from collections.abc import Sequence
from itertools import takewhile
from math import ceil, sqrt

from perilune_operator.observe.facts import Demand

START_S = 300.0
"""Seconds after a change from which readings may ask for more although endpoints are not ready."""
GAP_S = 20.0
"""Seconds between two readings, and since the last one, above which readings are missing. One comes every 5
s."""
FULL = 0.9
"""The largest share of the remaining endpoints' KV caches that may be in use after an endpoint has left."""


def current(demands: Sequence[Demand], at: float) -> Sequence[Demand]:
    """Return the latest readings, as far back as none is missing between two of them; none if the last one is
    old. A reading that lacked a part was not kept, so it is missing as a whole."""
    made, later = list[Demand](), at
    for demand in reversed(demands):
        if later - demand.at > GAP_S:
            break
        made.append(demand)
        later = demand.at
    return made[::-1]


def unchanged(demands: Sequence[Demand], wanted: int) -> Sequence[Demand]:
    """Return the latest readings, as far back as the pool should have this number of endpoints."""
    return tuple(takewhile(lambda demand: demand.wanted == wanted, reversed(demands)))[::-1]


def since(demands: Sequence[Demand], start: float) -> Sequence[Demand]:
    """Return the readings since then, and the last one; none if the readings begin later."""
    if not demands or demands[0].at > start:
        return ()
    return [demand for demand in demands if demand.at >= start] or demands[-1:]


def settled(demands: Sequence[Demand]) -> Sequence[Demand]:
    """Return the readings since no endpoint starts any more, or since START_S after the change."""
    unsettled = (i for i, d in enumerate(demands) if d.starting and d.at - demands[0].at < START_S)
    return demands[max(unsettled, default=-1) + 1 :]


def shrinks(demands: Sequence[Demand]) -> bool:
    """Return whether the queue is shorter at the last reading than at the first."""
    return demands[-1].queue_s < demands[0].queue_s


def fits(now: int, demands: Sequence[Demand]) -> bool:
    """Return whether there are readings, and the KV in use fits into one endpoint less."""
    return bool(demands) and demands[-1].kv_in_use <= FULL * (now - 1)


def arriving(demands: Sequence[Demand]) -> float:
    """Return the number of endpoints that the prefill that arrives keeps busy: those that were busy, and by
    how many seconds the queue has grown in each second. 0 if no reading names a busy endpoint."""
    busy = sum(demand.prefilling for demand in demands) / len(demands) if demands else 0.0
    if not busy:
        return 0.0
    first, last = demands[0], demands[-1]
    growth = (last.queue_s - first.queue_s) / (last.at - first.at) if last.at > first.at else 0.0
    return max(0.0, busy + growth)


def staffed(busy: float, spare: float) -> int:
    """Return the number of endpoints that are needed if so many are busy on average, with a multiple of its
    square root to spare (square-root staffing)."""
    return ceil(busy + spare * sqrt(busy))
