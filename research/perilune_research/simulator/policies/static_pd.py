"""static_pd: fixed prefill and decode endpoints (4 + 4 of 8, by their roles).

Prefill: the fewest pending prefill tokens. Decode: the most free KV. Knows no cache and no session, so each
turn's whole context crosses the fabric, and one long context may not fit where many already decode. Where
endpoints have no roles, each part chooses among all.
"""

from collections.abc import Sequence
from random import Random

from perilune_api.pool import Role
from perilune_gateway.model import Candidate, Decision, Reason, RequestView
from perilune_gateway.policy.cost import least_pending, lowest, pending_costs
from perilune_research.simulator.roles import with_role


def static_pd(request: RequestView, candidates: Sequence[Candidate], rng: Random) -> Decision:
    """One endpoint for each part."""
    prefiller = least_pending(with_role(candidates, Role.PREFILL), rng)
    decoders = with_role(candidates, Role.DECODE)
    decoder = lowest(decoders, lambda c: -c.load.kv_free_tokens, rng)
    if decoder is prefiller:
        return Decision(decoder.address, Reason.LEAST_LOADED, pending_costs(candidates))
    return Decision(decoder.address, Reason.SPLIT, pending_costs(candidates), prefill=prefiller.address)
