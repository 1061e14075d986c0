"""Reads the planner's facts from the pool's state: endpoints, sessions and hot prefixes.

Changes nothing but counts what cannot be handed over. `endpoints` costs O(endpoints), `sessions` costs
O(sessions returned).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from perilune_api.pool import Role
from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Location, Overlap, SessionKey, Subject
from perilune_gateway.model.handoff import Content, Immovable
from perilune_gateway.moves.handoff import Handoffs
from perilune_gateway.moves.plan import PrefixFacts, SessionFacts
from perilune_gateway.state.fleet import EndpointView
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.sessions import Session

REMEMBERED = 10_000
"""Maximum number of (session or prefix, cause) that are remembered, so that each is counted once."""


class LiveFacts:
    """The `planner.Facts` of a live pool. A session's key identifies it, a prefix is identified by its last
    block."""

    ahead = True
    """KV is copied before a session switches."""

    def __init__(self, state: PoolState, handoffs: Handoffs) -> None:
        self._state = state
        self._handoffs = handoffs
        self.loras: Collection[str] = ()
        """The pool's adapters."""
        self.immovable: Counter[Immovable] = Counter()
        """Number of sessions and prefixes that could not be handed over, by cause."""
        self._counted: set[tuple[Subject, Immovable]] = set()

    @property
    def pullable(self) -> bool:
        """Whether some engine can hand KV over, by what the engines themselves said."""
        return bool(self._state.connectors.known)

    def endpoints(self, now: float, near: Collection[str] = ()) -> Sequence[Candidate]:
        """Return all endpoints to which sessions may be bound, each with links to those `near` that can hand
        KV over to it."""
        state = self._state
        return [
            Candidate(
                view.endpoint,
                view.load,
                Overlap(),
                links=self._links(view, near, now),
                engine=state.calibration.speed(view.endpoint.address, now).engine,
            )
            for view in state.fleet.view(now, state.sessions.bound)
            if view.endpoint.role is not Role.PREFILL
        ]

    def _links(self, view: EndpointView, near: Collection[str], now: float) -> Mapping[str, Link]:
        here, calibration = view.endpoint.address, self._state.calibration
        if not view.endpoint.events:  # nothing would confirm a copy
            return {}
        return {
            there: view.links[there]._replace(slowdown=calibration.slowdown(there, here, now))
            for there in near
            if there in view.links and self._state.connectors.can(there, here)
        }

    def sessions(self, host: str, limit: int, now: float) -> Sequence[SessionFacts]:
        """Return at most `limit` sessions bound to `host`, the most recently used first. Those whose KV is on
        its way are left out."""
        bound = self._state.sessions.at(host, limit, now)
        facts = (self._session(s, now) for s in bound if not self._handoffs.moves(s.key))
        return [session for session in facts if session is not None]

    def _session(self, s: Session, now: float) -> SessionFacts | None:
        """The session's facts; None while its turn is being prefilled, because then it is not yet known what
        can be handed over."""
        state = self._state
        end, held = state.held_end(s, now)
        cause = self._why_not(s.key, s.host, end, now) if held and self.pullable else None
        if cause is Immovable.TOKENS and state.fleet.runs(s.ticket):
            return None
        self._count(s.key, cause)
        return SessionFacts(
            s.key,
            s.host,
            s.context_tokens,
            min(held, s.context_tokens) if self.pullable and cause is None else 0,
            len(s.chain) * state.block_size if s.chain and state.index.find_block(s.tail, now).store else 0,
            s.turns,
            now - s.moved_at,
            now - s.seen_at,
            s.chained,
        )

    def prefix(self, name: Subject, tokens: int, now: float) -> PrefixFacts | None:
        """Return the facts of the prefix that ends with the block `name`, or None if no endpoint caches
        it."""
        assert isinstance(name, int), "a prefix is named by its last block"
        index = self._state.index
        matches = index.find_block(name, now)
        if not matches.device or self._handoffs.moves(name):
            return None
        causes = {a: self._why_not(name, a, name, now) for a in matches.device} if self.pullable else {}
        givers = [address for address, cause in causes.items() if cause is None]
        if not givers:
            self._count(name, next(iter(causes.values()), None))
        locations = tuple(Location(address, tokens) for address in givers or matches.device)
        stored = tokens if matches.store else 0
        return PrefixFacts(name, tokens, index.statistics(name, now)[2], locations, stored)

    # -- what can be handed over -------------------------------------------------------------------

    def content(self, subject: Subject, now: float) -> Content | None:
        """Return the prompt that can be handed over: a session's context in whole blocks, or a prefix."""
        if isinstance(subject, SessionKey):
            session = self._state.sessions.find(subject, now)
            last, _ = self._state.held_end(session, now) if session else (0, 0)
        else:
            assert isinstance(subject, int), "a prefix is named by its last block"
            last = subject
        found = self._state.block_tokens.prompt(last)
        return found if isinstance(found, Content) else None

    def _count(self, subject: Subject, cause: Immovable | None) -> None:
        if cause is None or (subject, cause) in self._counted:
            return
        if len(self._counted) >= REMEMBERED:
            self._counted.clear()
        self._counted.add((subject, cause))
        self.immovable[cause] += 1

    def _why_not(self, subject: Subject, host: str, last: int, now: float) -> Immovable | None:
        state = self._state
        if cause := state.connectors.why_not(host):
            return cause
        if self._handoffs.gave_up(subject, now):
            return Immovable.GAVE_UP
        return state.block_tokens.why_not(last, self.loras)
