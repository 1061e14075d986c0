"""Which sessions and prefixes should move now: one pure function over facts.

    sessions, endpoints, hot prefixes, budget ──plan_migration──▶ Plan: moves, and what stays with the reason

1. *Trigger*, by a session's host: it drains; it is hot (`hot_pending_seconds` of prefill queued); its rack is
   (mean queue hot and `rack_pressure` times the fleet's). Sessions of other hosts are not looked at.
2. *Target*: ready, not draining, KV room for the context, for a hot host strictly less queued, for a rack
   another rack; of these the best benefit − worth × cost. None: stay, migration is opportunistic.
3. *Cost*: the context's KV by the cheapest way: pulled over the link with its learned slowdown, from the
   store, or recomputed. *Benefit*: the difference of the queues over the turns that the session is expected
   to meet it. A move needs benefit > `migration_worth` × cost and a session that did not move within
   `cooldown_seconds`. From a draining host every session must go: only room and budget count.
4. *Budget*: moves per minute of the pool, bytes on their way per link. A plan never exceeds it.
5. Each planned move shifts the session's share of the host's queue, so one target is not flooded and a host
   stops being hot when enough have left (hysteresis within one plan; the cooldown is that between plans).
6. *Replication* of hot prefixes under the same budget: to the least loaded endpoint without it, if the
   recomputing that its share of the next minute's requests would do there is worth the pull. (Conductor's
   published rule, in policy/conductor.py, collapses to a threshold on the frequency; this one weighs what a
   copy saves.)

A plan only offers: a binding switches with the session's next request, the target pulls, a pull that fails is
a recompute. `release` says that the source's copy may go when the target has it; a replica keeps it. Cost:
O(triggered sessions × endpoints).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean

from perilune_api.pool import PolicyParams
from perilune_gateway.model import Candidate, Location
from perilune_gateway.policy.cost import lasting_turns


class MoveReason(StrEnum):
    """Why something moves, or why not."""

    DRAIN = "drain"
    HOT_HOST = "hot_host"
    RACK_PRESSURE = "rack_pressure"
    REPLICATE = "replicate"
    COOLDOWN = "cooldown"
    """It moved too recently."""
    NOWHERE = "nowhere"
    """No endpoint has KV room and less to do."""
    NOT_WORTH = "not_worth"
    """Benefit is not above worth × cost."""
    RELIEVED = "relieved"
    """The moves planned before it suffice for its host."""
    NOT_HOT = "not_hot"
    """The prefix is not used often enough."""
    BUDGET_MOVES = "budget_moves"
    BUDGET_BYTES = "budget_bytes"


MOVING = frozenset({MoveReason.DRAIN, MoveReason.HOT_HOST, MoveReason.RACK_PRESSURE, MoveReason.REPLICATE})


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A bound session."""

    session_id: str
    host: str
    context_tokens: int
    cached_tokens: int = 0
    """Of its context, what the host holds and others could pull."""
    stored_tokens: int = 0
    """Of its context, what the shared store holds."""
    turns: int = 1
    seconds_since_move: float = float("inf")


@dataclass(frozen=True, slots=True)
class PrefixFacts:
    """A prefix that many prompts begin with."""

    name: str
    tokens: int
    frequency_score: float
    """hits / sqrt(age in seconds)."""
    locations: tuple[Location, ...]
    """All holders."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What may still be moved."""

    moves: int
    link_bytes: int
    """Most bytes on their way over one link."""
    in_flight: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Bytes on their way, by (source, target)."""


@dataclass(frozen=True, slots=True)
class Move:
    """A decision about one session or prefix, and its numbers."""

    subject: str
    reason: MoveReason
    source: str
    target: str = ""
    """Empty: none was found."""
    transfer_bytes: int = 0
    """Pulled from the source; 0: from the store, or recomputed."""
    cost_s: float = 0.0
    benefit_s: float = 0.0
    worth: float = 1.0
    """Benefit must be above worth × cost."""
    turns: float = 0.0
    """Over how many the benefit was counted."""
    release: bool = False

    @property
    def approved(self) -> bool:
        return self.reason in MOVING

    @property
    def value_s(self) -> float:
        return self.benefit_s - self.worth * self.cost_s


@dataclass(frozen=True, slots=True)
class Plan:
    """What moves, most valuable first, and what was looked at and stays."""

    moves: tuple[Move, ...] = ()
    stays: tuple[Move, ...] = ()


def plan_migration(
    sessions: Sequence[SessionFacts],
    endpoints: Sequence[Candidate],
    budget: Budget,
    params: PolicyParams,
    prefixes: Sequence[PrefixFacts] = (),
    *,
    pullable: bool = True,
) -> Plan:
    """`endpoints`: all of the pool, each with its links to hosts and holders. `pullable`: engines can pull
    from each other."""
    planner = _Planner(endpoints, budget, params, pullable)
    offers = [(planner.offer(session), session) for session in sessions if planner.trigger(session.host)]
    offers.sort(key=lambda offer: (offer[0].reason is not MoveReason.DRAIN, -offer[0].value_s))
    verdicts = [planner.settle(session) for _, session in offers]
    verdicts += [planner.replicate(p) for p in sorted(prefixes, key=lambda p: (-p.frequency_score, p.name))]
    return Plan(tuple(m for m in verdicts if m.approved), tuple(m for m in verdicts if not m.approved))


class _Planner:
    """One plan in the making: loads and budget as they will be after the moves so far."""

    def __init__(
        self, endpoints: Sequence[Candidate], budget: Budget, params: PolicyParams, pullable: bool
    ) -> None:
        self._endpoints = {c.address: c for c in endpoints}
        self._budget, self._params, self._pullable = budget, params, pullable
        self._moves_left = budget.moves
        self._in_flight = dict(budget.in_flight)
        self._queue_s = {c.address: c.load.pending_prefill_s for c in endpoints}
        self._room = {c.address: c.load.kv_free_tokens for c in endpoints}

    def trigger(self, host: str) -> MoveReason | None:
        """Why the host's sessions should go; None: they need not, or the host is unknown."""
        there = self._endpoints.get(host)
        if there is None:
            return None
        if there.draining:
            return MoveReason.DRAIN
        if self._queue_s[host] > self._params.hot_pending_seconds:
            return MoveReason.HOT_HOST
        return MoveReason.RACK_PRESSURE if self._rack_presses(there) else None

    def settle(self, session: SessionFacts) -> Move:
        """The session's best offer after the moves so far, within the budget; takes it from the budget."""
        move = self.offer(session)
        if not move.approved or not (move := self._afford(move)).approved:
            return move
        load = self._endpoints[move.source].load
        share_s = load.pending_prefill_s / max(1, load.sessions)
        self._queue_s[move.source] -= share_s
        self._queue_s[move.target] += share_s
        self._room[move.target] -= session.context_tokens
        return move

    def offer(self, session: SessionFacts) -> Move:
        """Steps 1 to 3."""
        trigger = self.trigger(session.host)
        if trigger is None:  # enough others have left
            return Move(session.session_id, MoveReason.RELIEVED, session.host)
        if trigger is not MoveReason.DRAIN and session.seconds_since_move <= self._params.cooldown_seconds:
            return Move(session.session_id, MoveReason.COOLDOWN, session.host)
        targets = self._targets(session, trigger)
        if not targets:
            return Move(session.session_id, MoveReason.NOWHERE, session.host)
        best = max((self._move(session, t, trigger) for t in targets), key=lambda move: move.value_s)
        if trigger is not MoveReason.DRAIN and best.value_s <= 0:
            return _because(best, MoveReason.NOT_WORTH)
        return best

    def replicate(self, prefix: PrefixFacts) -> Move:
        """Step 6."""
        source = prefix.locations[0].address
        if prefix.frequency_score < self._params.hot_cache_threshold:
            return Move(prefix.name, MoveReason.NOT_HOT, source)
        holders = {location.address for location in prefix.locations}
        free = [
            c
            for c in self._endpoints.values()
            if c.address not in holders and self._takes(c, prefix.tokens) and source in c.links
        ]
        if not free or not self._pullable:
            return Move(prefix.name, MoveReason.NOWHERE, source)
        target = min(free, key=lambda c: self._queue_s[c.address])
        link = target.links[source]
        cost_s = target.engine.transfer_s(prefix.tokens, link.bandwidth_bytes_per_s) * link.slowdown
        requests = prefix.frequency_score * 60.0 / len(self._endpoints)
        move = Move(
            prefix.name,
            MoveReason.REPLICATE,
            source,
            target.address,
            target.engine.kv_bytes(prefix.tokens),
            cost_s,
            requests * target.engine.prefill_s(prefix.tokens),
            self._params.migration_worth,
        )
        if move.value_s <= 0:
            return _because(move, MoveReason.NOT_WORTH)
        move = self._afford(move)
        if move.approved:
            self._room[target.address] -= prefix.tokens
        return move

    # -- parts -------------------------------------------------------------------------------------

    def _targets(self, session: SessionFacts, trigger: MoveReason) -> list[Candidate]:
        host = self._endpoints[session.host]
        return [
            c
            for c in self._endpoints.values()
            if c is not host
            and self._takes(c, session.context_tokens)
            and (trigger is MoveReason.DRAIN or self._queue_s[c.address] < self._queue_s[session.host])
            and (trigger is not MoveReason.RACK_PRESSURE or c.endpoint.place.rack != host.endpoint.place.rack)
        ]

    def _takes(self, candidate: Candidate, tokens: int) -> bool:
        endpoint = candidate.endpoint
        return endpoint.ready and not endpoint.draining and self._room[candidate.address] >= tokens

    def _move(self, session: SessionFacts, target: Candidate, trigger: MoveReason) -> Move:
        cost_s, pulled = self._bring(session, target)
        turns = lasting_turns(session.turns, self._params)
        benefit_s = (self._queue_s[session.host] - self._queue_s[target.address]) * turns
        if trigger is MoveReason.DRAIN:  # it would recompute all of it once the host is gone
            benefit_s = target.engine.prefill_s(session.context_tokens) - self._queue_s[target.address]
        return Move(
            session.session_id,
            trigger,
            session.host,
            target.address,
            target.engine.kv_bytes(pulled),
            cost_s,
            benefit_s,
            self._params.migration_worth,
            turns,
            release=True,
        )

    def _bring(self, session: SessionFacts, target: Candidate) -> tuple[float, int]:
        """Seconds until the target has the context, and the tokens that it pulls from the host."""
        engine, context = target.engine, session.context_tokens

        def with_rest(seconds: float, tokens: int) -> float:
            return seconds + engine.prefill_s(context - tokens, tokens)

        ways = [(with_rest(0.0, 0), 0)]
        if session.stored_tokens:
            ways.append((with_rest(engine.store_s(session.stored_tokens), session.stored_tokens), 0))
        link, cached = target.links.get(session.host), session.cached_tokens
        if self._pullable and cached and link is not None:
            pull_s = engine.transfer_s(cached, link.bandwidth_bytes_per_s) * link.slowdown
            ways.append((with_rest(pull_s, cached), cached))
        return min(ways)

    def _afford(self, move: Move) -> Move:
        """Takes it from the budget, or says which budget is used up."""
        link = (move.source, move.target)
        on_link = self._in_flight.get(link, 0) + move.transfer_bytes
        if self._moves_left <= 0:
            return _because(move, MoveReason.BUDGET_MOVES)
        if move.transfer_bytes and on_link > self._budget.link_bytes:
            return _because(move, MoveReason.BUDGET_BYTES)
        self._moves_left -= 1
        self._in_flight[link] = on_link
        return move

    def _rack_presses(self, host: Candidate) -> bool:
        rack = host.endpoint.place.rack
        queues = [self._queue_s[c.address] for c in self._endpoints.values() if c.endpoint.place.rack == rack]
        if not rack or len(queues) == len(self._queue_s):
            return False
        mean_s = fmean(queues)
        fleet_s = fmean(self._queue_s.values())
        return mean_s > self._params.hot_pending_seconds and mean_s > self._params.rack_pressure * fleet_s


def _because(move: Move, reason: MoveReason) -> Move:
    """The same numbers, and another verdict."""
    return replace(move, reason=reason, release=False)
