"""random: any endpoint, each equally likely."""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import pending_costs


def random(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """One draw per request."""
    return Decision(rng.choice(candidates).address, Reason.RANDOM, pending_costs(candidates))
