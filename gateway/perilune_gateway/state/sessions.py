"""Sessions: which endpoint each one is bound to, and what is known of its context.

A session is kept under (tenant, id). Bounded (the least recently used goes first) and expiring (idle
time). Three things are learned on the way:

- *bytes per token* of its bodies, so that a turn whose body is not read can be estimated from its length;
- its *tail*: the last block of its chain that its host holds. KV events move it forward
  (`blocks_stored`), also through turns that were never read, so the estimate corrects itself; and its *fork*,
  the end of its last prompt: templates may write an answer otherwise into the next prompt (without its
  reasoning), which then goes on from there;
- its *prompt tail*: the last full block of its last read prompt. A later prompt without a session id that
  contains this block and goes beyond continues the session (`infer`); one that ends with it takes its place,
  since only the latest can be continued (`superseded`).

Reading (`find`, `view`, `infer`) changes nothing. Costs: O(1) each; `infer` one dict lookup per
length that the tenant's prompts have, at most one per block of the prompt.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf

from msgspec import Struct

from perilune_gateway.model import Identity, SessionKey, SessionView

_SORTING = 4
"""Going over a length costs as much as going over so many blocks."""


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
    """Tokens of its context: the last prompt as counted or estimated, then what events say."""
    body_bytes: int = 0
    """Of its last body, read or not."""
    bytes_per_token: float = 0.0
    """Of its last read body; 0: none was read."""
    tail: int = 0
    """Block hash; 0: unknown."""
    tail_tokens: int = 0
    """Tokens up to the tail's end."""
    fork: int = 0
    """Block hash; 0: unknown."""
    fork_tokens: int = 0
    unconfirmed: bool = False
    """Its last turn was not read, and no KV event has continued its chain since."""
    prompt_tail: int = 0
    prompt_blocks: int = 0
    """Of the prompt that ends in `prompt_tail`."""
    prompt_tokens: int = 0
    ticket: int = -1
    """Its latest request."""
    inferred: bool = False
    """No client has named it; requests of several may be its own, if their prompts are equal."""

    def estimate_tokens(self, body_bytes: int, default_bytes_per_token: float) -> int:
        """Tokens of an unread body: the known context, and its growth at the session's own ratio. A body
        that shrank is a rewritten one; one without a length is taken to be as long as the context."""
        ratio = self.bytes_per_token or default_bytes_per_token
        if not body_bytes:
            return self.context_tokens
        if body_bytes < self.body_bytes or not self.context_tokens:
            return int(body_bytes / ratio)
        return self.context_tokens + int((body_bytes - self.body_bytes) / ratio)


class _Prompts:
    """The last read prompts of a tenant's sessions."""

    __slots__ = ("by_tail", "lengths")

    def __init__(self) -> None:
        self.by_tail: dict[int, Session] = {}
        """By the last block; of sessions with equal prompts the latest."""
        self.lengths: Counter[int] = Counter()
        """How many of them have so many blocks."""

    def add(self, session: Session) -> None:
        if session.prompt_tail not in self.by_tail:
            self.lengths[session.prompt_blocks] += 1
        self.by_tail[session.prompt_tail] = session

    def drop(self, session: Session) -> bool:
        """False: it is not there."""
        if self.by_tail.get(session.prompt_tail) is not session:
            return False
        del self.by_tail[session.prompt_tail]
        self.lengths[session.prompt_blocks] -= 1
        if not self.lengths[session.prompt_blocks]:
            del self.lengths[session.prompt_blocks]
        return True

    def within(self, blocks: Sequence[int]) -> Iterator[Session]:
        """Those whose prompt is a prefix of these blocks, the longest first."""
        if _SORTING * len(self.lengths) < len(blocks):
            lengths = sorted(self.lengths, reverse=True)
            ends = [blocks[length - 1] for length in lengths if length <= len(blocks)]
        else:
            ends = list(reversed(blocks))
        return map(self.by_tail.__getitem__, filter(self.by_tail.__contains__, ends))


class Sessions:
    """All sessions of a pool."""

    def __init__(
        self, max_sessions: int, idle_s: float, on_rebound: Callable[[str], object] = lambda host: None
    ) -> None:
        """`idle_s`: a session that was silent for longer is forgotten. `on_rebound` is called with every host
        whose number of sessions changes."""
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self.evicted = 0
        """Idle for too long, or for want of room."""
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        """Least recently used first."""
        self._oldest_at = -inf
        """No session was last used before that."""
        self._by_tail: dict[int, Session] = {}
        self._prompts: dict[str, _Prompts] = {}
        """By tenant."""
        self._hints: OrderedDict[tuple[str, str], str] = OrderedDict()
        self.bound: Counter[str] = Counter()
        """Sessions by host."""
        self._on_rebound = on_rebound
        self._at: dict[str, dict[SessionKey, Session]] = {}
        """By host, least recently used first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: SessionKey | None, now: float) -> Session | None:
        """The live session, or None."""
        session = self._sessions.get(key) if key else None
        return session if session and now - session.seen_at <= self.idle_s else None

    def at(self, host: str, limit: int, now: float) -> list[Session]:
        """Live sessions that are bound to `host`, at most `limit`, the most recently used first."""
        latest = islice(reversed(self._at.get(host, {}).values()), limit)
        return [session for session in latest if now - session.seen_at <= self.idle_s]

    def matching(self, session_id: str) -> list[Session]:
        """Every tenant's session of that id; O(sessions), for people."""
        return [s for s in self._sessions.values() if s.key.session_id == session_id]

    def view(self, session: Session, now: float) -> SessionView:
        """The session as a policy sees it."""
        parent = self.find(session.parent, now) if session.parent else None
        return SessionView(
            session.key.session_id,
            session.host,
            now - session.moved_at,
            session.context_tokens,
            session.turns,
            parent.host if parent else "",
        )

    def near_host(self, identity: Identity, hint: str, now: float) -> str:
        """Where a new session's prefix probably lies: its parent's host, else where the last request with
        this `hint` (a prompt_cache_key, which many sessions may share) went."""
        parent = self.find(identity.parent_key, now)
        return parent.host if parent else self._hints.get((identity.tenant, hint), "")

    def infer(self, tenant: str, blocks: Sequence[int], tokens: int, now: float) -> Session | None:
        """The session that a prompt of `tokens` goes on from: the deepest one whose last prompt is a prefix
        of it, in whole blocks, and shorter."""
        prompts = self._prompts.get(tenant)
        for session in prompts.within(blocks) if prompts else ():
            if session.prompt_tokens < tokens:
                return self.find(session.key, now)
        return None

    def superseded(self, tenant: str, last_block: int) -> str:
        """The id of the inferred session whose last prompt ends there too; empty: there is none. Once another
        prompt does, nothing can go on from it."""
        prompts = self._prompts.get(tenant)
        session = prompts.by_tail.get(last_block) if prompts else None
        return session.key.session_id if session and session.inferred else ""

    def touch(self, key: SessionKey, now: float, parent: SessionKey | None = None) -> Session:
        """The session, made if needed, as the most recently used."""
        session = self.find(key, now)
        if session is None:
            self.free(key)  # an idle one
            session = self._sessions[key] = Session(key, parent=parent)
        self.use(session, now)
        return session

    def begin(
        self, key: SessionKey, now: float, parent: SessionKey | None = None, inferred: bool = False
    ) -> Session:
        """A session begins: a new one, or a superseded one anew, bound to nobody."""
        session = self.touch(key, now, parent)
        session.inferred = inferred
        if session.host:
            self._leave(session)
            session.host, session.parent = "", parent
            session.turns, session.moves, session.moved_at = 0, 0, -inf
        return session

    def use(self, session: Session, now: float) -> None:
        """A session that was just found, as the most recently used."""
        session.seen_at = now
        self._sessions.move_to_end(session.key)
        if session.host:
            at = self._at[session.host]
            at[session.key] = at.pop(session.key)
        if now - self._oldest_at > self.idle_s or len(self._sessions) > self.max_sessions:
            self._expire(now)

    def bind(self, session: Session, host: str, now: float) -> None:
        """Bind to `host`; leaving another one is a move, and what that one held is forgotten."""
        if session.host and session.host != host:
            session.moved_at = now
            session.moves += 1
            self._set_tail(session, 0, 0, fork=True)
        if session.host != host:
            self._leave(session)
            session.host = host
            self._arrive(session)

    def read(self, session: Session, tokens: int, body_bytes: int, blocks: Sequence[int]) -> None:
        """A turn's body was read: `blocks` are its prompt's full blocks (none: only estimated)."""
        self.unread(session, tokens, body_bytes)
        if tokens and body_bytes:
            session.bytes_per_token = body_bytes / tokens
        if not blocks:
            return
        session.prompt_tokens = tokens
        prompts = self._prompts.get(session.key.tenant)
        if prompts and prompts.by_tail.get(blocks[-1]) is session:
            return
        self._drop_prompt(session)
        session.prompt_tail, session.prompt_blocks = blocks[-1], len(blocks)
        self._prompts.setdefault(session.key.tenant, prompts or _Prompts()).add(session)

    def unread(self, session: Session, tokens: int, body_bytes: int) -> None:
        """A turn's body was not read; `tokens` is an estimate."""
        session.context_tokens, session.body_bytes = tokens, body_bytes
        session.unconfirmed = True

    def cached(self, session: Session, tail: int, tail_tokens: int) -> None:
        """The host holds the session's prompt up to block `tail`, `tail_tokens` from the start."""
        if tail and tail == session.tail == session.fork and self._by_tail.get(tail) is session:
            session.tail_tokens = session.fork_tokens = tail_tokens
        else:
            self._set_tail(session, tail, tail_tokens, fork=True)
        session.unconfirmed = False

    def blocks_stored(
        self, host: str, parent: int, blocks: Sequence[int], block_size: int
    ) -> tuple[Session, int] | None:
        """KV event: `host` stored `blocks` after `parent`. If that continues a session there, its tail
        moves on; returns the session and the tokens by which it grew."""
        session = self._by_tail.get(parent)
        if session is None or session.host != host or not blocks:
            return None
        grown = len(blocks) * block_size
        reached = (session.tail_tokens if parent == session.tail else session.fork_tokens) + grown
        # a prompt's blocks come first and mostly many at once, an answer's one by one
        self._set_tail(session, blocks[-1], reached, fork=session.unconfirmed or len(blocks) > 1)
        session.unconfirmed = False
        session.context_tokens = reached
        return session, grown

    def hint(self, tenant: str, hint: str, host: str) -> None:
        """Remember where a request with this hint went."""
        self._hints[tenant, hint] = host
        self._hints.move_to_end((tenant, hint))
        if len(self._hints) > self.max_sessions:
            self._hints.popitem(last=False)

    def forget_host(self, host: str) -> None:
        """The host is gone, or lost its cache: bindings stay, but nothing is held there."""
        for session in self._sessions.values():
            if session.host == host:
                self._set_tail(session, 0, 0, fork=True)

    def free(self, key: SessionKey) -> None:
        """End a session; unknown keys are fine."""
        if session := self._sessions.pop(key, None):
            self._set_tail(session, 0, 0, fork=True)
            self._drop_prompt(session)
            self._leave(session)
            session.ticket = -1  # whatever of it is still in flight binds it no more

    def _arrive(self, session: Session) -> None:
        if not session.host:
            return
        self.bound[session.host] += 1
        self._on_rebound(session.host)
        at = self._at.get(session.host)
        if at is None:
            at = self._at[session.host] = {}
        at[session.key] = session

    def _leave(self, session: Session) -> None:
        if not session.host:
            return
        self.bound[session.host] -= 1
        self._on_rebound(session.host)
        del self._at[session.host][session.key]
        if not self.bound[session.host]:
            del self.bound[session.host], self._at[session.host]

    def _set_tail(self, session: Session, tail: int, tokens: int, *, fork: bool) -> None:
        """`fork`: a prompt ends there."""
        if session.tail or session.fork:
            for block in (session.tail, session.fork) if fork else (session.tail,):
                if self._by_tail.get(block) is session and (fork or block != session.fork):
                    del self._by_tail[block]
        session.tail, session.tail_tokens = tail, tokens
        if fork:
            session.fork, session.fork_tokens = tail, tokens
        if tail:
            self._by_tail[tail] = session

    def _drop_prompt(self, session: Session) -> None:
        prompts = self._prompts.get(session.key.tenant)
        if prompts and prompts.drop(session) and not prompts.by_tail:
            del self._prompts[session.key.tenant]

    def _expire(self, now: float) -> None:
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if len(self._sessions) <= self.max_sessions and now - oldest.seen_at <= self.idle_s:
                self._oldest_at = oldest.seen_at
                return
            self.free(oldest.key)
            self.evicted += 1
