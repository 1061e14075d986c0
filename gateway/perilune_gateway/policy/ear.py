"""ear: elastic affinity routing, which keeps a session on its host until the host is overloaded.

    cost = pending prefill tokens

1. Cold session (no host, or the host is gone): choose the lowest cost. Among equals prefer the host of the
   parent session, because parent and child share a prefix.
2. Warm session: choose the host unless it is hot, that is, its cost is above T_hot (`hot_pending_tokens`).
3. Hot host, and the session last moved more than T_cool (`cooldown_seconds`) ago: of the endpoints with KV
   room for the prompt and a lower cost than the host, choose the lowest cost. If there is none, stay. The
   session moves with this request; the new host loads its KV from the shared store or recomputes it.

Source: Perilune. Costs are observed loads and never predicted transfer times, because published predictors
are off by a factor of 10 to 21. A session moves at most (lifetime / T_cool) times. While the host is not
hot, the headers suffice; the KV room of another endpoint can only be checked with the prompt's length.

Prefer it for agents, whose turns follow each other quickly. It does not help where one session alone makes
an endpoint hot, and it assumes that all endpoints have equal hardware.
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
from perilune_gateway.policy.cost import (
    can_pull,
    has_kv_room,
    host_of,
    least_pending,
    near,
    pending_costs,
)


def ear(
    request: RequestView, candidates: Sequence[Candidate], params: EarParams, rng: Random
) -> Decision | NeedBody:
    """Keep the session on its host, or move it if the host is hot."""
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
        replicate_from=host.address if can_pull(target, request, host.address) else "",
    )
