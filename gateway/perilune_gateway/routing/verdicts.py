"""Applies verdicts: what follows from a decision for the state, the engine, the client and the records.

    routed / unprompted ──▶ the session is bound, the load begins (lifecycle.py follows the request), the
                            blocks count as cached, the record goes to the observer ──▶ Routed
    refused ──────────────▶ the record goes to the observer ──▶ Refusal

Each verdict is applied once, and at once. Does not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from msgspec.structs import replace

from perilune_api import names
from perilune_api.pool import Pool
from perilune_gateway.model import (
    NO_FIELDS,
    Candidate,
    Decision,
    DecisionRecord,
    EngineFields,
    Phase,
    Reason,
    Refusal,
    RequestHead,
    RequestView,
    Routed,
    TokenSource,
    rank_of,
    server_of,
)
from perilune_gateway.policy.cost import target_of
from perilune_gateway.request.aliases import Aliases
from perilune_gateway.routing.admission import engine_priority
from perilune_gateway.routing.context import RequestContext, StepTimer
from perilune_gateway.routing.full_reports import FullReports
from perilune_gateway.routing.lifecycle import Lifecycle
from perilune_gateway.routing.observer import Observer
from perilune_gateway.routing.peer_reads import HANGS_S, PeerReads
from perilune_gateway.routing.prefill_forecast import PrefillForecast, forecast, forecast_alone
from perilune_gateway.routing.pulling import Pulling
from perilune_gateway.routing.remote_prefills import RemotePrefills
from perilune_gateway.routing.running import Running
from perilune_gateway.routing.session_turns import SessionTurns
from perilune_gateway.state.fleet import EndpointView
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.sessions import Session

APPROXIMATE_TTL_S = 600.0
"""A prompt counts as cached for this long if its blocks are not announced: by an endpoint without KV events,
or because its tokens are only estimated, as those of pictures are."""
NO_DECISION_HEADER = ("", "0", "false")
"""Values of the request header x-perilune-decision that ask for no answer header."""


class Verdicts:
    """The verdicts of one pool."""

    def __init__(
        self,
        state: PoolState,
        lifecycle: Lifecycle,
        turns: SessionTurns,
        reports: FullReports,
        remote_prefills: RemotePrefills,
        pulling: Pulling,
        peer_reads: PeerReads,
        observer: Observer,
        aliases: Aliases,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._turns = turns
        self._reports = reports
        self._remote_prefills = remote_prefills
        self._pulling = pulling
        self._peer_reads = peer_reads
        self._observer = observer
        self._aliases = aliases
        self._clock = clock
        self._wall_clock = wall_clock
        self.ordinal = 0
        """Counts verdicts. The next request gets this number as its ticket."""

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        routing = pool.spec.routing
        self._fallbacks = routing.fallbacks
        self._engine_priority = routing.engine_priority
        self._decision_header = routing.decision_header
        self._held_s = routing.pull.max_seconds
        self._turns.configure(routing.ejection.session_failures)

    def request_id(self, head: RequestHead) -> str:
        """The client's request id, or one of ours."""
        return head.headers.get(names.REQUEST_ID_HEADER, "")[:128] or f"request-{self.ordinal}"

    # -- verdicts ----------------------------------------------------------------------------------

    def routed(self, context: RequestContext, view: RequestView, decision: Decision, policy: str) -> Routed:
        """A policy has chosen an endpoint."""
        prompt, identity, now, target = context.prompt, context.identity, context.now, decision.target
        chosen, believed = target_of(decision, context.candidates), self._state.calibration.engine
        from_host = view.prefix.from_host
        work = forecast(decision, chosen, prompt.tokens, believed, from_host=from_host)
        session = self._turns.bind(context, chosen.endpoint)
        running = self._running(context, decision, chosen, work, session)
        alone_s = work.alone_s
        if running.alone and from_host:  # it is not late while its endpoint waits for one that hangs
            alone_s = running.alone.alone_s + HANGS_S
        elif context.content and decision.replicate_from:  # nor while it is held
            alone_s += self._held_s
        priority = self._priority(identity.tenant, work.calibrated_s)
        ticket = self._next_ticket()
        with self._lifecycle.begun(
            ticket, running, decision.move, context_tokens=prompt.tokens, tenant=identity.tenant
        ):
            self._state.ejection.sent(
                ticket,
                target,
                now,
                tenant=identity.tenant,
                source=session.key if session else ticket,
                alone_s=alone_s,
                by_event=bool(running.awaited),
            )
            if session:
                session.ticket = ticket
            if prompt.cache_key:
                self._state.sessions.hint(identity.tenant, prompt.cache_key, target)
            if decision.moved_from:
                self._state.fleet.moved(decision.moved_from, target, now)
            self._state.claim(target, prompt.blocks, now, running.claim_s)
            record = DecisionRecord(
                view,
                decision,
                policy,
                context.candidates,
                context.excluded,
                self._destinations(decision),
                work.held_tokens,
                context.timer.total(),
                self._wall_clock(),
                identity.tenant,
                seed=context.seed,
                queued_s=context.queued_s,
                trace=context.head.trace,
            )
            routed = self._answer(context.head, ticket, running, record)
            routed = self._fetching(routed, context, decision, running)
            self._turns.began(ticket, session, prompt.tokens)
            return replace(routed, fields=self._engine_fields(context, target, priority))

    def unprompted(self, context: RequestContext, order: Sequence[EndpointView], reason: Reason) -> Routed:
        """No policy was asked: the request goes to the first of `order`, the rest are fallbacks."""
        target = order[0].endpoint.address
        request_id, ticket = self.request_id(context.head), self._next_ticket()
        running = Running(target, self._state.fleet.join(target), context.now, context.now)
        with self._lifecycle.begun(ticket, running):
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
            return self._answer(context.head, ticket, running, record)

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
        if record.queued_s:
            self.waited_in_vain(head)
        self._next_ticket()
        return refusal

    def waited_in_vain(self, head: RequestHead) -> None:
        """The request's session waited to begin, and its client left or was refused."""
        if head.arrived_at is not None:
            self._observer.first_token(self._clock() - head.arrived_at)

    # -- inside ------------------------------------------------------------------------------------

    def _next_ticket(self) -> int:
        ticket = self.ordinal
        self.ordinal += 1
        return ticket

    def _running(
        self,
        context: RequestContext,
        decision: Decision,
        chosen: Candidate,
        work: PrefillForecast,
        session: Session | None,
    ) -> Running:
        """What `lifecycle` has to know of the request."""
        prompt, block_size = context.prompt, self._state.block_size
        announces = chosen.endpoint.events and prompt.source is not TokenSource.ESTIMATE
        whole = self._state.fleet.whole_blocks(decision.target, len(prompt.blocks))
        covers_new = whole * block_size > work.held_tokens
        awaited = prompt.blocks[whole - 1] if announces and covers_new else 0
        continues = session is not None and (announces or not prompt.model)
        fetches = context.content or context.prefix.from_host
        from_peer = decision.prefill or (fetches and decision.replicate_from)
        believed = self._state.calibration.engine
        return Running(
            decision.target,
            self._state.fleet.join(decision.target),
            context.now,
            context.now,
            prompt.tokens,
            session,
            context.identity.final,
            prompt.blocks,
            prompt.blocks[chosen.overlap.device_tokens // block_size :],
            chosen.overlap.device_tokens if announces and not from_peer else 0,
            None if announces else APPROXIMATE_TTL_S,
            awaited,
            bool(awaited or (continues and chosen.endpoint.events)),
            0.0 if awaited else max(1.0, chosen.ttft_ratio),
            work,
            forecast_alone(decision, chosen, prompt.tokens, believed) if from_peer else None,
            learns=not decision.prefill,
            arrived_at=context.head.arrived_at,
            name=context.head.name,
        )

    def _fetching(
        self, routed: Routed, context: RequestContext, decision: Decision, running: Running
    ) -> Routed:
        """The answer with the KV that comes from another endpoint, if any does."""
        ticket, prompt, session = routed.ticket, context.prompt, running.session
        subject = session.key if session else routed.request_id
        if decision.prefill:
            remote = self._remote_prefills.begin(
                *(ticket, subject, decision, context.candidates, prompt.blocks, prompt.tokens),
                tenant=context.identity.tenant,
            )
            return replace(routed, remote=remote)
        if context.content and decision.replicate_from:
            pull = self._pulling.begin(ticket, subject, decision, context.candidates, context.content)
            return replace(routed, pull=pull)
        if context.prefix.from_host and decision.replicate_from:
            assert running.alone, "it comes from another endpoint"
            alone_s = running.alone.ttft_s if running.awaited else inf
            attachment = self._peer_reads.begin(ticket, subject, decision, context.candidates, alone_s)
            return replace(routed, attachment=attachment)
        return routed

    def _priority(self, tenant: str, prefill_s: float) -> int | None:
        """The request's rank in the engine's queue; None: first come, first served."""
        ranks = self._engine_priority
        if not ranks.used:
            return None
        ahead_s = self._state.in_flight.share_of_queue_s(tenant) if ranks.fair_share else 0.0
        return engine_priority(self._wall_clock() + ahead_s, prefill_s, ranks.ageing_weight)

    def _engine_fields(self, context: RequestContext, target: str, priority: int | None) -> EngineFields:
        """What to write into the body of a request that was routed to `target`."""
        prompt, identity = context.prompt, context.identity
        if not prompt.model:
            return NO_FIELDS  # the body is not read
        if asked := self._reports.wanted(target):
            self._reports.asked(target)
        response_id = ""
        if prompt.names_response:
            response_id = self._aliases.response(identity.tenant, identity.session_id, target, context.seed)
        return EngineFields(priority, prompt.cache_salt, response_id, asked)

    def _destinations(self, decision: Decision) -> tuple[str, ...]:
        """The target, then the cheapest other candidates as fallbacks."""
        by_cost = sorted(decision.costs, key=lambda cost: cost.total)
        return self._servers(decision.target, [cost.address for cost in by_cost])

    def _servers(self, target: str, others: Sequence[str]) -> tuple[str, ...]:
        """The `ip:port` of the target, then of its fallbacks. All get the same headers, so a fallback serves
        with the rank that was chosen."""
        alike = [a for a in others if a != target and rank_of(a) == rank_of(target)]
        return tuple(server_of(address) for address in (target, *alike[: self._fallbacks]))

    def _answer(self, head: RequestHead, ticket: int, running: Running, record: DecisionRecord) -> Routed:
        """Tell the observer of the record. Returns the answer for Envoy."""
        running.record = self._observer.decided(record)
        wants_header = head.headers.get(names.DECISION_HEADER, "") not in NO_DECISION_HEADER
        header = ""
        if wants_header and self._decision_header != "off":
            target = record.target
            named = target if self._decision_header == "address" else self._aliases.endpoint(target)
            header = f"{named}; {record.reason}; request={record.request_id}"
        return Routed(ticket, record.destinations, record.request_id, header, rank=rank_of(record.target))
