"""Conductor's prefill schedule: which node prefills, and how much cached prefix it starts from.

No prefix, or hit ratio below `min_hit_ratio` → the least loaded, no cache use. Else a node near the cache
(near_cache.py); if that one does not hold the prefix, `should_migrate` says whether it is copied there; if
not, the rest is recomputed. The arm `no_scheduling` draws, and counts on no cache.

Queue length = requests whose prefill has not ended. Estimated latency = queue wait + KV load + compute.
"""

from collections.abc import Collection, Sequence
from random import Random
from typing import NamedTuple

from perilune_api.pool import ConductorArm, PolicyParams
from perilune_gateway.model import Candidate, Reason, RequestView
from perilune_gateway.policy.cost import held_tokens, least_pending
from perilune_gateway.policy.near_cache import select_near_cache, should_migrate


class Prefill(NamedTuple):
    node: Candidate
    reason: Reason
    cached_tokens: int = 0
    """Of the prefix, what it uses."""
    source: str = ""
    """Whom that is copied from; empty: it holds it."""

    def estimated_s(self, request: RequestView) -> float:
        node, cached, engine = self.node, self.cached_tokens, self.node.engine
        missing = cached - node.overlap.device_tokens
        load_s = engine.host_s(missing)
        if self.source:
            load_s = engine.transfer_s(missing, node.links[self.source].bandwidth_bytes_per_s)
        compute_s = engine.prefill_s(request.prompt_tokens - cached, cached)
        return node.load.pending_prefill_s + load_s + compute_s


def schedule_prefill(
    request: RequestView,
    nodes: Sequence[Candidate],
    holders: Collection[str],
    params: PolicyParams,
    rng: Random,
) -> Prefill:
    """`holders`: who has the whole prefix."""
    if params.conductor_arm is ConductorArm.NO_SCHEDULING:
        return Prefill(rng.choice(nodes), Reason.RANDOM)
    prefix = request.prefix
    if not prefix.tokens or prefix.tokens / request.prompt_tokens < params.min_hit_ratio:
        return Prefill(least_pending(nodes, rng), Reason.NO_CACHE)
    found = select_near_cache(request, nodes, holders, params, waiting, rng)
    if found is None:
        return Prefill(least_pending(nodes, rng), Reason.NO_CACHE)
    node, reason = found
    held = held_tokens(node)
    may_copy = params.conductor_arm is ConductorArm.CACHE_AWARE_MIGRATION and prefix.pullable
    if held < prefix.tokens and may_copy and should_migrate(request, node, params).migrate:
        return Prefill(node, reason, prefix.tokens, prefix.locations[0].address)
    return Prefill(node, reason, held)


def waiting(candidate: Candidate) -> int:
    return candidate.load.prefilling
