"""How many endpoints of one duty a pool should have, by the load that its gateways report. Pure.

| signal | rules |
|---|---|
| queueSeconds, kvUsage | by_load.py |
| ttftAttainment | by_attainment.py |
| any of these, with `minReplicas: 0` | from_zero.py, whether there is any endpoint |

Endpoints that serve follow `scaling`, those that only prefill `prefillScaling`: the same rules, each with the
readings of its own endpoints. What the rules share is in readings.py. After each change of the number of
endpoints, and after readings that are missing, the readings start over; only `ttftAttainment` looks at
earlier ones. 0 endpoints are switched off and stay so, unless `minReplicas` is 0.
"""

from collections.abc import Sequence

import msgspec

from perilune_api.inference_pool.spec import PrefillScaling, Scaling, Signal
from perilune_operator.observe.facts import Demand
from perilune_operator.scaling import by_attainment, by_load, from_zero
from perilune_operator.scaling.readings import current, unchanged


def replicas(scaling: Scaling | PrefillScaling, now: int, demands: Sequence[Demand], at: float) -> int:
    """Return the endpoints that the pool should have. `now`: those that it should have so far. `demands`: the
    readings, in order. `at`: seconds since the epoch."""
    if scaling.signal is Signal.METRIC or (now == 0 and scaling.min_replicas):
        return now
    bounded = max(scaling.min_replicas, min(scaling.max_replicas, now))
    if bounded != now:
        return bounded
    lately = unchanged(current(demands, at), now)
    if not scaling.min_replicas:
        started = from_zero.replicas(now, lately, scaling.down_seconds, at)
        if started is not None:
            return started
        scaling = msgspec.structs.replace(scaling, min_replicas=1)
    if scaling.signal is Signal.TTFT_ATTAINMENT:
        return by_attainment.replicas(scaling, now, lately, demands, at)
    return by_load.replicas(scaling, now, lately, at)
