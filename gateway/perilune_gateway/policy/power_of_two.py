"""power_of_two: draw two endpoints, take the less loaded (Mitzenmacher 2001).

Nearly as even as least_loaded, and many gateways deciding at once do not all run to the same endpoint.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import least_pending, pending_costs


def power_of_two(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """With one endpoint, that one."""
    two = rng.sample(candidates, k=min(2, len(candidates)))
    return Decision(least_pending(two, rng).address, Reason.POWER_OF_TWO, pending_costs(candidates))
