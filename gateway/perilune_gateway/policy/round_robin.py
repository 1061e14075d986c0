"""round_robin: each endpoint in turn.

    chosen = candidates[ordinal mod number of candidates], where the ordinal counts the pool's requests

Prefer it only as a baseline: it ignores caches and load.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import pending_costs


def round_robin(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """Choose the next endpoint."""
    chosen = candidates[request.ordinal % len(candidates)]
    return Decision(chosen.address, Reason.ROUND_ROBIN, pending_costs(candidates))
