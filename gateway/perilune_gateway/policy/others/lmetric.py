"""lmetric: prefill tokens times batch size.

    cost = P × BS
    P    = pending uncached prefill tokens, including this prompt's
    BS   = requests in flight

Source: LMetric, arXiv 2603.15202. A product needs no weights. It is 0 on every idle endpoint, so it ignores
caches there and chooses randomly among them. Prefer `lmetric_plus_one`, which does not.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    NeedBody,
    Phase,
    RequestView,
)
from perilune_gateway.policy.cost import lowest_cost


def lmetric(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision | NeedBody:
    """Choose the lowest P × BS."""
    return lowest_product(request, candidates, 0, rng)


def lowest_product(
    request: RequestView, candidates: Sequence[Candidate], extra: int, rng: Random
) -> Decision | NeedBody:
    """Choose the lowest P × (BS + extra)."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    costs = tuple(_cost(c, request, extra) for c in candidates)
    return lowest_cost(candidates, costs, rng)


def _cost(candidate: Candidate, request: RequestView, extra: int) -> Cost:
    uncached = request.prompt_tokens - candidate.overlap.device_tokens
    terms = {
        "prefill_tokens": float(candidate.load.pending_prefill_tokens + uncached),
        "batch_size": float(candidate.load.in_flight),
    }
    return Cost(candidate.address, terms["prefill_tokens"] * (terms["batch_size"] + extra), terms)
