"""static_pd: prefill and decode on endpoints with fixed roles (of 8 endpoints, 4 prefill and 4 decode).

1. Prefill on the endpoint with the fewest pending prefill tokens.
2. Decode on the endpoint with the most free KV.

Where endpoints have no roles, both steps choose among all. The policy considers neither caches nor sessions,
so each turn's whole context crosses the fabric, and one long context may not fit where many already decode.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.pool import Role
from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import least_pending, lowest, pending_costs
from perilune_research.simulator.roles import with_role


def static_pd(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """Chooses one endpoint that prefills and one that decodes, which may be the same."""
    prefiller = least_pending(with_role(candidates, Role.PREFILL), rng)
    decoders = with_role(candidates, Role.DECODE)
    decoder = lowest(decoders, lambda c: -c.load.kv_free_tokens, rng)
    if decoder is prefiller:
        return Decision(decoder.address, Reason.LEAST_LOADED, pending_costs(candidates))
    return Decision(decoder.address, Reason.SPLIT, pending_costs(candidates), prefill=prefiller.address)
