"""perilune: the lowest cost in seconds over all tiers, with affinity by hysteresis.

1. Every endpoint's cost in seconds (cost.py): queue, fetching from the cheapest tier at learned speeds,
   prefill of the rest, what it takes from those in flight there, company while decoding.
2. No host (or it is gone): the lowest cost; of those that no prediction tells apart (cost.py, `nearly`) the
   fewest sessions. A host that drains: the lowest cost of the others.
3. A host: the session leaves it for the lowest cost if that saves more than `least_gain_seconds` and its
   fetch once more. Less is noise: most queues are gone before the next turn, and nothing is known as badly
   as the time of a fetch (the link may be an outlier). A session that moved just now may move again: having
   it wait instead costs more than it saves, at every load (docs/evaluation/notes.md).
4. Headers alone suffice while the session stays and its host is known to hold its context (its tail tells);
   what other endpoints hold is then taken as nothing. A host that has lost the tail, or a prompt that was
   rewritten, means a long prefill: against that the body costs little, and it tells where what is left lies.

What a prefill takes from others is its seconds, times those in flight (`interference_weight`): they are
delayed, and hold their KV for longer, for which idle sessions' KV is evicted, which is prefilled again when
they come back. So long prefills end up where few others are. Where links are slow a move costs more and
happens less: nothing else has to be switched off.
"""

from collections.abc import Mapping, Sequence
from random import Random

from perilune_api.policies import PeriluneParams
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    NeedBody,
    Phase,
    Reason,
    RequestView,
)
from perilune_gateway.policy.cost import Seconds, cheapest, host_of, nearly_cheapest, seconds


def perilune(
    request: RequestView, candidates: Sequence[Candidate], params: PeriluneParams, rng: Random
) -> Decision | NeedBody:
    """Lowest cost, or the host unless leaving it pays."""
    here = {c.address: seconds(c, request, params) for c in candidates}
    costs = [there.cost(address) for address, there in here.items()]
    host, by_headers = host_of(request, candidates), request.phase is Phase.HEADERS
    if host is None or request.session is None:
        if by_headers:
            return NEED_BODY
        return _decision(nearly_cheapest(candidates, costs, rng), Reason.COLD, here, costs)
    if by_headers and request.prompt_tokens > request.block_size > host.overlap.device_tokens:
        return NEED_BODY
    others = [c for c in candidates if c is not host]
    if not others:
        return _decision(host, Reason.HOST, here, costs)
    best = cheapest(others, costs, rng)
    saved_s = here[host.address].total_s - here[best.address].total_s
    if not host.draining and saved_s <= params.least_gain_seconds + here[best.address].fetch_s:
        return _decision(host, Reason.NOT_WORTH if saved_s > 0 else Reason.HOST, here, costs)
    if by_headers:
        return NEED_BODY
    return _decision(best, Reason.MOVED, here, costs, moved_from=host.address)


def _decision(
    target: Candidate,
    reason: Reason,
    here: Mapping[str, Seconds],
    costs: Sequence[Cost],
    moved_from: str = "",
) -> Decision:
    there = here[target.address]
    return Decision(
        target.address,
        reason,
        costs,
        moved_from,
        replicate_from=there.peer,
        cached_tokens=there.cached_tokens,
        estimated_ttft_s=there.ttft_s,
    )
