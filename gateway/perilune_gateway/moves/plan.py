"""Plans which sessions should move and which prefixes should be copied: a pure function.

    sessions, endpoints, hot prefixes, budget ──plan_migration──▶ Plan: moves, and what stays with the reason

1. *Trigger*: the session's host drains, is hot (more than `hot_pending_seconds` of queued prefill), or is in
   a hot rack (its mean queue is hot and `rack_pressure` times the fleet's). `pressed` lists these hosts.
2. *Target*: an endpoint that is ready, does not drain and has KV room for the context. Of these, one that
   will itself be replaced soon is taken only if there is no other. For a hot host its
   queue must be shorter, for a hot rack it must be in another rack, and for both its whole KV cache must have
   room beside the contexts of its own live sessions, because a copy that evicts those costs more than a
   queue. Sessions that are over cost no room. Of the `TARGETS` shortest queues the best
   benefit − worth × cost wins; for a draining host, of those at most `EVEN_S` longer than the shortest, the
   endpoint with the fewest sessions, so that no cache gets all that others held. Without a target the session
   stays.
3. *Cost*: the seconds to get the context's KV, by the fastest way: pulled over the link, read from the store,
   or recomputed. *Benefit*: the difference of the queues, over the turns for which it is expected to last
   (`relief_s` where the KV is copied before).
   The benefit must be above `worth` × cost, and the session must not have moved within `cooldown_seconds`.
   From a draining host every session moves; only KV room and budget limit that.
4. *Budget* (`Budget`): bytes on their way at each end of a link, by its measured speed; for moves that no
   drain demands, seconds of the pool's time; and moves per minute, where the pool limits them. A plan never
   exceeds it.
5. Each planned move shifts the session's share of the queue from its host to the target, so that one target
   does not get all sessions, and a host stops being hot when enough sessions have left.
6. *Replication*: a hot prefix is copied to the least loaded endpoint without it if the copy saves enough of
   the time that the requests of the next minute would need there. The same budget applies. (Conductor's rule,
   in policy/others/near_cache.py, reduces to a threshold on the frequency.)

A plan only makes proposals; planner.py lets the session's next request carry them out. `release` says that
the source's copy is not needed once the target has the KV.

Costs O(endpoints + sessions × TARGETS): 32 sessions take 5 ms among 64 endpoints and 15 ms among 1,000.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from math import inf

from perilune_api.pool import Migration, MoveTrigger
from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Location, Move, MoveReason, Subject
from perilune_gateway.policy.cost import lasting_turns

SHORTLIST, TARGETS = 64, 8
"""Number of endpoints with the shortest queues that a plan considers as targets, and that it compares for one
session."""
EVEN_S = 0.5
"""Seconds by which queues may differ that count as equally long for a session whose host drains."""
ALL_TRIGGERS = frozenset(MoveTrigger)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """A bound session."""

    session: Subject
    host: str
    context_tokens: int
    cached_tokens: int = 0
    """Number of context tokens that the host caches and others could pull."""
    stored_tokens: int = 0
    """Number of context tokens that the shared store holds."""
    turns: int = 1
    seconds_since_move: float = float("inf")
    idle_s: float = 0.0
    """Seconds since its last request."""
    prewarms: bool = False
    """Whether the gateway can let another endpoint read its KV from the store."""
    chained: bool = False
    """Whether its requests name earlier responses, which only the host's process has."""


@dataclass(frozen=True, slots=True)
class PrefixFacts:
    """A prefix that many prompts begin with."""

    name: Subject
    tokens: int
    frequency_score: float
    """hits / sqrt(age in seconds)."""
    locations: tuple[Location, ...]
    """All endpoints that cache it, at least one."""
    stored_tokens: int = 0
    """Number of its tokens that the shared store holds."""


LINK_S = 2.0
"""Seconds for which what is on its way may keep a network card busy, by the link's bandwidth and its measured
slowdown. One transfer at a time is always allowed."""
POOL_SHARE = 0.1
"""Share of the endpoints' time that moves from busy endpoints may cost."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a plan."""

    moves: int | None = None
    """Number of moves that are still allowed; None: any."""
    link_bytes: int | None = None
    """Maximum bytes on their way over one link; None: as many as `LINK_S` allows."""
    in_flight: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Bytes that are on their way, by (source, target)."""
    seconds: float = inf
    """Seconds that moves which no drain demands may still cost."""

    def has_room(self, source: str, target: str, transfer_bytes: int, link: Link | None) -> bool:
        """Return whether so many bytes more may be on their way over the link."""
        if not transfer_bytes:
            return True
        if self.link_bytes is not None:
            return self.in_flight.get((source, target), 0) + transfer_bytes <= self.link_bytes
        sent = sum(size for (a, _), size in self.in_flight.items() if a == source)
        received = sum(size for (_, b), size in self.in_flight.items() if b == target)
        busy = max(sent, received)
        if link is None or not busy:
            return True
        return busy + transfer_bytes <= LINK_S * link.bandwidth_bytes_per_s / link.slowdown


@dataclass(frozen=True, slots=True)
class Plan:
    """The moves, the most valuable first, and the considered sessions and prefixes that stay."""

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
    ahead: bool = False,
    live: Mapping[str, int] | None = None,
    triggers: Collection[MoveTrigger] = ALL_TRIGGERS,
) -> Plan:
    """Return a plan. `endpoints` are all endpoints of the pool, with links to the sessions' hosts and the
    prefixes' locations that they can pull KV from. `pullable`: whether engines can pull KV from each other.
    `ahead`: whether that happens before a session moves, so that no request waits for it. `live`: tokens of
    the contexts of each endpoint's live sessions; None: not known."""
    draft = _Draft(endpoints, budget, params, pullable, triggers, ahead, live)
    offers = [(draft.offer(session), session) for session in sessions if draft.trigger(session.host)]
    offers.sort(key=lambda offer: (offer[0].reason is not MoveReason.DRAIN, -offer[0].value_s))
    verdicts = [draft.settle(session) for _, session in offers]
    if MoveTrigger.REPLICATE in triggers:
        verdicts += [draft.replicate(p) for p in sorted(prefixes, key=lambda p: -p.frequency_score)]
    return Plan(tuple(m for m in verdicts if m.approved), tuple(m for m in verdicts if not m.approved))


def pressed(
    endpoints: Sequence[Candidate], params: Migration, triggers: Collection[MoveTrigger] = ALL_TRIGGERS
) -> list[str]:
    """Return the endpoints that sessions should leave: draining ones first, then the longest queues."""
    draft = _Draft(endpoints, Budget(), params, pullable=False, triggers=triggers)
    found = [c for c in endpoints if draft.trigger(c.address)]
    found.sort(key=lambda c: (not c.draining, -c.load.pending_prefill_s))
    return [c.address for c in found]


class _Draft:
    """A plan under construction: loads and budget as they will be after the moves so far."""

    def __init__(
        self,
        endpoints: Sequence[Candidate],
        budget: Budget,
        params: Migration,
        pullable: bool,
        triggers: Collection[MoveTrigger],
        ahead: bool = False,
        live: Mapping[str, int] | None = None,
    ) -> None:
        self._ahead = ahead
        self._unclaimed: dict[str, int] = {}
        """Tokens of each endpoint's KV cache that no live session's context needs, if that is known."""
        if live is not None:
            self._unclaimed = {c.address: c.load.kv_pool_tokens - live.get(c.address, 0) for c in endpoints}
        self._endpoints = {c.address: c for c in endpoints}
        self._params, self._pullable = params, pullable
        self._triggers = frozenset(triggers)
        self._moves_left, self._seconds_left = budget.moves, budget.seconds
        self._in_flight = dict(budget.in_flight)
        self._budget = replace(budget, in_flight=self._in_flight)
        self._queue_s = {c.address: c.load.pending_prefill_s for c in endpoints}
        self._room = {c.address: c.load.kv_free_tokens for c in endpoints}
        self._sessions = {c.address: c.load.sessions for c in endpoints}
        self._racks: dict[str, list[float]] = {}
        """Rack → [number of endpoints, sum of their queued seconds]."""
        for c in endpoints:
            rack = self._racks.setdefault(c.endpoint.place.rack, [0.0, 0.0])
            rack[0] += 1.0
            rack[1] += c.load.pending_prefill_s
        taking = [c for c in endpoints if self._takes(c, 1)]
        self._shortlist = nsmallest(
            SHORTLIST, taking, key=lambda c: (c.endpoint.superseded, self._queue_s[c.address])
        )

    def trigger(self, host: str) -> MoveReason | None:
        """Return why sessions should leave the host; None if they need not, or the host is unknown."""
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
        """Return the session's best move after the moves so far, and take it from the budget."""
        move = self.offer(session)
        if not move.approved or not (move := self._afford(move)).approved:
            return move
        load = self._endpoints[move.source].load
        share_s = load.pending_prefill_s / max(1, load.sessions)
        for address, change_s in ((move.source, -share_s), (move.target, share_s)):
            self._queue_s[address] += change_s
            self._racks[self._endpoints[address].endpoint.place.rack][1] += change_s
        self._room[move.target] -= session.context_tokens
        self._sessions[move.target] += 1
        if self._unclaimed:
            self._unclaimed[move.source] += session.context_tokens
            self._unclaimed[move.target] -= session.context_tokens
        return move

    def offer(self, session: SessionFacts) -> Move:
        """Return the session's best move by steps 1 to 3."""
        trigger = self.trigger(session.host)
        if trigger is None:  # enough other sessions have left
            return Move(subject=session.session, reason=MoveReason.RELIEVED, source=session.host)
        if session.chained:
            return Move(subject=session.session, reason=MoveReason.CHAINED, source=session.host)
        if trigger is not MoveReason.DRAIN and session.seconds_since_move <= self._params.cooldown_seconds:
            return Move(subject=session.session, reason=MoveReason.COOLDOWN, source=session.host)
        targets = self._targets(session, trigger)
        if not targets:
            return Move(subject=session.session, reason=MoveReason.NOWHERE, source=session.host)
        best = max((self._move(session, t, trigger) for t in targets), key=lambda move: move.value_s)
        if trigger is not MoveReason.DRAIN and best.value_s <= 0:
            return _because(best, MoveReason.NOT_WORTH)
        return best

    def replicate(self, prefix: PrefixFacts) -> Move:
        """Return the copy of the prefix by step 6."""
        source = prefix.locations[0].address
        if prefix.frequency_score < self._params.replicate_score:
            return Move(subject=prefix.name, reason=MoveReason.NOT_HOT, source=source)
        holders = {location.address for location in prefix.locations}
        free = [c for c in self._shortlist if c.address not in holders and self._takes(c, prefix.tokens)]
        if not free:
            return Move(subject=prefix.name, reason=MoveReason.NOWHERE, source=source)
        target = min(free, key=lambda c: (c.endpoint.superseded, self._queue_s[c.address]))
        cached = prefix.locations[0].tokens
        cost_s, pulled, _ = self._bring(target, source, prefix.tokens, cached, prefix.stored_tokens)
        without_s, *_ = self._bring(target, "", prefix.tokens, 0, prefix.stored_tokens)
        requests = prefix.frequency_score * 60.0 / len(self._endpoints)
        move = Move(
            subject=prefix.name,
            reason=MoveReason.REPLICATE,
            source=source,
            target=target.address,
            transfer_bytes=target.engine.kv_bytes(pulled),
            cost_s=cost_s,
            benefit_s=requests * without_s,
            worth=self._params.worth,
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
            and (trigger is MoveReason.DRAIN or self._is_better(c, session))
            and (trigger is not MoveReason.RACK_PRESSURE or c.endpoint.place.rack != host.endpoint.place.rack)
        ]
        found = [c for c in found if not c.endpoint.superseded] or found
        if len(found) > TARGETS:
            found = nsmallest(TARGETS, found, key=lambda c: queue_s[c.address])
        if found and trigger is MoveReason.DRAIN:
            even_s = min(queue_s[c.address] for c in found) + EVEN_S
            found = [c for c in found if queue_s[c.address] <= even_s]
            fewest = min(self._sessions[c.address] for c in found)
            found = [c for c in found if self._sessions[c.address] == fewest]
        return found

    def _is_better(self, target: Candidate, session: SessionFacts) -> bool:
        """Return whether a session of a hot host waits less at the target, and displaces nothing there that
        is needed."""
        address, tokens = target.address, session.context_tokens
        shorter = self._queue_s[address] < self._queue_s[session.host]
        return shorter and self._unclaimed.get(address, tokens) >= tokens

    def _takes(self, candidate: Candidate, tokens: int) -> bool:
        endpoint = candidate.endpoint
        serves = endpoint.ready and not endpoint.draining
        return serves and self._room[candidate.address] >= tokens

    def _move(self, session: SessionFacts, target: Candidate, trigger: MoveReason) -> Move:
        cost_s, pulled, stored = self._bring(
            target, session.host, session.context_tokens, session.cached_tokens, session.stored_tokens
        )
        turns = lasting_turns(session.turns, self._params)
        here_s, there_s = self._queue_s[session.host], self._queue_s[target.address]
        if not session.prewarms:
            stored = 0
        if self._ahead and (pulled or stored):
            benefit_s, turns = relief_s(here_s, there_s, cost_s, turns), turns - 1.0
        else:
            benefit_s = (here_s - there_s) * turns
        if trigger is MoveReason.DRAIN:  # once the host is gone, everything would be recomputed
            benefit_s = target.engine.prefill_s(session.context_tokens) - self._queue_s[target.address]
        return Move(
            subject=session.session,
            reason=trigger,
            source=session.host,
            target=target.address,
            transfer_bytes=target.engine.kv_bytes(pulled),
            cost_s=cost_s,
            benefit_s=benefit_s,
            worth=self._params.worth,
            turns=turns,
            release=True,
            stored_tokens=stored,
        )

    def _bring(
        self, target: Candidate, source: str, tokens: int, cached_tokens: int, stored_tokens: int
    ) -> tuple[float, int, int]:
        """Return the seconds until the target has `tokens`, and how many of them it pulls from the source and
        reads from the store. A pull ahead of the move costs no request anything, so it is preferred."""
        engine = target.engine

        def with_rest(seconds: float, there: int) -> float:
            return seconds + engine.prefill_s(tokens - there, there)

        ways = [(with_rest(0.0, 0), 0, 0)]
        if stored_tokens:
            ways.append((with_rest(engine.store_s(stored_tokens), stored_tokens), 0, stored_tokens))
        link = target.links.get(source)
        if self._pullable and cached_tokens and link is not None:
            pull_s = engine.transfer_s(cached_tokens, link.bandwidth_bytes_per_s) * link.slowdown
            pull = with_rest(pull_s, cached_tokens), cached_tokens, 0
            if self._ahead:
                return pull
            ways.append(pull)
        return min(ways)

    def _afford(self, move: Move) -> Move:
        """Take the move from the budget, or return it with the reason which budget is used up."""
        ends = move.source, move.target
        link = self._endpoints[move.target].links.get(move.source)
        if self._moves_left is not None and self._moves_left <= 0:
            return _because(move, MoveReason.BUDGET_MOVES)
        if not self._budget.has_room(*ends, move.transfer_bytes, link):
            return _because(move, MoveReason.BUDGET_BYTES)
        if move.reason is not MoveReason.DRAIN:
            if move.cost_s > self._seconds_left:
                return _because(move, MoveReason.BUDGET_SECONDS)
            self._seconds_left -= move.cost_s
        if self._moves_left is not None:
            self._moves_left -= 1
        self._in_flight[ends] = self._in_flight.get(ends, 0) + move.transfer_bytes
        return move

    def _rack_presses(self, host: Candidate) -> bool:
        rack = host.endpoint.place.rack
        count, queued_s = self._racks[rack]
        if not rack or count == len(self._endpoints):
            return False
        mean_s = queued_s / count
        fleet_s = sum(queued_s for _, queued_s in self._racks.values()) / len(self._endpoints)
        return mean_s > self._params.hot_pending_seconds and mean_s > self._params.rack_pressure * fleet_s


def relief_s(here_s: float, there_s: float, copy_s: float, lasting_turns: float) -> float:
    """Return the seconds that a session waits less in all if its KV is copied from a host whose queue takes
    `here_s` to an endpoint whose queue takes `there_s`.

    The copy takes `copy_s`, in which both queues go on shrinking, so a queue that is gone by then is no
    reason to move. The present turn does not gain, because the session switches after it: of `lasting_turns`,
    which counts it as 1, the later ones do.
    """
    shorter_s = max(0.0, here_s - copy_s) - max(0.0, there_s - copy_s)
    return shorter_s * (lasting_turns - 1.0)


def _because(move: Move, reason: MoveReason) -> Move:
    """Return the move with another reason."""
    return replace(move, reason=reason, release=False)
