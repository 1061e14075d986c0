"""The migration planner of a simulation: the gateway's own `Planner` on facts of the simulated gateway.

The facts come from `Beliefs` and `RunIndex`. Where engines hand KV over, `handing_over` copies it before a
session switches. In the other arms, the session's next request carries an offered move out. In arm `pull`,
that request pulls the KV; when the target has it, the source frees those parts of its copy that no other
session has used, which its LRU would evict only later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, islice
from math import sqrt

from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Location, Move, Overlap, Subject
from perilune_gateway.moves.handoff import Handoffs, Standing
from perilune_gateway.moves.plan import PrefixFacts, SessionFacts
from perilune_gateway.moves.planner import Planner
from perilune_gateway.routing.pull_limits import OpenPulls, PullLimits
from perilune_research.simulator.beliefs import Beliefs, KnownSession
from perilune_research.simulator.index import RunIndex
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.store import SimulatedStore

SHARED = -1
"""Owner of a run through which several sessions go."""


class Moving:
    """The planner, the hand-offs and the limits of pulls, and the facts that they ask for. A session is named
    by its number, and a prefix that ends in run r by -1 - r."""

    def __init__(
        self,
        setting: Setting,
        beliefs: Beliefs,
        index: RunIndex,
        store: SimulatedStore | None,
        sessions: Sequence[KnownSession],
        block_tokens: int = 16,
    ) -> None:
        self.planner = Planner(self)
        open_pulls = OpenPulls()
        self.handoffs = Handoffs(open_pulls.copies)
        self.limits = PullLimits(self.planner, self.handoffs, open_pulls)
        self.planner.configure(setting.migration, setting.policy_name)
        reach = setting.deployment.reach
        self._reads = reach.reads_peers and setting.routing.pull.enabled
        self.pullable = reach.hands_over or self._reads or setting.deployment.pulls
        self.ahead = reach.hands_over
        self.on = bool(self.planner.triggers)
        self.interval_s = setting.migration.interval_seconds
        self._block = block_tokens
        self._beliefs, self._index, self._store, self._all = beliefs, index, store, sessions
        self._at: list[dict[int, KnownSession]] = [{} for _ in beliefs.endpoints]
        """For each endpoint, the sessions that have run there, the most recent last. Some may have left."""
        self._tickets: dict[SimulatedRequest, int] = {}
        self._busy: Counter[int] = Counter()
        """Requests in flight by session."""
        self._begun: dict[int, tuple[float, int]] = {}
        """Per run: when a new session first began with it, and how many did."""
        self._owner: dict[int, int] = {}
        """Per run: the one session that goes through it, or SHARED."""

    # -- requests ----------------------------------------------------------------------------------

    def offer(
        self, request: SimulatedRequest, session: KnownSession, known_tokens: int, now: float
    ) -> Move | None:
        """Return the planner's offer for a request, if any. `known_tokens`: the length of the longest prefix
        of its prompt that any endpoint holds."""
        if session.host >= 0:
            return self.planner.offer(session.number, None)
        if not known_tokens:
            return None
        runs = self._index.runs
        prefix = next(r for r in runs.chain[request.run] if known_tokens <= runs.end[r])
        since, times = self._begun.get(prefix, (now, 0))
        self._begun[prefix] = since, times + 1
        self.planner.saw(_prefix(prefix), known_tokens)
        return self.planner.offer(None, _prefix(prefix))

    def recorded(
        self, request: SimulatedRequest, session: KnownSession, move: Move | None, now: float
    ) -> None:
        """Record that a request was routed, with the move that it carries out."""
        session.run, session.seen_s = request.run, now
        there = self._at[request.endpoint]
        there.pop(session.number, None)
        there[session.number] = session
        for run in self._index.runs.chain[request.run]:
            owner = self._owner.setdefault(run, session.number)
            if owner != session.number:
                self._owner[run] = SHARED
        self._busy[session.number] += 1
        if move:
            self._tickets[request] = self.planner.started(move, now)

    def over(self, request: SimulatedRequest) -> None:
        """Record that a request which was routed has ended."""
        self._busy[request.task.session] -= 1

    def rebind(self, number: int, target: int, now: float) -> None:
        """Switches a session to the target without a request."""
        session = self._all[number]
        self._at[session.host].pop(number, None)
        self._beliefs.bind(session, target, now)
        self._at[target][number] = session

    def ended(self, request: SimulatedRequest, now: float, *, arrived: bool) -> Sequence[int]:
        """End the move that a request carries out, if any. `arrived`: the target has the KV. Return the
        runs that the source may free, leaf first."""
        ticket = self._tickets.pop(request, -1)
        if ticket < 0:
            return ()
        move = self.planner.finished(ticket, now, arrived=arrived)
        if not (arrived and move.release):
            return ()
        return self.own_runs(request)

    def own_runs(self, request: SimulatedRequest) -> list[int]:
        """Return the runs of the request's prompt that only its session has used, leaf first."""
        mine = request.task.session
        chain = self._index.runs.chain[request.run]
        return [run for run in reversed(chain) if self._owner.get(run) == mine]

    # -- facts -------------------------------------------------------------------------------------

    def endpoints(self, now: float, near: Collection[str] = ()) -> Sequence[Candidate]:
        b = self._beliefs
        locations = [Location(address, 0) for address in near]
        nothing: dict[str, Link] = {}
        return [
            Candidate(
                endpoint=endpoint,
                load=b.load(e, now),
                overlap=Overlap(),
                links=b.links(e, locations, now) if locations else nothing,
                engine=b.models[e],
            )
            for e, endpoint in enumerate(b.endpoints)
        ]

    def link(self, source: str, target: str, now: float) -> Link | None:
        b = self._beliefs
        return b.links(b.number[target], [Location(source, 0)], now).get(source)

    def sessions(
        self, host: str, limit: int, now: float, last: Collection[Subject] = ()
    ) -> Sequence[SessionFacts]:
        e = self._beliefs.number[host]
        there = self._at[e]
        for gone in [number for number, session in there.items() if session.host != e]:
            del there[gone]
        first = (s for s in reversed(there.values()) if s.number not in last)
        after = (self._all[subject] for subject in last if subject in there)
        recent = chain(first, after)
        if not self.ahead:
            return [self._facts(s, host, self._readable(s, e, now), now) for s in islice(recent, limit)]
        staying = (
            s
            for s in recent
            if not (self.handoffs.moves(s.number) or (self._busy[s.number] and not self._handed(s, e)))
        )
        return [
            self._facts(s, host, 0 if self.handoffs.gave_up(s.number, now) else self._handed(s, e), now)
            for s in islice(staying, limit)
        ]

    def _readable(self, s: KnownSession, e: int, now: float) -> int:
        """Tokens of the session's context that others can read at the endpoint, with a request."""
        host = self._beliefs.engines[e].host if self._reads else None
        if host is None:
            return self._index.of(e, s.run, s.context_tokens, now)
        return min(host.match(s.run, s.context_tokens), s.context_tokens)

    def _handed(self, s: KnownSession, e: int) -> int:
        """Return how many tokens of the session's context the endpoint has announced, and so can hand
        over."""
        return self._index.announced(e, s.run, s.context_tokens)

    def _facts(self, s: KnownSession, host: str, held_tokens: int, now: float) -> SessionFacts:
        context = s.context_tokens
        return SessionFacts(
            session=s.number,
            host=host,
            context_tokens=context,
            cached_tokens=held_tokens,
            stored_tokens=self._store.match(s.run, context) if self._store else 0,
            turns=s.turns,
            seconds_since_move=now - s.moved_s,
            idle_s=now - s.seen_s,
        )

    def live_tokens(self, now: float, active_s: float) -> None:
        """Return None: targets are not looked at for what a copy would evict."""

    def prefix(self, name: Subject, tokens: int, now: float) -> PrefixFacts | None:
        assert isinstance(name, int), "a prefix is named by a run"
        if self.handoffs.moves(name):
            return None
        run = _prefix(name)
        held = self._index.match(run, tokens, now)
        addresses = self._beliefs.endpoints
        locations = [Location(addresses[e].address, held_tokens) for e, held_tokens in held.items()]
        if not locations:
            return None
        since, times = self._begun[run]
        score = times / sqrt(max(1.0, now - since))
        stored = self._store.match(run, tokens) if self._store else 0
        locations.sort(key=lambda location: -location.tokens)
        return PrefixFacts(name, tokens, score, tuple(locations), stored)

    # -- what can be handed over -------------------------------------------------------------------

    def standing(self, subject: Subject, now: float) -> Standing | None:
        """Return where a session stands; None for a session that has ended, and for a prefix."""
        assert isinstance(subject, int), "sessions and prefixes are numbers"
        if subject < 0 or self._all[subject].host < 0:
            return None
        session = self._all[subject]
        host = self._beliefs.endpoints[session.host].address
        return Standing(host, self._handed(session, session.host), self._busy[subject] > 0)

    def content(self, subject: Subject) -> tuple[int, int] | None:
        """Return (run, tokens) of what can be handed over, in whole blocks; None if there is nothing."""
        assert isinstance(subject, int), "sessions and prefixes are numbers"
        if subject < 0:
            run = _prefix(subject)
            depth = self._index.runs.end[run]
            held = max((self._index.announced(e, run, depth) for e in range(len(self._at))), default=0)
        else:
            session = self._all[subject]
            run, held = session.run, self._handed(session, session.host)
        tokens = held // self._block * self._block
        return (run, tokens) if tokens else None


def _prefix(run: int) -> int:
    """Return the name of the prefix that ends in a run; given a prefix's name, returns its run."""
    return -1 - run
