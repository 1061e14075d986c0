"""What both sets of rules derive from the readings."""

from collections.abc import Sequence
from itertools import takewhile

from perilune_operator.observe.facts import Demand

START_S = 300.0
"""Seconds after a change from which readings may ask for more although endpoints are not ready."""
FULL = 0.9
"""The largest share of the remaining endpoints' KV caches that may be in use after an endpoint has left."""


def unchanged(demands: Sequence[Demand], wanted: int) -> Sequence[Demand]:
    """The latest readings, as far back as the pool should have this number of endpoints."""
    return tuple(takewhile(lambda demand: demand.wanted == wanted, reversed(demands)))[::-1]


def since(demands: Sequence[Demand], start: float) -> Sequence[Demand]:
    """The readings since then, and the last one; none if the readings begin later."""
    if not demands or demands[0].at > start:
        return ()
    return [demand for demand in demands if demand.at >= start] or demands[-1:]


def settled(demands: Sequence[Demand]) -> Sequence[Demand]:
    """The readings since no endpoint starts any more, or since START_S after the change."""
    unsettled = (i for i, d in enumerate(demands) if d.starting and d.at - demands[0].at < START_S)
    return demands[max(unsettled, default=-1) + 1 :]


def shrinks(demands: Sequence[Demand]) -> bool:
    """Whether the queue is shorter at the last reading than at the first."""
    return demands[-1].queue_s < demands[0].queue_s


def fits(now: int, demands: Sequence[Demand]) -> bool:
    """Whether there are readings, and the KV in use fits into one endpoint less."""
    return bool(demands) and demands[-1].kv_in_use <= FULL * (now - 1)
