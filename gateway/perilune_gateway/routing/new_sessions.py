"""Where new sessions wait: gathers what fills the pool's KV, asks the queue, and passes its verdicts on.

`Router` asks `arrive` for the first request of every session. A request that has to wait is `Queued`; `due`
names those that begin or are refused now, and is called several times per second while some wait. A session
that is bound to an endpoint, or whose parent is, never waits, and neither does another request of a session
that has just begun. Without `routing.sessionAdmission.enabled` nothing is learnt, and every session begins at
once.

With several replicas of the gateway:

1. Each counts the sessions of which it routed the latest turn, and tells the others that number (`counted`).
   All add up what they were told. What a replica counted that is gone fades within `HORIZON_S`, while its
   sessions return to the others.
2. Each tells which sessions wait at it (`line`), so that all have one queue, see session_queue.py. A session
   begins at once only if none waits at any replica."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

from msgspec import Struct

from perilune_api.pool import Role, SessionAdmission
from perilune_gateway.model import Identity, Refusal, RefuseReason, RequestHead, SessionKey
from perilune_gateway.model.shared import Counted
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.routing import admission
from perilune_gateway.routing.context import Prompt, RequestContext
from perilune_gateway.state.active_contexts import HORIZON_S, ActiveContexts
from perilune_gateway.state.facts import LineChanged
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.session_queue import Line, Refused, Room, SessionQueue

LOOK_S = 1.0
"""Seconds after which the sessions that wait are compared again with those that have begun elsewhere."""
TELL_S = 0.1
"""Least seconds between two tellings of many places; few are told at once."""
FEW_PLACES = 64


class Queued(Struct, frozen=True, gc=False):
    """The first request of a session, which waits: `Router.on_begun` takes it."""

    ticket: int
    head: RequestHead
    request: ParsedRequest
    prompt: Prompt
    since: float


class SessionAdmissionStats(Struct, frozen=True, gc=False, kw_only=True):
    """New sessions and active contexts at one moment."""

    enabled: bool = False
    waiting: int = 0
    longest_s: float = 0.0
    """Seconds for which the one that has waited longest has done so."""
    begun: int = 0
    """Number of new sessions that have begun, whether they waited or not."""
    refused: int = 0
    active_tokens: float = 0.0
    """Expected tokens of the contexts that are used again soon."""
    capacity_tokens: int = 0
    """Tokens that fit into the KV of the endpoints that take new sessions."""


class _Beginning(Struct, frozen=True, gc=False):
    """A session that begins and is not yet routed."""

    session: Hashable
    tokens: int


class _Elsewhere(Struct, frozen=True, gc=False):
    """What another replica counts, or last counted."""

    counted: Counted
    gone_at: float | None = None

    def tokens(self, now: float) -> float:
        gone_s = 0.0 if self.gone_at is None else now - self.gone_at
        return self.counted.active_tokens * max(0.0, 1.0 - gone_s / HORIZON_S)


class NewSessions:
    """The new sessions of one pool, and the contexts of those that are active."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._contexts = ActiveContexts()
        self._queue = SessionQueue(0.0, 0)
        self._asked: dict[Hashable, Identity] = {}
        """Session that waits → who it is."""
        self._looked_at = -inf
        self._told_at = -inf
        self._told = Line()
        self._beginning: dict[int, _Beginning] = {}
        """By ticket."""
        self._begun = self._refused = 0
        self._elsewhere: dict[str, _Elsewhere] = {}
        """Other replica → what it counts."""
        self.on = False
        self._start_s = 0.0
        self.configure(SessionAdmission())

    def configure(self, rules: SessionAdmission, *, start_s: float = 0.0) -> None:
        """Take over (changed) rules. Those that wait when it is turned off begin with the next `due`.
        `start_s`: seconds that an endpoint takes to start when a session comes and none is ready; 0: none is
        started."""
        self._start_s = start_s
        if self.on and not rules.enabled:
            self._contexts = ActiveContexts()
            self._queue.clear()
            self._state.facts.tell(LineChanged())
        self.on = rules.enabled
        self._queue.max_wait_s = rules.max_wait_seconds
        self._queue.max_waiting = rules.max_waiting

    # -- requests ----------------------------------------------------------------------------------

    def arrive(self, context: RequestContext, request: ParsedRequest) -> Queued | Refusal | None:
        """Return what becomes of a request with its prompt. None: it may be routed."""
        identity, prompt, now = context.identity, context.prompt, context.now
        if not self.on or self._inside(identity, now):
            return None
        sessions = self._state.sessions
        session = sessions.shared_name(identity.key) if identity.key else None
        if session is not None and any(b.session == session for b in self._beginning.values()):
            return None
        room = self._room(now)
        if room.starting:
            self._state.starts.begin(now)
        verdict = self._queue.arrive(
            session,
            sessions.shared_tenant(identity.tenant),
            prompt.tokens,
            room,
            now,
            body_bytes=prompt.body_bytes,
            now_us=self._state.now_us(now),
        )
        self._state.facts.tell(LineChanged())
        if isinstance(verdict, Refused):
            return self._refusal(verdict, now)
        if verdict is None:
            self._begun += 1
            return None
        self._asked[verdict.session] = identity
        return Queued(verdict.ticket, context.head, request, prompt, now)

    def due(self, now: float) -> list[tuple[int, Refusal | None]]:
        """Return the tickets of the sessions that begin now (None) or are refused."""
        if self._queue.changed:
            self._state.facts.tell(LineChanged())
        if self._queue.is_idle:
            self._asked.clear()
            return []
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._release(now)
        found: list[tuple[int, Refusal | None]] = []
        while first := self._queue.begin(self._room(now) if self.on else Room(0.0, 0), now):
            self._beginning[first.ticket] = _Beginning(first.session, first.tokens)
            self._begun += 1
            found.append((first.ticket, None))
        found += [(late.ticket, self._refusal(refused, now)) for late, refused in self._queue.refuse(now)]
        if found:
            self._state.facts.tell(LineChanged())
        return found

    def over(self, ticket: int) -> None:
        """Record that the request waits no longer: it is routed now, or its client has gone. Safe to call
        twice."""
        self._queue.leave(ticket)
        self._beginning.pop(ticket, None)
        self._state.facts.tell(LineChanged())

    def turn_began(self, session: Hashable, tokens: int, turns: int) -> None:
        if self.on:
            self._contexts.began(session, tokens, turns)

    def turn_ended(self, session: Hashable, tokens: int, now: float, *, final: bool) -> None:
        self._contexts.ended(session, tokens, now, final=final)

    # -- other replicas ----------------------------------------------------------------------------

    def counted(self, now: float, at_us: int) -> Counted:
        """Return what the other replicas are told."""
        return Counted(at_us, round(self._active(now)), len(self._queue)) if self.on else Counted(at_us)

    def line(self, now: float, *, repeat: bool) -> Line | None:
        """Return what the other replicas are told of the sessions that wait here; None: nothing new.
        `repeat`: tell it again."""
        queue = self._queue
        soon = len(queue) <= FEW_PLACES or now - self._told_at >= TELL_S
        if not (queue.changed and soon) and not (repeat and (self._told.places or queue.gives)):
            return None
        self._told, self._told_at, queue.changed = queue.line(now), now, False
        return self._told

    def line_elsewhere(self, replica: str, line: Line) -> None:
        """Record that another replica has told which sessions wait there."""
        self._queue.hear(replica, line)

    def counted_elsewhere(self, replica: str, counted: Counted) -> None:
        """Record that another replica has told what it counts."""
        self._elsewhere[replica] = _Elsewhere(counted)

    def gone(self, replica: str, now: float) -> None:
        """Record that another replica is not heard any more."""
        self._queue.forget(replica)
        if other := self._elsewhere.get(replica):
            self._elsewhere[replica] = _Elsewhere(other.counted, now)
        self._elsewhere = {r: e for r, e in self._elsewhere.items() if e.gone_at is None or e.tokens(now)}

    def turn_elsewhere(self, session: SessionKey) -> None:
        """Record that another replica has routed a turn of the session."""
        if self.on:
            self._contexts.turn_elsewhere(session)
            self._state.facts.tell(LineChanged())

    # -- facts -------------------------------------------------------------------------------------

    def stats(self, now: float) -> SessionAdmissionStats:
        room = self._room(now)
        return SessionAdmissionStats(
            enabled=self.on,
            waiting=len(self._queue),
            longest_s=self._queue.longest_s(now),
            begun=self._begun,
            refused=self._refused,
            active_tokens=room.active,
            capacity_tokens=room.capacity,
        )

    def _inside(self, identity: Identity, now: float) -> bool:
        """Return whether the session has begun, or its parent has."""
        sessions = self._state.sessions
        each = (sessions.find(key, now) for key in (identity.key, identity.parent_key))
        return any(session and (session.host or session.turns) for session in each)

    def _release(self, now: float) -> None:
        """Let those pass that have begun elsewhere, or whose parents have begun meanwhile."""
        waiting = self._queue.sessions()
        self._asked = {session: self._asked[session] for session in waiting}
        for session, identity in self._asked.items():
            if self._inside(identity, now):
                self._queue.release(session)

    def _room(self, now: float) -> Room:
        views = self._state.fleet.recent(now, self._state.sessions.bound)
        taking = [
            view
            for view in views
            if view.endpoint.ready and not view.endpoint.draining and view.endpoint.role is not Role.PREFILL
        ]
        capacity = sum(view.load.kv_pool_tokens for view in taking)
        elsewhere = sum(other.tokens(now) for other in self._elsewhere.values())
        return Room(self._active(now) + elsewhere, capacity, self._start_s > 0 and not taking)

    def _active(self, now: float) -> float:
        """Return the expected tokens of the contexts that count here."""
        active = self._contexts.tokens(now, lambda session: self._held(session, now))
        return active + sum(beginning.tokens for beginning in self._beginning.values())

    def _held(self, key: Hashable, now: float) -> int:
        session = self._state.sessions.find(key, now) if isinstance(key, SessionKey) else None
        return self._state.held(session, now).longest * self._state.block_size if session else 0

    def _refusal(self, refused: Refused, now: float) -> Refusal:
        self._refused += 1
        if self._room(now).starting:
            return admission.starting(self._state.starts.retry_after_s(self._start_s, now))
        return Refusal(
            RefuseReason.NO_ROOM,
            "The pool's KV cache is full of active sessions, and no new session can begin now",
            refused.retry_after_s,
        )
