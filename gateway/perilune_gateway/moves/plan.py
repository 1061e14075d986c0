"""Which sessions and prefixes should move now: one pure function over facts.

    sessions, endpoints, hot prefixes, budget ──plan_migration──▶ Plan: moves, and what stays with the reason

1. *Trigger*, by a session's host: it drains; it is hot (`hot_pending_seconds` of prefill queued); its rack is
   (mean queue hot and `rack_pressure` times the fleet's). Sessions of other hosts are not looked at
   (`pressed` says whose will be).
2. *Target*: ready, not draining, KV room for the context, for a hot host strictly less
   queued, for a rack another rack; of the `TARGETS` least queued the best benefit − worth × cost.
   None: stay, migration is opportunistic.
3. *Cost*: the context's KV by the cheapest way: pulled over the link with its learned slowdown, from the
   store, or recomputed. *Benefit*: the difference of the queues over the turns that the session is expected
   to meet it. A move needs benefit > `worth` × cost and a session that did not move within
   `cooldown_seconds`. From a draining host every session must go: only room and budget count.
4. *Budget*: moves per minute of the pool, bytes on their way per link. A plan never exceeds it.
5. Each planned move shifts the session's share of the host's queue, so one target is not flooded and a host
   stops being hot when enough have left (hysteresis within one plan; the cooldown is that between plans).
6. *Replication* of hot prefixes under the same budget: to the least loaded endpoint without it, if what its
   share of the next minute's requests would spend there without a copy (recomputing, or reading the store) is
   worth making one. (Conductor's published rule, in policy/others/near_cache.py, collapses to a threshold on
   the frequency; this one weighs what a copy saves.)

A plan only offers: a binding switches with the session's next request, the target pulls, a pull that fails is
a recompute. `release` says that the source's copy may go when the target has it; a replica keeps it.

Cost: O(endpoints + sessions × TARGETS); 32 sessions of hot hosts take 5 ms among 64 endpoints, 15 ms among
1,000, and nothing presses most of the time. Who drives it: planner.py.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest

from perilune_api.pool import Migration, MoveTrigger
from perilune_gateway.model import Candidate, Location, Move, MoveReason, Subject
from perilune_gateway.policy.cost import lasting_turns

SHORTLIST, TARGETS = 64, 8
"""Endpoints that a plan may move something to, and those that one session is weighed against: the shortest
queues."""
ALL_TRIGGERS = frozenset(MoveTrigger)


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A bound session."""

    session: Subject
    host: str
    context_tokens: int
    cached_tokens: int = 0
    """Of its context, what the host holds and others could pull."""
    stored_tokens: int = 0
    """Of its context, what the shared store holds."""
    turns: int = 1
    seconds_since_move: float = float("inf")
    idle_s: float = 0.0
    """Since its last request."""


@dataclass(frozen=True, slots=True)
class PrefixFacts:
    """A prefix that many prompts begin with."""

    name: Subject
    tokens: int
    frequency_score: float
    """hits / sqrt(age in seconds)."""
    locations: tuple[Location, ...]
    """All holders, at least one."""
    stored_tokens: int = 0
    """Of it, what the shared store holds."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What may still be moved."""

    moves: int
    link_bytes: int
    """Most bytes on their way over one link."""
    in_flight: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Bytes on their way, by (source, target)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What moves, most valuable first, and what was looked at and stays."""

    moves: tuple[Move, ...] = ()
    stays: tuple[Move, ...] = ()


def plan_migration(
    sessions: Sequence[SessionFacts],
    endpoints: Sequence[Candidate],
    budget: Budget,
    params: Migration,
    prefixes: Sequence[PrefixFacts] = (),
    *,
    pullable: bool = True,
    triggers: Collection[MoveTrigger] = ALL_TRIGGERS,
) -> Plan:
    """`endpoints`: all of the pool, each with its links to hosts and holders. `pullable`: engines can pull
    from each other."""
    draft = _Draft(endpoints, budget, params, pullable, triggers)
    offers = [(draft.offer(session), session) for session in sessions if draft.trigger(session.host)]
    offers.sort(key=lambda offer: (offer[0].reason is not MoveReason.DRAIN, -offer[0].value_s))
    verdicts = [draft.settle(session) for _, session in offers]
    if MoveTrigger.REPLICATE in triggers:
        verdicts += [draft.replicate(p) for p in sorted(prefixes, key=lambda p: -p.frequency_score)]
    return Plan(tuple(m for m in verdicts if m.approved), tuple(m for m in verdicts if not m.approved))


def pressed(
    endpoints: Sequence[Candidate], params: Migration, triggers: Collection[MoveTrigger] = ALL_TRIGGERS
) -> list[str]:
    """The endpoints whose sessions a plan looks at: draining ones first, then the longest queues."""
    draft = _Draft(endpoints, Budget(0, 0), params, pullable=False, triggers=triggers)
    found = [c for c in endpoints if draft.trigger(c.address)]
    found.sort(key=lambda c: (not c.draining, -c.load.pending_prefill_s))
    return [c.address for c in found]


class _Draft:
    """One plan in the making: loads and budget as they will be after the moves so far."""

    def __init__(
        self,
        endpoints: Sequence[Candidate],
        budget: Budget,
        params: Migration,
        pullable: bool,
        triggers: Collection[MoveTrigger],
    ) -> None:
        self._endpoints = {c.address: c for c in endpoints}
        self._budget, self._params, self._pullable = budget, params, pullable
        self._triggers = frozenset(triggers)
        self._moves_left = budget.moves
        self._in_flight = dict(budget.in_flight)
        self._queue_s = {c.address: c.load.pending_prefill_s for c in endpoints}
        self._room = {c.address: c.load.kv_free_tokens for c in endpoints}
        self._racks: dict[str, list[float]] = {}
        """Per rack: how many endpoints, and seconds queued there in all."""
        for c in endpoints:
            rack = self._racks.setdefault(c.endpoint.place.rack, [0.0, 0.0])
            rack[0] += 1.0
            rack[1] += c.load.pending_prefill_s
        taking = [c for c in endpoints if self._takes(c, 1)]
        self._shortlist = nsmallest(SHORTLIST, taking, key=lambda c: self._queue_s[c.address])

    def trigger(self, host: str) -> MoveReason | None:
        """Why the host's sessions should go; None: they need not, or the host is unknown."""
        there, on = self._endpoints.get(host), self._triggers
        if there is None:
            return None
        if MoveTrigger.DRAIN in on and there.draining:
            return MoveReason.DRAIN
        if MoveTrigger.HOT_HOST in on and self._queue_s[host] > self._params.hot_pending_seconds:
            return MoveReason.HOT_HOST
        if MoveTrigger.RACK_PRESSURE in on and self._rack_presses(there):
            return MoveReason.RACK_PRESSURE
        return None

    def settle(self, session: SessionFacts) -> Move:
        """The session's best offer after the moves so far, within the budget; takes it from the budget."""
        move = self.offer(session)
        if not move.approved or not (move := self._afford(move)).approved:
            return move
        load = self._endpoints[move.source].load
        share_s = load.pending_prefill_s / max(1, load.sessions)
        for address, change_s in ((move.source, -share_s), (move.target, share_s)):
            self._queue_s[address] += change_s
            self._racks[self._endpoints[address].endpoint.place.rack][1] += change_s
        self._room[move.target] -= session.context_tokens
        return move

    def offer(self, session: SessionFacts) -> Move:
        """Steps 1 to 3."""
        trigger = self.trigger(session.host)
        if trigger is None:  # enough others have left
            return Move(session.session, MoveReason.RELIEVED, session.host)
        if trigger is not MoveReason.DRAIN and session.seconds_since_move <= self._params.cooldown_seconds:
            return Move(session.session, MoveReason.COOLDOWN, session.host)
        targets = self._targets(session, trigger)
        if not targets:
            return Move(session.session, MoveReason.NOWHERE, session.host)
        best = max((self._move(session, t, trigger) for t in targets), key=lambda move: move.value_s)
        if trigger is not MoveReason.DRAIN and best.value_s <= 0:
            return _because(best, MoveReason.NOT_WORTH)
        return best

    def replicate(self, prefix: PrefixFacts) -> Move:
        """Step 6."""
        source = prefix.locations[0].address
        if prefix.frequency_score < self._params.replicate_score:
            return Move(prefix.name, MoveReason.NOT_HOT, source)
        holders = {location.address for location in prefix.locations}
        free = [c for c in self._shortlist if c.address not in holders and self._takes(c, prefix.tokens)]
        if not free:
            return Move(prefix.name, MoveReason.NOWHERE, source)
        target = min(free, key=lambda c: self._queue_s[c.address])
        cached = prefix.locations[0].tokens
        cost_s, pulled = self._bring(target, source, prefix.tokens, cached, prefix.stored_tokens)
        without_s, _ = self._bring(target, "", prefix.tokens, 0, prefix.stored_tokens)
        requests = prefix.frequency_score * 60.0 / len(self._endpoints)
        move = Move(
            prefix.name,
            MoveReason.REPLICATE,
            source,
            target.address,
            target.engine.kv_bytes(pulled),
            cost_s,
            requests * without_s,
            self._params.worth,
        )
        if move.value_s <= 0:
            return _because(move, MoveReason.NOT_WORTH)
        move = self._afford(move)
        if move.approved:
            self._room[target.address] -= prefix.tokens
        return move

    # -- parts -------------------------------------------------------------------------------------

    def _targets(self, session: SessionFacts, trigger: MoveReason) -> list[Candidate]:
        host, queue_s = self._endpoints[session.host], self._queue_s
        found = [
            c
            for c in self._shortlist
            if c is not host
            and self._takes(c, session.context_tokens)
            and (trigger is MoveReason.DRAIN or queue_s[c.address] < queue_s[session.host])
            and (trigger is not MoveReason.RACK_PRESSURE or c.endpoint.place.rack != host.endpoint.place.rack)
        ]
        if len(found) > TARGETS:
            found = nsmallest(TARGETS, found, key=lambda c: queue_s[c.address])
        return found

    def _takes(self, candidate: Candidate, tokens: int) -> bool:
        endpoint = candidate.endpoint
        serves = endpoint.ready and not endpoint.draining
        return serves and self._room[candidate.address] >= tokens

    def _move(self, session: SessionFacts, target: Candidate, trigger: MoveReason) -> Move:
        cost_s, pulled = self._bring(
            target, session.host, session.context_tokens, session.cached_tokens, session.stored_tokens
        )
        turns = lasting_turns(session.turns, self._params)
        benefit_s = (self._queue_s[session.host] - self._queue_s[target.address]) * turns
        if trigger is MoveReason.DRAIN:  # it would recompute all of it once the host is gone
            benefit_s = target.engine.prefill_s(session.context_tokens) - self._queue_s[target.address]
        return Move(
            session.session,
            trigger,
            session.host,
            target.address,
            target.engine.kv_bytes(pulled),
            cost_s,
            benefit_s,
            self._params.worth,
            turns,
            release=True,
        )

    def _bring(
        self, target: Candidate, source: str, tokens: int, cached_tokens: int, stored_tokens: int
    ) -> tuple[float, int]:
        """Seconds until the target has `tokens`, and how many of them it pulls from the source."""
        engine = target.engine

        def with_rest(seconds: float, there: int) -> float:
            return seconds + engine.prefill_s(tokens - there, there)

        ways = [(with_rest(0.0, 0), 0)]
        if stored_tokens:
            ways.append((with_rest(engine.store_s(stored_tokens), stored_tokens), 0))
        link = target.links.get(source)
        if self._pullable and cached_tokens and link is not None:
            pull_s = engine.transfer_s(cached_tokens, link.bandwidth_bytes_per_s) * link.slowdown
            ways.append((with_rest(pull_s, cached_tokens), cached_tokens))
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
        count, queued_s = self._racks[rack]
        if not rack or count == len(self._endpoints):
            return False
        mean_s = queued_s / count
        fleet_s = sum(queued_s for _, queued_s in self._racks.values()) / len(self._endpoints)
        return mean_s > self._params.hot_pending_seconds and mean_s > self._params.rack_pressure * fleet_s


def _because(move: Move, reason: MoveReason) -> Move:
    """The same numbers, and another verdict."""
    return replace(move, reason=reason, release=False)
