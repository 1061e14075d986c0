"""Sets the number of endpoints by their load.

The load is the queued prefill, in seconds and without what caches save (`queueSeconds`), or the KV in use, as
a number of full KV caches (`kvUsage`).

1. The load of all endpoints of the duty, divided by `target`, is the number of endpoints that are wanted.
2. *Up*: every reading of the last `upSeconds` wants more, and the queue does not shrink, since a backlog that
   shrinks needs time, not endpoints. The smallest of these numbers is taken, at most twice the present one.
3. *Down*: no reading of the last `downSeconds` wants as many, and the KV in use fits into the endpoints that
   would remain. One endpoint leaves.
4. Two changes are at least one of these times apart, since the readings begin anew. They may ask for more
   when all endpoints are ready, or START_S later: until then queues grow in any case.

Within TOLERANCE of the target nothing changes.
"""

from collections.abc import Sequence
from math import ceil

from perilune_api.inference_pool.spec import PrefillScaling, Scaling, Signal
from perilune_api.quantities import quantity
from perilune_operator.observe.facts import Demand
from perilune_operator.scaling.readings import fits, settled, shrinks, since

TOLERANCE = 0.1


def replicas(scaling: Scaling | PrefillScaling, now: int, demands: Sequence[Demand], at: float) -> int:
    """As `scaling.replicas`. `demands`: the readings since the last change."""
    lately = since(settled(demands), at - scaling.up_seconds)
    up = min((_wanted(scaling, now, demand) for demand in lately), default=now)
    if up > now and not (scaling.signal is Signal.QUEUE_SECONDS and shrinks(lately)):
        return min(scaling.max_replicas, 2 * now, up)
    long = since(demands, at - scaling.down_seconds)
    down = max((_wanted(scaling, now, demand) for demand in long), default=now)
    return now - 1 if down < now and now > scaling.min_replicas and fits(now, long) else now


def _wanted(scaling: Scaling | PrefillScaling, now: int, demand: Demand) -> int:
    """The number of endpoints that a reading wants."""
    target = float(quantity(scaling.target))
    load = demand.queue_s if scaling.signal is Signal.QUEUE_SECONDS else demand.kv_in_use
    near = abs(load / (target * now) - 1.0) <= TOLERANCE
    return now if near else ceil(load / target)
