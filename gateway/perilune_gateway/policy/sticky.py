"""sticky: a session stays on its first endpoint.

    host, if the session has one and it may be chosen; else the fewest pending prefill tokens

Prefer it where sessions are short or the load is far below capacity. It reuses the most KV within a session,
but a session never leaves an overloaded endpoint.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import host_of, least_pending, near, pending_costs


def sticky(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """Choose the session's host if possible, else the endpoint with the fewest pending prefill tokens."""
    costs = pending_costs(candidates)
    if host := host_of(request, candidates):
        return Decision(host.address, Reason.HOST, costs)
    return Decision(least_pending(candidates, rng, near(request)).address, Reason.COLD, costs)
