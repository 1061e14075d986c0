"""Counts the blocks of prompts as cached where the prompts were sent, before the engines announce them.

A claim is dropped when its prompt will not be cached there after all: the endpoint answers with an error,
could not be reached, or another endpoint serves the request.
"""

from __future__ import annotations

from perilune_gateway.model import Outcome
from perilune_gateway.state.facts import Claimed, Tell
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.request_facts import Answered, Decided, Ended, Rerouted

UNREACHABLE = (0, 502, 503, 504)
"""Statuses by which Envoy reports an endpoint that it could not reach. 0 if no answer came."""


class Claiming:
    """The claims of one pool's requests."""

    def __init__(self, index: PrefixIndex, tell: Tell) -> None:
        """`tell` hears `Claimed`."""
        self._index = index
        self._tell = tell

    def on_decided(self, fact: Decided) -> None:
        self._claim(fact.request, fact.now)

    def on_rerouted(self, fact: Rerouted) -> None:
        if fact.was_there:
            self._index.unclaim(fact.before, fact.request.claimed)
        self._claim(fact.request, fact.now)

    def on_answered(self, fact: Answered) -> None:
        if fact.refused and fact.is_there:
            self._index.unclaim(fact.request.target, fact.request.claimed)

    def on_ended(self, fact: Ended) -> None:
        request, unreached = fact.request, fact.ending.outcome is Outcome.FAILED
        if unreached and request.status in UNREACHABLE and fact.is_there:
            self._index.unclaim(request.target, request.claimed)

    def _claim(self, request: InFlight, now: float) -> None:
        blocks, request.claimed = request.blocks, ()
        if not blocks:
            return
        claimed = request.claimed = self._index.speculate(request.target, blocks, now, ttl_s=request.claim_s)
        if claimed:
            before = len(blocks) - len(claimed)
            parent = blocks[before - 1] if before else 0
            self._tell(Claimed(request.target, claimed, request.claim_s, parent))
