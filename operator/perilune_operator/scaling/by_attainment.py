"""Sets the number of endpoints by the share of first tokens that come in time (`ttftAttainment`).

The share says whether there are too few endpoints, but not how many are wanted. First tokens that are late
while endpoints are free are late for another reason, such as prompts whose prefill alone takes longer: more
endpoints would not help. So the share of the last hour's readings with free endpoints takes the place of a
target that is higher.

1. Readings are taken together until they have ENOUGH requests.
2. *Up*: in all of these of the last `upSeconds` (or in the latest ENOUGH requests, if that is longer) the
   share is below the target, and in all together by more than CHANCE standard deviations; the queue does not
   shrink; and at least USED of the endpoints have prompts to prefill. Where fewer have, many endpoints could
   begin a prompt at once, so more of them would not help. As many are added as bring the least queue of the
   readings to `ttftSeconds` per endpoint: one at least, and at most as many as there are.
3. *Down*: over `downSeconds` the share reached the target, and at most CALM of the endpoints that would
   remain would have prompts to prefill; or at most IDLE of them, if first tokens were late. The average
   number of endpoints that have some is the work for all, whatever their number, if they are not overloaded.
   CALM is less than USED, so the load with which an endpoint leaves does not ask for it again. One leaves.

The readings of each rule are those since the last change. A first token is late whichever duty has too few
endpoints; USED tells which.
"""

from collections.abc import Sequence
from math import ceil, sqrt

from perilune_api.inference_pool.spec import PrefillScaling, Scaling
from perilune_api.quantities import quantity
from perilune_operator.observe.facts import Demand
from perilune_operator.scaling.readings import fits, settled, shrinks, since

ENOUGH = 20
"""Number of requests whose share of first tokens in time can ask for an endpoint."""
CHANCE = 4.0
"""Standard deviations of the number of requests in time that chance may explain."""
USED, CALM, IDLE = 0.6, 0.4, 0.2
"""Shares of endpoints that have prompts to prefill."""


def replicas(
    scaling: Scaling | PrefillScaling, now: int, demands: Sequence[Demand], hour: Sequence[Demand], at: float
) -> int:
    """Return the same as `scaling.replicas`. `demands`: the readings since the last change. `hour`: also
    those before."""
    target, steady = min(float(quantity(scaling.target)), _reachable(hour)), settled(demands)
    lately = since(steady, at - scaling.up_seconds)
    kept = [demand for demand in steady if demand.at >= at - max(scaling.up_seconds, scaling.down_seconds)]
    if lately and _too_late(target, _together(lately) or _together(kept)[:1]):
        if _prefilling(lately) < USED * now or shrinks(lately):
            return now
        wanted = ceil(min(demand.queue_s for demand in lately) / scaling.ttft_seconds)
        return min(scaling.max_replicas, 2 * now, max(now + 1, wanted))
    long = since(demands, at - scaling.down_seconds)
    attains = sum(d.in_time for d in long) >= target * sum(d.first_tokens for d in long)
    bearable = (CALM if attains else IDLE) * (now - 1)
    leaves = now > scaling.min_replicas and fits(now, long) and _prefilling(long) <= bearable
    return now - 1 if leaves else now


def _reachable(demands: Sequence[Demand]) -> float:
    """Return the share of first tokens in time while endpoints are free; 1 if too few came then. An endpoint
    that still starts is not free."""
    ready = ((d, d.wanted - d.starting) for d in demands)
    calm = [d for d, n in ready if d.prefilling < n and d.prefilling <= max(1.0, CALM * n)]
    first_tokens = sum(demand.first_tokens for demand in calm)
    return sum(demand.in_time for demand in calm) / first_tokens if first_tokens >= ENOUGH else 1.0


def _together(demands: Sequence[Demand]) -> Sequence[tuple[int, int]]:
    """Return (requests, those in time) of the latest readings, the latest first, with ENOUGH requests or more
    together."""
    made, first_tokens, in_time = list[tuple[int, int]](), 0, 0
    for demand in reversed(demands):
        first_tokens, in_time = first_tokens + demand.first_tokens, in_time + demand.in_time
        if first_tokens >= ENOUGH:
            made.append((first_tokens, in_time))
            first_tokens, in_time = 0, 0
    return made


def _too_late(target: float, counts: Sequence[tuple[int, int]]) -> bool:
    """Return whether each share is below the target, and all together more than chance explains."""
    requests = sum(first_tokens for first_tokens, _ in counts)
    missing = target * requests - sum(in_time for _, in_time in counts)
    below = all(in_time < target * first_tokens for first_tokens, in_time in counts)
    return below and missing > CHANCE * sqrt(requests * target * (1.0 - target))


def _prefilling(demands: Sequence[Demand]) -> float:
    """Return how many endpoints have prompts to prefill, on average."""
    return sum(demand.prefilling for demand in demands) / len(demands) if demands else 0.0
