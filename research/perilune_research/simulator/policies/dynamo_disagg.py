"""dynamo_disagg: NVIDIA Dynamo's conditional disaggregation over endpoints with roles.

1. Decode on the endpoint with the lowest `dynamo` cost among those that decode.
2. Put the prompt into the pool's prefill queue if int(prompt_tokens × (1 − prefix hit rate of that endpoint))
   > MAX_LOCAL_PREFILL_TOKENS and the queue is shorter than MAX_PREFILL_QUEUE. Otherwise the decoding endpoint
   prefills as well.

Whichever prefill endpoint is free takes the next prompt from the queue, so the decision is a `QueuedPrefill`
and names no prefill endpoint. In a pool without one, the decoding endpoint always prefills.
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
"""Uncached tokens above which a prompt is prefilled remotely. Dynamo's max_local_prefill_length."""
MAX_PREFILL_QUEUE = 2
"""With this many prompts in the prefill queue, another one is prefilled locally. Dynamo's
max_prefill_queue_size."""


class QueuedPrefill(Decision, frozen=True, gc=False):
    """A decision whose prefill goes into the pool's prefill queue, from which the next free endpoint takes
    it."""

    @property
    def prefill_endpoint(self) -> str:
        return ""


def dynamo_disagg(
    request: RequestView, candidates: Sequence[Candidate], params: DynamoParams, rng: Random
) -> Decision | NeedBody:
    """Chooses the endpoint that decodes, and whether it prefills as well."""
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    costs = tuple(cost(c, request, params) for c in candidates)
    decoder = cheapest(with_role(candidates, Role.DECODE), costs, rng)
    remote = is_split(candidates) and prefill_remotely(request, decoder.overlap.device_tokens)
    made = QueuedPrefill if remote else Decision
    return made(
        decoder.address,
        Reason.SPLIT if remote else Reason.LOWEST_COST,
        costs,
        cached_tokens=decoder.overlap.device_tokens,
    )


def prefill_remotely(request: RequestView, cached_tokens: int) -> bool:
    """Return whether the prompt goes into the prefill queue (step 2), where the decoding endpoint caches
    `cached_tokens` of it."""
    hit_rate = cached_tokens / max(request.prompt_tokens, 1)
    uncached = int(request.prompt_tokens * (1.0 - hit_rate))
    return uncached > MAX_LOCAL_PREFILL_TOKENS and request.prefill_queue < MAX_PREFILL_QUEUE
