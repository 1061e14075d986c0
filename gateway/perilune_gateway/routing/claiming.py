"""Counts the blocks of prompts as cached where the prompts were sent, before the engines announce them.

A claim is dropped, once, when its prompt will not be cached there after all: the endpoint answers with an
error, could not be reached, another endpoint serves the request, or the request is not sent.
"""

from __future__ import annotations

from perilune_gateway.model import Outcome
from perilune_gateway.state.facts import Claimed, Tell
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.request_facts import Answered, Decided, Ended, Rerouted, Withdrawn

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
            self._drop(fact.request, fact.before)
        self._claim(fact.request, fact.now)

    def on_answered(self, fact: Answered) -> None:
        if fact.refused and fact.is_there:
            self._drop(fact.request, fact.request.target)

    def on_ended(self, fact: Ended) -> None:
        request, unreached = fact.request, fact.ending.outcome is Outcome.FAILED
        if unreached and request.status in UNREACHABLE and fact.is_there:
            self._drop(request, request.target)

    def on_withdrawn(self, fact: Withdrawn) -> None:
        self._drop(fact.request, fact.request.target)

    def _drop(self, request: InFlight, address: str) -> None:
        self._index.unclaim(address, request.claimed)
        request.claimed = ()

    def _claim(self, request: InFlight, now: float) -> None:
        blocks, request.claimed = request.blocks, ()
        if not blocks:
            return
        claimed = request.claimed = self._index.speculate(request.target, blocks, now, ttl_s=request.claim_s)
        if claimed:
            before = len(blocks) - len(claimed)
            parent = blocks[before - 1] if before else 0
            self._tell(Claimed(request.target, claimed, request.claim_s, parent))
