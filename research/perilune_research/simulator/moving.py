"""The migration planner of a simulation: the gateway's own `Planner`, its facts from the simulated gateway.

Facts are read from beliefs and the run index; what a plan offers is carried out by the session's next
request, whose pull starts with it. When the target has the KV, the source's copy is freed (an engine's LRU
would get to it later), as far as it belongs to that session alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from math import sqrt

from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Location, Move, Overlap, Subject
from perilune_gateway.moves.plan import PrefixFacts, SessionFacts
from perilune_gateway.moves.planner import Planner
from perilune_research.simulator.beliefs import Beliefs, KnownSession
from perilune_research.simulator.index import RunIndex
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.store import SimulatedStore

SHARED = -1


class Moving:
    """Sessions are named by their numbers, prefixes by the run in which they end."""

    def __init__(
        self,
        setting: Setting,
        beliefs: Beliefs,
        index: RunIndex,
        store: SimulatedStore | None,
        sessions: Sequence[KnownSession],
    ) -> None:
        self.planner = Planner(self)
        self.planner.configure(setting.migration, setting.policy_name)
        self.on = bool(self.planner.triggers)
        self.pullable = setting.pullable
        self.ahead = False
        self.interval_s = setting.migration.interval_seconds
        self._beliefs, self._index, self._store, self._all = beliefs, index, store, sessions
        self._at: list[dict[int, KnownSession]] = [{} for _ in beliefs.endpoints]
        """Sessions by endpoint, the most recent last; some have left since."""
        self._tickets: dict[SimulatedRequest, int] = {}
        self._begun: dict[int, tuple[float, int]] = {}
        """Per run: when a new session first began with it, and how many did."""
        self._owner: dict[int, int] = {}
        """Per run: the one session that goes through it, or SHARED."""

    # -- requests ----------------------------------------------------------------------------------

    def offer(
        self, request: SimulatedRequest, session: KnownSession, known_tokens: int, now: float
    ) -> Move | None:
        """The planner's offer for a request. `known_tokens`: the longest prefix of its prompt that any
        endpoint holds."""
        if session.host >= 0:
            return self.planner.offer(session.number, None)
        if not known_tokens:
            return None
        runs = self._index.runs
        prefix = next(r for r in runs.chain[request.run] if known_tokens <= runs.end[r])
        since, times = self._begun.get(prefix, (now, 0))
        self._begun[prefix] = since, times + 1
        self.planner.saw(prefix, known_tokens)
        return self.planner.offer(None, prefix)

    def recorded(
        self, request: SimulatedRequest, session: KnownSession, move: Move | None, now: float
    ) -> None:
        session.run, session.seen_s = request.run, now
        there = self._at[request.endpoint]
        there.pop(session.number, None)
        there[session.number] = session
        for run in self._index.runs.chain[request.run]:
            owner = self._owner.setdefault(run, session.number)
            if owner != session.number:
                self._owner[run] = SHARED
        if move:
            self._tickets[request] = self.planner.started(move, now)

    def ended(self, request: SimulatedRequest, now: float, *, arrived: bool) -> Sequence[int]:
        """Ends the request's move when its first token exists or never will. Returns the runs that the source
        may forget, leaf first."""
        ticket = self._tickets.pop(request, -1)
        if ticket < 0:
            return ()
        move = self.planner.finished(ticket, now, arrived=arrived)
        if not (arrived and move.release):
            return ()
        return self.own_runs(request)

    def own_runs(self, request: SimulatedRequest) -> list[int]:
        """Runs of the request's prompt that only its session has used, leaf first."""
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
                endpoint,
                b.load(e, now),
                Overlap(),
                links=b.links(e, locations, now) if locations else nothing,
                engine=b.models[e],
            )
            for e, endpoint in enumerate(b.endpoints)
        ]

    def sessions(self, host: str, limit: int, now: float) -> Sequence[SessionFacts]:
        e = self._beliefs.number[host]
        there = self._at[e]
        for gone in [number for number, session in there.items() if session.host != e]:
            del there[gone]
        return [self._facts(session, host, e, now) for session in islice(reversed(there.values()), limit)]

    def _facts(self, s: KnownSession, host: str, e: int, now: float) -> SessionFacts:
        context = s.context_tokens
        return SessionFacts(
            s.number,
            host,
            context,
            self._index.of(e, s.run, context, now),
            self._store.match(s.run, context) if self._store else 0,
            s.turns,
            now - s.moved_s,
            now - s.seen_s,
        )

    def prefix(self, name: Subject, tokens: int, now: float) -> PrefixFacts | None:
        assert isinstance(name, int), "a prefix is named by a run"
        held = self._index.match(name, tokens, now)
        addresses = self._beliefs.endpoints
        locations = [Location(addresses[e].address, held_tokens) for e, held_tokens in held.items()]
        if not locations:
            return None
        since, times = self._begun[name]
        score = times / sqrt(max(1.0, now - since))
        stored = self._store.match(name, tokens) if self._store else 0
        locations.sort(key=lambda location: -location.tokens)
        return PrefixFacts(name, tokens, score, tuple(locations), stored)
