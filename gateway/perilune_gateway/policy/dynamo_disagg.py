"""dynamo_disagg: NVIDIA Dynamo's conditional disaggregation over endpoints with roles.

1. The decoding endpoint: the lowest `dynamo` cost of those that decode.
2. Prefill remotely, that is put the prompt into the pool's prefill queue, iff int(prompt_tokens × (1 − its
   prefix hit rate)) > `max_local_prefill_tokens` and the queue is shorter than `max_prefill_queue`; else the
   decoding endpoint prefills as well.

The queue is a real one: filled from the decode side, emptied by whichever prefill endpoint is free, so the
decision names none (`prefill_queued`). Without a prefill endpoint everything is local. With the condition
switched off (`max_local_prefill_tokens` 1 and a long queue allowed) every prompt with more than one uncached
token is prefilled remotely.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.pool import PolicyParams, Role
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Decision,
    NeedBody,
    Phase,
    Reason,
    RequestView,
)
from perilune_gateway.policy.cost import cheapest, is_split, with_role
from perilune_gateway.policy.dynamo import cost


def dynamo_disagg(
    request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
) -> Decision | NeedBody:
    """A decoding endpoint, and whether it prefills."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    costs = tuple(cost(c, request, params) for c in candidates)
    decoder = cheapest(with_role(candidates, Role.DECODE), costs, rng)
    remote = is_split(candidates) and prefill_remotely(request, decoder.overlap.device_tokens, params)
    return Decision(
        decoder.address,
        Reason.SPLIT if remote else Reason.LOWEST_COST,
        costs,
        prefill_queued=remote,
        cached_tokens=decoder.overlap.device_tokens,
    )


def prefill_remotely(request: RequestView, cached_tokens: int, params: PolicyParams) -> bool:
    """Step 2."""
    hit_rate = cached_tokens / max(request.prompt_tokens, 1)
    uncached = int(request.prompt_tokens * (1.0 - hit_rate))
    return uncached > params.max_local_prefill_tokens and request.prefill_queue < params.max_prefill_queue
