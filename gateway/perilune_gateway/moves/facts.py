"""Reads the planner's facts from the pool's state: endpoints, sessions and hot prefixes.

Changes nothing. `endpoints` costs O(endpoints), `sessions` costs O(sessions returned).
"""

from collections.abc import Collection, Sequence

from perilune_gateway.model import Candidate, Location, Overlap, Subject
from perilune_gateway.moves.plan import PrefixFacts, SessionFacts
from perilune_gateway.state.pool_state import PoolState


class LiveFacts:
    """The `planner.Facts` of a live pool. A session's key identifies it, a prefix is identified by its last
    block."""

    pullable = False
    """Engines do not pull KV from each other; the target reads the store or recomputes."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def endpoints(self, now: float, near: Collection[str] = ()) -> Sequence[Candidate]:
        """Return all endpoints of the pool. They have no links, because they cannot pull KV."""
        state = self._state
        return [
            Candidate(
                view.endpoint,
                view.load,
                Overlap(),
                engine=state.calibration.speed(view.endpoint.address, now).engine,
            )
            for view in state.fleet.view(now, state.sessions.bound)
        ]

    def sessions(self, host: str, limit: int, now: float) -> Sequence[SessionFacts]:
        """Return at most `limit` sessions bound to `host`, the most recently used first."""
        state = self._state
        return [
            SessionFacts(
                s.key,
                host,
                s.context_tokens,
                min(state.held_tokens(s, now), s.context_tokens),
                s.tail_tokens if s.tail and state.index.find_block(s.tail, now).store else 0,
                s.turns,
                now - s.moved_at,
                now - s.seen_at,
            )
            for s in state.sessions.at(host, limit, now)
        ]

    def prefix(self, name: Subject, tokens: int, now: float) -> PrefixFacts | None:
        """Return the facts of the prefix that ends with the block `name`, or None if no endpoint caches
        it."""
        assert isinstance(name, int), "a prefix is named by its last block"
        index = self._state.index
        matches = index.find_block(name, now)
        if not matches.device:
            return None
        locations = tuple(Location(address, tokens) for address in matches.device)
        stored = tokens if matches.store else 0
        return PrefixFacts(name, tokens, index.frequency_score(name, now), locations, stored)
