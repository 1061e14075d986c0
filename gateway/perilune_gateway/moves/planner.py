"""Plans moves in the background, and lets the next request of a session or prefix carry each one out.

    facts ─▶ plan(now), every second ─▶ offers ─┐
    a request's decision ─────▶ redirected ─────┴─▶ the decision, moved ─▶ started ─▶ finished
                                        └─▶ why the offer lapses ─▶ lapsed

1. `plan` gathers the endpoints that sessions should leave, their recently active sessions, hot prefixes and
the budget, and calls `plan.plan_migration`. Each plan replaces the offers of the plan before. 2. `redirected`
runs after the policy has decided. An offer for the request's session, or for the prefix of a new session,
replaces the decision if the target may still be chosen, is no busier than the host, has KV room, and the
budget allows it. If the policy itself moves the session, the offer lapses. Where engines hand KV over to each
other, no request carries an offer out that needs it: handoff.py copies the KV first. 3. A move lasts from
`started`, the request's decision, to `finished`, when its prefill ends, its answer begins or it ends. In
between, its bytes count as on their way.

The gateway and the simulator use the same class with different `Gatherer`s. Time is an argument. A request
costs one dict look-up; plan.py states the cost of a plan.

Moves that a policy makes itself do not count against the budget. A moved session's old copy (`Move.release`)
stays on the engine until its LRU evicts it, because engines cannot be told to free it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from msgspec import structs

from perilune_api.policies import PolicyName
from perilune_api.pool import Migration, MoveTrigger
from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Decision, Move, MoveReason, Reason, RequestView, Subject
from perilune_gateway.model.handoff import HandoffRecord
from perilune_gateway.moves.budget import Elsewhere, Moves
from perilune_gateway.moves.plan import Plan, PrefixFacts, SessionFacts, plan_migration, pressed
from perilune_gateway.policy import POLICIES
from perilune_gateway.policy.cost import cheapest_fetch, has_kv_room
from perilune_gateway.state.facts import OffersChanged, Tell, nobody

LOOKED_AT = 32
"""Maximum number of sessions that one plan considers, the most recently used ones. Those that the plans
before left where they are come last."""
ACTIVE_S = 60.0
"""Seconds of idleness after which a session may move only from a draining endpoint, because it may never
continue. (90 % of an agent's turns follow within 44 s.)"""
PREFIXES = 64
"""Maximum number of prefixes that the planner remembers, those that new sessions used last."""
KEPT = 256
"""Maximum number of ended moves that the planner remembers."""


class Lapse(StrEnum):
    """Why an offer was not carried out."""

    WITHDRAWN = "withdrawn"
    """The next plan no longer contains it."""
    POLICY = "policy"
    """The session has another host by now, or the policy moved it."""
    EXCLUDED = "excluded"
    """The target may not be chosen."""
    BUSY = "busy"
    """The target's queue is not shorter than the host's or, for a copy, the target is hot."""
    NO_ROOM = "no_room"
    """The prompt does not fit into the target's KV pool."""
    BUDGET = "budget"
    """The prompt has grown: its bytes would exceed the link's budget."""


class State(StrEnum):
    """State of a planned move."""

    PLANNED = "planned"
    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    """The request ended before the target had the KV."""
    LAPSED = "lapsed"


class Gatherer(Protocol):
    """Gathers what a plan is made of."""

    @property
    def pullable(self) -> bool:
        """Return whether engines can pull KV from each other."""

    @property
    def ahead(self) -> bool:
        """Return whether they pull it before a session moves, see `handoff`. If not, the session's next
        request waits for it."""

    def endpoints(self, now: float, near: Collection[str] = ()) -> Sequence[Candidate]:
        """Return all endpoints of the pool, each with its links to the addresses `near`."""

    def link(self, source: str, target: str, now: float) -> Link | None:
        """Return the link from `source` to `target`, as slow as it was measured; None if it is not known."""

    def sessions(
        self, host: str, limit: int, now: float, last: Collection[Subject] = ()
    ) -> Sequence[SessionFacts]:
        """Return at most `limit` sessions bound to `host`, the most recently used first, but those of `last`
        after all others and in its order."""

    def live_tokens(self, now: float, active_s: float) -> Mapping[str, int] | None:
        """Return the tokens of the contexts of each endpoint's sessions that were used within `active_s`;
        None if they are not known."""

    def prefix(self, name: Subject, tokens: int, now: float) -> PrefixFacts | None:
        """Return the facts of a prefix, or None if no endpoint caches it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A move or an offer that has ended."""

    move: Move
    state: State
    at: float
    lapse: Lapse | None = None
    seconds: float = 0.0
    """Seconds from the request's decision, or from the first give leg, to the end of the move."""
    handoff: HandoffRecord | None = None
    """How the KV was handed over; None if a request carried the move out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStats:
    """Statistics of the planner."""

    triggers: Sequence[MoveTrigger]
    planned_at: float
    moves_left: int | None
    """Number of moves left in the pool's budget of this minute; None: the pool does not limit it."""
    in_flight: Mapping[tuple[str, str], int]
    """Bytes on their way, by (source, target)."""
    moves: Mapping[tuple[MoveReason, State], int]
    lapses: Mapping[Lapse, int]
    stays: Mapping[MoveReason, int]
    """Number of verdicts not to move; repeated verdicts for one session and reason count once."""


class Planner:
    """One pool's planner."""

    def __init__(
        self,
        gatherer: Gatherer,
        link_bytes: int | None = None,
        elsewhere: Elsewhere | None = None,
        tell: Tell = nobody,
    ) -> None:
        """`link_bytes`: most bytes on their way between two endpoints; None: by their link's measured speed.
        `elsewhere`: what other replicas of the gateway move. `tell` hears `OffersChanged`."""
        self._gatherer = gatherer
        self._moves = Moves(link_bytes, elsewhere)
        self._tell = tell
        self._sessions: dict[Subject, Move] = {}
        self._copies: dict[Subject, Move] = {}
        self._prefixes: OrderedDict[Subject, int] = OrderedDict()
        self._counts: Counter[tuple[MoveReason, State]] = Counter()
        self._lapses: Counter[Lapse] = Counter()
        self._stays: Counter[MoveReason] = Counter()
        self._stayed: dict[Subject, Move] = {}
        """What the plans left where it is, each with the last verdict. A plan looks at these after all
        others, beginning with the one that waited longest, so they hide no session that can move."""
        self._params = Migration()
        self._policy = ""
        self.last = Plan()
        self.planned_at = float("-inf")
        self.ended: deque[Ended] = deque(maxlen=KEPT)

    def configure(self, migration: Migration, policy: str) -> None:
        """Take over the pool's settings."""
        self._params, self._policy = migration, policy

    @property
    def triggers(self) -> Sequence[MoveTrigger]:
        """The situations in which it acts now."""
        return triggers(self._params, self._policy, ahead=self._gatherer.ahead and self._gatherer.pullable)

    # -- plan --------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Make a new plan; its moves replace all offers."""
        gatherer, params, on = self._gatherer, self._params, self.triggers
        hosts = pressed(gatherer.endpoints(now), params, on)[:LOOKED_AT] if on else []
        prefixes = self._hot_prefixes(now)
        if hosts or prefixes:
            near = {*hosts, *(prefix.locations[0].address for prefix in prefixes)}
            endpoints = gatherer.endpoints(now, near)
            budget = self._moves.budget(now, params, len(endpoints))
            plan = plan_migration(
                self._gather(hosts, endpoints, now),
                endpoints,
                budget,
                params,
                prefixes,
                pullable=gatherer.pullable,
                ahead=gatherer.ahead,
                live=gatherer.live_tokens(now, ACTIVE_S),
                triggers=on,
            )
        else:
            plan = Plan()
        self._replace(plan, now)
        return plan

    def withdraw(self, now: float) -> None:
        """Withdraw all offers."""
        self._replace(Plan(), now)

    def _gather(self, hosts: Sequence[str], endpoints: Sequence[Candidate], now: float) -> list[SessionFacts]:
        draining = {c.address for c in endpoints if c.draining}
        each = max(1, LOOKED_AT // max(1, len(hosts)))
        self._stayed = {subject: stay for subject, stay in self._stayed.items() if stay.source in hosts}
        return [
            session
            for host in hosts
            for session in self._gatherer.sessions(host, each, now, self._stayed)
            if session.idle_s <= ACTIVE_S or host in draining
        ]

    def _hot_prefixes(self, now: float) -> list[PrefixFacts]:
        if MoveTrigger.REPLICATE not in self.triggers:
            return []
        hot = []
        for name, tokens in list(self._prefixes.items()):
            facts = self._gatherer.prefix(name, tokens, now)
            if facts and facts.frequency_score >= self._params.replicate_score:
                hot.append(facts)
            else:
                del self._prefixes[name]  # until a new session begins with it again
        return hot

    def _replace(self, plan: Plan, now: float) -> None:
        before = {**self._sessions, **self._copies}
        offered = {move.subject: move for move in plan.moves}
        for subject, move in before.items():
            if subject not in offered or offered[subject].target != move.target:
                self._over(move, State.LAPSED, now, Lapse.WITHDRAWN)
        for subject, move in offered.items():
            if subject not in before or before[subject].target != move.target:
                self._counts[move.reason, State.PLANNED] += 1
        for move in plan.stays:
            before_it = self._stayed.pop(move.subject, None)
            self._stays[move.reason] += before_it is None or before_it.reason is not move.reason
            self._stayed[move.subject] = move
        for move in plan.moves:
            self._stayed.pop(move.subject, None)
        self._sessions = {m.subject: m for m in plan.moves if m.reason is not MoveReason.REPLICATE}
        self._copies = {m.subject: m for m in plan.moves if m.reason is MoveReason.REPLICATE}
        self.last, self.planned_at = plan, now
        if before or offered:
            self._tell(OffersChanged())

    # -- requests ----------------------------------------------------------------------------------

    @property
    def offers(self) -> Sequence[Move]:
        return (*self._sessions.values(), *self._copies.values())

    @property
    def ahead(self) -> Sequence[Move]:
        """The offers whose KV is copied before the switch; no request carries them out."""
        return tuple(move for move in self.offers if self._is_ahead(move))

    @property
    def by_request(self) -> Sequence[Move]:
        """The offers that requests carry out."""
        return tuple(move for move in self.offers if not self._is_ahead(move))

    def begun(self, now: float) -> Sequence[tuple[float, Move]]:
        """Return the moves that began within the last minute, each with its start."""
        return self._moves.begun(now)

    def saw(self, prefix: Subject, tokens: int) -> None:
        """Record that a new session began with a cached prefix of `tokens` tokens."""
        if MoveTrigger.REPLICATE not in self.triggers:
            return
        self._prefixes[prefix] = tokens
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)

    def offer(self, session: Subject | None, prefix: Subject | None) -> Move | None:
        """Return the offer that a request carries out: of a bound session, or of a new session whose prompt
        begins with `prefix`."""
        offer = self._sessions.get(session) if session is not None else self._copies.get(prefix)
        return None if offer is None or self._is_ahead(offer) else offer

    def redirected(
        self,
        offer: Move,
        decision: Decision,
        request: RequestView,
        candidates: Sequence[Candidate],
        now: float,
    ) -> Decision | Lapse:
        """Return the decision with the offer carried out, or why the offer lapses. Change nothing."""
        moved = redirect(offer, decision, request, candidates, self._params)
        if isinstance(moved, Lapse):
            return moved
        assert moved.move is not None
        return moved if self.affords(moved.move, moved.move.transfer_bytes, now) else Lapse.BUDGET

    def lapsed(self, offer: Move, lapse: Lapse, now: float) -> None:
        """Record that an offer is not carried out."""
        self._drop(offer)
        self._over(offer, State.LAPSED, now, lapse)

    def started(self, move: Move, now: float) -> int:
        """Record that a request carries the move out. Return the ticket for `finished`."""
        self._drop(move)
        self._counts[move.reason, State.STARTED] += 1
        ticket = self._moves.started(move, now)
        self._tell(OffersChanged())
        return ticket

    def finished(
        self, ticket: int, now: float, *, arrived: bool = True, handoff: HandoffRecord | None = None
    ) -> Move:
        """Record the end of a move. `arrived`: whether the target has the KV. Raise KeyError if the move has
        already ended."""
        move, begun = self._moves.finished(ticket)
        state = State.COMPLETED if arrived else State.FAILED
        self._over(move, state, now, seconds=now - begun, handoff=handoff)
        return move

    def affords(self, move: Move, transfer_bytes: int, now: float) -> bool:
        """Return whether the budget allows a move with so many bytes."""
        left = self._moves.budget(now, self._params).moves
        return (left is None or left > 0) and self.has_room((move.source, move.target), transfer_bytes, now)

    def has_room(self, link: tuple[str, str], transfer_bytes: int, now: float) -> bool:
        """Return whether so many bytes more may be on their way over the link (source, target)."""
        budget = self._moves.budget(now, self._params)
        return budget.has_room(*link, transfer_bytes, self._gatherer.link(*link, now))

    def transfer_began(self, move: Move, now: float) -> int:
        """Record that bytes are on their way which no plan wanted. Return the ticket for
        `transfer_ended`."""
        self._tell(OffersChanged())
        return self._moves.began(move, now)

    def transfer_ended(self, ticket: int) -> None:
        """Record the end of such a transfer. Raise KeyError if it has ended."""
        self._tell(OffersChanged())
        self._moves.finished(ticket)

    def transfers(self, address: str) -> int:
        """Return the number of moves and transfers of this gateway that begin or end at the endpoint now."""
        return self._moves.at(address)

    def _is_ahead(self, move: Move) -> bool:
        return self._gatherer.ahead and bool(move.transfer_bytes or move.stored_tokens)

    def _drop(self, move: Move) -> None:
        offers = self._copies if move.reason is MoveReason.REPLICATE else self._sessions
        offers.pop(move.subject, None)

    def _over(
        self,
        move: Move,
        state: State,
        now: float,
        lapse: Lapse | None = None,
        seconds: float = 0.0,
        handoff: HandoffRecord | None = None,
    ) -> None:
        self._counts[move.reason, state] += 1
        if lapse:
            self._lapses[lapse] += 1
        self.ended.append(
            Ended(move=move, state=state, at=now, lapse=lapse, seconds=seconds, handoff=handoff)
        )

    # -- questions ---------------------------------------------------------------------------------

    def stats(self, now: float) -> PlannerStats:
        budget = self._moves.budget(now, self._params)
        return PlannerStats(
            triggers=self.triggers,
            planned_at=self.planned_at,
            moves_left=budget.moves,
            in_flight=budget.in_flight,
            moves=dict(self._counts),
            lapses=dict(self._lapses),
            stays=dict(self._stays),
        )


def triggers(migration: Migration, policy: str, *, ahead: bool) -> tuple[MoveTrigger, ...]:
    """Return the situations in which the planner acts. `ahead`: whether KV is copied before a session moves.

    By default it acts on draining hosts only: most queues are gone before a session's next turn, and what
    copies take from both engines is more than they save (docs/evaluation/README.md). The policy perilune
    moves a session from a hot host when its request comes, and weighs then what it would have to compute;
    where the KV can go ahead, the planner may do it before. The policy ear has its own rule.
    """
    asked = migration.triggers
    if asked is None:
        return (MoveTrigger.DRAIN,)
    itself = POLICIES.moves_sessions(policy) and not (ahead and policy == PolicyName.PERILUNE)
    return tuple(t for t in asked if not (itself and t is MoveTrigger.HOT_HOST))


def redirect(
    offer: Move,
    decision: Decision,
    request: RequestView,
    candidates: Sequence[Candidate],
    params: Migration,
) -> Decision | Lapse:
    """Return the decision redirected to the offer's target, or why the offer lapses."""
    by_address = {c.address: c for c in candidates}
    copies = offer.reason is MoveReason.REPLICATE
    host = request.session.host if request.session else ""
    if decision.moved_from or decision.prefill or (not copies and host != offer.source):
        return Lapse.POLICY
    target = by_address.get(offer.target)
    if target is None or target.draining:
        return Lapse.EXCLUDED
    if offer.reason is not MoveReason.DRAIN:
        there = by_address.get(host)
        most_s = params.hot_pending_seconds if copies or there is None else there.load.pending_prefill_s
        if target.load.pending_prefill_s >= most_s:
            return Lapse.BUSY
    if not has_kv_room(target, request):
        return Lapse.NO_ROOM
    _, peer, cached, fetch_s, prefill_s = cheapest_fetch(target, request)
    pulled = cached - target.overlap.device_tokens if peer else 0
    return structs.replace(
        decision,
        target=target.address,
        reason=Reason.REPLICA if copies else Reason.PLANNED,
        moved_from="" if copies else host,
        replicate_from=peer,
        cached_tokens=cached,
        estimated_ttft_s=target.load.pending_prefill_s + fetch_s + prefill_s,
        move=replace(offer, transfer_bytes=target.engine.kv_bytes(pulled)),
    )
