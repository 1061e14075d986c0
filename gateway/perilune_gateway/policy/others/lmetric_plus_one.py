"""lmetric_plus_one: the lowest P × (BS + 1).

`lmetric` whose product does not vanish on idle endpoints, so the cache counts there too: a much stronger
baseline.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, NeedBody, RequestView
from perilune_gateway.policy.others.lmetric import lowest_product


def lmetric_plus_one(
    request: RequestView, candidates: Sequence[Candidate], rng: Random
) -> Decision | NeedBody:
    """P × (BS + 1)."""
    return lowest_product(request, candidates, 1, rng)
