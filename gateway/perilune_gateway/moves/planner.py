"""Drives migration: facts → plan → offers; each offer is carried out by the next request that it concerns.

    facts ─▶ plan(now), every second ─▶ offers ─┐
    a request's decision ──────────▶ apply ─────┴─▶ the decision, moved ─▶ started ─▶ finished
                                        └─▶ as it was, and the offer lapses with its reason

1. *plan*: which endpoints press, which of their sessions asked for something lately, which prefixes many new
   sessions began with, what is left of the budget → `migration.plan_migration`. Each plan replaces the one
   before, as desired state is written whole: what nobody took up is weighed anew, or withdrawn.
2. *apply*: the policy has decided; an offer for this session, or for the prefix of a new one, takes the
   decision's place, if the target may still be chosen, is no busier than the host, has KV room, and the link
   has budget. A policy that moves the session itself wins.
3. *started … finished* bracket a move: from the request's decision until its first block is stored, its
   answer begins or it ends; the target then has the KV. In between its bytes count as on their way.

The same class runs in the gateway and in the simulator; they differ in where facts come from (`Facts`). Time
is an argument; reading changes nothing. Cost: a dict look-up per request; per plan see migration.

Moves that a policy makes by itself are not in the budget: the policy has weighed each of them. The old copy
(`Move.release`): an engine's LRU frees it, since nobody asks for it again; engines cannot be told. The
simulator's free it at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from msgspec import structs

from perilune_api.pool import Migration, MoveTrigger
from perilune_gateway.model import Candidate, Decision, Move, MoveReason, Reason, RequestView, Subject
from perilune_gateway.moves.budget import LINK_BYTES, Moves
from perilune_gateway.moves.plan import Plan, PrefixFacts, SessionFacts, plan_migration, pressed
from perilune_gateway.policy import MOVES_SESSIONS
from perilune_gateway.policy.cost import cheapest_fetch, has_kv_room

LOOKED_AT = 32
"""Sessions that one plan weighs, those that asked for something last."""
ACTIVE_S = 60.0
"""A session that was silent for longer may never come back: it is offered a move only from an endpoint that
drains. (Of an agent's turns 90 % follow within 44 s.)"""
PREFIXES = 64
"""Hot prefixes that are remembered, those that new sessions began with last."""
KEPT = 256
"""Ended moves that are remembered."""


class Lapse(StrEnum):
    """Why an offer came to nothing."""

    WITHDRAWN = "withdrawn"
    """The next plan no longer makes it."""
    POLICY = "policy"
    """The session's host is another by now, or the policy moved it."""
    EXCLUDED = "excluded"
    """The target may not be chosen."""
    BUSY = "busy"
    """The target has no less to do than the host (for a copy: is hot)."""
    NO_ROOM = "no_room"
    """The prompt does not fit into the target's KV pool."""
    BUDGET = "budget"
    """The prompt has grown: its bytes would exceed the link's budget."""


class State(StrEnum):
    """What became of a planned move."""

    PLANNED = "planned"
    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    """Its request ended before the target had anything."""
    LAPSED = "lapsed"


class Facts(Protocol):
    """Where a plan's facts come from."""

    @property
    def pullable(self) -> bool:
        """Engines can pull KV from each other."""

    def endpoints(self, now: float, near: Collection[str] = ()) -> Sequence[Candidate]:
        """All of the pool, each with its links to those of `near`."""

    def sessions(self, host: str, limit: int, now: float) -> Sequence[SessionFacts]:
        """Bound to `host`, at most `limit`, the latest active first."""

    def prefix(self, name: Subject, tokens: int, now: float) -> PrefixFacts | None:
        """None: nobody holds it any more."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A move or an offer that is over."""

    move: Move
    state: State
    at: float
    lapse: Lapse | None = None
    seconds: float = 0.0
    """From its request's decision to the end."""


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """The planner in numbers."""

    triggers: Sequence[MoveTrigger]
    planned_at: float
    moves_left: int
    """Of the pool's budget per minute."""
    link_bytes: int
    in_flight: Mapping[tuple[str, str], int]
    """Bytes on their way, by (source, target)."""
    moves: Mapping[tuple[MoveReason, State], int]
    lapses: Mapping[Lapse, int]
    stays: Mapping[MoveReason, int]
    """Verdicts not to move, one per session and reason as long as it lasts."""


class Planner:
    """One pool's planner."""

    def __init__(self, facts: Facts, link_bytes: int = LINK_BYTES) -> None:
        """`link_bytes`: most bytes on their way between two endpoints."""
        self._facts = facts
        self._moves = Moves(link_bytes)
        self._begun: dict[int, float] = {}
        self._sessions: dict[Subject, Move] = {}
        self._copies: dict[Subject, Move] = {}
        self._prefixes: OrderedDict[Subject, int] = OrderedDict()
        self._counts: Counter[tuple[MoveReason, State]] = Counter()
        self._lapses: Counter[Lapse] = Counter()
        self._stays: Counter[MoveReason] = Counter()
        self._params = Migration()
        self.triggers: tuple[MoveTrigger, ...] = ()
        self.last = Plan()
        self.planned_at = float("-inf")
        self.ended: deque[Ended] = deque(maxlen=KEPT)

    def configure(self, migration: Migration, policy: str) -> None:
        """What it acts on; sessions on hot hosts are left to a policy that moves them itself."""
        left_out = {MoveTrigger.HOT_HOST} if policy in MOVES_SESSIONS else set()
        self.triggers = tuple(t for t in migration.triggers if t not in left_out)
        self._params = migration

    # -- plan --------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Replaces all offers."""
        facts, params, on = self._facts, self._params, self.triggers
        hosts = pressed(facts.endpoints(now), params, on)[:LOOKED_AT] if on else []
        prefixes = self._hot_prefixes(now)
        if hosts or prefixes:
            near = {*hosts, *(prefix.locations[0].address for prefix in prefixes)}
            endpoints, budget = facts.endpoints(now, near), self._moves.budget(now, params)
            plan = plan_migration(
                self._gather(hosts, endpoints, now),
                endpoints,
                budget,
                params,
                prefixes,
                pullable=facts.pullable,
                triggers=on,
            )
        else:
            plan = Plan()
        self._replace(plan, now)
        return plan

    def _gather(self, hosts: Sequence[str], endpoints: Sequence[Candidate], now: float) -> list[SessionFacts]:
        draining = {c.address for c in endpoints if c.draining}
        each = max(1, LOOKED_AT // max(1, len(hosts)))
        return [
            session
            for host in hosts
            for session in self._facts.sessions(host, each, now)
            if session.idle_s <= ACTIVE_S or host in draining
        ]

    def _hot_prefixes(self, now: float) -> list[PrefixFacts]:
        if MoveTrigger.REPLICATE not in self.triggers:
            return []
        hot = []
        for name, tokens in list(self._prefixes.items()):
            facts = self._facts.prefix(name, tokens, now)
            if facts and facts.frequency_score >= self._params.replicate_score:
                hot.append(facts)
            else:
                del self._prefixes[name]  # until a new session begins with it again
        return hot

    def _replace(self, plan: Plan, now: float) -> None:
        before = {**self._sessions, **self._copies}
        stayed = {(move.subject, move.reason) for move in self.last.stays}
        offered = {move.subject: move for move in plan.moves}
        for subject, move in before.items():
            if subject not in offered or offered[subject].target != move.target:
                self._over(move, State.LAPSED, now, Lapse.WITHDRAWN)
        for subject, move in offered.items():
            if subject not in before or before[subject].target != move.target:
                self._counts[move.reason, State.PLANNED] += 1
        for move in plan.stays:
            self._stays[move.reason] += (move.subject, move.reason) not in stayed
        self._sessions = {m.subject: m for m in plan.moves if m.reason is not MoveReason.REPLICATE}
        self._copies = {m.subject: m for m in plan.moves if m.reason is MoveReason.REPLICATE}
        self.last, self.planned_at = plan, now

    # -- requests ----------------------------------------------------------------------------------

    @property
    def offers(self) -> Sequence[Move]:
        return (*self._sessions.values(), *self._copies.values())

    def saw(self, prefix: Subject, tokens: int) -> None:
        """A new session began with a prefix that is known, `tokens` of it."""
        if MoveTrigger.REPLICATE not in self.triggers:
            return
        self._prefixes[prefix] = tokens
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)

    def offer(self, session: Subject | None, prefix: Subject | None) -> Move | None:
        """For a request of this (bound) session, or of a new one whose prompt begins with this prefix."""
        return self._sessions.get(session) if session is not None else self._copies.get(prefix)

    def apply(
        self,
        offer: Move,
        decision: Decision,
        request: RequestView,
        candidates: Sequence[Candidate],
        now: float,
    ) -> Decision:
        """The decision with the offer carried out; or as it was, and the offer lapses."""
        budget = self._moves.budget(now, self._params)
        moved = redirect(offer, decision, request, candidates, self._params)
        if isinstance(moved, Decision):
            assert moved.move is not None
            link = (moved.move.source, moved.move.target)
            size = moved.move.transfer_bytes
            if budget.moves > 0 and (not size or budget.in_flight.get(link, 0) + size <= budget.link_bytes):
                return moved
            moved = Lapse.BUDGET
        self._drop(offer)
        self._over(offer, State.LAPSED, now, moved)
        return decision

    def started(self, move: Move, now: float) -> int:
        """A request carries it out. Returns the ticket for `finished`."""
        self._drop(move)
        self._counts[move.reason, State.STARTED] += 1
        ticket = self._moves.started(move, now)
        self._begun[ticket] = now
        return ticket

    def finished(self, ticket: int, now: float, *, arrived: bool = True) -> Move:
        """The target has the KV, or the request ended before it had. Raises KeyError when that was known."""
        move = self._moves.finished(ticket)
        begun = self._begun.pop(ticket)
        self._over(move, State.COMPLETED if arrived else State.FAILED, now, seconds=now - begun)
        return move

    def _drop(self, move: Move) -> None:
        offers = self._copies if move.reason is MoveReason.REPLICATE else self._sessions
        offers.pop(move.subject, None)

    def _over(
        self, move: Move, state: State, now: float, lapse: Lapse | None = None, seconds: float = 0.0
    ) -> None:
        self._counts[move.reason, state] += 1
        if lapse:
            self._lapses[lapse] += 1
        self.ended.append(Ended(move, state, now, lapse, seconds))

    # -- questions ---------------------------------------------------------------------------------

    def stats(self, now: float) -> PlannerStats:
        budget = self._moves.budget(now, self._params)
        return PlannerStats(
            self.triggers,
            self.planned_at,
            budget.moves,
            budget.link_bytes,
            budget.in_flight,
            dict(self._counts),
            dict(self._lapses),
            dict(self._stays),
        )


def redirect(
    offer: Move,
    decision: Decision,
    request: RequestView,
    candidates: Sequence[Candidate],
    params: Migration,
) -> Decision | Lapse:
    """The decision, to the offer's target; or why not any more."""
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
