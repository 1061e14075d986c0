"""How many endpoints a pool should have, by the load that its gateways report.

1. A *demand* is what all endpoints together have to do: seconds of queued prefill (what caches save is not in
   it), or the KV in use, in endpoints' KV caches. Divided by `target` it says how many endpoints are wanted.
2. *Up*: every reading of the last `upSeconds` wants more. The smallest of these numbers is taken.
3. *Down*: no reading of the last `downSeconds` wants as many, and the KV in use fits into the endpoints that
   would remain. One endpoint leaves.
4. After each change the readings begin anew, so two changes are at least one of these times apart.

Within TOLERANCE of the target nothing changes. A pool of 0 replicas is switched off and stays so. Pure.
"""

from collections.abc import Sequence
from math import ceil

from perilune_api.inference_pool.spec import Scaling, Signal
from perilune_api.quantities import quantity
from perilune_operator.observe.facts import Demand

TOLERANCE = 0.1
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
    up = min(_wanted(scaling, now, demands, at - scaling.up_seconds), default=now)
    if up > now:
        return min(scaling.max_replicas, up)
    down = max(_wanted(scaling, now, demands, at - scaling.down_seconds), default=now)
    fits = bool(demands) and demands[-1].kv_in_use <= FULL * (now - 1)
    return now - 1 if down < now and fits and now > scaling.min_replicas else now


def _wanted(scaling: Scaling, now: int, demands: Sequence[Demand], since: float) -> list[int]:
    """The number of endpoints that each reading since then wants; none if the readings begin later."""
    if not demands or demands[0].at > since:
        return []
    target = float(quantity(scaling.target))
    made = []
    for demand in demands:
        if demand.at >= since or demand is demands[-1]:
            load = demand.queue_s if scaling.signal is Signal.QUEUE_SECONDS else demand.kv_in_use
            near = abs(load / (target * now) - 1.0) <= TOLERANCE
            made.append(now if near else ceil(load / target))
    return made
