"""ear: elastic affinity routing, for sessions whose turns follow each other without a human between.

1. Cold (no host, or its host is gone): the endpoint with the fewest pending prefill tokens; among equals
   the host of the session that started this one, since they share a prefix.
2. Warm: always the host, unless it is *hot*: more than T_hot (`hot_pending_tokens`) uncached prompt
   tokens wait or run there.
3. Hot host, and the session last moved more than T_cool (`cooldown_seconds`) ago: of the endpoints
   with KV room for the prompt and strictly fewer pending tokens than the host, the one with the fewest.
   None: stay. The session moves with this request; its KV follows where endpoints share a store, or pull.

Ranked by observed load, never by predicted transfer time (published predictors are off by 10–21×).
Decides from the headers alone while it stays with a host that is not hot: KV room needs the prompt's
length. Thrash is bounded: one session moves at most lifetime / T_cool times. It does not help where one
session alone makes any endpoint hot, nor knows endpoints of unequal hardware.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.policies import EarParams
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Decision,
    NeedBody,
    Phase,
    Reason,
    RequestView,
)
from perilune_gateway.policy.cost import has_kv_room, host_of, least_pending, near, pending_costs


def ear(
    request: RequestView, candidates: Sequence[Candidate], params: EarParams, rng: Random
) -> Decision | NeedBody:
    """Affinity, and a move when the host is hot."""
    costs = pending_costs(candidates)
    host = host_of(request, candidates)
    if host and host.load.pending_prefill_tokens <= params.hot_pending_tokens:
        return Decision(host.address, Reason.HOST, costs)
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    if host is None or request.session is None:
        return Decision(least_pending(candidates, rng, near(request)).address, Reason.COLD, costs)
    if request.session.seconds_since_move <= params.cooldown_seconds:
        return Decision(host.address, Reason.HOT_COOLDOWN, costs)
    cooler = [
        c
        for c in candidates
        if c.load.pending_prefill_tokens < host.load.pending_prefill_tokens and has_kv_room(c, request)
    ]
    if not cooler:
        return Decision(host.address, Reason.HOT_NOWHERE, costs)
    target = least_pending(cooler, rng)
    return Decision(
        target.address,
        Reason.MOVED,
        costs,
        moved_from=host.address,
        replicate_from=host.address if request.prefix.pullable else "",
    )
