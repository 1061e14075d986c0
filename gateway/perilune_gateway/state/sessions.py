"""Sessions: which endpoint each session is bound to, and what is known about its context.

A session is identified by tenant and id. The number of sessions is bounded (the least recently used one is
forgotten first), and an idle session expires. What is known of one is in session.py; its parts are kept by
bindings.py (its host), chains.py (the blocks of its context) and prompt_tails.py (its last prompt).

    a request comes ─▶ `arrived`, or `infer` and `arrived` ─▶ the session, which is known here from then on
    its decision    ─▶ `begin` or `use`, `bind`, `read` or `unread`, `routed`
    its end         ─▶ `turn_ended`, `free`
    another replica routes it ─▶ sessions_elsewhere.py; `learn` if it is known here

`find`, `infer`, `of`, `at`, `view` and `near_host` only read: of a session that only other replicas have
routed they return a copy. Every method costs O(1), apart from those of chains.py and prompt_tails.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from heapq import merge
from math import inf

from perilune_gateway.model import Identity, SessionKey, SessionView, Subject
from perilune_gateway.model.shared import Bound, Stamp
from perilune_gateway.state.bindings import Bindings
from perilune_gateway.state.chains import Chains
from perilune_gateway.state.facts import BlocksChanged, EndpointLeft, Tell, nobody
from perilune_gateway.state.prompt_tails import PromptTails
from perilune_gateway.state.session import UNKNOWN, Session, copied
from perilune_gateway.state.sessions_elsewhere import SessionsElsewhere

EXPIRED_AT_ONCE = 32
"""Maximum number of sessions that one request forgets, so that no request waits while many expire."""


class Sessions:
    """The sessions of a pool."""

    def __init__(
        self,
        max_sessions: int,
        idle_s: float,
        max_blocks: int = 4_000_000,
        elsewhere: SessionsElsewhere | None = None,
        tell: Tell = nobody,
    ) -> None:
        """`idle_s`: seconds after which an idle session is forgotten. `max_blocks`: of all chains.
        `elsewhere`: the sessions of other replicas; None: nothing is shared. `tell` hears
        `SessionsChanged`."""
        self._elsewhere = elsewhere
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self.evicted = 0
        """Number of sessions forgotten because they were idle too long or there were too many."""
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        """All sessions, the least recently used first."""
        self._oldest_at = -inf
        """No session was last used before this time."""
        self._chains = Chains(max_blocks)
        self._prompts = PromptTails()
        self._hints: OrderedDict[tuple[str, str], str] = OrderedDict()
        """(tenant, hint) → host of the last request with that hint, see `hint`."""
        self._bindings = Bindings(tell)

        self.bound = self._bindings.count
        """Host → number of sessions bound to it."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: SessionKey | None, now: float) -> Session | None:
        """Return the session, or None if it is unknown or expired. Of one that only other replicas have
        routed, return a copy."""
        session = self._sessions.get(key) if key else None
        if session is None and key and self._elsewhere and (there := self._elsewhere.find(key)):
            session = copied(key, there)
        return session if session and now - session.seen_at <= self.idle_s else None

    def arrived(self, key: SessionKey | None, now: float) -> Session | None:
        """Return the session of a request that has come, or None if it is unknown or expired. One that only
        other replicas have routed is known here from now on."""
        session = self._sessions.get(key) if key else None
        since = now - self.idle_s
        if session is None and key and self._elsewhere and (there := self._elsewhere.take(key, since)):
            return self.learn(key, there.bound, there.stamp, now)
        return session if session and now - session.seen_at <= self.idle_s else None

    def get(self, key: SessionKey) -> Session | None:
        """Return the session if it is known here, expired or not."""
        return self._sessions.get(key)

    def named(self, name: bytes) -> Session | None:
        """Return the session with this name among replicas if it is known here, expired or not."""
        key = self._elsewhere.key(name) if self._elsewhere else None
        return self._sessions.get(key) if key else None

    def shared_name(self, key: SessionKey) -> Hashable:
        """Return what all replicas call the session."""
        return self._elsewhere.name(key) if self._elsewhere else key

    def shared_tenant(self, tenant: str) -> Hashable:
        """Return what all replicas call the tenant."""
        return self._elsewhere.tenant(tenant) if self._elsewhere else tenant

    def at(self, host: str, now: float) -> Iterator[Session]:
        """Yield the live sessions that are bound to `host`, the most recently used first. Those that only
        other replicas have routed are copies."""
        here = self._bindings.at(host)
        there = (copied(UNKNOWN, there) for there in self._elsewhere.at(host)) if self._elsewhere else ()
        latest = merge(here, there, key=lambda session: session.seen_at, reverse=True)
        return (s for s in latest if now - s.seen_at <= self.idle_s)

    def of(self, subject: Subject, now: float) -> Session | None:
        """Return the live session that a planned move is about; a copy if only other replicas have routed it.
        None if it has ended, or if the subject is no session."""
        if isinstance(subject, SessionKey):
            return self.find(subject, now)
        if not isinstance(subject, bytes) or not self._elsewhere:
            return None
        there = self._elsewhere.latest(subject)
        session = copied(UNKNOWN, there) if there and there.bound.host else self.named(subject)
        return session if session and now - session.seen_at <= self.idle_s else None

    def matching(self, session_id: str) -> list[Session]:
        """Return the sessions with this id of all tenants. Costs O(sessions); for the admin interface."""
        return [s for s in self._sessions.values() if s.key.session_id == session_id]

    def view(self, session: Session, now: float) -> SessionView:
        """Return the session as a policy sees it."""
        parent = self.find(session.parent, now) if session.parent else None
        return SessionView(
            session_id=session.key.session_id,
            host=session.host,
            seconds_since_move=now - session.moved_at,
            context_tokens=session.context_tokens,
            turns=session.turns,
            parent_host=parent.host if parent else "",
            came_from=session.came_from,
        )

    def near_host(self, identity: Identity, hint: str, now: float) -> str:
        """Return the address that probably caches a new session's prefix: its parent's host, else the host of
        the last request with this `hint` (a prompt_cache_key, which many sessions may share). Empty if
        unknown."""
        parent = self.find(identity.parent_key, now)
        return parent.host if parent else self._hints.get((identity.tenant, hint), "")

    def infer(self, tenant: str, blocks: Sequence[int], tokens: int, now: float) -> Session | None:
        """Return the session that a prompt of `tokens` tokens continues: the one with the longest last prompt
        that is shorter and, in whole blocks, a prefix of it. None if there is none."""
        here = self._prompts.continued(tenant, blocks, tokens)
        if self._elsewhere and (there := self._elsewhere.infer(tenant, blocks, tokens)):
            key, latest = there
            longer = here is None or latest.bound.prompt_blocks > here.prompt_blocks
            if longer and now - latest.heard_at <= self.idle_s:
                return copied(key, latest)
        return here if here and now - here.seen_at <= self.idle_s else None

    def superseded(self, tenant: str, last_block: int) -> str:
        """Return the id of the inferred session whose last prompt also ends with this block, or an empty
        string. A new prompt that ends there replaces it, because nothing can continue it any more."""
        session = self._prompts.ending(tenant, last_block)
        return session.key.session_id if session and session.inferred else ""

    def touch(self, key: SessionKey, now: float, parent: SessionKey | None = None) -> Session:
        """Return the session, created if needed, and mark it as the most recently used."""
        session = self.arrived(key, now)
        if session is None:
            self.forget(key)  # it may be there, but expired
            session = self._sessions[key] = Session(key=key, parent=parent)
        self.use(session, now)
        return session

    def begin(
        self, key: SessionKey, now: float, parent: SessionKey | None = None, inferred: bool = False
    ) -> Session:
        """Begin a session: a new one, or a superseded one again, which is then not bound."""
        session = self.touch(key, now, parent)
        session.inferred = inferred
        if session.host:
            self._bindings.bind(session, "")
            session.parent = parent
            session.turns, session.moves, session.moved_at = 0, 0, -inf
        return session

    def use(self, session: Session, now: float) -> None:
        """Mark the session as the most recently used, by a turn that is decided here."""
        if self._elsewhere:
            self._elsewhere.changed(session)
        self._used(session, now)

    def turn_ended(self, session: Session) -> None:
        """Record that a turn of the session that was decided here has ended."""
        if self._elsewhere:
            self._elsewhere.turn_ended(session)

    def runs_elsewhere(self, session: Session) -> bool:
        """Return whether a turn of the session runs at another replica, as far as is known."""
        return bool(session.runs_at) and self._elsewhere is not None and self._elsewhere.runs(session)

    def _used(self, session: Session, now: float) -> None:
        session.seen_at = now
        self._sessions.move_to_end(session.key)
        self._bindings.used(session)
        if now - self._oldest_at > self.idle_s or len(self._sessions) > self.max_sessions:
            self._expire(now)

    def bind(self, session: Session, host: str, now: float) -> None:
        """Bind the session to `host`. Leaving another host counts as a move."""
        if session.host and session.host != host:
            session.moved_at = now
            session.moves += 1
            session.unblocked_tokens = 0
        if session.host != host:
            session.failures = 0
            session.came_from = ""
            self._bindings.bind(session, host)
            if self._elsewhere:
                self._elsewhere.changed(session)

    def learn(self, key: SessionKey, bound: Bound, stamp: Stamp, now: float) -> Session:
        """Take over what another replica knows of a session after a turn there."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(
                key=key, name=bound.session, inferred=bool(bound.inferred)
            )
        if session.host != bound.host:
            session.moved_at = now if session.host else -inf
            session.unblocked_tokens, session.failures, session.came_from = 0, 0, ""
            self._bindings.bind(session, bound.host)
        session.take_over(bound, stamp)
        if bound.prompt_blocks and bound.prompt_tail != session.prompt_tail:
            self._prompts.set(session, bound.prompt_tail, bound.prompt_blocks)
        session.prompt_tokens = bound.prompt_tokens
        self._used(session, now)
        return session

    def hand_over(self, session: Session, host: str, now: float) -> None:
        """Bind the session to `host`, which got its KV from the present host."""
        if self._sessions.get(session.key) is not session:
            assert self._elsewhere, "others have routed it"
            self._elsewhere.hand_over(session.name, host)
            return
        source = session.host
        self.bind(session, host, now)
        session.came_from = source

    def read(self, session: Session, tokens: int, body_bytes: int, blocks: Sequence[int]) -> None:
        """Record a turn whose body was read. `blocks` are the prompt's full blocks, empty if estimated."""
        self.unread(session, tokens, body_bytes)
        session.unserved = False
        if tokens and body_bytes:
            session.bytes_per_token = body_bytes / tokens
        if not blocks:
            return
        session.prompt_tokens = tokens
        if self._prompts.ending(session.key.tenant, blocks[-1]) is not session:
            self._prompts.set(session, blocks[-1], len(blocks))

    def unread(self, session: Session, tokens: int, body_bytes: int) -> None:
        """Record a turn whose body was not read; `tokens` is an estimate."""
        session.context_tokens, session.body_bytes = tokens, body_bytes
        session.unconfirmed = True

    def routed(self, session: Session, blocks: Sequence[int], unblocked_tokens: int = 0) -> None:
        """Record that the session's prompt, which has these full blocks, was sent to its host. Without block
        hashes, that its host will cache this many tokens."""
        session.forked = bool(blocks and session.chain) and not session.goes_on(blocks)
        session.unblocked_tokens = unblocked_tokens
        session.unconfirmed = False
        session.shared_blocks = 0
        self._chains.replace(session, blocks, len(blocks))

    def blocks_stored(
        self, host: str, parent: int, blocks: Sequence[int], block_size: int, stride: int = 1
    ) -> tuple[Session, int] | None:
        """Record a KV event: `host` stored `blocks` after `parent`, see chains.py."""
        return self._chains.stored(host, parent, blocks, block_size, stride)

    def hint(self, tenant: str, hint: str, host: str) -> None:
        """Remember the host of a request with this hint (its prompt_cache_key)."""
        self._hints[tenant, hint] = host
        self._hints.move_to_end((tenant, hint))
        if len(self._hints) > self.max_sessions:
            self._hints.popitem(last=False)

    def forget_host(self, host: str) -> None:
        """Note that a host is gone or lost its cache. Bindings stay, and so do chains, of which the prefix
        index says what is left."""
        for session in self._bindings.at(host):
            session.unblocked_tokens = 0

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self.forget_host(fact.address)

    def on_blocks_changed(self, fact: BlocksChanged) -> None:
        if fact.applied.cleared:
            self.forget_host(fact.applied.endpoint)

    def unbind(self, host: str) -> None:
        """Unbind all sessions of this address, where another endpoint is now. What is known of the sessions
        stays."""
        for session in list(self._bindings.at(host)):
            self._bindings.bind(session, "")
            session.unblocked_tokens, session.came_from = 0, ""

    def free(self, key: SessionKey) -> None:
        """End a session. Unknown keys are ignored."""
        session = self.forget(key)
        if session and self._elsewhere:
            self._elsewhere.ended(session)

    def forget(self, key: SessionKey) -> Session | None:
        """Forget a session here, while other replicas may still know it. Unknown keys are ignored."""
        session = self._sessions.pop(key, None)
        if session:
            if self._elsewhere:
                self._elsewhere.forgotten(session)
            self._chains.replace(session, (), 0)
            self._prompts.drop(session)
            self._bindings.drop(session)
            session.ticket = -1  # requests that are still in flight no longer bind it
        return session

    def _expire(self, now: float) -> None:
        """Forget the oldest sessions, at most EXPIRED_AT_ONCE; the next use goes on."""
        for _ in range(min(EXPIRED_AT_ONCE, len(self._sessions))):
            oldest = next(iter(self._sessions.values()))
            if len(self._sessions) <= self.max_sessions and now - oldest.seen_at <= self.idle_s:
                self._oldest_at = oldest.seen_at
                return
            self.forget(oldest.key)
            self.evicted += 1
