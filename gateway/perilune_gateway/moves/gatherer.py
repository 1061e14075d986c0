"""Gathers from the pool's state what a plan is made of: endpoints, sessions and hot prefixes.

Engines hand KV over to each other, or read each other's host memory, or neither. Changes nothing but counts
what cannot be handed over. `endpoints` costs O(endpoints), `sessions` costs O(sessions returned).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile

from perilune_api.pool import Role, Spec
from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Location, Overlap, Subject
from perilune_gateway.model.handoff import Content, Immovable
from perilune_gateway.model.kv_reach import kv_reach
from perilune_gateway.model.shared import prefix_name
from perilune_gateway.moves.handoff import Handoffs
from perilune_gateway.moves.plan import PrefixFacts, SessionFacts
from perilune_gateway.state.fleet import EndpointView
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.session import Session

ASKED_S = 10.0
"""Seconds after its joining the pool within which an endpoint is asked whether it hands KV over."""
REMEMBERED = 10_000
"""Maximum number of (session or prefix, cause) that are remembered, so that each is counted once."""


class PoolGatherer:
    """The `planner.Gatherer` of a live pool. Its key identifies a session, or its name among replicas if only
    others have routed it; its last block identifies a prefix."""

    def __init__(self, state: PoolState, handoffs: Handoffs) -> None:
        self._state = state
        self._handoffs = handoffs
        self._loras: Collection[str] = ()
        self._reads_peers = False
        self.prewarms = False
        """Whether an endpoint reads a session's KV from the store before the session switches there, because
        engines hand nothing over to each other."""
        self.immovable: Counter[Immovable] = Counter()
        """Number of sessions and prefixes that could not be handed over, by cause."""
        self._counted: set[tuple[Subject, Immovable]] = set()

    def configure(self, spec: Spec) -> None:
        """Take over a (changed) pool document."""
        reach = kv_reach(spec)
        self._loras = {lora.name for lora in spec.model.loras}
        self._reads_peers = spec.routing.pull.enabled and reach.reads_peers
        confirmed = all(endpoint.events for endpoint in spec.endpoints)
        self.prewarms = reach.stores and confirmed and not (reach.hands_over or self._reads_peers)

    @property
    def pullable(self) -> bool:
        """Return whether some engine can hand KV over or be read, by what the engines themselves said."""
        state = self._state
        return bool(state.host_tiers.known if self._reads_peers else state.connectors.known)

    @property
    def ahead(self) -> bool:
        """Return whether KV is copied before a session switches. Host memory is read by the session's
        request."""
        return not self._reads_peers

    def endpoints(self, now: float, near: Collection[str] = ()) -> Sequence[Candidate]:
        """Return all endpoints to which sessions may be bound, each with links to those `near` whose KV it
        can get. One that has just joined, and has not told yet whether it can get any, is left out, and
        sessions wait for it rather than go to one that it will replace."""
        state = self._state
        views = [
            view
            for view in state.fleet.recent(now, state.sessions.bound)
            if view.endpoint.role is not Role.PREFILL
        ]
        asked = [view for view in views if not self._is_unasked(view, now)]
        waits = len(asked) < len(views)
        return [
            Candidate(
                endpoint=replace(view.endpoint, ready=False)
                if waits and view.endpoint.superseded
                else view.endpoint,
                load=view.load,
                overlap=Overlap(),
                links=self._links(view, near, now),
                engine=state.calibration.speed(view.endpoint.address, now).engine,
            )
            for view in asked
        ]

    def _is_unasked(self, view: EndpointView, now: float) -> bool:
        """Return whether the endpoint has just joined and has not told yet whether it can take KV: a session
        that moved there now would leave its KV behind."""
        address, known = view.endpoint.address, self._state.connectors.known
        takes = view.endpoint.bootstrap and not view.endpoint.draining
        return bool(takes and known) and address not in known and self._is_young(address, now)

    def _is_young(self, address: str, now: float) -> bool:
        return now - self._state.fleet.joined_at(address) < ASKED_S

    def _links(self, view: EndpointView, near: Collection[str], now: float) -> Mapping[str, Link]:
        here, calibration = view.endpoint.address, self._state.calibration
        if not view.endpoint.events:  # nothing would confirm a copy
            return {}
        can = self._state.host_tiers.can if self._reads_peers else self._state.connectors.can
        return {
            there: view.links[there]._replace(slowdown=calibration.slowdown(there, here, now))
            for there in near
            if there in view.links and can(there, here)
        }

    def link(self, source: str, target: str, now: float) -> Link | None:
        """Return the link from `source` to `target`, as slow as it was measured; None if it is not known."""
        link = self._state.fleet.link(target, source)
        slowdown = self._state.calibration.slowdown(source, target, now)
        return link._replace(slowdown=slowdown) if link else None

    def sessions(
        self, host: str, limit: int, now: float, last: Collection[Subject] = ()
    ) -> Sequence[SessionFacts]:
        """Return at most `limit` sessions bound to `host`, the most recently used first, but those of `last`
        after all others and in its order. Those whose KV is on its way, by whichever replica, are left
        out."""
        sessions, ours, others = self._state.sessions, self._handoffs, self._state.offers
        first = (s for s in sessions.at(host, now) if s.subject not in last)
        after = (s for s in (sessions.of(subject, now) for subject in last) if s and s.host == host)
        staying = (
            s
            for s in chain(first, after)
            if not (ours.moves(s.key) or ours.moves(s.name) or others.moves(s.name, now))
        )
        facts = (self._session(s, now) for s in staying)
        return list(islice((session for session in facts if session is not None), limit))

    def live_tokens(self, now: float, active_s: float) -> Mapping[str, int]:
        """Return the tokens of the contexts of each endpoint's sessions that were used within `active_s`."""
        sessions = self._state.sessions
        return {
            host: sum(
                s.context_tokens
                for s in takewhile(lambda s: now - s.seen_at <= active_s, sessions.at(host, now))
            )
            for host in self._state.fleet.addresses()
        }

    def _session(self, s: Session, now: float) -> SessionFacts | None:
        """Return the session's facts; None while its turn is being prefilled, because then it is not yet
        known what can be handed over."""
        state = self._state
        end, held, cause = 0, 0, None
        if self._reads_peers:
            held = state.offloaded_tokens(s)
        elif self.pullable:
            end, held = state.held_end(s, now)
            if not held and state.sessions.runs_elsewhere(s):
                return None
            cause = self._why_not(s.subject, s.host, end, now) if held else None
        if cause is Immovable.TOKENS and (s.ticket in state.requests or self._is_to_be_told(s.host, end)):
            return None
        self._count(s.subject, cause)
        stored = (
            len(s.chain) * state.block_size if s.chain and state.index.find_block(s.tail, now).store else 0
        )
        return SessionFacts(
            session=s.subject,
            host=s.host,
            context_tokens=s.context_tokens,
            cached_tokens=min(held, s.context_tokens) if cause is None else 0,
            stored_tokens=stored,
            turns=s.turns,
            seconds_since_move=now - s.moved_at,
            idle_s=now - s.seen_at,
            prewarms=bool(stored) and self._can_prewarm(s, now),
            chained=s.chained,
        )

    def _can_prewarm(self, s: Session, now: float) -> bool:
        """Return whether the session's prompt is known, so that another endpoint can be asked to load it."""
        if not self.prewarms or s.ticket in self._state.requests or self._handoffs.gave_up(s.subject, now):
            return False
        end, _ = self._state.held_end(s, now)
        return bool(end) and self._state.block_tokens.why_not(end, self._loras) is None

    def can_be_copied(self, session: Session, now: float) -> bool:
        """Return whether the session's KV can be handed over, or could once its present turn has been
        prefilled."""
        if not self.ahead or self._state.connectors.why_not(session.host):
            return False
        end, _ = self._state.held_end(session, now)
        cause = self._why_not(session.subject, session.host, end, now) if end else Immovable.TOKENS
        if cause is Immovable.TOKENS:
            return self._runs(session) or self._is_to_be_told(session.host, end)
        return cause is None

    def _is_to_be_told(self, host: str, end: int) -> bool:
        """Return whether the host has yet to announce the block: the turn's end overtook its KV events."""
        return bool(end) and not self._state.index.announced(host, end)

    def _runs(self, session: Session) -> bool:
        """Return whether a turn of the session runs, here or at another replica."""
        return session.ticket in self._state.requests or self._state.sessions.runs_elsewhere(session)

    def prefix(self, name: Subject, tokens: int, now: float) -> PrefixFacts | None:
        """Return the facts of the prefix that ends with the block `name`, or None if no endpoint caches
        it."""
        assert isinstance(name, int), "a prefix is named by its last block"
        index = self._state.index
        matches = index.find_block(name, now)
        if not matches.device or self._handoffs.moves(name):
            return None
        if self._state.offers.moves(prefix_name(name), now):
            return None
        if self._reads_peers:
            givers = [address for address in matches.device if address in matches.offloaded]
        else:
            causes = {a: self._why_not(name, a, name, now) for a in matches.device} if self.pullable else {}
            givers = [address for address, cause in causes.items() if cause is None]
            if not givers:
                self._count(name, next(iter(causes.values()), None))
        readable = tokens if givers else 0  # without a giver, the copy is computed
        locations = tuple(Location(address, readable) for address in givers or matches.device)
        stored = tokens if matches.store else 0
        return PrefixFacts(name, tokens, index.statistics(name, now)[2], locations, stored)

    # -- what can be handed over -------------------------------------------------------------------

    def content(self, subject: Subject, now: float) -> Content | None:
        """Return the prompt that can be handed over: a session's context in whole blocks, or a prefix."""
        if isinstance(subject, int):
            last = subject
        else:
            session = self._state.sessions.of(subject, now)
            last, _ = self._state.held_end(session, now) if session else (0, 0)
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
        return state.block_tokens.why_not(last, self._loras)
