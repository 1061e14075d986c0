"""Decides when new sessions begin: at once while the active contexts leave room in the pool's KV, else later.

1. A new session *fits* if its prompt and the active contexts (`active_contexts.py`) fill at most `FULL` of
   the pool's KV. More would evict contexts that are about to be used again, and computing these again takes
   the time in which the pool would have served both. Sessions that have begun never wait.
2. Sessions that do not fit wait. The next one to begin is of the tenant that was given the fewest tokens.
   Among a tenant's sessions it is the one that has waited longest, where each token of the prompt counts as
   `S_PER_TOKEN` seconds less: most new sessions are short, and one long prompt would hold up many.
3. A session that has waited `max_wait_s` is refused, and so is one that finds `max_waiting` others. It is
   told when its turn would come at the pace of the last minutes. If it returns, it counts as waiting since
   its first arrival; so a long prompt is overtaken by those only that arrive within its prompt's seconds.

Does not wait, has no clock and calls no client; the gateway and the simulator use it. Costs O(waiting) for
each session that begins or is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from math import inf

from msgspec import Struct

FULL = 0.75
"""Share of the pool's KV above which new sessions wait."""
S_PER_TOKEN = 0.01
"""Seconds of waiting that one token of the prompt outweighs."""
PACE_S = 60.0
"""The pace is that of about this many past seconds."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Bounds of what a refused client is told; clients of OpenAI's SDKs ignore more than 60 s."""
MOST_REMEMBERED = 10_000
"""Refused sessions whose first arrival is remembered."""


class Room(Struct, frozen=True, gc=False):
    """What fills the pool's KV, in tokens."""

    active: float
    """Expected tokens of the contexts that are used again soon."""
    capacity: int

    @property
    def free(self) -> float:
        return max(0.0, FULL * self.capacity - self.active)


class Waiting(Struct, frozen=True, gc=False):
    """A new session that waits."""

    ticket: int
    session: Hashable
    tenant: str
    tokens: int
    since: float
    """When this request came."""
    arrived: float
    """When the session first came; earlier than `since` if it was refused before."""

    @property
    def rank(self) -> float:
        """The lower one of two sessions of a tenant begins first."""
        return self.arrived + S_PER_TOKEN * self.tokens


class Refused(Struct, frozen=True, gc=False):
    """The session may not begin now."""

    retry_after_s: float


class SessionQueue:
    """The new sessions of one pool that wait."""

    def __init__(self, max_wait_s: float, max_waiting: int) -> None:
        self.max_wait_s = max_wait_s
        self.max_waiting = max_waiting
        self._waiting: dict[int, Waiting] = {}
        self._next = 0
        self._begun_tokens: dict[str, float] = {}
        """Tenant → tokens that it was given; only the differences count."""
        self._arrived: OrderedDict[Hashable, float] = OrderedDict()
        """Refused session → when it first came."""
        self._pace = 0.0
        """Sessions that began per second while others waited, weighted towards the last `PACE_S`."""
        self._pace_at = -inf

    def __len__(self) -> int:
        return len(self._waiting)

    def arrive(
        self, session: Hashable, tenant: str, tokens: int, room: Room, now: float
    ) -> Waiting | Refused | None:
        """A new session has come. None: it begins."""
        if not self._waiting and _fits(tokens, room):
            self._arrived.pop(session, None)
            return None
        arrived = self._arrived.get(session, now)
        if len(self._waiting) >= self.max_waiting:
            return self._refuse(session, arrived, sum(w.arrived <= arrived for w in self._waiting.values()))
        tenants = {w.tenant for w in self._waiting.values()}
        if tenant not in tenants:  # it has no claim to the time in which none of its sessions waited
            least = min((self._begun_tokens[t] for t in tenants), default=0.0)
            self._begun_tokens[tenant] = max(least, self._begun_tokens.get(tenant, 0.0))
        if not self._waiting:
            self._pace_at = now
        self._next += 1
        waiting = Waiting(self._next, session, tenant, tokens, now, arrived)
        self._waiting[waiting.ticket] = waiting
        return waiting

    def begin(self, room: Room, now: float) -> Waiting | None:
        """Return the next session if it begins now. Call it again until it returns None."""
        if not self._waiting:
            return None
        first = min(self._waiting.values(), key=lambda w: (self._begun_tokens[w.tenant], w.rank, w.ticket))
        if not _fits(first.tokens, room):
            return None
        del self._waiting[first.ticket]
        self._arrived.pop(first.session, None)
        self._begun_tokens[first.tenant] += first.tokens
        self._count(1, now)
        if not self._waiting:
            self._begun_tokens.clear()
        return first

    def refuse(self, now: float) -> Iterator[tuple[Waiting, Refused]]:
        """Refuse the sessions that have waited too long."""
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if now - oldest.since < self.max_wait_s:
                return
            del self._waiting[oldest.ticket]
            before = sum(w.rank < oldest.rank for w in self._waiting.values())
            self._count(0, now)
            yield oldest, self._refuse(oldest.session, oldest.arrived, before)

    def longest_s(self, now: float) -> float:
        """Return for how many seconds the session at the head has waited; 0 if none waits."""
        return now - next(iter(self._waiting.values())).since if self._waiting else 0.0

    def leave(self, ticket: int) -> None:
        """The client has gone. Ignores sessions that do not wait."""
        self._waiting.pop(ticket, None)

    def _refuse(self, session: Hashable, arrived: float, before: int) -> Refused:
        self._arrived.setdefault(session, arrived)
        if len(self._arrived) > MOST_REMEMBERED:
            self._arrived.popitem(last=False)
        after_s = (before + 1) / self._pace if self._pace else LONGEST_RETRY_S
        return Refused(min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, after_s)))

    def _count(self, begun: int, now: float) -> None:
        share = min(1.0, (now - self._pace_at) / PACE_S)
        self._pace = self._pace * (1.0 - share) + begun / PACE_S
        self._pace_at = now


def _fits(tokens: int, room: Room) -> bool:
    """A prompt that is larger than the room may begin while half of the room is free. Without any endpoint,
    waiting is of no use."""
    allowed = FULL * room.capacity
    return not room.capacity or room.active + tokens <= allowed or room.active <= allowed / 2
