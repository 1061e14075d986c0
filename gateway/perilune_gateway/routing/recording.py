"""What a verdict changes: binding, load, claims in the index, the decision's record, metrics.

    routed(asked, decision) ─▶ session bound · load begun · blocks claimed · record kept ─▶ Routed
    unprompted(…)           ─▶ the same without a prompt: pass-through and forced requests
    refused(…)              ─▶ record kept

Every verdict of a pool passes here once, and gets the next ordinal, which is also its ticket. What becomes of
a routed request is `in_flight`'s. Does not: decide.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from perilune_api import names
from perilune_gateway.model import (
    Candidate,
    Decision,
    DecisionRecord,
    Endpoint,
    Move,
    Phase,
    Reason,
    Refusal,
    RequestHead,
    RequestView,
    Routed,
    TokenSource,
)
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.explain import sentence
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.routing.admission import engine_priority
from perilune_gateway.routing.gather import Asked, Gatherer, Laps
from perilune_gateway.routing.in_flight import InFlight, Running
from perilune_gateway.routing.rows import find, ranked
from perilune_gateway.state.fleet import EndpointView, Fleet
from perilune_gateway.state.sessions import Session, Sessions

NOT_ASKED = ("", "0", "false")
"""Values of x-perilune-decision that ask for nothing."""
log = logging.getLogger(__name__)


class Recorder:
    """Applies one pool's verdicts."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        gatherer: Gatherer,
        in_flight: InFlight,
        decisions: Decisions,
        metrics: Metrics,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._gatherer = gatherer
        self._in_flight = in_flight
        self._decisions = decisions
        self._metrics = metrics
        self._wall_clock = wall_clock
        self.ordinal = 0
        """Of the next verdict."""

    def configure(self, block_size: int, fallbacks: int, ageing_weight: float = 0.0) -> None:
        """`fallbacks`: endpoints that Envoy is told beside the target. `ageing_weight`: of the engine's
        priority; 0: none is told."""
        self._block_size = block_size
        self._fallbacks = fallbacks
        self._ageing_weight = ageing_weight

    def request_id(self, head: RequestHead) -> str:
        return head.headers.get(names.REQUEST_ID_HEADER, "")[:128] or f"request-{self.ordinal}"

    def routed(self, asked: Asked, view: RequestView, decision: Decision, policy: str) -> Routed:
        """A policy has chosen."""
        prompt, identity, now, target = asked.prompt, asked.identity, asked.now, decision.target
        chosen = find(asked.candidates, target)
        assert chosen is not None, "a policy chose somebody who was no candidate"
        cached, fetch_s = self._fetching(decision, chosen)
        new = prompt.tokens - cached
        session = self._bind(asked, chosen.endpoint)
        last = prompt.blocks[-1] if len(prompt.blocks) * self._block_size > cached else 0
        awaited = last if chosen.endpoint.events and prompt.source is not TokenSource.ESTIMATE else 0
        as_rowed, engine = cached == chosen.overlap.device_tokens, self._gatherer.engine
        prefill_s = chosen.prefill_s if as_rowed else chosen.engine.prefill_s(new, cached)
        running = Running(
            view.request_id,
            target,
            now,
            session,
            identity.final,
            prompt.blocks,
            awaited,
            prefill_s if chosen.engine is engine else engine.prefill_s(new, cached),
            fetch_s,
            decision.replicate_from,
            engine.request_overhead_s(prompt.tokens) if fetch_s else 0.0,
            chosen.load.pending_prefill_s + fetch_s + prefill_s,
        )
        ticket = self._start(running, decision.move)
        self._fleet.start(
            ticket,
            target,
            uncached_tokens=new,
            prefill_s=prefill_s,
            context_tokens=prompt.tokens,
            last_block=awaited,
        )
        if session:
            session.ticket = ticket
        if prompt.hint:
            self._sessions.hint(identity.tenant, prompt.hint, target)
        if decision.moved_from:
            self._fleet.moved(decision.moved_from, target, now)
        if prompt.blocks:
            self._in_flight.speculate(chosen.endpoint, prompt.blocks, now)
        record = DecisionRecord(
            view,
            decision,
            policy,
            asked.candidates,
            asked.excluded,
            self._destinations(decision),
            cached,
            asked.laps.total(),
            self._wall_clock(),
            identity.tenant,
            dice=asked.dice,
        )
        running.record = self._keep(record)
        routed = self._answer(asked.head, ticket, record)
        if self._ageing_weight:
            priority = engine_priority(self._wall_clock(), prefill_s, self._ageing_weight)
            routed = replace(routed, priority=priority)
        return routed

    def unprompted(self, asked: Asked, order: Sequence[EndpointView], reason: Reason) -> Routed:
        """No policy was asked: the first of `order`."""
        target = order[0].endpoint.address
        request_id = self.request_id(asked.head)
        running = Running(request_id, target, asked.now, None, False, (), 0)
        ticket = self._start(running)
        self._fleet.start(ticket, target, uncached_tokens=0, prefill_s=0.0, context_tokens=0)
        record = DecisionRecord(
            RequestView(request_id, ticket, 0, Phase.HEADERS),
            Decision(target, reason),
            "",
            excluded=asked.excluded,
            destinations=tuple(e.endpoint.address for e in order[: 1 + self._fallbacks]),
            timings_us=asked.laps.total(),
            time=self._wall_clock(),
        )
        running.record = self._keep(record)
        return self._answer(asked.head, ticket, record)

    def refused(
        self,
        head: RequestHead,
        refusal: Refusal,
        laps: Laps | None = None,
        asked: Asked | None = None,
        view: RequestView | None = None,
        policy: str = "",
    ) -> Refusal:
        """Nobody gets it. `asked`: as far as it came; `view` and `policy`: if a policy was asked."""
        record = DecisionRecord(
            view or RequestView(self.request_id(head), self.ordinal, 0),
            refusal,
            policy,
            asked.candidates if asked else (),
            asked.excluded if asked else {},
            timings_us=laps.total() if laps else {},
            time=self._wall_clock(),
            tenant=asked.identity.tenant if asked else "",
            dice=asked.dice if asked else 0,
        )
        self._keep(record)
        self.ordinal += 1
        return refusal

    # -- inside ------------------------------------------------------------------------------------

    def _fetching(self, decision: Decision, chosen: Candidate) -> tuple[int, float]:
        """Prompt tokens that the target need not prefill, and the seconds, without correction, of fetching
        those that its device does not hold: from the peer that the decision names, or else what the shared
        store has, which an engine looks up by itself, whatever the policy thought of it."""
        device, host, stored = chosen.overlap
        here, peer = max(device, decision.cached_tokens), decision.replicate_from
        engine = self._gatherer.engine
        if peer and peer in chosen.links:
            bandwidth = chosen.links[peer].bandwidth_bytes_per_s
            return here, engine.transfer_s(here - device, bandwidth)
        if stored > max(device, host):
            return max(here, stored), engine.store_s(stored - device)
        return max(here, host), 0.0

    def _bind(self, asked: Asked, target: Endpoint) -> Session | None:
        sessions, session, prompt, now = self._sessions, asked.session, asked.prompt, asked.now
        if session:
            sessions.use(session, now)
        elif key := asked.identity.key:
            session = sessions.begin(key, now, asked.identity.parent_key, asked.identity.inferred)
        else:
            return None
        if session.host != target.address:
            sessions.bind(session, target.address, now)
        session.turns += 1
        if prompt.model:
            sessions.read(session, prompt.tokens, prompt.body_bytes, prompt.blocks)
        else:
            sessions.unread(session, prompt.tokens, prompt.body_bytes)
        if prompt.blocks:
            sessions.cached(session, prompt.blocks[-1], len(prompt.blocks) * self._block_size)
        elif not target.events:
            sessions.cached(session, 0, self._gatherer.whole_blocks(prompt.tokens))
        return session

    def _start(self, running: Running, move: Move | None = None) -> int:
        ticket = self.ordinal
        self._in_flight.started(ticket, running, move)
        self.ordinal += 1
        return ticket

    def _destinations(self, decision: Decision) -> tuple[str, ...]:
        """The target, then the candidates by cost."""
        by_cost = ranked(decision.costs, self._fallbacks + 1)
        others = [address for address in by_cost if address != decision.target]
        return (decision.target, *others[: self._fallbacks])

    def _keep(self, record: DecisionRecord) -> int:
        self._metrics.decided(record)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("decision request_id=%s %s", record.request_id, sentence(record))
        return self._decisions.add(record)

    def _answer(self, head: RequestHead, ticket: int, record: DecisionRecord) -> Routed:
        asked = head.headers.get(names.DECISION_HEADER, "") not in NOT_ASKED
        header = f"{record.target}; {record.reason}; request={record.request_id}" if asked else ""
        return Routed(ticket, record.destinations, record.request_id, header)
