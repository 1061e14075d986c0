"""What the migration planner must know, read from the router's state: endpoints, sessions, prefixes.

Reads, changes nothing. Cost: O(endpoints) per call of `endpoints`, O(sessions asked for) of `sessions`.
"""

from collections.abc import Collection, Sequence

from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Location, Overlap, Subject
from perilune_gateway.moves.plan import PrefixFacts, SessionFacts
from perilune_gateway.routing.gather import Gatherer
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.fleet import EndpointView, Fleet
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.sessions import Sessions


class MoveFacts:
    """planner.Facts of one pool. Sessions are named by their keys, prefixes by their last block."""

    pullable = False
    """Nobody asks an engine to pull from another yet: what moves is read from the store, or recomputed."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        index: PrefixIndex,
        calibration: Calibration,
        gatherer: Gatherer,
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._index = index
        self._calibration = calibration
        self._gatherer = gatherer

    def endpoints(self, now: float, near: Collection[str] = ()) -> Sequence[Candidate]:
        near = near if self.pullable else ()
        return [
            Candidate(
                view.endpoint,
                view.load,
                Overlap(),
                links={there: self._link(view, there, now) for there in near if there in view.links},
                engine=self._gatherer.engine_of(view.endpoint.address, now),
            )
            for view in self._fleet.view(now, self._sessions.bound)
        ]

    def sessions(self, host: str, limit: int, now: float) -> Sequence[SessionFacts]:
        return [
            SessionFacts(
                s.key,
                host,
                s.context_tokens,
                min(self._gatherer.held(s, now), s.context_tokens),
                s.tail_tokens if s.tail and self._index.find_block(s.tail, now).store else 0,
                s.turns,
                now - s.moved_at,
                now - s.seen_at,
            )
            for s in self._sessions.at(host, limit, now)
        ]

    def prefix(self, name: Subject, tokens: int, now: float) -> PrefixFacts | None:
        assert isinstance(name, int), "a prefix is named by its last block"
        matches = self._index.find_block(name, now)
        if not matches.device:
            return None
        locations = tuple(Location(address, tokens) for address in matches.device)
        stored = tokens if matches.store else 0
        return PrefixFacts(name, tokens, self._index.frequency_score(name, now), locations, stored)

    def _link(self, view: EndpointView, there: str, now: float) -> Link:
        slowdown = self._calibration.slowdown(there, view.endpoint.address, now)
        return view.links[there]._replace(slowdown=slowdown)
