"""least_loaded: the endpoint with the fewest pending prefill tokens.

    cost = pending prefill tokens; among equals the fewest requests in flight, then the fewest sessions

Prefer it for short prompts that share no prefix. It ignores caches, so it spreads the turns of a session, and
every endpoint computes the same prefix again.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import least_pending, pending_costs


def least_loaded(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """Choose the fewest pending prefill tokens; among endpoints that are equal in all three, choose
    randomly."""
    return Decision(least_pending(candidates, rng).address, Reason.LEAST_LOADED, pending_costs(candidates))
