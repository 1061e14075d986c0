"""Sessions: which endpoint each session is bound to, and what is known about its context.

A session is identified by tenant and id. The number of sessions is bounded (the least recently used one is
forgotten first), and an idle session expires. The gateway learns three things about a session:

- *Bytes per token* of its bodies. They give an estimate for a turn whose body is not read.
- The *chain*, the blocks of its context as far as they are known. KV events make it longer (`blocks_stored`),
  also during turns that were not read, which corrects the estimate. What its host still caches of the chain
  is a question for the prefix index. The *fork* is the end of its last prompt: a chat template may render an
  answer differently in the next prompt (without its reasoning), so the chain can continue there too. At most
  `max_blocks` blocks are kept; the chains that were used least recently are forgotten first.
- The *prompt tail*, the last full block of the last prompt that was read. A later prompt without a session id
  that contains this block and is longer continues the session (`infer`). A prompt that ends with this block
  replaces it, because only the latest can be continued (`superseded`).

`view` changes nothing, nor do `find` and `infer`, except that they make sessions of other replicas known
(`learn`). Every method costs O(1), except `blocks_stored`, which is O(blocks
of the event) and copies the chain that it makes longer, and `infer`, which does one dict lookup per distinct
length of the tenant's prompts, at most one per block of the prompt."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from heapq import merge
from math import inf
from typing import Protocol

from msgspec import Struct

from perilune_gateway.model import Identity, SessionKey, SessionView, Subject
from perilune_gateway.model.shared import NEVER, Bound, BoundElsewhere, Stamp
from perilune_gateway.state.facts import BlocksChanged, EndpointLeft, SessionsChanged, Tell, nobody

UNKNOWN = SessionKey("", "")
"""Key of a session that only other replicas have routed."""
EXPIRED_AT_ONCE = 32
"""Maximum number of sessions that one request forgets, so that no request waits while many expire."""
_SORTING = 4
"""Cost of sorting one length, in units of the cost of looking up one block."""


class Session(Struct, gc=False):
    """One session's state. Times are monotonic seconds."""

    key: SessionKey
    host: str = ""
    parent: SessionKey | None = None
    turns: int = 0
    seen_at: float = 0.0
    moved_at: float = -inf
    moves: int = 0
    context_tokens: int = 0
    """Number of tokens of its context: the last prompt as counted or estimated, then as KV events report."""
    body_bytes: int = 0
    """Bytes of its last body, whether read or not."""
    bytes_per_token: float = 0.0
    """Bytes per token of the last body that was read; 0: none was read."""
    chain: Sequence[int] = ()
    """Block hashes of its context, from the start to the tail; empty: unknown."""
    fork: int = 0
    """Number of blocks of the chain up to the fork; 0: unknown."""
    unblocked_tokens: int = 0
    """Number of tokens that its host caches, if they have no block hashes."""
    unconfirmed: bool = False
    """Whether the last turn was not read and no KV event has continued the chain since."""
    prompt_tail: int = 0
    """Block hash of the prompt tail; 0: unknown."""
    prompt_blocks: int = 0
    """Number of full blocks of the prompt that ends in `prompt_tail`."""
    prompt_tokens: int = 0
    """Number of tokens of that prompt."""
    ticket: int = -1
    """Ticket of the latest request; -1: none."""
    chained: bool = False
    """Whether a request of it named an earlier response, which only its host's process has."""
    came_from: str = ""
    """The endpoint that handed its KV over to the host; empty: it did not come so."""
    inferred: bool = False
    """Whether the gateway inferred the session. Clients with equal prompts then share it."""
    unserved: bool = False
    """Whether an engine answered 404 since its last body was read: it does not serve what was asked for."""
    failures: int = 0
    """Number of its latest requests, one after the other, that failed at its host."""
    name: bytes = b""
    """Its name among replicas; empty: it has none yet."""
    stamp: Stamp = NEVER
    """When its latest turn was decided, and by which replica."""
    runs_at: str = ""
    """The other replica at which its latest turn runs, as far as it has told; empty: none."""
    shared_blocks: int = 0
    """Number of blocks of the chain as the replica that decided the latest turn knows it; 0: that was we."""
    shared_tail: int = 0
    """The last of those blocks."""

    @property
    def subject(self) -> Subject:
        """What identifies it in a planned move: its key, or its name while the key is unknown."""
        return self.name if self.key is UNKNOWN else self.key

    @property
    def follows(self) -> bool:
        """Whether the chain contains all that other replicas know of it."""
        at = self.shared_blocks
        return not at or (len(self.chain) >= at and self.chain[at - 1] == self.shared_tail)

    @property
    def tail(self) -> int:
        """The last block of the chain; 0: unknown."""
        return self.chain[-1] if self.chain else 0

    def take_over(self, bound: Bound, stamp: Stamp) -> None:
        """Take over all but host and prompt from a turn at another replica."""
        self.stamp, self.runs_at = stamp, stamp.replica if bound.running else ""
        self.turns, self.chained = bound.turns, bound.chained
        self.context_tokens, self.body_bytes = bound.context_tokens, bound.body_bytes
        self.bytes_per_token = bound.bytes_per_token
        self.shared_blocks, self.shared_tail = bound.blocks, bound.tail

    def estimate_tokens(self, body_bytes: int, default_bytes_per_token: float) -> int:
        """Return the estimated number of tokens of an unread body.

        The estimate is the known context plus the growth of the body at the session's bytes per token. A body
        that shrank was rewritten, so its whole length counts. A body without a length counts as the context.
        """
        ratio = self.bytes_per_token or default_bytes_per_token
        if not body_bytes:
            return self.context_tokens
        if body_bytes < self.body_bytes or not self.context_tokens:
            return int(body_bytes / ratio)
        return self.context_tokens + int((body_bytes - self.body_bytes) / ratio)


class _Prompts:
    """The last prompts of a tenant's sessions."""

    __slots__ = ("by_tail", "lengths")

    def __init__(self) -> None:
        self.by_tail: dict[int, Session] = {}
        """Last block of a prompt → its session; for equal prompts the latest session."""
        self.lengths: Counter[int] = Counter()
        """Number of blocks → how many prompts have that length."""

    def add(self, session: Session) -> None:
        if session.prompt_tail not in self.by_tail:
            self.lengths[session.prompt_blocks] += 1
        self.by_tail[session.prompt_tail] = session

    def drop(self, session: Session) -> bool:
        """Remove the session's prompt. Returns whether it was present."""
        if self.by_tail.get(session.prompt_tail) is not session:
            return False
        del self.by_tail[session.prompt_tail]
        self.lengths[session.prompt_blocks] -= 1
        if not self.lengths[session.prompt_blocks]:
            del self.lengths[session.prompt_blocks]
        return True

    def within(self, blocks: Sequence[int]) -> Iterator[Session]:
        """Return the sessions whose last prompt is a prefix of these blocks, the longest first."""
        if _SORTING * len(self.lengths) < len(blocks):
            lengths = sorted(self.lengths, reverse=True)
            ends = [blocks[length - 1] for length in lengths if length <= len(blocks)]
        else:
            ends = list(reversed(blocks))
        return (self.by_tail[end] for end in ends if end in self.by_tail)


class Elsewhere(Protocol):
    """The sessions that other replicas of the gateway have routed, see `sessions_elsewhere`."""

    def name(self, key: SessionKey) -> bytes:
        """Return the session's name among replicas."""

    def tenant(self, tenant: str) -> bytes:
        """Return the tenant's name among replicas."""

    def find(self, key: SessionKey, since: float) -> tuple[SessionKey, Bound, Stamp] | None:
        """Return the session if others have routed it, and were heard of it after `since`."""

    def infer(
        self, tenant: str, blocks: Sequence[int], tokens: int, since: float
    ) -> tuple[SessionKey, Bound, Stamp] | None:
        """Return the session that a prompt of `tokens` tokens continues, as `find`."""

    def changed(self, session: Session) -> None:
        """A turn of the session was decided here."""

    def ended(self, session: Session) -> None:
        """The session has ended here."""

    def forgotten(self, session: Session) -> None:
        """The session was idle too long, or there are too many."""

    def key(self, name: bytes) -> SessionKey | None:
        """Return the session with this name if it is known here."""

    def latest(self, name: bytes) -> BoundElsewhere | None:
        """Return the latest turn, or the end, of a session that is not known here."""

    def at(self, host: str) -> Iterator[BoundElsewhere]:
        """The sessions that are not known here and are bound to `host`, the latest first."""

    def hand_over(self, name: bytes, host: str) -> None:
        """Bind a session that is not known here to `host`, which has got its KV."""

    def turn_ended(self, session: Session) -> None:
        """A turn of the session that was decided here has ended."""

    def runs(self, session: Session) -> bool:
        """Whether a turn of the session runs at another replica, as far as is known."""


class Sessions:
    """The sessions of a pool."""

    def __init__(
        self,
        max_sessions: int,
        idle_s: float,
        max_blocks: int = 4_000_000,
        elsewhere: Elsewhere | None = None,
        tell: Tell = nobody,
    ) -> None:
        """A session that was idle for more than `idle_s` seconds is forgotten. `max_blocks`: of all chains.
        `elsewhere`: the sessions of other replicas; None: nothing is shared. `tell` hears
        `SessionsChanged`."""
        self._elsewhere = elsewhere
        self.max_blocks = max_blocks
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self.evicted = 0
        """Number of sessions forgotten because they were idle too long or there were too many."""
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        """All sessions, the least recently used first."""
        self._oldest_at = -inf
        """No session was last used before this time."""
        self._by_end: dict[int, Session] = {}
        """Last block of a chain, or block at its fork → its session."""
        self._chained: OrderedDict[SessionKey, Session] = OrderedDict()
        """The sessions that have a chain, the one whose chain changed least recently first."""
        self._blocks = 0
        """Number of blocks of all chains."""
        self._prompts: dict[str, _Prompts] = {}
        """Tenant → the last prompts of its sessions."""
        self._hints: OrderedDict[tuple[str, str], str] = OrderedDict()
        """(tenant, hint) → host of the last request with that hint, see `hint`."""
        self.bound: Counter[str] = Counter()
        """Host → number of sessions bound to it."""
        self._tell = tell
        self._at: dict[str, dict[SessionKey, Session]] = {}
        """Host → the sessions bound to it, the least recently used first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: SessionKey | None, now: float) -> Session | None:
        """Return the session, or None if it is unknown or expired. One that other replicas have routed
        becomes known here."""
        session = self._sessions.get(key) if key else None
        if (
            session is None
            and key
            and self._elsewhere
            and (found := self._elsewhere.find(key, now - self.idle_s))
        ):
            session = self.learn(*found, now)
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
        here = reversed(self._at.get(host, {}).values())
        there = map(_copy, self._elsewhere.at(host)) if self._elsewhere else ()
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
        session = _copy(there) if there and there.bound.host else self.named(subject)
        return session if session and now - session.seen_at <= self.idle_s else None

    def matching(self, session_id: str) -> list[Session]:
        """Return the sessions with this id of all tenants. Costs O(sessions); for the admin interface."""
        return [s for s in self._sessions.values() if s.key.session_id == session_id]

    def view(self, session: Session, now: float) -> SessionView:
        """Return the session as a policy sees it."""
        parent = self.find(session.parent, now) if session.parent else None
        return SessionView(
            session.key.session_id,
            session.host,
            now - session.moved_at,
            session.context_tokens,
            session.turns,
            parent.host if parent else "",
            session.came_from,
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
        prompts = self._prompts.get(tenant)
        known = prompts.within(blocks) if prompts else iter(())
        here = next((session for session in known if session.prompt_tokens < tokens), None)
        if self._elsewhere and (there := self._elsewhere.infer(tenant, blocks, tokens, now - self.idle_s)):
            key, bound, stamp = there
            if here is None or bound.prompt_blocks > here.prompt_blocks:
                here = self.learn(key, bound, stamp, now)
        return self.find(here.key, now) if here else None

    def superseded(self, tenant: str, last_block: int) -> str:
        """Return the id of the inferred session whose last prompt also ends with this block, or an empty
        string. A new prompt that ends there replaces it, because nothing can continue it any more."""
        prompts = self._prompts.get(tenant)
        session = prompts.by_tail.get(last_block) if prompts else None
        return session.key.session_id if session and session.inferred else ""

    def touch(self, key: SessionKey, now: float, parent: SessionKey | None = None) -> Session:
        """Return the session, created if needed, and mark it as the most recently used."""
        session = self.find(key, now)
        if session is None:
            self.forget(key)  # it may be there, but expired
            session = self._sessions[key] = Session(key, parent=parent)
        self.use(session, now)
        return session

    def begin(
        self, key: SessionKey, now: float, parent: SessionKey | None = None, inferred: bool = False
    ) -> Session:
        """Begin a session: a new one, or a superseded one again, which is then not bound."""
        session = self.touch(key, now, parent)
        session.inferred = inferred
        if session.host:
            self._leave(session)
            session.host, session.parent = "", parent
            session.turns, session.moves, session.moved_at = 0, 0, -inf
        return session

    def use(self, session: Session, now: float) -> None:
        """Mark the session as the most recently used, by a turn that is decided here."""
        if self._elsewhere:
            self._elsewhere.changed(session)
        self._used(session, now)

    def turn_ended(self, session: Session) -> None:
        """A turn of the session that was decided here has ended."""
        if self._elsewhere:
            self._elsewhere.turn_ended(session)

    def runs_elsewhere(self, session: Session) -> bool:
        """Whether a turn of the session runs at another replica, as far as is known."""
        return bool(session.runs_at) and self._elsewhere is not None and self._elsewhere.runs(session)

    def _used(self, session: Session, now: float) -> None:
        session.seen_at = now
        self._sessions.move_to_end(session.key)
        if session.host:
            at = self._at[session.host]
            at[session.key] = at.pop(session.key)
        if now - self._oldest_at > self.idle_s or len(self._sessions) > self.max_sessions:
            self._expire(now)

    def bind(self, session: Session, host: str, now: float) -> None:
        """Bind the session to `host`. Leaving another host counts as a move."""
        if session.host and session.host != host:
            session.moved_at = now
            session.moves += 1
            session.unblocked_tokens = 0
        if session.host != host:
            self._leave(session)
            session.host = host
            session.failures = 0
            session.came_from = ""
            self._arrive(session)
            if self._elsewhere:
                self._elsewhere.changed(session)

    def learn(self, key: SessionKey, bound: Bound, stamp: Stamp, now: float) -> Session:
        """Take over what another replica knows of a session after a turn there."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(key, name=bound.session, inferred=bool(bound.inferred))
        if session.host != bound.host:
            session.moved_at = now if session.host else -inf
            session.unblocked_tokens, session.failures, session.came_from = 0, 0, ""
            self._leave(session)
            session.host = bound.host
            self._arrive(session)
        session.take_over(bound, stamp)
        if bound.prompt_blocks and bound.prompt_tail != session.prompt_tail:
            self._set_prompt(session, bound.prompt_tail, bound.prompt_blocks)
        session.prompt_tokens = bound.prompt_tokens
        self._used(session, now)
        return session

    def hand_over(self, session: Session, host: str, now: float) -> None:
        """Bind the session to `host`, which got its KV from the present host."""
        if session.key is UNKNOWN:
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
        prompts = self._prompts.get(session.key.tenant)
        if prompts and prompts.by_tail.get(blocks[-1]) is session:
            return
        self._set_prompt(session, blocks[-1], len(blocks))

    def unread(self, session: Session, tokens: int, body_bytes: int) -> None:
        """Record a turn whose body was not read; `tokens` is an estimate."""
        session.context_tokens, session.body_bytes = tokens, body_bytes
        session.unconfirmed = True

    def routed(self, session: Session, blocks: Sequence[int], unblocked_tokens: int = 0) -> None:
        """Record that the session's prompt, which has these full blocks, was sent to its host. Without block
        hashes, that its host will cache this many tokens."""
        session.unblocked_tokens = unblocked_tokens
        session.unconfirmed = False
        session.shared_blocks = 0
        self._set_chain(session, blocks, len(blocks))

    def blocks_stored(
        self, host: str, parent: int, blocks: Sequence[int], block_size: int, stride: int = 1
    ) -> tuple[Session, int] | None:
        """Record a KV event: `host` stored `blocks` after `parent`. If they continue a session on that host
        (its last blocks may come back with them), its chain grows. Returns that session and how many tokens
        of its context were stored, else None. `stride`: the number of blocks in one of the host's engine."""
        by_end, at = self._by_end, len(blocks) - 1
        while at >= 0 and blocks[at] not in by_end:
            at -= 1
        end = blocks[at] if at >= 0 else parent
        session = by_end.get(end)
        if session is None or session.host != host or not blocks:
            return None
        news = blocks[at + 1 :]
        if news:
            known = session.chain if end == session.tail else session.chain[: session.fork]
            # The blocks of a prompt come first and mostly in one event, those of an answer one by one.
            prompt = session.unconfirmed or len(news) > stride
            chain = array("Q", (*known, *news))
            self._set_chain(session, chain, len(chain) if prompt else session.fork)
            session.context_tokens = len(chain) * block_size
            session.unconfirmed = False
        return session, len(blocks) * block_size

    def hint(self, tenant: str, hint: str, host: str) -> None:
        """Remember the host of a request with this hint (its prompt_cache_key)."""
        self._hints[tenant, hint] = host
        self._hints.move_to_end((tenant, hint))
        if len(self._hints) > self.max_sessions:
            self._hints.popitem(last=False)

    def forget_host(self, host: str) -> None:
        """Note that a host is gone or lost its cache. Bindings stay, and so do chains, of which the prefix
        index says what is left."""
        for session in self._at.get(host, {}).values():
            session.unblocked_tokens = 0

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self.forget_host(fact.address)

    def on_blocks_changed(self, fact: BlocksChanged) -> None:
        if fact.applied.cleared:
            self.forget_host(fact.applied.endpoint)

    def unbind(self, host: str) -> None:
        """Another endpoint is at this address: no session is bound to it. What is known of the sessions
        stays."""
        for session in list(self._at.get(host, {}).values()):
            self._leave(session)
            session.host, session.unblocked_tokens, session.came_from = "", 0, ""

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
            self._set_chain(session, (), 0)
            self._drop_prompt(session)
            self._leave(session)
            session.ticket = -1  # requests that are still in flight no longer bind it
        return session

    def _arrive(self, session: Session) -> None:
        if not session.host:
            return
        self.bound[session.host] += 1
        self._tell(SessionsChanged(session.host))
        at = self._at.get(session.host)
        if at is None:
            at = self._at[session.host] = {}
        at[session.key] = session

    def _leave(self, session: Session) -> None:
        if not session.host:
            return
        self.bound[session.host] -= 1
        self._tell(SessionsChanged(session.host))
        del self._at[session.host][session.key]
        if not self.bound[session.host]:
            del self.bound[session.host], self._at[session.host]

    def _set_chain(self, session: Session, chain: Sequence[int], fork: int) -> None:
        by_end = self._by_end
        for end in self._ends(session):
            if by_end.get(end) is session:
                del by_end[end]
        self._blocks += len(chain) - len(session.chain)
        session.chain, session.fork = chain, fork
        by_end.update(dict.fromkeys(self._ends(session), session))
        self._chained.pop(session.key, None)
        if chain:
            self._chained[session.key] = session
            while self._blocks > self.max_blocks and len(self._chained) > 1:
                _, oldest = self._chained.popitem(last=False)
                self._set_chain(oldest, (), 0)

    @staticmethod
    def _ends(session: Session) -> set[int]:
        return {session.chain[at - 1] for at in (len(session.chain), session.fork) if at}

    def _set_prompt(self, session: Session, tail: int, blocks: int) -> None:
        self._drop_prompt(session)
        session.prompt_tail, session.prompt_blocks = tail, blocks
        self._prompts.setdefault(session.key.tenant, _Prompts()).add(session)

    def _drop_prompt(self, session: Session) -> None:
        prompts = self._prompts.get(session.key.tenant)
        if prompts and prompts.drop(session) and not prompts.by_tail:
            del self._prompts[session.key.tenant]

    def _expire(self, now: float) -> None:
        """Forget the oldest sessions, at most EXPIRED_AT_ONCE; the next use goes on."""
        for _ in range(min(EXPIRED_AT_ONCE, len(self._sessions))):
            oldest = next(iter(self._sessions.values()))
            if len(self._sessions) <= self.max_sessions and now - oldest.seen_at <= self.idle_s:
                self._oldest_at = oldest.seen_at
                return
            self.forget(oldest.key)
            self.evicted += 1


def _copy(there: BoundElsewhere) -> Session:
    session = Session(UNKNOWN, there.bound.host, name=there.bound.session)
    session.seen_at, session.moved_at = there.heard_at, there.moved_at
    session.take_over(there.bound, there.stamp)
    return session
