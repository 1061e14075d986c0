"""dynamo_disagg: NVIDIA Dynamo's conditional disaggregation over endpoints with roles.

1. The decoding endpoint: the lowest `dynamo` cost of those that decode.
2. Prefill remotely, that is put the prompt into the pool's prefill queue, iff int(prompt_tokens × (1 − its
   prefix hit rate)) > MAX_LOCAL_PREFILL_TOKENS and the queue is shorter than MAX_PREFILL_QUEUE; else the
   decoding endpoint prefills as well.

The queue is a real one: filled from the decode side, emptied by whichever prefill endpoint is free, so the
decision names none (`prefill_queued`). Without a prefill endpoint everything is local.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.policies import DynamoParams
from perilune_api.pool import Role
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Decision,
    NeedBody,
    Phase,
    Reason,
    RequestView,
)
from perilune_gateway.policy.cost import cheapest
from perilune_gateway.policy.others.dynamo import cost
from perilune_research.simulator.roles import is_split, with_role

MAX_LOCAL_PREFILL_TOKENS = 1_000
"""A prompt with more uncached tokens is prefilled remotely. Dynamo's max_local_prefill_length."""
MAX_PREFILL_QUEUE = 2
"""Prompts in the prefill queue from which another is prefilled locally. Dynamo's max_prefill_queue_size."""


def dynamo_disagg(
    request: RequestView, candidates: Sequence[Candidate], params: DynamoParams, rng: Random
) -> Decision | NeedBody:
    """A decoding endpoint, and whether it prefills."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    costs = tuple(cost(c, request, params) for c in candidates)
    decoder = cheapest(with_role(candidates, Role.DECODE), costs, rng)
    remote = is_split(candidates) and prefill_remotely(request, decoder.overlap.device_tokens)
    return Decision(
        decoder.address,
        Reason.SPLIT if remote else Reason.LOWEST_COST,
        costs,
        prefill_queued=remote,
        cached_tokens=decoder.overlap.device_tokens,
    )


def prefill_remotely(request: RequestView, cached_tokens: int) -> bool:
    """Step 2."""
    hit_rate = cached_tokens / max(request.prompt_tokens, 1)
    uncached = int(request.prompt_tokens * (1.0 - hit_rate))
    return uncached > MAX_LOCAL_PREFILL_TOKENS and request.prefill_queue < MAX_PREFILL_QUEUE
