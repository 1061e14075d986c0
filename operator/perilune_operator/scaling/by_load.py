"""Sets the number of endpoints by their load.

The load is the queued prefill, in seconds and without what caches save (`queueSeconds`), or the KV in use, as
a number of full KV caches (`kvUsage`).

1. The load of all endpoints of the duty, divided by `target`, is the number of endpoints that are wanted.
2. *Up*: every reading of the last `upSeconds` wants more. A queue says that there are too few endpoints, but
   not how many are wanted, since it grows for as long as they are too few. The prefill that arrives says it:
   as many as it keeps busy, and GROWING to spare. Nothing is added if a backlog shrinks and there are as many
   already. At most as many are added as there are.
3. *Up, too*: in the last LONG_S the queue was more than half of what is wanted, and the prefill that arrived
   leaves less than TIGHT to spare. Sooner or later such a queue grows too long by chance.
4. *Down*: no reading of the last `downSeconds` wants as many, the KV in use fits into the endpoints that
   would remain, and the prefill that arrived in this time leaves SHRINKING of them to spare. One endpoint
   leaves.
5. Two changes are at least one of these times apart, since the readings start over. They may ask for more
   when all endpoints are ready, or START_S later: until then queues grow in any case.

The endpoints to spare are a multiple of the square root of the busy ones, because the number of prompts that
come at once varies as that root does. SHRINKING is more than GROWING, so a load under which an endpoint
leaves does not ask for it again. With `kvUsage` the two are TOLERANCE of the target apart.
"""

from collections.abc import Sequence
from itertools import takewhile
from math import ceil

from perilune_api.inference_pool.spec import PrefillScaling, Scaling, Signal
from perilune_api.quantities import quantity
from perilune_operator.observe.facts import Demand
from perilune_operator.scaling.readings import arriving, fits, settled, shrinks, since, staffed

TOLERANCE = 0.1
TIGHT, GROWING, SHRINKING = 0.5, 1.25, 2.0
"""Endpoints to spare, as a multiple of the square root of the busy ones: fewer are too few, so many are added
for, and with more an endpoint may leave."""
LONG_S = 300.0
"""Seconds for which the queue is so long that it will grow too long by chance."""


def replicas(scaling: Scaling | PrefillScaling, now: int, demands: Sequence[Demand], at: float) -> int:
    """Return the same as `scaling.replicas`. `demands`: the readings since the last change."""
    steady = settled(demands)
    lately = since(steady, at - scaling.up_seconds)
    asked = min((_wanted(scaling, now, demand) for demand in lately), default=now)
    if scaling.signal is Signal.QUEUE_SECONDS:
        if asked > now:
            asked = _for_queue(scaling, now, demands, asked, shrinking=shrinks(lately))
        else:
            asked = _for_tight(scaling, now, since(steady, at - LONG_S))
    if asked > now:
        return min(scaling.max_replicas, 2 * now, asked)
    long = since(demands, at - scaling.down_seconds)
    leaves = now > scaling.min_replicas and fits(now, long) and _calm(scaling, now, long)
    return now - 1 if leaves else now


def _for_queue(
    scaling: Scaling | PrefillScaling, now: int, demands: Sequence[Demand], asked: int, *, shrinking: bool
) -> int:
    """Return the number of endpoints for a queue that is too long. `asked`: the number that the queue alone
    would want, which counts where no reading tells how many endpoints are busy."""
    too_long = takewhile(lambda demand: _wanted(scaling, now, demand) > now, reversed(demands))
    work = arriving(list(too_long)[::-1])
    enough = staffed(work, GROWING) if work else asked
    if shrinking and (not work or enough <= now):
        return now
    return max(now + 1, enough)


def _for_tight(scaling: Scaling | PrefillScaling, now: int, demands: Sequence[Demand]) -> int:
    """Return the number of endpoints for a queue that is not too long yet."""
    work = arriving(demands)
    if not work or staffed(work, TIGHT) <= now:
        return now
    mean_s = sum(demand.queue_s for demand in demands) / len(demands)
    return staffed(work, GROWING) if mean_s > float(quantity(scaling.target)) * now / 2 else now


def _calm(scaling: Scaling | PrefillScaling, now: int, demands: Sequence[Demand]) -> bool:
    """Return whether one endpoint less would do for all of these readings."""
    if scaling.signal is Signal.KV_USAGE:
        kept = (1.0 - TOLERANCE) * float(quantity(scaling.target)) * (now - 1)
        return max(demand.kv_in_use for demand in demands) <= kept
    most = max(_wanted(scaling, now, demand) for demand in demands)
    return most < now and staffed(arriving(demands), SHRINKING) < now


def _wanted(scaling: Scaling | PrefillScaling, now: int, demand: Demand) -> int:
    """Return the number of endpoints that a reading wants."""
    target = float(quantity(scaling.target))
    load = demand.queue_s if scaling.signal is Signal.QUEUE_SECONDS else demand.kv_in_use
    near = abs(load / (target * now) - 1.0) <= TOLERANCE
    return now if near else ceil(load / target)
