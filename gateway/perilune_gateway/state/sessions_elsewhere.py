"""The names of sessions among replicas, the sessions that only other replicas have routed, and the turns here
of which the others are to be told.

    a session's turns here (`Sessions`) ─▶ changed, ended, turn_ended ─▶ `Replicas.take` ─▶ the others
    the others' turns (`Replicas`) ─▶ hear ─▶ kept under its name ─▶ take ─▶ `Sessions` takes it over
                                                                  └▶ at ─▶ the planner ─▶ hand_over

A session that only others have routed is kept under its name, a keyed hash, until one of its requests comes
here (`take`). Only then is the session's key known; `find` and `infer` only look. The planner moves it by its
name. Every method costs O(1), except `infer`, which is O(blocks), `at` and `names`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf

from msgspec.structs import replace

from perilune_gateway.model import SessionKey
from perilune_gateway.model.shared import Bound, BoundElsewhere, Names, Stamp
from perilune_gateway.state.changes import Stamps
from perilune_gateway.state.peers import Peers
from perilune_gateway.state.session import Session

MAX_TOLD = 10_000
"""Maximum number of ends and moves of sessions that wait to be told; the oldest are dropped."""


class SessionsElsewhere:
    """What one replica knows of the others' sessions, and has to tell them of its own."""

    def __init__(
        self,
        names: Names,
        stamps: Stamps,
        peers: Peers,
        clock: Callable[[], float],
        wake: Callable[[], object],
    ) -> None:
        """`wake` is called when there is something to take."""
        self._names = names
        self._stamps = stamps
        self._peers = peers
        self._clock = clock
        self._wake = wake
        self._here: dict[bytes, SessionKey] = {}
        """Name → key of every session that is known here."""
        self._there: OrderedDict[bytes, BoundElsewhere] = OrderedDict()
        """Name → session of other replicas, the one that was heard of least recently first."""
        self._tails: dict[int, bytes] = {}
        """Last block of the last prompt of an inferred session in `_there` → the session's name."""
        self._at: dict[str, dict[bytes, None]] = {}
        """Host → names of the sessions in `_there` that are bound to it, the latest last."""
        self._turns: dict[bytes, None] = {}
        """Names of sessions with a turn to tell."""
        self._turns_over: dict[bytes, None] = {}
        """Names of sessions whose turn has ended."""
        self._told: OrderedDict[bytes, Bound] = OrderedDict()
        """Name → end of a session, or move of one in `_there`, to tell."""
        self._unsaved: dict[bytes, None] = {}
        """Names of sessions that the server lacks."""

    @property
    def count(self) -> int:
        """Number of sessions that only other replicas have routed."""
        return len(self._there)

    # -- what happens here -------------------------------------------------------------------------

    def changed(self, session: Session) -> None:
        """Record that a turn of the session was decided here."""
        if not session.name:
            session.name = self._names.session(session.key)
            self._here[session.name] = session.key
            self._drop(session.name)
        session.stamp, session.runs_at = self._stamps.next(), ""
        self._turns[session.name] = None
        self._wake()

    def turn_ended(self, session: Session) -> None:
        """Record that a turn of the session that was decided here has ended."""
        if session.name:
            self._turns_over[session.name] = None
            self._wake()

    def ended(self, session: Session) -> None:
        """Record that the session has ended here."""
        if session.name:
            bound = Bound(at_us=self._stamps.next_us(), session=session.name, host="")
            self._tell(bound)

    def forgotten(self, session: Session) -> None:
        """Record that the session was forgotten here, because it was idle or there are too many."""
        self._here.pop(session.name, None)
        self._turns.pop(session.name, None)
        self._turns_over.pop(session.name, None)
        self._unsaved.pop(session.name, None)

    def hand_over(self, name: bytes, host: str) -> None:
        """Bind a session that only others have routed to `host`, which has got its KV."""
        bound, at_us = self._there[name].bound, self._stamps.next_us()
        self._tell(replace(bound, at_us=at_us, host=host, running=False, moved_from=bound.host))
        self._unsaved[name] = None

    def _tell(self, bound: Bound) -> None:
        self.hear(bound, Stamp(bound.at_us, self._stamps.replica), self._clock())
        self.tell_again(bound)

    # -- what is taken to be told ------------------------------------------------------------------

    def tell(self, name: bytes) -> None:
        """Tell of the session's latest turn, which was decided here."""
        self._turns[name] = None
        self._wake()

    def tell_again(self, bound: Bound) -> None:
        """Tell of the end or the move of a session that is not known here."""
        self._told.pop(bound.session, None)
        self._told[bound.session] = bound
        if len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)
        self._wake()

    def save(self, name: bytes) -> None:
        """Record that the server lacks the session's latest turn."""
        self._unsaved[name] = None
        self._wake()

    def superseded(self, name: bytes) -> None:
        """Record that another replica has decided a later turn of the session."""
        self._turns.pop(name, None)

    def take_turns(self, limit: int) -> list[bytes]:
        """Return the names of at most `limit` sessions with a turn to tell. The server lacks these."""
        taken = _take(self._turns, limit)
        self._unsaved.update(dict.fromkeys(taken))
        return taken

    def take_turns_over(self) -> list[bytes]:
        """Return the names of the sessions of which a turn has ended since the last call."""
        return _take(self._turns_over, len(self._turns_over))

    def take_told(self, limit: int) -> list[Bound]:
        """Return at most `limit` sessions that have ended, or of the others' that have got another host. The
        server lacks these."""
        told = [self._told.popitem(last=False)[1] for _ in range(min(limit, len(self._told)))]
        self._unsaved.update(dict.fromkeys(bound.session for bound in told))
        return told

    def take_unsaved(self, limit: int) -> list[bytes]:
        """Return the names of at most `limit` sessions that the server lacks."""
        return _take(self._unsaved, limit)

    @property
    def has_more(self) -> bool:
        """Whether there are turns to tell or to save."""
        return bool(self._turns or self._told or self._unsaved)

    # -- what the others have told -----------------------------------------------------------------

    def hear(self, bound: Bound, stamp: Stamp, now: float) -> None:
        """Keep the latest turn, or the end, of a session that is not known here."""
        before, moved_at = self._there.get(bound.session), -inf
        if before and before.bound.host and bound.host:  # else it ended, or begins again
            moved_at = before.moved_at if before.bound.host == bound.host else now
        self._drop(bound.session)
        self._there[bound.session] = BoundElsewhere(bound, stamp, now, moved_at)
        if bound.host:
            self._at.setdefault(bound.host, {})[bound.session] = None
        if bound.inferred and bound.prompt_tail:
            self._tails[bound.prompt_tail] = bound.session

    def trim(self, limit: int) -> None:
        """Forget all but `limit` of the others' sessions, those that were heard of least recently first."""
        while len(self._there) > limit:
            oldest = next(iter(self._there))
            self._drop(oldest)
            self._unsaved.pop(oldest, None)

    def latest(self, name: bytes) -> BoundElsewhere | None:
        """Return the latest turn, or the end, of a session that is not known here."""
        return self._there.get(name)

    def at(self, host: str) -> Iterator[BoundElsewhere]:
        """Return the sessions that are not known here and are bound to `host`, those that were heard of last
        first."""
        return (self._there[name] for name in reversed(self._at.get(host, {})))

    def find(self, key: SessionKey) -> BoundElsewhere | None:
        """Return the latest turn of a session that only other replicas have routed and that has not ended."""
        return self._bound(self._names.session(key)) if self._there else None

    def infer(
        self, tenant: str, blocks: Sequence[int], tokens: int
    ) -> tuple[SessionKey, BoundElsewhere] | None:
        """Return the inferred session of other replicas that a prompt of `tokens` tokens continues, with its
        latest turn."""
        if not self._tails:
            return None
        for block in reversed(blocks):
            if name := self._tails.get(block):
                there = self._there[name]
                bound = there.bound
                if bound.prompt_tokens < tokens and bound.tenant == self._names.tenant(tenant):
                    return (SessionKey(tenant, bound.inferred), there) if bound.host else None
        return None

    def take(self, key: SessionKey, since: float) -> BoundElsewhere | None:
        """Return what `find` does if it was heard after `since`. From then on the session is known here."""
        if not self._there:
            return None
        name = self._names.session(key)
        there = self._bound(name)
        if there is None:
            return None
        self._drop(name)
        if there.heard_at < since:
            return None
        self._here[name] = key
        return there

    def key(self, name: bytes) -> SessionKey | None:
        """Return the key of the session with this name if it is known here."""
        return self._here.get(name)

    def names(self) -> Iterator[bytes]:
        """Return the names of all sessions, here and there."""
        return iter((*self._here, *self._there))

    def runs(self, session: Session) -> bool:
        """Return whether a turn of the session runs at another replica that is alive, as far as it has
        told."""
        return session.runs_at in self._peers

    def name(self, key: SessionKey) -> bytes:
        """Return the session's name among replicas."""
        return self._names.session(key)

    def tenant(self, tenant: str) -> bytes:
        """Return the tenant's name among replicas."""
        return self._names.tenant(tenant)

    def _bound(self, name: bytes) -> BoundElsewhere | None:
        there = self._there.get(name)
        return there if there and there.bound.host else None

    def _drop(self, name: bytes) -> None:
        there = self._there.pop(name, None)
        if there is None:
            return
        if self._tails.get(there.bound.prompt_tail) == name:
            del self._tails[there.bound.prompt_tail]
        if host := there.bound.host:
            del self._at[host][name]
            if not self._at[host]:
                del self._at[host]


def _take(names: dict[bytes, None], limit: int) -> list[bytes]:
    """Remove the first of the names, and return them."""
    taken = list(islice(names, limit))
    for name in taken:
        del names[name]
    return taken
