"""Decides when new sessions begin: at once while the active contexts leave room in the pool's KV, else later.

1. A new session *fits* if its prompt and the active contexts (`active_contexts.py`) fill at most `FULL` of
   the pool's KV. More would evict contexts that are about to be used again, and computing these again takes
   the time in which the pool would have served both. Sessions that have begun never wait. For tenants that
   ask for little beside others, room is kept: theirs may fill `KEPT`.
2. Sessions that do not fit have *places* in one queue, whichever gateway holds their requests. Each gateway
   knows the places of all (`hear`) and goes through them in the same order: it begins its own that fit, and
   leaves room for another gateway's that would. So they do not give away the same room twice. Another
   gateway's place that could begin and does not within `YIELD_S` is passed, so none waits for a gateway that
   does not know or do the same.
3. The next one to begin is of the tenant that was given the fewest tokens of late. Among a tenant's sessions
   it is the one that has waited longest, where each token of the prompt counts as `S_PER_TOKEN` seconds less,
   because most new sessions are short, and one long prompt would hold up many.
4. Waiting is bounded. A session is overtaken only by those of its tenant that come within `OVERTAKEN` ×
   `max_wait_s` after it, however long it is, and every `TURN` × `max_wait_s` its tenant gets a turn. If the
   session at the head does not fit, only those pass it for which room is kept.
5. A session that has waited `max_wait_s` is refused and told when its turn would come. It keeps its place: it
   counts as waiting since its first arrival, and since half as long before as it was overtaken, because a
   long one needs more time until its room is free. The first of those whose clients are expected back has
   its room kept for `HOLD_S`.
6. With `max_wait_s` 0 nothing waits here: a session that cannot begin is refused as it comes, keeps its place
   in the same way, and begins when it returns in time and no other place goes before it. The shares of
   `max_wait_s` above are then of `PATIENCE_S`.
7. At most `max_waiting` requests and `MAX_BYTES` of their bodies wait at one gateway. A tenant that fills
   them gives up its latest place to another tenant's session.

Does not wait, has no clock and calls no client; the gateway and the simulator use it. Costs O(places) for
each session that arrives, begins or is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop
from math import exp, inf

from msgspec import Struct
from msgspec.structs import replace

FULL = 0.75
"""Share of the pool's KV above which new sessions wait."""
KEPT = 0.9
"""The same for sessions of tenants that ask for little: what is between is kept for them."""
LITTLE = 0.5
"""Share of what tenants ask for on average, up to which one asks for little: the tokens that they were given
of late, and those that wait."""
S_PER_TOKEN = 0.01
"""Seconds of waiting that one token of the prompt outweighs."""
OVERTAKEN = 0.75
"""Share of `max_wait_s` within which later sessions of its tenant overtake one."""
TURN = 1.0
"""Share of `max_wait_s` after which a tenant has a turn, whatever it was given."""
GIVEN_HALF_S = 15.0
"""Seconds after which a token that a tenant was given counts half."""
YIELD_S = 1.0
"""Seconds for which a session of another gateway that could begin holds back those behind it."""
HOLD_S = 5.0
"""Seconds before and after its client is expected back for which a refused session's room is kept."""
PATIENCE_S = 60.0
"""Stands for `max_wait_s` in the order of the queue where nothing waits."""
PACE_S = 60.0
"""The pace is that of about this many past seconds."""
FEW_BEGUN = 3.0
"""Without so many sessions that began of late, the pace tells nothing of a session's wait."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Bounds of what a refused client is told; clients of OpenAI's SDKs ignore more than 60 s."""
REMEMBERED_S = 600.0
"""Seconds for which a refused session's first arrival is remembered."""
MOST_REMEMBERED = 10_000
"""Refused sessions whose first arrival is remembered."""
MOST_TOLD = 1_000
"""Places of refused sessions, and tenants, of which other gateways are told."""
MAX_BYTES = 256 * 1024 * 1024
"""Bytes of bodies that may wait."""


class Room(Struct, frozen=True, gc=False):
    """What fills the pool's KV, in tokens."""

    active: float
    """Expected tokens of the contexts that are used again soon."""
    capacity: int
    starting: bool = False
    """No endpoint is ready, and one starts because a session waits."""

    def after(self, tokens: int) -> Room:
        """Return what is left when a session with so many tokens has begun."""
        return Room(self.active + tokens, self.capacity, self.starting)


class Waiting(Struct, frozen=True, gc=False, kw_only=True):
    """A request of a new session that waits."""

    ticket: int
    session: Hashable
    tenant: Hashable
    tokens: int
    since: float
    """When this request came."""
    body_bytes: int = 0


class Refused(Struct, frozen=True, gc=False):
    """The session may not begin now."""

    retry_after_s: float


class Place(Struct, frozen=True, gc=False, kw_only=True):
    """A new session's place in the queue. Times are monotonic seconds of this gateway."""

    session: Hashable
    tenant: Hashable
    tokens: int
    arrived: float
    """When the session first came."""
    arrived_us: int
    """The same by the clock that all gateways share."""
    rank_us: int
    """The lower one of two sessions of a tenant begins first."""
    number: int
    """Settles ties, as the first one; the sessions of a gateway are numbered as they come."""
    back_at: float | None = None
    """When the client of a refused session is expected back; None: the session waits."""

    def is_held(self, now: float) -> bool:
        """Return whether it waits, or its client is about to come back."""
        return self.back_at is None or abs(now - self.back_at) <= HOLD_S

    def is_kept(self, now: float) -> bool:
        """Return whether it waits, or its client is not overdue."""
        return self.back_at is None or now - self.back_at <= HOLD_S


class Given(Struct, frozen=True, gc=False):
    """What a tenant was given while others waited."""

    tokens: float
    """As of `at`; each token counts half GIVEN_HALF_S later."""
    at: float
    """When its latest session began."""

    def left(self, now: float) -> float:
        """Return the tokens that still count."""
        left: float = self.tokens * 0.5 ** (max(0.0, now - self.at) / GIVEN_HALF_S)
        return left


class Line(Struct, frozen=True, gc=False):
    """What one gateway tells others about the sessions that wait there."""

    places: Sequence[Place] = ()
    given: Mapping[Hashable, Given] = {}
    pace: float = 0.0
    """Tokens of its sessions that began per second while others waited."""


class _Nameless(int):
    """Number of a session that would not be recognized when it returns."""


class SessionQueue:
    """The new sessions of one pool that wait."""

    def __init__(self, max_wait_s: float, max_waiting: int) -> None:
        self.max_wait_s = max_wait_s
        self.max_waiting = max_waiting
        self.changed = False
        """Whether there is something to tell; set here, and cleared by whoever tells it."""
        self._requests: dict[int, Waiting] = {}
        """Ticket → request that waits here, the one that came first at the beginning."""
        self._bytes = 0
        """Bytes of their bodies."""
        self._places: dict[Hashable, Place] = {}
        """Session → its place, of the sessions with requests here."""
        self._away: OrderedDict[Hashable, Place] = OrderedDict()
        """Session that was refused here → its place."""
        self._elsewhere: dict[str, Line] = {}
        """Other gateway → what it tells."""
        self._passing: deque[Waiting] = deque()
        """Further requests of sessions that have begun."""
        self._displaced: deque[tuple[Waiting, Refused]] = deque()
        """Requests that are refused because others took their places."""
        self._due_since: dict[Hashable, float] = {}
        """Other gateways' session → since when it could begin."""
        self._given: dict[Hashable, Given] = {}
        self._next = 0
        self._begun, self._begun_tokens, self._waited_s = 0.0, 0.0, 0.0
        """Sessions that began, their tokens, and seconds in which some waited, weighted towards the last
        `PACE_S`."""
        self._expected_until = -inf
        """Until when refused clients are expected back; counts as waiting where nothing waits."""
        self._paced_at = -inf

    def __len__(self) -> int:
        """Return the number of sessions that wait here."""
        return len(self._places)

    @property
    def patience_s(self) -> float:
        """How long waiting takes, for what depends on it."""
        return self.max_wait_s or PATIENCE_S

    @property
    def gives(self) -> bool:
        """Whether sessions have begun here of which the others should know when there is time."""
        return bool(self._given)

    @property
    def is_idle(self) -> bool:
        """Whether `begin` and `refuse` have nothing to return."""
        return not (self._places or self._passing or self._displaced)

    # -- requests ----------------------------------------------------------------------------------

    def arrive(
        self,
        session: Hashable | None,
        tenant: Hashable,
        tokens: int,
        room: Room,
        now: float,
        *,
        body_bytes: int = 0,
        now_us: int | None = None,
    ) -> Waiting | Refused | None:
        """Return what becomes of a request of a new session. None: it begins. `session`: None if it would not
        be recognized when it returns. `now_us`: the time by the clock that all gateways share."""
        self._pace(now)
        places, known = self._all(now), self._known(session, now)
        if known is None or known.back_at is not None:
            others = [place for place in places.values() if place.session != session]
            counts = Place.is_held if self.max_wait_s else Place.is_kept
            full = _Order(self, others, now).full(tenant, tokens)
            if _fits(tokens, room, full) and not any(counts(place, now) for place in others):
                self._away.pop(session, None)
                self._give(tenant, tokens, now)
                return None
        self._next += 1
        at_us = int(now * 1e6) if now_us is None else now_us
        later_us = int(1e6 * min(S_PER_TOKEN * tokens, OVERTAKEN * self.patience_s))
        if known is None:
            place = Place(
                session=_Nameless(self._next) if session is None else session,
                tenant=tenant,
                tokens=tokens,
                arrived=now,
                arrived_us=at_us,
                rank_us=at_us + later_us,
                number=self._next,
            )
        else:
            stays = known.back_at is None or not self.max_wait_s
            rank_us = known.rank_us if stays else known.arrived_us - later_us // 2
            longest = max(tokens, known.tokens)
            place = replace(known, tenant=tenant, tokens=longest, rank_us=rank_us, back_at=None)
        if not self._makes_room(tenant, body_bytes, now):
            return self._refuse(place, now)
        waiting = Waiting(
            ticket=self._next,
            session=place.session,
            tenant=tenant,
            tokens=tokens,
            since=now,
            body_bytes=body_bytes,
        )
        self._requests[waiting.ticket] = waiting
        self._bytes += body_bytes
        self._places[place.session] = place
        self._away.pop(place.session, None)
        self.changed = True
        if self.max_wait_s:
            return waiting
        # Those that have waited until waiting was no longer allowed begin or are refused by their own calls.
        alone = len(self._requests) == 1 and not self._passing
        return None if alone and self.begin(room, now) else self._out(waiting, now)

    def begin(self, room: Room, now: float) -> Waiting | None:
        """Return the next request that begins now. Call it again until it returns None."""
        if self._passing:
            return self._passing.popleft()
        if not self._places:
            return None
        self._pace(now)
        due_since: dict[Hashable, float] = {}
        order, keeps, mine = _Order(self, self._all(now).values(), now), False, None
        for place in order:
            away = place.back_at is not None
            if away and (keeps or not place.is_held(now)):
                continue
            if not _fits(place.tokens, room, order.full(place.tenant)):
                order.goes_on_with_little(place.tenant)
                continue
            if place.session in self._places:
                mine = place
                break
            if away:
                keeps = True
            else:
                since = due_since[place.session] = self._due_since.get(place.session, now)
                if now - since >= YIELD_S:
                    continue
            room = room.after(place.tokens)
            order.give(place)
        self._due_since = due_since
        return self._begins(mine, now) if mine else None

    def refuse(self, now: float) -> Iterator[tuple[Waiting, Refused]]:
        """Refuse the requests that have waited too long."""
        self._pace(now)
        while self._displaced:
            yield self._displaced.popleft()
        while self._requests:
            oldest = next(iter(self._requests.values()))
            if now - oldest.since < self.max_wait_s:
                return
            yield oldest, self._out(oldest, now)

    def release(self, session: Hashable) -> None:
        """Record that the session has begun elsewhere, so that its requests need not wait."""
        place = self._places.pop(session, None)
        if place:
            self._passing += self._requests_of(place)
            self.changed = True

    def leave(self, ticket: int) -> None:
        """Record that the client has gone. Ignore requests that do not wait."""
        if waiting := self._take(ticket):
            self._drop(waiting)

    def clear(self) -> None:
        """Forget all but the requests that wait."""
        self._away.clear()
        self._given.clear()
        self._due_since.clear()
        self._begun, self._begun_tokens, self._waited_s = 0.0, 0.0, 0.0
        self.changed = True

    def sessions(self) -> list[Hashable]:
        """Return the sessions with requests here."""
        return list(self._places)

    def longest_s(self, now: float) -> float:
        """Return for how many seconds the request that came first has waited; 0 if none waits."""
        return now - next(iter(self._requests.values())).since if self._requests else 0.0

    # -- other gateways ----------------------------------------------------------------------------

    def line(self, now: float) -> Line:
        """Return what the other gateways are told."""
        self._pace(now)
        away = [place for place in self._away.values() if place.is_kept(now)]
        given = [item for item in self._given.items() if item[1].left(now) >= 1.0]
        latest = sorted(given, key=lambda item: item[1].at)[-MOST_TOLD:]
        return Line((*self._places.values(), *away[-MOST_TOLD:]), dict(latest), self._own_pace())

    def hear(self, gateway: str, line: Line) -> None:
        """Record that another gateway has told of its queue."""
        self._elsewhere[gateway] = line

    def forget(self, gateway: str) -> None:
        """Record that another gateway is gone."""
        self._elsewhere.pop(gateway, None)

    @property
    def waiting_elsewhere(self) -> int:
        """Number of sessions that wait at other gateways."""
        return sum(place.back_at is None for line in self._elsewhere.values() for place in line.places)

    # -- inside ------------------------------------------------------------------------------------

    def all_given(self, now: float) -> dict[Hashable, float]:
        """Return how many tokens each tenant was given of late, here and elsewhere, if it was given any."""
        total: dict[Hashable, float] = {}
        for given in self._all_given():
            for tenant, one in given.items():
                if (left := one.left(now)) >= 1.0:
                    total[tenant] = total.get(tenant, 0.0) + left
        return total

    def turn_at(self, tenant: Hashable) -> float:
        """Return when the tenant's latest session began, here or elsewhere; -inf if none did of late."""
        return max((given[tenant].at for given in self._all_given() if tenant in given), default=-inf)

    def _all_given(self) -> Iterator[Mapping[Hashable, Given]]:
        yield self._given
        yield from (line.given for line in self._elsewhere.values())

    def _all(self, now: float) -> dict[Hashable, Place]:
        """Return all places by session. Of a session with several it is the one where it waits; our own goes
        before others."""
        places = {session: place for session, place in self._away.items() if place.is_kept(now)}
        for line in self._elsewhere.values():
            for place in line.places:
                if place.back_at is None or (place.is_kept(now) and place.session not in places):
                    places[place.session] = place
        return places | self._places

    def _known(self, session: Hashable | None, now: float) -> Place | None:
        """Return the session's place."""
        if session is None:
            return None
        if place := self._places.get(session):
            return place
        there = (p for line in self._elsewhere.values() for p in line.places if p.session == session)
        place = min((*there, *filter(None, [self._away.get(session)])), key=_arrived, default=None)
        return place if place and now - place.arrived <= REMEMBERED_S else None

    def _begins(self, place: Place, now: float) -> Waiting:
        first, *more = self._requests_of(place)
        del self._places[place.session]
        self._passing += more
        self._give(place.tenant, place.tokens, now)
        self._begun += 1.0
        self._begun_tokens += place.tokens
        self.changed = True
        return replace(first, tokens=place.tokens)

    def _give(self, tenant: Hashable, tokens: int, now: float) -> None:
        if len(self._given) > MOST_REMEMBERED:
            self._given = {tenant: g for tenant, g in self._given.items() if g.left(now) >= 1.0}
        before = self._given.get(tenant)
        self._given[tenant] = Given(tokens + (before.left(now) if before else 0.0), now)

    def _requests_of(self, place: Place) -> list[Waiting]:
        """Take the requests of a place; they wait no longer."""
        found = [w for w in self._requests.values() if w.session == place.session]
        return [replace(w, tokens=0) for w in found if self._take(w.ticket)]

    def _take(self, ticket: int) -> Waiting | None:
        waiting = self._requests.pop(ticket, None)
        if waiting:
            self._bytes -= waiting.body_bytes
        return waiting

    def _drop(self, waiting: Waiting) -> Place | None:
        """Take the place away from a request that is gone. Returns it unless another one has it, too."""
        if any(other.session == waiting.session for other in self._requests.values()):
            return None
        self.changed = True
        return self._places.pop(waiting.session, None)

    def _out(self, waiting: Waiting, now: float) -> Refused:
        self._take(waiting.ticket)
        place = self._drop(waiting)
        return self._refuse(place, now) if place else Refused(SHORTEST_RETRY_S)

    def _refuse(self, place: Place, now: float) -> Refused:
        """Tell the client when to come back; it keeps its place."""
        retry_s = min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, self._wait_s(place, now)))
        if not isinstance(place.session, _Nameless):
            self._away[place.session] = replace(place, back_at=now + retry_s)
            self._expected_until = max(self._expected_until, now + retry_s + HOLD_S)
            self._away.move_to_end(place.session)
            if len(self._away) > MOST_REMEMBERED:
                self._away.popitem(last=False)
            self.changed = True
        return Refused(retry_s)

    def _wait_s(self, place: Place, now: float) -> float:
        """Return the seconds until the session's turn comes, at the present pace and without those that may
        overtake it; infinite while too few have begun to tell."""
        pace = self._own_pace() + sum(line.pace for line in self._elsewhere.values())
        if not pace or self._begun < FEW_BEGUN:
            return inf
        before: Counter[Hashable] = Counter({place.tenant: 0})
        for other in self._all(now).values():
            if other.arrived_us <= place.arrived_us and other.session != place.session:
                before[other.tenant] += other.tokens
        return (min(before.total(), before[place.tenant] * len(before)) + 1) / pace

    def _makes_room(self, tenant: Hashable, body_bytes: int, now: float) -> bool:
        """Return whether a further request may wait, if need be in the place of a tenant that has more."""
        while (crowded := len(self._requests) >= self.max_waiting) or self._bytes + body_bytes > MAX_BYTES:
            has: Counter[Hashable] = Counter()
            for waiting in self._requests.values():
                has[waiting.tenant] += 1 if crowded else waiting.body_bytes
            most, number = max(has.items(), key=lambda item: item[1], default=(tenant, 0))
            if has[tenant] + (1 if crowded else body_bytes) >= number:
                return False
            last = next(w for w in reversed(self._requests.values()) if w.tenant == most)
            self._displaced.append((last, self._out(last, now)))
        return True

    def _own_pace(self) -> float:
        return self._begun_tokens / self._waited_s if self._waited_s else 0.0

    def _pace(self, now: float) -> None:
        """Count the time since the last call if sessions have waited meanwhile."""
        if self._places or (not self.max_wait_s and self._paced_at < self._expected_until):
            kept = exp(-max(0.0, now - self._paced_at) / PACE_S)
            self._begun *= kept
            self._begun_tokens *= kept
            self._waited_s = self._waited_s * kept + PACE_S * (1.0 - kept)
        self._paced_at = now


class _Order:
    """Goes through places in the order in which they begin."""

    def __init__(self, queue: SessionQueue, places: Iterable[Place], now: float) -> None:
        self._now = now
        self._turn_s = TURN * queue.patience_s
        self._of: dict[Hashable, list[tuple[tuple[int, int, bytes], Place]]] = {}
        for place in places:
            name = place.session if isinstance(place.session, bytes) else b""
            rank = place.rank_us, place.number, name
            self._of.setdefault(place.tenant, []).append((rank, place))
        for heap in self._of.values():
            heapify(heap)
        self._given = queue.all_given(now)
        self._asked = dict(self._given)
        for tenant, heap in self._of.items():
            waiting = sum(place.tokens for _, place in heap)
            self._asked[tenant] = self._asked.get(tenant, 0.0) + waiting
        self._all_asked = sum(self._asked.values())
        self._turn_at = {tenant: queue.turn_at(tenant) for tenant in self._of}

    def __iter__(self) -> Iterator[Place]:
        while self._of:
            tenant = min(self._of, key=self._key)
            _, place = heappop(self._of[tenant])
            if not self._of[tenant]:
                del self._of[tenant]
            yield place

    def full(self, tenant: Hashable, tokens: int = 0) -> float:
        """Return the share of the KV up to which a session of the tenant begins. `tokens`: of a session that
        has no place."""
        asked = self._asked.get(tenant, 0.0) + tokens
        tenants = len(self._asked) + (tenant not in self._asked)
        return KEPT if asked * tenants <= LITTLE * self._all_asked else FULL

    def goes_on_with_little(self, tenant: Hashable) -> None:
        """Leave out the tenant, whose head has to wait, and all that do not ask for little."""
        self._of.pop(tenant, None)
        self._of = {other: heap for other, heap in self._of.items() if self.full(other) > FULL}

    def give(self, place: Place) -> None:
        """Record that the place begins, so its tenant was given its tokens."""
        self._given[place.tenant] = self._given.get(place.tenant, 0.0) + place.tokens
        self._turn_at[place.tenant] = self._now

    def _key(self, tenant: Hashable) -> tuple[bool, float, tuple[int, int, bytes]]:
        rank, head = self._of[tenant][0]
        overdue = self._now - max(head.arrived, self._turn_at[tenant]) >= self._turn_s
        return not overdue, 0.0 if overdue else self._given.get(tenant, 0.0), rank


def _arrived(place: Place) -> int:
    return place.arrived_us


def _fits(tokens: int, room: Room, full: float) -> bool:
    """Return whether the prompt fits if this share of the KV may be filled. One that is larger than the room
    may begin while half of the room is free. Without any endpoint, waiting is of no use, unless one
    starts."""
    if room.starting:
        return False
    most = full * room.capacity
    return not room.capacity or room.active + tokens <= most or room.active <= FULL * room.capacity / 2
