"""Applies hand-offs to the state, and tells the applier of their legs what to send.

    planner's offers ─▶ moves/handoff.step ─┬─▶ legs ─▶ feeds/handoff_legs.py ─▶ accepted, took, failed ─┐
    events, ends of turns, time ────────────┤                                                          │
                       ▲                    ├─▶ the session's new host                                 │
                       └────────────────────┴──────────────────────────────────────────────────────────┘

A give leg is load on the host: one block to compute and the context's blocks, which stay until they are
fetched. A take leg reserves the context's room on the target. The bytes count against the link's budget from
the first leg to the end. What a take leg needed, less its overhead, teaches the calibration how fast the link
is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace as replace_fields

from perilune_api.pool import MoveTrigger, Pool
from perilune_gateway.model import Move, MoveReason, SessionKey, Subject, Tier
from perilune_gateway.model.handoff import (
    Content,
    GivenUp,
    HandoffOutcome,
    HandoffRecord,
    Immovable,
    Leg,
)
from perilune_gateway.model.kv_reach import kv_reach
from perilune_gateway.model.shared import Offered, OfferStage, prefix_name
from perilune_gateway.moves.gatherer import PoolGatherer
from perilune_gateway.moves.handoff import (
    Copy,
    Handoff,
    Handoffs,
    Over,
    Stage,
    Standing,
    Switch,
    may_follow,
)
from perilune_gateway.moves.planner import Planner
from perilune_gateway.state.connectors import Connector
from perilune_gateway.state.facts import BlocksChanged, HandedOver, LegsDue, OffersChanged
from perilune_gateway.state.in_flight import Load
from perilune_gateway.state.offers import MOVING, STANDS_S
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import TurnOver
from perilune_gateway.state.session import Session

KEPT_SHARE = 0.25
"""Share of an endpoint's KV cache that it may keep for engines which have not fetched it yet."""


class Legs(Struct, frozen=True, gc=False, kw_only=True):
    """The two requests of one round."""

    handoff: Handoff
    transfer_id: str
    model: str
    content: Content
    source: str
    target: str
    bootstrap: str
    """The source's bootstrap page, `ip:port`."""
    from_store: bool = False
    """Whether the target reads the store; then there is no give leg."""


class HandoffStats(Struct, frozen=True, kw_only=True):
    """Statistics of a pool's hand-offs."""

    open: Sequence[Handoff]
    outcomes: Mapping[tuple[MoveReason, HandoffOutcome], int]
    given_up: Mapping[GivenUp, int]
    immovable: Mapping[Immovable, int]
    legs: Mapping[Leg, int]
    """Number of legs that have ended."""
    leg_seconds: Mapping[Leg, float]
    transfer_bytes: int
    """Bytes that ended hand-offs asked for."""
    token_bytes: int
    """Memory in use for token ids."""
    token_max_bytes: int
    tokens_forgotten: int
    """Number of blocks whose token ids were forgotten because the memory was used up."""
    tokens_missing: int
    """Number of those that an endpoint still caches."""
    connectors: Mapping[str, Connector]
    """What the endpoints can, by address."""


class HandingOver:
    """The hand-offs of one pool; also the `World` that their steps ask."""

    def __init__(
        self,
        state: PoolState,
        planner: Planner,
        handoffs: Handoffs,
        gatherer: PoolGatherer,
        open_pulls: Mapping[int, Move],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`open_pulls`: by ticket, the KV that is on its way with requests; the other replicas are told of
        it."""
        self._state = state
        self._planner = planner
        self._handoffs = handoffs
        self._gatherer = gatherer
        self._open_pulls = open_pulls
        self._clock = clock
        self._wall_clock = wall_clock
        self._due: list[Legs] = []
        self._tickets: dict[Handoff, int] = {}
        self._copies: dict[Handoff, tuple[int, float]] = {}
        """Open hand-off → (tokens to pull, predicted seconds) of its round."""
        self._running: dict[tuple[Handoff, Leg], tuple[Load, float]] = {}
        """(hand-off, leg) → (its load, its start)."""
        self._leg_counts: Counter[Leg] = Counter()
        self._leg_seconds: defaultdict[Leg, float] = defaultdict(float)
        self._outcomes: Counter[tuple[MoveReason, HandoffOutcome]] = Counter()
        self._given_up: Counter[GivenUp] = Counter()
        self._bytes = 0

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        self._model = pool.spec.model.name
        self._worth = pool.spec.routing.migration.worth
        self._gatherer.configure(pool.spec)
        memory = pool.spec.routing.migration.token_memory_bytes
        knows = kv_reach(pool.spec).hands_over or self._gatherer.prewarms
        self._state.block_tokens.max_bytes = memory if knows else 0

    def stats(self) -> HandoffStats:
        tokens = self._state.block_tokens
        return HandoffStats(
            open=self._handoffs.open,
            outcomes=dict(self._outcomes),
            given_up=dict(self._given_up),
            immovable=dict(self._gatherer.immovable),
            legs=dict(self._leg_counts),
            leg_seconds=dict(self._leg_seconds),
            transfer_bytes=self._bytes,
            token_bytes=tokens.bytes,
            token_max_bytes=tokens.max_bytes,
            tokens_forgotten=tokens.forgotten,
            tokens_missing=tokens.missing,
            connectors=dict(self._state.connectors.known),
        )

    # -- what happens ------------------------------------------------------------------------------

    def planned(self, plans: bool = True) -> None:
        """Record that the planner has made a new plan; called at the planner's interval. `plans`: whether
        this replica is the one that plans. It also ends what others, which may be gone, have copied."""
        now, offers = self._clock(), self._state.offers
        self._handoffs.offer(
            [move for move in self._planner.ahead if not offers.moves(self._name(move.subject), now)], now
        )
        if plans:
            for offered in offers.all_elsewhere(now):
                if session := self._state.sessions.named(offered.subject):
                    self.follow(session)
        self.step()

    def on_blocks_changed(self, fact: BlocksChanged) -> None:
        """Take a copy for confirmed, or what the host of a copied session holds for complete."""
        applied = fact.applied
        if applied.stored and applied.tier is Tier.DEVICE and self._handoffs.awaits(applied.endpoint):
            self.step()

    def on_turn_over(self, fact: TurnOver) -> None:
        """Let sessions switch that waited for the end of a turn."""
        if self._handoffs.open:
            self.step()

    def due(self) -> list[Legs]:
        """Return the rounds to begin, each once."""
        due, self._due = self._due, []
        return due

    def giving(self, legs: Legs) -> None:
        """Record that the give leg is sent: the host computes the last block and keeps all blocks."""
        size = self._state.block_tokens.block_size
        self._begin(legs, Leg.GIVE, legs.source, size)

    def taking(self, legs: Legs) -> None:
        """Record that the host has accepted the give leg, and the take leg is sent."""
        self._begin(legs, Leg.TAKE, legs.target, 0)

    def ended(self, legs: Legs, leg: Leg) -> None:
        """Record that a leg has ended, however. Ignore legs that were not sent."""
        running = self._running.pop((legs.handoff, leg), None)
        if running is None:
            return
        load, since = running
        self._state.loads.finish(load)
        self._leg_counts[leg] += 1
        self._leg_seconds[leg] += self._clock() - since

    def took(self, legs: Legs, cached_tokens: int, seconds: float) -> None:
        """Record that the take leg has answered after `seconds`; the target computed all but
        `cached_tokens`."""
        if legs.handoff not in self._copies:
            return  # it was given up meanwhile
        now, state = self._clock(), self._state
        missing, predicted_s = self._copies[legs.handoff]
        tokens = legs.content.tokens
        if missing and cached_tokens >= tokens:
            took_s = max(0.001, seconds - state.calibration.engine.leg_overhead_s(tokens))
            if legs.from_store:
                state.calibration.store(legs.target, took_s, predicted_s, now)
            else:
                state.calibration.transfer(legs.source, legs.target, took_s, predicted_s, now)
        self._handoffs.took(legs.handoff, cached_tokens, now)
        self.step()

    def failed(self, legs: Legs, cause: GivenUp) -> None:
        """Record that a leg has failed."""
        self._handoffs.failed(legs.handoff, cause)
        self.step()

    # -- what follows ------------------------------------------------------------------------------

    def step(self) -> None:
        """Do what the hand-offs' present state asks for."""
        now, open_before = self._clock(), len(self._tickets)
        for effect in self._handoffs.step(self, now):
            match effect:
                case Copy(handoff, missing_tokens):
                    self._copy(handoff, missing_tokens, now)
                case Switch(handoff):
                    self._switch(handoff, now)
                case Over(handoff):
                    self._over(handoff, now)
        if self._handoffs.open or len(self._tickets) != open_before:
            self._state.facts.tell(OffersChanged())
        if self._due:
            self._state.facts.tell(LegsDue())

    def keeps(self, session: Session) -> bool:
        """Return whether the session stays on its host until its KV has been handed over. It stays while it
        is copied, here or by another replica, and on a host that drains if its KV can be copied."""
        now, moves = self._clock(), self._handoffs.moves
        if moves(session.key) or moves(session.name) or self._state.offers.moves(session.name, now):
            return True
        host = self._state.fleet.get(session.host)
        if host is None or not host.draining or MoveTrigger.DRAIN not in self._planner.triggers:
            return False
        return self._gatherer.can_be_copied(session, now)

    # -- among replicas ----------------------------------------------------------------------------

    def follow(self, session: Session) -> None:
        """Bind the session to the target of another replica's hand-off if its KV has arrived there: a turn of
        the session has come, or the planner looks after it."""
        if not self._state.offers:
            return
        now = self._clock()
        offered = self._state.offers.elsewhere(session.name, now)
        if offered is None or offered.stage not in MOVING:
            return
        source, target = offered.source, offered.target
        if may_follow(session.key, source, target, offered.tail, self, now):
            self._rebind(session, source, target, now)

    def offered(self, subject: Subject, name: bytes) -> Move | None:
        """Return another replica's offer for this session or prefix if a request carries it out."""
        if not self._state.offers:
            return None
        offered = self._state.offers.elsewhere(name, self._clock())
        if offered is None or offered.stage is not OfferStage.OFFERED or offered.transfer_bytes:
            return None
        return Move(
            subject=subject,
            reason=offered.reason,
            source=offered.source,
            target=offered.target,
            cost_s=offered.cost_s,
            benefit_s=offered.benefit_s,
            worth=self._worth,
            turns=offered.turns,
            release=offered.reason is not MoveReason.REPLICATE,
        )

    def transfers(self, address: str) -> int:
        """Return the number of transfers that begin or end at the endpoint now, here or at other replicas, or
        wait to begin there. A hand-off may count twice."""
        under_way = self._handoffs.copies(address) + self._planner.transfers(address)
        return under_way + self._handoffs.waiting(address)

    def offers(self) -> list[Offered]:
        """Return what this replica offers, copies, or began within the last minute, without stamps. Of moves
        away from where a session is not any more, another replica's are the truth. KV that goes with requests
        counts as a copy under a name of its own."""
        now, others = self._clock(), self._state.offers
        pulls = [
            replace_fields(
                self._as_offered(move, OfferStage.COPYING),
                subject=f"{others.replica} {ticket}".encode(),
                seconds=STANDS_S[OfferStage.OFFERED],
            )
            for ticket, move in self._open_pulls.items()
        ]
        began = {move.subject: (at, move) for at, move in self._planner.begun(now)}
        found = {s: self._as_offered(move, OfferStage.OVER, now - at) for s, (at, move) in began.items()}
        for move in self._planner.by_request:
            found[move.subject] = self._as_offered(move, OfferStage.OFFERED)
        for handoff in self._handoffs.open:
            stage, content = OfferStage(handoff.stage), handoff.content
            begun_s = None if stage is OfferStage.OFFERED else now - handoff.began_at
            found[handoff.move.subject] = replace_fields(
                self._as_offered(handoff.move, stage, begun_s),
                transfer_bytes=handoff.transfer_bytes or handoff.move.transfer_bytes,
                tokens=content.tokens if content else 0,
                tail=content.blocks[-1] if content else 0,
            )
        return [
            offered
            for offered in (*found.values(), *pulls)
            if offered.subject
            and not (
                offered.stage is OfferStage.OFFERED
                and others.carried_out(offered.subject, offered.source, now)
            )
        ]

    def _as_offered(self, move: Move, stage: OfferStage, begun_s: float | None = None) -> Offered:
        return Offered(
            at_us=0,
            subject=self._name(move.subject),
            reason=move.reason,
            source=move.source,
            target=move.target,
            stage=stage,
            seconds=STANDS_S[stage],
            begun_s=begun_s,
            transfer_bytes=0 if stage is OfferStage.OVER else move.transfer_bytes,
            cost_s=max(0.0, move.cost_s),
            benefit_s=move.benefit_s,
            turns=move.turns,
        )

    def _name(self, subject: Subject) -> bytes:
        """Return the subject's name among replicas. It is empty if it has none."""
        if isinstance(subject, int):
            return prefix_name(subject)
        if isinstance(subject, bytes):
            return subject
        session = self._state.sessions.get(subject) if isinstance(subject, SessionKey) else None
        return session.name if session else b""

    # -- the legs, the switch, the end -------------------------------------------------------------

    def _copy(self, handoff: Handoff, missing_tokens: int, now: float) -> None:
        move, content, state = handoff.move, handoff.content, self._state
        source = state.fleet.get(move.source)
        assert content is not None
        if handoff not in self._tickets:
            self._tickets[handoff] = self._planner.started(
                replace(move, transfer_bytes=handoff.transfer_bytes), now
            )
        link = state.fleet.link(move.target, move.source)
        engine, from_store = state.calibration.engine, self._gatherer.prewarms
        if from_store:
            predicted_s = engine.store_s(missing_tokens)
        else:
            predicted_s = engine.transfer_s(missing_tokens, link.bandwidth_bytes_per_s) if link else 0.0
        self._copies[handoff] = missing_tokens, predicted_s
        self._due.append(
            Legs(
                handoff=handoff,
                transfer_id=f"perilune-{uuid4().hex}",
                model=content.lora or self._model,
                content=content,
                source=move.source,
                target=move.target,
                bootstrap=source.bootstrap if source else "",
                from_store=from_store,
            )
        )

    def _switch(self, handoff: Handoff, now: float) -> None:
        move, state = handoff.move, self._state
        session = state.sessions.of(move.subject, now)
        assert session is not None, "step asks for standing first"
        self._rebind(session, move.source, move.target, now)

    def _rebind(self, session: Session, source: str, target: str, now: float) -> None:
        self._state.sessions.hand_over(session, target, now)
        self._state.fleet.moved(source, target, now)

    def _over(self, handoff: Handoff, now: float) -> None:
        record = HandoffRecord(
            move=handoff.move,
            outcome=handoff.outcome,
            cause=handoff.cause,
            tokens=handoff.content.tokens if handoff.content else 0,
            pulled_tokens=handoff.pulled_tokens,
            transfer_bytes=handoff.transfer_bytes,
            rounds=handoff.rounds,
            seconds=now - handoff.began_at,
            time=self._wall_clock(),
        )
        self._bytes += handoff.transfer_bytes
        self._outcomes[record.move.reason, record.outcome] += 1
        if record.cause:
            self._given_up[record.cause] += 1
        self._copies.pop(handoff, None)
        ticket = self._tickets.pop(handoff)
        arrived = handoff.stage is not Stage.GIVEN_UP
        self._planner.finished(ticket, now, arrived=arrived, handoff=record)
        self._state.facts.tell(HandedOver(record))
        if not arrived:
            self._state.facts.tell(LegsDue())

    def _begin(self, legs: Legs, leg: Leg, address: str, uncached_tokens: int) -> None:
        """Count a leg as load."""
        engine = self._state.calibration.speed(address, self._clock()).engine
        load = self._state.loads.start(
            address,
            uncached_tokens=uncached_tokens,
            prefill_s=engine.prefill_s(uncached_tokens, legs.content.tokens) if uncached_tokens else 0.0,
            context_tokens=legs.content.tokens,
        )
        self._running[legs.handoff, leg] = load, self._clock()

    # -- the world ---------------------------------------------------------------------------------

    def standing(self, subject: Subject) -> Standing | None:
        state, now = self._state, self._clock()
        session = state.sessions.of(subject, now)
        if session is None:
            return None
        _, held_tokens = state.held_end(session, now)
        if session.follows:
            whole = state.fleet.whole_blocks(session.host, session.fork)
            prompt_end = session.chain[whole - 1] if whole else 0
        else:
            prompt_end = session.shared_tail
        announced = not prompt_end or state.index.announced(session.host, prompt_end)
        return Standing(
            session.host,
            held_tokens,
            session.ticket in state.requests or state.sessions.runs_elsewhere(session),
            announced and not session.unconfirmed,
        )

    def content(self, subject: Subject) -> Content | None:
        return self._gatherer.content(subject, self._clock())

    def missing_tokens(self, target: str, content: Content, now: float) -> int:
        held = self._state.index.leading(target, content.blocks, now)
        return content.tokens - held * self._state.block_tokens.block_size

    def confirmed(self, target: str, block: int) -> bool:
        return self._state.index.announced(target, block)

    def can_copy(self, source: str, target: str) -> bool:
        return self._gatherer.prewarms or self._state.connectors.can(source, target)

    def may_choose(self, target: str) -> bool:
        return self._state.fleet.takes_sessions(target, self._clock())

    def kv_bytes(self, tokens: int) -> int:
        return self._state.calibration.engine.kv_bytes(tokens)

    def keeps_room(self, source: str, tokens: int) -> bool:
        return tokens <= KEPT_SHARE * self._state.fleet.kv_tokens(source)

    def affords(self, move: Move, transfer_bytes: int, now: float) -> bool:
        return self._planner.affords(move, transfer_bytes, now)
