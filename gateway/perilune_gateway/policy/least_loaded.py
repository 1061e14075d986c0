"""least_loaded: the endpoint with the fewest pending prefill tokens, then the fewest requests in flight.

Sees load only: a session's turns are spread, and each endpoint computes the same prefix again.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import least_pending, pending_costs


def least_loaded(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """Ties by requests in flight, bound sessions, then by draw."""
    return Decision(least_pending(candidates, rng).address, Reason.LEAST_LOADED, pending_costs(candidates))
