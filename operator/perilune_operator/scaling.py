"""How many endpoints a pool should have, by the load that its gateways report.

1. A *demand* is what all endpoints together have to do: seconds of queued prefill (what caches save is not in
   it), or the KV in use, in endpoints' KV caches. Divided by `target` it says how many endpoints are wanted.
2. *Up*: every reading of the last `upSeconds` wants more, and the queue does not shrink, since a backlog that
   shrinks needs time, not endpoints. The smallest of these numbers is taken, at most twice the present one.
3. *Down*: no reading of the last `downSeconds` wants as many, and the KV in use fits into the endpoints that
   would remain. One endpoint leaves.
4. After each change the readings begin anew, so two changes are at least one of these times apart. They may
   ask for more when all endpoints are ready, or START_S later: until then queues grow in any case.

Within TOLERANCE of the target nothing changes. A pool of 0 replicas is switched off and stays so. Pure.
"""

from collections.abc import Sequence
from math import ceil

from perilune_api.inference_pool.spec import Scaling, Signal
from perilune_api.quantities import quantity
from perilune_operator.observe.facts import Demand

TOLERANCE = 0.1
START_S = 300.0
"""Seconds after a change from which readings may ask for more although endpoints are not ready."""
FULL = 0.9
"""The largest share of the remaining endpoints' KV caches that may be in use after an endpoint has left."""


def replicas(scaling: Scaling, now: int, demands: Sequence[Demand], at: float) -> int:
    """The replicas that the pool should have. `now`: those that its spec has. `demands`: the readings since
    the last change, in order. `at`: seconds since the epoch."""
    if scaling.signal is Signal.METRIC or now == 0:
        return now
    bounded = max(scaling.min_replicas, min(scaling.max_replicas, now))
    if bounded != now:
        return bounded
    lately = _since(_settled(demands), at - scaling.up_seconds)
    up = min((_wanted(scaling, now, demand) for demand in lately), default=now)
    if up > now and not _shrinks(scaling, lately):
        return min(scaling.max_replicas, 2 * now, up)
    long = _since(demands, at - scaling.down_seconds)
    down = max((_wanted(scaling, now, demand) for demand in long), default=now)
    fits = bool(long) and long[-1].kv_in_use <= FULL * (now - 1)
    return now - 1 if down < now and fits and now > scaling.min_replicas else now


def _settled(demands: Sequence[Demand]) -> Sequence[Demand]:
    """The readings since no endpoint starts any more, or since START_S after the change."""
    unsettled = (i for i, d in enumerate(demands) if d.starting and d.at - demands[0].at < START_S)
    return demands[max(unsettled, default=-1) + 1 :]


def _since(demands: Sequence[Demand], since: float) -> Sequence[Demand]:
    """The readings since then, and the last one; none if the readings begin later."""
    if not demands or demands[0].at > since:
        return ()
    return [demand for demand in demands if demand.at >= since] or demands[-1:]


def _wanted(scaling: Scaling, now: int, demand: Demand) -> int:
    """The number of endpoints that a reading wants."""
    target, load = float(quantity(scaling.target)), _load(scaling, demand)
    near = abs(load / (target * now) - 1.0) <= TOLERANCE
    return now if near else ceil(load / target)


def _shrinks(scaling: Scaling, demands: Sequence[Demand]) -> bool:
    return scaling.signal is Signal.QUEUE_SECONDS and demands[-1].queue_s < demands[0].queue_s


def _load(scaling: Scaling, demand: Demand) -> float:
    return demand.queue_s if scaling.signal is Signal.QUEUE_SECONDS else demand.kv_in_use
