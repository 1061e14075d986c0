"""lmetric_plus_one: prefill tokens times batch size plus one.

    cost = P × (BS + 1), with P and BS as in `lmetric`

Source: a variant of LMetric, arXiv 2603.15202. The cost of an idle endpoint is not 0, so caches count there
too. Prefer it to `lmetric` always, and to other policies where no weights are to be tuned.
"""

from collections.abc import Sequence
from random import Random

from perilune_gateway.model import Candidate, Decision, NeedBody, RequestView
from perilune_gateway.policy.others.lmetric import lowest_product


def lmetric_plus_one(
    request: RequestView, candidates: Sequence[Candidate], rng: Random
) -> Decision | NeedBody:
    """Choose the lowest P × (BS + 1)."""
    return lowest_product(request, candidates, 1, rng)
