"""Applies verdicts and follows every routed request to its end.

    routed / unprompted ──▶ on_response ──▶ on_usage (each 0 or 1 times) ──▶ finished (exactly once)
                              └─ on_applied, whenever an engine announces blocks
    refused

1. A verdict is applied once: the session is bound to the target, its load begins, its blocks count as cached
   there, and the decision's record goes to the observer.
2. `on_applied`: a KV event that covers the prompt's last block ends its prefill. The load is released, and
   the calibration learns how long the prefill took. An event that continues a session's blocks moves the
   session's known context forward.
3. `on_response`: the answer's head says which endpoint really serves. A fallback takes over load and session.
4. `on_usage`: the answer said how much of the prompt was cached; the record's ending keeps it.
5. `finished`: the load is given back. A moment later the parity check is told whether the prompt's blocks
   were announced.

A planned move that a request carries out is over with the first of: its prefill's end, the head of a whole
answer, its end. Does not decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from perilune_api import names
from perilune_api.pool import Pool
from perilune_gateway.model import (
    NO_FIELDS,
    Candidate,
    Decision,
    DecisionRecord,
    Ending,
    Endpoint,
    EngineFields,
    Move,
    Outcome,
    Phase,
    Reason,
    Refusal,
    RequestHead,
    RequestView,
    Routed,
    Tier,
    TokenSource,
    rank_of,
    server_of,
)
from perilune_gateway.model.handoff import HandoffRecord
from perilune_gateway.moves.planner import Planner
from perilune_gateway.request.aliases import Aliases
from perilune_gateway.routing.admission import engine_priority
from perilune_gateway.routing.candidates import CandidateBuilder
from perilune_gateway.routing.context import RequestContext, StepTimer
from perilune_gateway.routing.handing_over import HandingOver
from perilune_gateway.routing.new_sessions import NewSessions
from perilune_gateway.routing.remote_prefills import RemotePrefills
from perilune_gateway.state.ejection import Cause
from perilune_gateway.state.engine_blocks import Applied
from perilune_gateway.state.fleet import EndpointView
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.sessions import Session

EVENTS_LATE_S = 1.0
"""After a request's end, its prompt's KV events may take this long before they count as missing."""
APPROXIMATE_TTL_S = 600.0
"""A prompt counts as cached for this long if its blocks are not announced: by an endpoint without KV events,
or because its tokens are only estimated, as those of pictures are."""
MAX_ASKING = 256
"""The most requests that ask an endpoint to announce cached blocks again, before it has told all. The answer
has all blocks of one prompt."""
NOT_FOUND = 404
REFUSED = 400
"""Least status of an answer without a prefill."""
UNREACHABLE = (0, 502, 503, 504)
"""Statuses by which Envoy reports an endpoint that it could not reach; 0: no answer came."""
NO_DECISION_HEADER = ("", "0", "false")
"""Values of the request header x-perilune-decision that ask for no answer header."""


class Observer(Protocol):
    """Is told of every verdict, every end and every hand-off: metrics, kept decisions, logs."""

    def decided(self, record: DecisionRecord) -> int:
        """Returns the record's number, for `ended`."""

    def ended(self, number: int, target: str, ending: Ending) -> None: ...

    def handed_over(self, record: HandoffRecord) -> None: ...


class Running(Struct, gc=False):
    """A routed request that has not ended."""

    request_id: str
    target: str
    started_at: float
    session: Session | None
    final: bool
    blocks: Sequence[int]
    claimed: Sequence[int]
    """Those of its blocks that were neither announced nor claimed before."""
    awaited: int
    """The block whose KV event ends the prefill; 0 if none is known."""
    prefill_s: float = 0.0
    """Predicted seconds of the prefill alone, without calibration."""
    fetch_s: float = 0.0
    """Predicted seconds of pulling or loading KV before it, without calibration; 0: nothing is fetched."""
    peer: str = ""
    """The endpoint that KV is pulled from; empty: it comes from the shared store, if from anywhere."""
    overhead_s: float = 0.0
    """Predicted seconds beside prefill and decode, without calibration."""
    ttft_s: float = 0.0
    """Predicted seconds of queue, fetching and prefill."""
    prefilled_at: float = 0.0
    answered_at: float = 0.0
    claim_s: float | None = None
    """Seconds for which its blocks count as cached if they are not announced; None: as the pool says."""
    record: int = -1
    """The observer's number for the decision's record."""
    served: str = ""
    status: int = 0
    cached_tokens: int | None = None
    """As the engine reports it."""
    move: int = -1
    """The planner's ticket of the move that this request carries out; -1: none, or it is over."""
    alone: tuple[int, float] = (0, 0.0)
    """If another endpoint prefills: the uncached tokens here, and the seconds that their prefill would
    take."""


class Lifecycle:
    """All requests of one pool, from verdict to end."""

    def __init__(
        self,
        state: PoolState,
        candidates: CandidateBuilder,
        planner: Planner,
        handing_over: HandingOver,
        remote_prefills: RemotePrefills,
        new_sessions: NewSessions,
        observer: Observer,
        aliases: Aliases,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._candidates = candidates
        self._planner = planner
        self._handing_over = handing_over
        self._remote_prefills = remote_prefills
        self._new_sessions = new_sessions
        self._observer = observer
        self._aliases = aliases
        self._clock = clock
        self._wall_clock = wall_clock
        self.ordinal = 0
        """Counts verdicts. The next request gets this number as its ticket."""
        self._running: dict[int, Running] = {}
        self._ended: deque[tuple[float, str, int, float]] = deque()
        """(when to look, endpoint, last block, start) of prompts whose KV events may still come."""
        self._to_ask: dict[str, int] = {}
        """Endpoint of whose cache a part is not known → how many more requests may ask it to tell."""
        self._prefilled_at: dict[str, float] = {}
        """Address → when the last prefill there ended."""
        self.on_claimed: Callable[[str, Sequence[int], float | None], object] = lambda *claim: None
        """Called with (address, blocks, seconds) when blocks of a prompt begin to count as cached."""

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        self._block_size = pool.spec.engine.block_size
        self._fallbacks = pool.spec.routing.fallbacks
        self._engine_priority = pool.spec.routing.engine_priority
        self._decision_header = pool.spec.routing.decision_header
        self._session_failures = pool.spec.routing.ejection.session_failures
        self._state.ejection.rules = pool.spec.routing.ejection
        self._remote_prefills.configure(pool.spec.routing.disaggregation)

    def forget(self, address: str) -> None:
        """The endpoint left the pool. Its requests go on."""
        self._prefilled_at.pop(address, None)
        self._to_ask.pop(address, None)

    def request_id(self, head: RequestHead) -> str:
        """The client's request id, or one of ours."""
        return head.headers.get(names.REQUEST_ID_HEADER, "")[:128] or f"request-{self.ordinal}"

    # -- verdicts ----------------------------------------------------------------------------------

    def routed(self, context: RequestContext, view: RequestView, decision: Decision, policy: str) -> Routed:
        """A policy has chosen an endpoint."""
        prompt, now, target = context.prompt, context.now, decision.target
        chosen = next(c for c in context.candidates if c.address == target)
        split = bool(decision.prefill)
        held, fetch_s = self._fetching(decision, chosen)
        cached = prompt.tokens if split else held
        uncached = prompt.tokens - cached
        prefill_s = chosen.engine.prefill_s(uncached, cached)
        believed = self._state.calibration.engine
        session = self._bind(context, chosen.endpoint)
        announces = chosen.endpoint.events and prompt.source is not TokenSource.ESTIMATE
        claim_s = None if announces else APPROXIMATE_TTL_S
        covers_new = len(prompt.blocks) * self._block_size > held
        awaited = prompt.blocks[-1] if announces and covers_new else 0
        priority = self._priority(context.identity.tenant, prefill_s)
        ticket = self._start(
            Running(
                view.request_id,
                target,
                now,
                session,
                context.identity.final,
                prompt.blocks,
                prompt.blocks[chosen.overlap.device_tokens // self._block_size :],
                awaited,
                believed.prefill_s(uncached, cached),
                0.0 if split else fetch_s,
                decision.replicate_from,
                believed.request_overhead_s(prompt.tokens),
                chosen.load.pending_prefill_s + fetch_s + prefill_s,
                claim_s=claim_s,
                alone=(prompt.tokens - held, chosen.engine.prefill_s(prompt.tokens - held, held)),
            ),
            decision.move,
        )
        self._state.fleet.start(
            ticket,
            target,
            uncached_tokens=uncached,
            prefill_s=prefill_s,
            context_tokens=prompt.tokens,
            last_block=awaited,
            tenant=context.identity.tenant,
        )
        with self._taken_back_on_error(ticket):
            self._state.ejection.sent(
                ticket,
                target,
                now,
                source=session.key if session else ticket,
                alone_s=believed.prefill_s(uncached, cached) + fetch_s,
                by_event=bool(awaited),
            )
            if not awaited:
                ratio = max(1.0, chosen.ttft_ratio)
                self._state.fleet.expect_prefilled(ticket, now + ratio * self._running[ticket].ttft_s)
            if session:
                session.ticket = ticket
            if prompt.cache_key:
                self._state.sessions.hint(context.identity.tenant, prompt.cache_key, target)
            if decision.moved_from:
                self._state.fleet.moved(decision.moved_from, target, now)
            self._claim(target, prompt.blocks, now, claim_s)
            record = DecisionRecord(
                view,
                decision,
                policy,
                context.candidates,
                context.excluded,
                self._destinations(decision),
                held,
                context.timer.total(),
                self._wall_clock(),
                context.identity.tenant,
                seed=context.seed,
                queued_s=context.queued_s,
                trace=context.head.trace,
            )
            routed = self._answer(context.head, ticket, record)
            if split:
                subject = session.key if session else view.request_id
                remote = self._remote_prefills.begin(
                    *(ticket, subject, decision, context.candidates, prompt.blocks, prompt.tokens)
                )
                routed = replace(routed, remote=remote)
            name, turns = (session.key, session.turns) if session else (ticket, 1)
            self._new_sessions.turn_began(name, prompt.tokens, turns)
            return replace(routed, fields=self._engine_fields(context, target, priority))

    def _priority(self, tenant: str, prefill_s: float) -> int | None:
        """The request's rank in the engine's queue; None: first come, first served."""
        ranks = self._engine_priority
        if not ranks.used:
            return None
        ahead_s = self._state.fleet.share_of_queue_s(tenant) if ranks.fair_share else 0.0
        return engine_priority(self._wall_clock() + ahead_s, prefill_s, ranks.ageing_weight)

    def _engine_fields(self, context: RequestContext, target: str, priority: int | None) -> EngineFields:
        """What to write into the body of a request that was routed to `target`."""
        prompt, identity = context.prompt, context.identity
        if not prompt.model:
            return NO_FIELDS  # the body is not read
        if asked := self.asks(target):
            self._to_ask[target] -= 1
        response_id = ""
        if prompt.names_response:
            response_id = self._aliases.response(identity.tenant, identity.session_id, target, context.seed)
        return EngineFields(
            priority,
            prompt.cache_salt,
            response_id,
            asked,
        )

    def unprompted(self, context: RequestContext, order: Sequence[EndpointView], reason: Reason) -> Routed:
        """No policy was asked: the request goes to the first of `order`, the rest are fallbacks."""
        target = order[0].endpoint.address
        request_id = self.request_id(context.head)
        ticket = self._start(Running(request_id, target, context.now, None, False, (), (), 0))
        self._state.fleet.start(ticket, target, uncached_tokens=0, prefill_s=0.0, context_tokens=0)
        with self._taken_back_on_error(ticket):
            record = DecisionRecord(
                RequestView(request_id, ticket, 0, Phase.HEADERS),
                Decision(target, reason),
                "",
                excluded=context.excluded,
                destinations=self._servers(target, [e.endpoint.address for e in order]),
                timings_us=context.timer.total(),
                time=self._wall_clock(),
                trace=context.head.trace,
            )
            return self._answer(context.head, ticket, record)

    def refused(
        self,
        head: RequestHead,
        refusal: Refusal,
        timer: StepTimer | None = None,
        context: RequestContext | None = None,
        view: RequestView | None = None,
        policy: str = "",
    ) -> Refusal:
        """No endpoint gets the request. `context`: as far as it is known; `view` and `policy`: where a policy
        was asked."""
        record = DecisionRecord(
            view or RequestView(self.request_id(head), self.ordinal, 0),
            refusal,
            policy,
            context.candidates if context else (),
            context.excluded if context else {},
            timings_us=timer.total() if timer else {},
            time=self._wall_clock(),
            tenant=context.identity.tenant if context else "",
            seed=context.seed if context else 0,
            queued_s=context.queued_s if context else 0.0,
            trace=head.trace,
        )
        self._observer.decided(record)
        self.ordinal += 1
        return refusal

    def prefills_itself(self, ticket: int) -> None:
        """No other endpoint prefills the request's prompt after all: it is load on the target."""
        running, fleet = self._running[ticket], self._state.fleet
        (uncached, prefill_s), prompt = running.alone, fleet.context_tokens(ticket)
        fleet.finish(ticket)
        fleet.start(
            ticket,
            running.target,
            uncached_tokens=uncached,
            prefill_s=prefill_s,
            context_tokens=prompt,
            last_block=running.awaited,
        )

    # -- what Envoy says ---------------------------------------------------------------------------

    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None:
        """The answer's head has come. `served`: the endpoint that answers, empty if unknown. One that refuses
        a request caches nothing of it."""
        running, now, fleet = self._running[ticket], self._clock(), self._state.fleet
        rank = rank_of(running.target)
        if served and rank is not None:
            served = f"{served}#{rank}"
        running.status, running.served, running.answered_at = status, served, now
        if served and served != running.target and fleet.get(served):
            self._served_elsewhere(ticket, running, served, now)
        if status >= REFUSED:
            self._state.index.unclaim(running.target, running.claimed)
        if status == NOT_FOUND and running.session:
            running.session.unserved = True
        self._state.ejection.head(ticket, status, now)
        if not streamed:
            fleet.prefill_done(ticket)
            self._end_move(running, now, arrived=status < 400)

    def _served_elsewhere(self, ticket: int, running: Running, served: str, now: float) -> None:
        fleet = self._state.fleet
        self._remote_prefills.served_elsewhere(ticket)
        fleet.suspect(running.target, now)
        self._end_move(running, now, arrived=False)
        fleet.served_by(ticket, served)
        self._state.ejection.served_by(ticket, served, now)
        if running.session and running.session.ticket == ticket:
            self._state.sessions.bind(running.session, served, now)
        if endpoint := fleet.get(served):
            self._claim(served, running.blocks, now, running.claim_s)
            if running.awaited and not endpoint.events:
                running.awaited = 0
                fleet.expect_prefilled(ticket, now + running.ttft_s)
        running.target = served

    def on_usage(self, ticket: int, cached_tokens: int) -> None:
        """The engine served so many of the prompt's tokens from its prefix cache."""
        self._running[ticket].cached_tokens = cached_tokens

    def finished(self, ticket: int, outcome: Outcome) -> None:
        """The request has ended. Raises KeyError if it had ended before."""
        running, now, state = self._running.pop(ticket), self._clock(), self._state
        completed = outcome is Outcome.COMPLETED
        answered = completed and running.status < 400
        state.fleet.finish(ticket)
        wrong = state.ejection.ended(ticket, now, well=answered)
        self._end_move(running, now, arrived=answered)
        self._remote_prefills.ended(ticket, answered=answered)
        if outcome is Outcome.FAILED and running.status in UNREACHABLE:
            state.fleet.suspect(running.target, now)
        if completed and running.prefilled_at and state.fleet.get(running.target):
            state.calibration.decoded(running.target, now - running.prefilled_at)
        if answered and running.awaited:
            self._ended.append((now + EVENTS_LATE_S, running.target, running.awaited, running.started_at))
        self._check_announcements(now)
        session = running.session
        if session and session.host == running.target:
            self._count_failures(session, running.status, wrong, answered=answered)
        if running.final and session and (session.ticket == ticket or not session.inferred):
            state.sessions.free(session.key)
        name, tokens = (session.key, session.context_tokens) if session else (ticket, 0)
        self._new_sessions.turn_ended(name, tokens, now, final=running.final or session is None)
        since = running.started_at
        ending = Ending(
            outcome,
            now - since,
            running.served,
            running.status,
            running.cached_tokens,
            running.answered_at - since if running.answered_at else None,
            running.prefilled_at - since if running.prefilled_at else None,
        )
        self._observer.ended(running.record, running.target, ending)
        self._handing_over.turn_ended()

    def _count_failures(self, session: Session, status: int, wrong: Cause | None, *, answered: bool) -> None:
        """Count the session's failures in a row. One that got no sign of life leaves its host at once."""
        if wrong is Cause.LATE and not status:
            session.failures = self._session_failures
        elif wrong is Cause.FAILURES:
            session.failures += 1
        elif answered:
            session.failures = 0

    def _end_move(self, running: Running, now: float, *, arrived: bool) -> None:
        """If the request carries out a move, the move is over. `arrived`: the target has the KV."""
        if running.move >= 0:
            self._planner.finished(running.move, now, arrived=arrived)
            running.move = -1

    def _check_announcements(self, now: float) -> None:
        """Tell the parity check whether prompts that ended a moment ago were announced by their engines. If
        they are not, hashes or chat templates differ."""
        while self._ended and self._ended[0][0] <= now:
            _, target, block, since = self._ended.popleft()
            seen = self._state.index.announced(target, block)
            self._state.parity.request_blocks_seen(target, seen, since)

    def asks(self, endpoint: str) -> bool:
        """Whether a request to this endpoint should ask it to announce its prompt's cached blocks again."""
        return self._to_ask.get(endpoint, 0) > 0

    def on_learning(self, endpoint: str, learning: bool) -> None:
        """Whether blocks of the endpoint wait for others that are not known, so that it should tell them. It
        is asked by MAX_ASKING requests at most until it has told all; then the budget is full again."""
        if learning:
            self._to_ask.setdefault(endpoint, MAX_ASKING)
        else:
            self._to_ask.pop(endpoint, None)

    # -- what engines announce ---------------------------------------------------------------------

    def on_applied(self, applied: Applied) -> None:
        """A KV event has changed the index: release the load that it ends, and extend sessions' contexts."""
        state = self._state
        if applied.cleared:
            state.sessions.forget_host(applied.endpoint)
        self._handing_over.on_applied(applied)
        if not applied.stored or applied.tier is not Tier.DEVICE:
            return
        now = self._clock()
        state.ejection.heard(applied.endpoint)
        for ticket in state.fleet.blocks_stored(applied.endpoint, applied.stored):
            if ticket not in self._running:  # a prompt that is prefilled for another endpoint
                continue
            state.ejection.prefilled(ticket, now)
            self._prefilled(self._running[ticket], now)
            self._end_move(self._running[ticket], now, arrived=True)
        grown = state.sessions.blocks_stored(
            applied.endpoint, applied.parent, applied.stored, self._block_size
        )
        if grown:
            session, tokens = grown
            state.fleet.progress(session.ticket, tokens)

    def _prefilled(self, running: Running, now: float) -> None:
        """The prefill has just ended: learn from how long it took. An engine prefills one prompt after the
        other, so this one ran since the one before ended, or since its own start; then the request's overhead
        came first."""
        target, calibration = running.target, self._state.calibration
        before = self._prefilled_at.get(target, 0.0)
        running.prefilled_at = self._prefilled_at[target] = now
        if running.fetch_s:
            if before < running.started_at:  # otherwise it may have fetched while others were prefilled
                self._fetched(running, now)
        elif running.prefill_s:
            if before <= running.started_at:
                alone_s, predicted_s = now - running.started_at, running.overhead_s + running.prefill_s
            else:
                alone_s, predicted_s = now - before, running.prefill_s
            overhead_s = running.overhead_s * calibration.prefill_ratio(target, now)
            calibration.prefill(target, alone_s, predicted_s, now)
            calibration.ttft(target, now - running.started_at, running.ttft_s + overhead_s, now)

    def _fetched(self, running: Running, now: float) -> None:
        """Fetching took the time that prefill and overhead do not explain."""
        target, calibration = running.target, self._state.calibration
        rest_s = running.prefill_s * calibration.prefill_ratio(target, now) + running.overhead_s
        took_s = max(0.001, now - running.started_at - rest_s)
        if running.peer:
            calibration.transfer(running.peer, target, took_s, running.fetch_s, now)
        else:
            calibration.store(target, took_s, running.fetch_s, now)

    # -- inside ------------------------------------------------------------------------------------

    def _fetching(self, decision: Decision, chosen: Candidate) -> tuple[int, float]:
        """(prompt tokens that the target need not prefill, uncalibrated seconds of fetching them). They come
        from the peer that the decision names, or else from the shared store: an engine looks there by itself,
        whatever the policy expected."""
        device, host, stored = chosen.overlap
        if decision.prefill:
            return device, decision.estimated_ttft_s
        here, peer = max(device, decision.cached_tokens), decision.replicate_from
        believed = self._state.calibration.engine
        if peer and peer in chosen.links:
            bandwidth = chosen.links[peer].bandwidth_bytes_per_s
            return here, believed.transfer_s(here - device, bandwidth)
        if stored > max(device, host):
            return max(here, stored), believed.store_s(stored - device)
        return max(here, host), 0.0

    def _bind(self, context: RequestContext, target: Endpoint) -> Session | None:
        """Bind the request's session to the target; None if it has no session."""
        sessions, prompt, now = self._state.sessions, context.prompt, context.now
        session, identity = context.session, context.identity
        if session:
            sessions.use(session, now)
        elif identity.key:
            session = sessions.begin(identity.key, now, identity.parent_key, identity.inferred)
        else:
            return None
        if session.host != target.address:
            sessions.bind(session, target.address, now)
        session.turns += 1
        session.chained = session.chained or prompt.chained
        if prompt.model:
            sessions.read(session, prompt.tokens, prompt.body_bytes, prompt.blocks)
        if prompt.blocks:
            sessions.routed(session, prompt.blocks)
        elif not target.events:
            sessions.routed(session, (), self._candidates.cacheable(prompt.tokens))
        return session

    def _claim(self, address: str, blocks: Sequence[int], now: float, ttl_s: float | None) -> None:
        """Count the prompt's blocks as cached at the endpoint, before it announces them."""
        if blocks and (claimed := self._state.index.speculate(address, blocks, now, ttl_s=ttl_s)):
            self.on_claimed(address, claimed, ttl_s)

    @contextmanager
    def _taken_back_on_error(self, ticket: int) -> Iterator[None]:
        """If applying the verdict fails, the request leaves no load behind."""
        try:
            yield
        except BaseException:
            running, now = self._running.pop(ticket), self._clock()
            self._state.fleet.finish(ticket)
            self._state.ejection.ended(ticket, now, well=False)
            self._end_move(running, now, arrived=False)
            self._remote_prefills.ended(ticket, answered=False)
            raise

    def _start(self, running: Running, move: Move | None = None) -> int:
        """Returns the request's ticket. `move`: the planned move that it carries out."""
        ticket = self.ordinal
        self.ordinal += 1
        self._running[ticket] = running
        if move:
            running.move = self._planner.started(move, running.started_at)
        return ticket

    def _destinations(self, decision: Decision) -> tuple[str, ...]:
        """The target, then the cheapest other candidates as fallbacks."""
        by_cost = sorted(decision.costs, key=lambda cost: cost.total)
        return self._servers(decision.target, [cost.address for cost in by_cost])

    def _servers(self, target: str, others: Sequence[str]) -> tuple[str, ...]:
        """The `ip:port` of the target, then of its fallbacks. All get the same headers, so a fallback serves
        with the rank that was chosen."""
        alike = [a for a in others if a != target and rank_of(a) == rank_of(target)]
        return tuple(server_of(address) for address in (target, *alike[: self._fallbacks]))

    def _answer(self, head: RequestHead, ticket: int, record: DecisionRecord) -> Routed:
        self._running[ticket].record = self._observer.decided(record)
        wants_header = head.headers.get(names.DECISION_HEADER, "") not in NO_DECISION_HEADER
        header = ""
        if wants_header and self._decision_header != "off":
            target = record.target
            named = target if self._decision_header == "address" else self._aliases.endpoint(target)
            header = f"{named}; {record.reason}; request={record.request_id}"
        return Routed(ticket, record.destinations, record.request_id, header, rank=rank_of(record.target))
