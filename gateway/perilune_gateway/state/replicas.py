"""What this replica of the gateway knows of the others, merged into its own state, and what it tells them.

    a turn, a request's start or end, an ejection, a measurement, a claim ─▶ sharing ─▶ take ─▶ the stream
    the stream ─▶ apply ─▶ sessions, load, ejection, calibration, prefix index, session admission
    what the server has kept, after every connection ─▶ reconcile ─▶ what the server lacks

1. Everything is decided from this replica's own state; this module changes that state as if the other
   replicas' requests had been decided here. No decision waits for another replica.
2. A session, an endpoint's standing and a replica's load at an endpoint are registers: the later stamp wins.
   A stamp is later than all that its replica had seen, so a turn always replaces the turn that it followed.
3. Sessions that only others have routed are kept by sessions_elsewhere.py until one of their requests comes
   here.
4. A replica is alive while it is heard at least every LEASE_S seconds (peers.py). Otherwise its load counts
   as gone. It repeats its whole load in every sign of life, so one that was only slow is complete again at
   once.
5. Of the replicas that are alive, the one with the least id plans the moves of all sessions. All know what it
   offers (offers.py). The same one has the server keep what was learned from measurements, so that a replica
   that starts predicts as the others do.

Does no I/O. Costs about 5 µs for each change that is received.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from perilune_gateway.model import SessionKey
from perilune_gateway.model.shared import (
    AHEAD_US,
    MAX_LEARNED,
    MAX_QUEUEING,
    NEVER,
    Alive,
    Batch,
    Bound,
    Change,
    Claimed,
    Counted,
    Ejected,
    InLine,
    Learned,
    Loaded,
    Measured,
    Offered,
    OfferStage,
    PlaceInLine,
    QueuedOf,
    Queueing,
    Stamp,
    TenantInLine,
    encode,
    implausible,
    unpacked,
)
from perilune_gateway.state.loads import NOTHING, AtEndpoint
from perilune_gateway.state.offers import same
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import TurnOver
from perilune_gateway.state.session import Session
from perilune_gateway.state.session_queue import Given, Line, Place

log = logging.getLogger(__name__)

MAX_MEASURING = 1_000
"""Replicas of which the last measurement is remembered."""
LEARNED_S = 5.0
"""Least seconds after which the server gets again what was learned from measurements."""
MAX_BATCH = 1_000
"""Maximum number of sessions in one batch."""


class Outbox(Struct, frozen=True, gc=False):
    """What is to be written to the server."""

    changes: Sequence[Change]
    """For the stream."""
    sessions: Sequence[tuple[bytes, bytes]]
    """(name, bytes of a batch with its latest turn or its end) of sessions to keep."""
    learned: bytes = b""
    """Bytes of a batch with what was learned from measurements, to keep; empty: nothing new."""


class Admission(Protocol):
    """What session admission counts; `routing.new_sessions` has it."""

    def counted(self, now: float, at_us: int) -> Counted: ...

    def counted_elsewhere(self, replica: str, counted: Counted) -> None: ...

    def line(self, now: float, *, repeat: bool) -> Line | None: ...

    def line_elsewhere(self, replica: str, line: Line) -> None: ...

    def gone(self, replica: str, now: float) -> None: ...

    def turn_elsewhere(self, session: SessionKey) -> None: ...


class Moving(Protocol):
    """What this replica offers to move, and moves; `routing.handing_over` has it."""

    def offers(self) -> Sequence[Offered]:
        """Return what it offers, copies, or began within the last minute, without stamps."""


class Replicas:
    """The other replicas, as one replica sees them."""

    def __init__(self, state: PoolState, admission: Admission, moving: Moving) -> None:
        """`state`: one that is shared."""
        sharing = state.sharing
        assert sharing, "with others"
        self.replica = sharing.replica
        self.received = 0
        """Number of changes applied."""
        self.dropped = 0
        """Number of changes that could not be used."""
        self._state = state
        self._admission = admission
        self._moving = moving
        self._stamps = sharing.stamps
        self._changes = sharing.changes
        self._peers = sharing.peers
        self._elsewhere = sharing.sessions
        self._clock = sharing.clock
        self._wake = sharing.wake
        self._loads: dict[tuple[str, str], int] = {}
        """(other replica, endpoint) → stamp of its load there."""
        self._queued: Mapping[Hashable, float] = {}
        """Tenant → seconds of pending prefill here, as the others were last told."""
        self._queues: dict[str, int] = {}
        """Other replica → stamp of its tenants' pending prefill."""
        self._counted = Counted(0)
        """What the others were last told of session admission."""
        self._line_lost = False
        """Whether the others may have missed the last change of our part of the queue."""
        self._counts: dict[str, int] = {}
        """Other replica → stamp of what it counts."""
        self._lines: dict[str, int] = {}
        """Other replica → stamp of its part of the queue."""
        self._offered: dict[bytes, Offered] = {}
        """Name of a session or prefix → what the others were last told of its offer here."""
        self._learned_at, self._learned_from = -inf, 0
        """When the server last got what was learned, and the number of measurements until then."""
        self._measured_until: OrderedDict[str, int] = OrderedDict()
        """Other replica → stamp of its last measurement; also of those that have gone of late."""
        self._damaged_kinds: set[str] = set()
        """Kinds of damaged changes that were logged."""

    # -- what the others are told ------------------------------------------------------------------

    def take(self, *, alive: bool = False, leaving: bool = False) -> Outbox:
        """Return what has changed since the last call. `alive`: with a sign of life; `leaving`: the last."""
        repeat, loads = alive or leaving, self._state.loads
        changes: list[Change] = [*self._changes.take_events()]
        loaded = self._changes.take_loaded()
        if repeat:
            changes.append(Alive(leaving))
            loaded.update(e for e in self._state.fleet.addresses() if loads.own(e).in_flight)
        if self._changes.take_offers_changed() or repeat:
            changes += self._offers(repeat=alive, leaving=leaving)
        changes += [self._loaded(e) for e in loaded]
        if (loaded or repeat) and (queueing := self._queueing(repeat=repeat)):
            changes.append(queueing)
        changes += self._changes.take_judged(repeat=repeat)
        counted = self._admission.counted(self._clock(), self._counted.at_us)
        if counted != self._counted or (alive and counted.at_us):
            self._counted = replace(counted, at_us=self._stamps.next_us())
            changes.append(self._counted)
        if line := self._admission.line(self._clock(), repeat=alive or self._line_lost):
            changes.append(self._in_line(line))
        self._line_lost = False
        turns, saved = self._turns()
        return Outbox([*changes, *turns], saved, self._learned() if alive and self.plans else b"")

    def _learned(self) -> bytes:
        """Return what the server is to keep of what was learned from measurements; empty: nothing new."""
        now, calibration = self._clock(), self._state.calibration
        if calibration.observed == self._learned_from or now - self._learned_at < LEARNED_S:
            return b""
        self._learned_at, self._learned_from = now, calibration.observed
        at_us = self._stamps.now_us()
        learned = [replace(one, at_us=at_us) for one in islice(calibration.learned(now), MAX_LEARNED)]
        return encode(Batch(self.replica, learned))

    def _loaded(self, address: str) -> Loaded:
        """Return what is told of the requests that this replica has at an endpoint."""
        own = self._state.loads.own(address)
        return Loaded(at_us=self._stamps.next_us(), endpoint=address, **own._asdict())

    def _queueing(self, *, repeat: bool) -> Queueing | None:
        """Return what is told of tenants' pending prefill here; None: nothing new."""
        queued = self._state.loads.queued(MAX_QUEUEING)
        if queued == self._queued and not (repeat and queued):
            return None
        self._queued = queued
        tenants = [
            QueuedOf(tenant, seconds) for tenant, seconds in queued.items() if isinstance(tenant, bytes)
        ]
        return Queueing(self._stamps.next_us(), tenants)

    def failed(self, outbox: Outbox) -> None:
        """Tell again what was taken, because it may not have reached the server."""
        elsewhere = self._elsewhere
        self._changes.put_back(outbox.changes)
        for change in outbox.changes:
            match change:
                case Bound():
                    if elsewhere.key(change.session):
                        elsewhere.tell(change.session)
                    elif (there := elsewhere.latest(change.session)) and there.bound == change:
                        elsewhere.tell_again(change)
                case Counted():
                    self._counted = Counted(self._counted.at_us, -1.0)  # differs from whatever is counted
                case InLine():
                    self._line_lost = True
                case Queueing():
                    self._queued = {b"": -1.0}  # differs from whatever is queued
                case Offered():
                    if change.stage is OfferStage.OVER:
                        self._offered.setdefault(change.subject, replace(change, seconds=1.0))
                    else:
                        self._offered.pop(change.subject, None)
        for name, _ in outbox.sessions:
            elsewhere.save(name)
        if outbox.learned:
            self._learned_from = -1  # differs from whatever was observed

    def _turns(self) -> tuple[list[Bound], list[tuple[bytes, bytes]]]:
        """Return the turns and ends of sessions to tell, and what the server is to keep of sessions."""
        elsewhere, now = self._elsewhere, self._clock()
        for name in elsewhere.take_turns_over():
            # While a move of the session is offered, the others must know, because it may switch only then.
            if self._state.offers.stands(name, now) and (session := self._state.sessions.named(name)):
                self._tell_turn(session)
        changes: list[Bound] = []
        for name in elsewhere.take_turns(MAX_BATCH):
            session = self._state.sessions.named(name)
            if session and session.host:
                changes.append(self._bound(session))
        told = elsewhere.take_told(MAX_BATCH)
        saved = []
        for name in elsewhere.take_unsaved(MAX_BATCH):
            if latest := self._latest(name):
                bound, stamp = latest
                saved.append((name, encode(Batch(stamp.replica, (bound,)))))
        if elsewhere.has_more:
            self._wake()
        return changes + told, saved

    def _tell_turn(self, session: Session) -> None:
        """Tell that the session's latest turn has ended, if that is so and it was decided here."""
        if session.stamp.replica == self.replica and session.ticket not in self._state.requests:
            self._elsewhere.tell(session.name)

    def _offers(self, *, repeat: bool, leaving: bool) -> list[Offered]:
        """Return what has changed in this replica's offers since the last call. `repeat`: return all of them.
        `leaving`: this replica stops, so it withdraws the moves whose KV has not arrived yet."""
        offers, now, told = self._state.offers, self._clock(), []
        unfinished = (OfferStage.OFFERED, OfferStage.COPYING) if leaving else ()
        mine = {o.subject: o for o in self._moving.offers() if o.stage not in unfinished}
        before, self._offered = self._offered, mine
        for name, offered in mine.items():
            known, latest = before.get(name), offers.stamp(name).replica
            is_new = known is None or not same(known, offered)
            if is_new or (repeat and latest in (self.replica, "")):
                told.append(replace(offered, at_us=self._stamps.next_us()))
        for name, offered in before.items():
            if name not in mine and offered.seconds and offers.stamp(name).replica == self.replica:
                told.append(
                    replace(
                        offered,
                        at_us=self._stamps.next_us(),
                        stage=OfferStage.OVER,
                        seconds=0.0,
                        transfer_bytes=0,
                    )
                )
        for offered in told:
            offers.hear(offered, Stamp(offered.at_us, self.replica), now)
        return told

    def _in_line(self, line: Line) -> InLine:
        now = self._clock()
        places = [
            PlaceInLine(
                session=self._name(place.session),
                tenant=self._name(place.tenant),
                tokens=place.tokens,
                arrived_us=place.arrived_us,
                rank_us=place.rank_us,
                number=place.number,
                back_s=None if place.back_at is None else place.back_at - now,
            )
            for place in line.places
        ]
        tenants = [
            TenantInLine(self._name(tenant), given.tokens, now - given.at)
            for tenant, given in line.given.items()
        ]
        return InLine(self._stamps.next_us(), places, tenants, line.pace)

    def _name(self, of: Hashable) -> bytes:
        """Return a name that no other replica uses for something else."""
        return of if isinstance(of, bytes) else f"{self.replica}:{of}".encode()[-64:]

    def _latest(self, name: bytes) -> tuple[Bound, Stamp] | None:
        """Return the session's latest turn, or its end, that is known here."""
        if session := self._state.sessions.named(name):
            return (self._bound(session), session.stamp) if session.host else None
        there = self._elsewhere.latest(name)
        return (there.bound, there.stamp) if there else None

    def _bound(self, session: Session) -> Bound:
        return Bound(
            at_us=session.stamp.at_us,
            session=session.name,
            host=session.host,
            turns=session.turns,
            context_tokens=session.context_tokens,
            body_bytes=session.body_bytes,
            bytes_per_token=session.bytes_per_token,
            blocks=len(session.chain),
            tail=session.tail,
            prompt_blocks=session.prompt_blocks,
            prompt_tail=session.prompt_tail,
            prompt_tokens=session.prompt_tokens,
            inferred=session.key.session_id if session.inferred else "",
            tenant=self._elsewhere.tenant(session.key.tenant) if session.inferred else b"",
            chained=session.chained,
            running=bool(session.runs_at) or session.ticket in self._state.requests,
        )

    # -- what the others tell ----------------------------------------------------------------------

    def apply(self, batch: Batch) -> None:
        """Merge another replica's batch into the state. Our own batches change nothing."""
        if batch.replica == self.replica:
            return
        self._peers.hear(batch.replica, self._clock())
        self._merge(batch)

    def _merge(self, batch: Batch, *, stored: bool = False) -> None:
        now, replica, now_us = self._clock(), batch.replica, self._stamps.now_us()
        self.dropped += batch.unknown
        for why in batch.damage:
            self._damaged(replica, why)
        for change in batch.changes:
            if why := implausible(change, now_us):
                self.dropped += 1
                self._damaged(replica, f"{type(change).__name__}: {why}")
                continue
            self.received += 1
            match change:
                case Bound():
                    heard_at = now - self._stamps.age_s(change.at_us) if stored else now
                    self._session(change, Stamp(change.at_us, replica), heard_at)
                case Loaded():
                    self._load(change, replica)
                case Queueing():
                    self._queue(change, replica)
                case Ejected():
                    self._ejection(change, Stamp(change.at_us, replica), now)
                case Counted():
                    self._count(change, replica)
                case InLine():
                    self._line(change, replica, now)
                case Offered():
                    self._offer(change, Stamp(change.at_us, replica), now)
                case Measured():
                    self._measurement(change, replica, now)
                case Learned():
                    self._take_over(change, now)
                case Claimed():
                    self._claim(change, now)
                case Alive(leaving=True):
                    self._gone(replica)
        self._elsewhere.trim(self._state.sessions.max_sessions)

    def _damaged(self, replica: str, why: str) -> None:
        """Log the first damaged change of each kind; all are counted."""
        kind = why.partition(":")[0]
        if kind not in self._damaged_kinds:
            self._damaged_kinds.add(kind)
            log.warning(
                "shared state has a damaged change replica=%s error=%s; others of its kind are only counted",
                replica,
                why[:200],
            )

    def reconcile(self, stored: Iterable[Batch]) -> None:
        """Merge what the server has kept, and note the sessions of which it lacks the latest turn."""
        found: dict[bytes, Stamp] = {}
        for batch in stored:
            for change in batch.changes:
                if isinstance(change, Bound) and not implausible(change, self._stamps.now_us()):
                    found[change.session] = Stamp(change.at_us, batch.replica)
            self._merge(batch, stored=True)
        for name in self._elsewhere.names():
            latest, kept = self._latest(name), found.get(name, NEVER)
            if latest is None or latest[1] <= kept or not (latest[0].host or kept is not NEVER):
                continue
            if latest[1].replica != self.replica:
                self._elsewhere.save(name)
            elif self._elsewhere.key(name):
                self._elsewhere.tell(name)
            else:
                self._elsewhere.tell_again(latest[0])

    def lapse(self) -> None:
        """Forget the load of replicas that are not heard any more."""
        now = self._clock()
        self._state.offers.lapse(now)
        self._elsewhere.trim(self._state.sessions.max_sessions)
        for replica in self._peers.late(now):
            self._gone(replica)

    def alone(self) -> None:
        """Forget the load of all other replicas, because the server is away."""
        for replica in self._peers.all():
            self._gone(replica)

    def _gone(self, replica: str) -> None:
        self._peers.forget(replica)
        self._counts.pop(replica, None)
        self._lines.pop(replica, None)
        self._queues.pop(replica, None)
        self._state.loads.set_queued_elsewhere(replica, {})
        self._admission.gone(replica, self._clock())
        for there, endpoint in [load for load in self._loads if load[0] == replica]:
            del self._loads[there, endpoint]
            self._state.loads.set_elsewhere(replica, endpoint, NOTHING)

    def _session(self, bound: Bound, stamp: Stamp, heard_at: float) -> None:
        self._stamps.saw(bound.at_us)
        sessions, elsewhere = self._state.sessions, self._elsewhere
        session = sessions.named(bound.session)
        if session is None:
            before = elsewhere.latest(bound.session)
            if before is None or (stamp, not bound.running) > (before.stamp, not before.bound.running):
                elsewhere.hear(bound, stamp, heard_at)
                if not bound.running and self._state.offers.stands(bound.session, self._clock()):
                    self._state.facts.tell(TurnOver())
        elif stamp > session.stamp and bound.moved_from and session.stamp.replica == self.replica:
            if session.host == bound.moved_from:  # else a later turn here has moved it
                sessions.hand_over(session, bound.host, heard_at)
        elif stamp > session.stamp:
            elsewhere.superseded(bound.session)
            if bound.host:
                sessions.learn(session.key, bound, stamp, heard_at)
                if not bound.moved_from:
                    self._admission.turn_elsewhere(session.key)
            else:
                sessions.forget(session.key)
                elsewhere.hear(bound, stamp, heard_at)
        elif stamp == session.stamp and session.runs_at and not bound.running:
            session.runs_at = ""
            self._state.facts.tell(TurnOver())

    def _load(self, change: Loaded, replica: str) -> None:
        self._stamps.saw(change.at_us)
        if not self._state.fleet.get(change.endpoint):
            return
        if change.at_us > self._loads.get((replica, change.endpoint), 0):
            self._loads[replica, change.endpoint] = change.at_us
            self._state.loads.set_elsewhere(
                replica,
                change.endpoint,
                AtEndpoint(
                    change.in_flight,
                    change.prefilling,
                    change.pending_tokens,
                    change.pending_s,
                    change.context_tokens,
                ),
            )

    def _queue(self, change: Queueing, replica: str) -> None:
        self._stamps.saw(change.at_us)
        if change.at_us > self._queues.get(replica, 0):
            self._queues[replica] = change.at_us
            queued: dict[Hashable, float] = {of.tenant: of.pending_s for of in change.tenants}
            self._state.loads.set_queued_elsewhere(replica, queued)

    def _count(self, change: Counted, replica: str) -> None:
        self._stamps.saw(change.at_us)
        if change.at_us > self._counts.get(replica, 0):
            self._counts[replica] = change.at_us
            self._admission.counted_elsewhere(replica, change)

    def _line(self, change: InLine, replica: str, now: float) -> None:
        self._stamps.saw(change.at_us)
        if change.at_us <= self._lines.get(replica, 0):
            return
        self._lines[replica] = change.at_us
        places = tuple(
            Place(
                session=place.session,
                tenant=place.tenant,
                tokens=place.tokens,
                arrived=now - self._stamps.age_s(place.arrived_us),
                arrived_us=place.arrived_us,
                rank_us=place.rank_us,
                number=place.number,
                back_at=None if place.back_s is None else now + place.back_s,
            )
            for place in change.places
        )
        given: dict[Hashable, Given] = {
            one.tenant: Given(one.tokens, now - one.seconds) for one in change.tenants
        }
        self._admission.line_elsewhere(replica, Line(places, given, change.pace))

    def _offer(self, change: Offered, stamp: Stamp, now: float) -> None:
        self._stamps.saw(change.at_us)
        if self._state.offers.hear(change, stamp, now) and (
            session := self._state.sessions.named(change.subject)
        ):
            self._tell_turn(session)

    def _ejection(self, change: Ejected, stamp: Stamp, now: float) -> None:
        self._stamps.saw(change.at_us)
        endpoint, cause = change.endpoint, change.cause
        if self._state.fleet.get(endpoint) and self._changes.judged_elsewhere(endpoint, cause, stamp):
            self._state.ejection.learn(endpoint, cause, now)

    def _measurement(self, seen: Measured, replica: str, now: float) -> None:
        self._stamps.saw(seen.at_us)
        if seen.at_us > self._measured_until.get(replica, 0) and self._state.fleet.get(seen.endpoint):
            self._measured_until[replica] = seen.at_us
            if len(self._measured_until) > MAX_MEASURING:
                self._measured_until.popitem(last=False)
            self._state.calibration.learn(seen, now)

    def _take_over(self, learned: Learned, now: float) -> None:
        if all(self._state.fleet.get(of) for of in (learned.endpoint, learned.source) if of):
            self._state.calibration.take_over(learned, now - self._stamps.age_s(learned.at_us))

    def _claim(self, change: Claimed, now: float) -> None:
        if self._state.fleet.get(change.endpoint):
            blocks = unpacked(change.blocks)
            self._state.index.speculate(change.endpoint, blocks, now, change.seconds, change.parent)

    # -- questions ---------------------------------------------------------------------------------

    @property
    def plans(self) -> bool:
        """Whether this replica is the one that plans moves."""
        return self._peers.this_is_first

    @property
    def peers(self) -> int:
        """Number of other replicas that are alive."""
        return len(self._peers)

    @property
    def sessions(self) -> int:
        """Number of sessions that only other replicas have routed."""
        return self._elsewhere.count

    @property
    def latest_us(self) -> int:
        """The latest stamp that can be true now."""
        return self._stamps.now_us() + AHEAD_US

    @property
    def session_idle_ms(self) -> int:
        """Milliseconds after which an idle session is forgotten."""
        return max(1, int(self._state.sessions.idle_s * 1_000))
