"""llm_d: the highest weighted sum of three scores between 0 and 1, with llm-d's default weights 2, 2 and 3.

    score = queue_weight × queue + kv_usage_weight × (1 − KV usage) + prefix_weight × hit ratio
    queue = (longest − own) / (longest − shortest) of the engines' waiting prompts; 1 if all are equal

An endpoint whose metrics were never read counts as empty. Equal scores are decided randomly.

Source: the default scorers of llm-d's router and of the inference extension's endpoint picker:
queue-scorer, kv-cache-utilization-scorer and prefix-cache-scorer under max-score-picker. Prefer it to compare
with them. It knows neither a session nor how long a prefill takes, and queues only as old as the metrics.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.policies import LlmDParams
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


def llm_d(
    request: RequestView, candidates: Sequence[Candidate], params: LlmDParams, rng: Random
) -> Decision | NeedBody:
    """Choose the highest score."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    waiting = [c.load.waiting for c in candidates]
    shortest, longest = min(waiting), max(waiting)
    costs = [_cost(c, request, params, shortest, longest) for c in candidates]
    return lowest_cost(candidates, costs, rng)


def _cost(
    candidate: Candidate, request: RequestView, params: LlmDParams, shortest: int, longest: int
) -> Cost:
    load, range_ = candidate.load, longest - shortest
    terms = {
        "queue": (longest - load.waiting) / range_ if range_ else 1.0,
        "kv_free": 1.0 - load.kv_usage,
        "hit_ratio": candidate.overlap.device_tokens / max(request.prompt_tokens, 1),
    }
    score = (
        params.queue_weight * terms["queue"]
        + params.kv_usage_weight * terms["kv_free"]
        + params.prefix_weight * terms["hit_ratio"]
    )
    return Cost(candidate.address, -score, terms)
