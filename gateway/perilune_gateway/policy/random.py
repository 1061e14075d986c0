"""random: a random endpoint, each with the same probability.

    P(endpoint) = 1 / number of candidates

Prefer it only as a baseline: it ignores caches and load.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import pending_costs


def random(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """Choose a random endpoint."""
    return Decision(rng.choice(candidates).address, Reason.RANDOM, pending_costs(candidates))
