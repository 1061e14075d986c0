"""power_of_two: the less loaded of two random endpoints.

    cost = pending prefill tokens, compared for two endpoints only

Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001). Prefer it to
least_loaded when many gateways decide at once: they do not all choose the same endpoint, and the load is
nearly as even. Like least_loaded it ignores caches.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import least_pending, pending_costs


def power_of_two(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """Choose between two random endpoints, or take the only one."""
    two = rng.sample(candidates, k=min(2, len(candidates)))
    return Decision(least_pending(two, rng).address, Reason.POWER_OF_TWO, pending_costs(candidates))
