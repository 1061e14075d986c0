"""round_robin: the next endpoint. Knows nothing of caches or load; the floor of every comparison."""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import pending_costs


def round_robin(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """Endpoint number `ordinal mod n`."""
    chosen = candidates[request.ordinal % len(candidates)]
    return Decision(chosen.address, Reason.ROUND_ROBIN, pending_costs(candidates))
