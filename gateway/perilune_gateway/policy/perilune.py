"""perilune: the lowest predicted cost in seconds; a session leaves its host only if that saves enough.

    cost = queue + fetch + prefill + interference_weight × requests in flight × delay + slower decoding

1. Compute every endpoint's cost in seconds (the terms are in cost.py).
2. The session has no host, or the host is gone: choose the lowest cost. Among costs that differ by less than
   the predictions' precision (`nearly` in cost.py), choose the endpoint with the fewest sessions.
3. The host drains: choose the lowest cost of the other endpoints. (A session whose KV can be handed over
   stays until that is done, as under every policy, see routing/decide.py.)
4. Otherwise the session moves to the lowest cost only if that saves enough, since a small saving is within
   the error of the predictions, and most queues are gone before the next turn. Enough are
   `least_gain_seconds` if the other endpoint has nothing of the prompt, `least_gain_with_kv_seconds` if it
   has or fetches all of it, and in proportion for a share. Both are seconds of an H20, and follow the speed
   that is measured of the two endpoints. There is no cooldown (docs/evaluation/notes.md).
5. The headers suffice while the session stays and its host is known to cache its context. (Other endpoints
   then count as caching nothing, unless the host is busy and KV lies in host memory or a store.) Otherwise
   a long prefill follows, so waiting for the body costs little.

The interference term charges a prefill for the delay of the others on the endpoint, which also keep their KV
for longer. It places long prefills where few requests run.

Source: Perilune. Prefer it for agents and chats; where others are ahead of it is told in
docs/evaluation/README.md. It depends on predictions, which the gateway corrects by measurement
(state/calibration.py).
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
    """Choose the host, or the lowest cost if leaving the host saves enough."""
    here = {c.endpoint.address: seconds(c, request, params) for c in candidates}
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
    stays, goes = here[host.address], here[best.address]
    with_kv_s = min(params.least_gain_seconds, params.least_gain_with_kv_seconds)
    share = goes.cached_tokens / max(1, request.prompt_tokens)
    least_s = params.least_gain_seconds + share * (with_kv_s - params.least_gain_seconds)
    least_s *= (host.engine.pace() + best.engine.pace()) / 2.0
    saved_s = stays.total_s - goes.total_s
    if not host.draining and saved_s <= least_s:
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
        moved_from=moved_from,
        replicate_from=there.peer,
        cached_tokens=there.cached_tokens,
        estimated_ttft_s=there.ttft_s,
    )
