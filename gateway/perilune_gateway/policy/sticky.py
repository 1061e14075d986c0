"""sticky: a session stays on its first endpoint for ever; that one is chosen least loaded.

Best reuse inside a session, no escape from a hot endpoint. Requests without a session: least loaded.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import host_of, least_pending, near, pending_costs


def sticky(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """The session's host if it may be chosen, else the endpoint with the fewest pending tokens."""
    costs = pending_costs(candidates)
    if host := host_of(request, candidates):
        return Decision(host.address, Reason.HOST, costs)
    return Decision(least_pending(candidates, rng, near(request)).address, Reason.COLD, costs)
