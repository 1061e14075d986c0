"""What a request means for its session: the session is bound to the request's endpoint, its turn begins and
ends, and failures of its turns in a row are counted.
"""

from __future__ import annotations

from perilune_gateway.model import Endpoint
from perilune_gateway.routing.candidates import cacheable
from perilune_gateway.routing.context import RequestContext
from perilune_gateway.routing.new_sessions import NewSessions
from perilune_gateway.state.in_flight import Cause, InFlight
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import Answered, Decided, Ended, Rerouted, Withdrawn
from perilune_gateway.state.session import UNLIKE_ANY, Session

NOT_FOUND = 404


class SessionTurns:
    """The turns of one pool's sessions. A request without a session counts as a session of one turn."""

    def __init__(self, state: PoolState, new_sessions: NewSessions) -> None:
        self._state = state
        self._new_sessions = new_sessions

    def configure(self, session_failures: int) -> None:
        """`session_failures`: so many failures in a row make a session leave its host."""
        self._session_failures = session_failures

    def bind(self, context: RequestContext, target: Endpoint) -> Session | None:
        """Bind the request's session to the target. Returns None if it has no session."""
        sessions, prompt, now = self._state.sessions, context.prompt, context.now
        session, identity = context.session, context.identity
        if session:
            sessions.use(session, now)
        elif identity.key:
            session = sessions.begin(identity.key, now, identity.parent_key, identity.inferred)
        else:
            return None
        if session.host != target.address:
            sessions.bind(session, target.address, now)
        session.turns += 1
        session.chained = session.chained or prompt.chained
        if prompt.chained and not session.begins_with(prompt.lead):
            sessions.routed(session, ())
        session.lead = prompt.lead if prompt.keeps_lead else UNLIKE_ANY
        if prompt.model:
            body_bytes = 0 if prompt.chained else prompt.body_bytes  # a part says nothing of the whole
            sessions.read(session, prompt.tokens, body_bytes, prompt.blocks)
        else:
            sessions.unread(session, prompt.tokens, prompt.body_bytes)
        if prompt.blocks:
            sessions.routed(session, prompt.blocks)
        elif not target.events:
            sessions.routed(session, (), cacheable(prompt.tokens, self._state.block_size))
        return session

    def on_decided(self, fact: Decided) -> None:
        request, sessions, session = fact.request, self._state.sessions, fact.request.session
        if session:
            session.ticket = request.ticket
        if request.cache_key:
            sessions.hint(request.tenant, request.cache_key, request.target)
        if request.prompt_tokens:
            name, turns = (session.key, session.turns) if session else (request.ticket, 1)
            self._new_sessions.turn_began(name, request.prompt_tokens, turns)

    def on_answered(self, fact: Answered) -> None:
        if fact.request.status == NOT_FOUND and (session := fact.request.session):
            session.unserved = True

    def on_rerouted(self, fact: Rerouted) -> None:
        request, session = fact.request, fact.request.session
        if session and session.ticket == request.ticket:
            self._state.sessions.bind(session, request.target, fact.now)

    def on_ended(self, fact: Ended) -> None:
        request, session, sessions = fact.request, fact.request.session, self._state.sessions
        if session and session.host == request.target:
            self._count_failures(session, request.status, fact.wrong, answered=fact.answered)
        if session and fact.answered and not request.blocks and request.cached_tokens is not None:
            session.forked = session.forked or request.cached_tokens < request.forecast.held_tokens
        if request.final and session and (session.ticket == request.ticket or not session.inferred):
            sessions.free(session.key)
        self._turn_ended(request, fact.now)

    def on_withdrawn(self, fact: Withdrawn) -> None:
        session = fact.request.session
        if session is None or session.ticket == fact.request.ticket:  # otherwise its turn did not begin
            self._turn_ended(fact.request, fact.now)

    def _turn_ended(self, request: InFlight, now: float) -> None:
        session = request.session
        name, tokens = (session.key, session.context_tokens) if session else (request.ticket, 0)
        self._new_sessions.turn_ended(name, tokens, now, final=request.final or session is None)
        if session:
            self._state.sessions.turn_ended(session)

    def _count_failures(self, session: Session, status: int, wrong: Cause | None, *, answered: bool) -> None:
        """Count the session's failures in a row. One that got no sign of life leaves its host at once."""
        if wrong is Cause.LATE and not status:
            session.failures = self._session_failures
        elif wrong is Cause.FAILURES:
            session.failures += 1
        elif answered:
            session.failures = 0
