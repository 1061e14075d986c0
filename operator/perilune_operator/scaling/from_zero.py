"""Sets whether a pool with `minReplicas: 0` has any endpoint. Pure.

1. *From zero*: one endpoint, at the first reading with a request that no endpoint could take. Gateways refuse
   such requests with 429 and `Retry-After`, or let new sessions wait (`routing.sessionAdmission`).
2. *To zero*, from any number: over `downSeconds` no request came or was under way while all endpoints were
   ready. The time in which one starts does not count, since clients were told to come back later. Never while
   a gateway's page is missing, since it may have requests of which the others do not know.
3. In between the pool follows its signal.
"""

from collections.abc import Sequence

from perilune_operator.observe.facts import Demand
from perilune_operator.scaling.readings import settled, since


def replicas(now: int, demands: Sequence[Demand], down_seconds: int, at: float) -> int | None:
    """Return the number of endpoints; None if the pool's signal decides. `demands`: the readings since the
    last change."""
    if not now:
        return int(any(demand.unserved for demand in demands))
    long = since(settled(demands), at - down_seconds)
    quiet = long and not long[-1].missing and not any(demand.requests for demand in long)
    return 0 if quiet else None
