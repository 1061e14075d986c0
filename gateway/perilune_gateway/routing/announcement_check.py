"""Compares what engines announce, or are believed to have, with what they answer.

1. If an engine announces no prompt that it answers, hashes or chat templates differ: the parity check hears
   of each prompt.
2. If it reports fewer cached tokens than it had announced, it computes a part again (computed_again.py).
3. If one without KV events reports that what it was believed to have is gone, its blocks are forgotten
   (silent_resets.py).
"""

from __future__ import annotations

import logging
from collections import deque

from perilune_gateway.model.applied import Applied
from perilune_gateway.state.facts import BlocksChanged
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import Ended
from perilune_gateway.state.silent_resets import Report

log = logging.getLogger(__name__)

EVENTS_LATE_S = 1.0
"""After a request's end, its prompt's KV events may take this long before they count as missing."""


class AnnouncementCheck:
    """The prompts of one pool whose KV events may still come."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._late: deque[tuple[float, str, int, float]] = deque()
        """(when to look, endpoint, last block, the request's start)."""

    def on_ended(self, fact: Ended) -> None:
        request, index, parity = fact.request, self._state.index, self._state.parity
        if fact.answered and fact.is_there:
            self._compare(fact)
            self._look_for_reset(fact)
            # The engine may evict the block soon, so that is looked for at once; only what has not come yet
            # is looked for again later.
            if request.awaited and index.announced(request.target, request.awaited):
                parity.request_blocks_seen(request.target, True, request.started_at)
            elif request.awaited:
                due = fact.now + EVENTS_LATE_S, request.target, request.awaited, request.started_at
                self._late.append(due)
        while self._late and self._late[0][0] <= fact.now:
            _, endpoint, block, since = self._late.popleft()
            parity.request_blocks_seen(endpoint, index.announced(endpoint, block), since)

    def _compare(self, fact: Ended) -> None:
        request, state = fact.request, self._state
        told, found = request.announced_tokens, request.cached_tokens
        if told and found is not None and request.forecast.held_tokens == told:
            target = request.target
            block_tokens = state.fleet.engine_blocks(target) * state.block_size
            state.computed_again.reported(target, found, told, block_tokens)

    def _look_for_reset(self, fact: Ended) -> None:
        request, fleet, session = fact.request, self._state.fleet, fact.request.session
        address, found = request.target, request.cached_tokens
        endpoint = fleet.get(address)
        if endpoint is None or endpoint.events:
            return
        computed = max(0, request.prompt_tokens - (found or 0)) + request.output_tokens
        resets, sharing = self._state.silent_resets, self._state.sharing
        if session is None or found is None or request.content:
            resets.computed(address, computed)
            return
        report = Report(
            session=session.key, predicted=request.forecast.held_tokens, cached=found, computed=computed
        )
        # Other gateways' requests fill the pool, too.
        gateways = 1 + len(sharing.peers) if sharing else 1
        if resets.is_empty(address, report, fleet.kv_tokens(address) // gateways):
            log.warning("kv blocks forgotten endpoint=%s cause=reset, by its answers", address)
            self._state.index.forget(address)
            self._state.facts.tell(BlocksChanged(Applied(endpoint=address, cleared=True), fact.now))
