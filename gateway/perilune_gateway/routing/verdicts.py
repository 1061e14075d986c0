"""Applies verdicts: what follows from a decision for the state, the engine, the client and the records.

    routed / unprompted ──▶ the session is bound, the request's record begins (lifecycle.py), all who have to
                            know hear of it ──▶ Routed
    refused ──────────────▶ those who record hear of it ──▶ Refusal

Each verdict is applied once, and at once. Does not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter

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
from perilune_gateway.model.forecast import PrefillForecast
from perilune_gateway.policy.cost import target_of
from perilune_gateway.request.aliases import Aliases
from perilune_gateway.routing.admission import engine_priority
from perilune_gateway.routing.context import RequestContext, StepTimer
from perilune_gateway.routing.lifecycle import Lifecycle
from perilune_gateway.routing.peer_reads import HANGS_S, PeerRead
from perilune_gateway.routing.prefill_forecast import forecast, forecast_alone
from perilune_gateway.routing.pulling import Pull
from perilune_gateway.routing.remote_prefills import Prefilling
from perilune_gateway.routing.session_turns import SessionTurns
from perilune_gateway.state.fleet import EndpointView
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import FirstToken, Recorded
from perilune_gateway.state.session import Session

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
        aliases: Aliases,
        wall_clock: Callable[[], float],
    ) -> None:
        self._state = state
        self.lifecycle = lifecycle
        self._turns = turns
        self._aliases = aliases
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
        """Return the client's request id, or one of ours."""
        return head.headers.get(names.REQUEST_ID_HEADER, "")[:128] or f"request-{self.ordinal}"

    # -- verdicts ----------------------------------------------------------------------------------

    def routed(self, context: RequestContext, view: RequestView, decision: Decision, policy: str) -> Routed:
        """Apply a policy's choice of an endpoint."""
        prompt, identity = context.prompt, context.identity
        chosen, believed = target_of(decision, context.candidates), self._state.calibration.engine
        work = forecast(decision, chosen, prompt.tokens, believed, from_host=view.prefix.from_host)
        session = self._turns.bind(context, chosen.endpoint)
        priority = self._priority(identity.tenant, work.calibrated_s)
        request = self._in_flight(context, decision, chosen, work, session)
        try:
            self.lifecycle.begin(request, view, decision, context.candidates)
            record = DecisionRecord(
                view=view,
                verdict=decision,
                policy=policy,
                candidates=context.candidates,
                excluded=context.excluded,
                destinations=self._destinations(decision),
                cached_tokens=work.held_tokens,
                timings_us=context.timer.total(),
                time=self._wall_clock(),
                tenant=identity.tenant,
                seed=context.seed,
                queued_s=context.queued_s,
                trace=context.head.trace,
                canary=context.by_canary and not context.fell_back,
            )
            fields = self._engine_fields(context, decision.target, priority)
            return self._answer(context.head, request, record, fields)
        except BaseException:
            self.lifecycle.withdraw(request)
            raise

    def unprompted(self, context: RequestContext, order: Sequence[EndpointView], reason: Reason) -> Routed:
        """Send the request to the first of `order`; the rest are fallbacks. No policy was asked."""
        target = order[0].endpoint.address
        request_id, ticket = self.request_id(context.head), self._next_ticket()
        view, decision = (
            RequestView(request_id=request_id, ordinal=ticket, prompt_tokens=0, phase=Phase.HEADERS),
            Decision(target, reason),
        )
        request = InFlight(
            ticket=ticket,
            target=target,
            join=self._state.fleet.join(target),
            started_at=context.now,
            sent_at=context.now,
        )
        try:
            self.lifecycle.begin(request, view, decision)
            record = DecisionRecord(
                view=view,
                verdict=decision,
                policy="",
                excluded=context.excluded,
                destinations=self._servers(target, (e.endpoint.address for e in order)),
                timings_us=context.timer.total(),
                time=self._wall_clock(),
                trace=context.head.trace,
            )
            return self._answer(context.head, request, record)
        except BaseException:
            self.lifecycle.withdraw(request)
            raise

    def refused(
        self,
        head: RequestHead,
        refusal: Refusal,
        timer: StepTimer | None = None,
        context: RequestContext | None = None,
        view: RequestView | None = None,
        policy: str = "",
    ) -> Refusal:
        """Record that no endpoint gets the request, and return the refusal. `context`: as far as it is known;
        `view` and `policy`: where a policy was asked."""
        record = DecisionRecord(
            view=view or RequestView(request_id=self.request_id(head), ordinal=self.ordinal, prompt_tokens=0),
            verdict=refusal,
            policy=policy,
            candidates=context.candidates if context else (),
            excluded=context.excluded if context else {},
            timings_us=timer.total() if timer else {},
            time=self._wall_clock(),
            tenant=context.identity.tenant if context else "",
            seed=context.seed if context else 0,
            queued_s=context.queued_s if context else 0.0,
            trace=head.trace,
            canary=context is not None and context.by_canary and not context.fell_back,
        )
        place = context.place if context else None
        self._state.facts.tell(Recorded(record, tally=place.tally if place else None))
        if context and context.queued_s:
            self.gave_up(head, context.now)
        self._next_ticket()
        return refusal

    def gave_up(self, head: RequestHead, now: float) -> None:
        """Record that the request's session waited to begin, and its client left or was refused."""
        if head.arrived_at is not None:
            self._state.facts.tell(FirstToken(now - head.arrived_at))

    # -- inside ------------------------------------------------------------------------------------

    def _next_ticket(self) -> int:
        ticket = self.ordinal
        self.ordinal += 1
        return ticket

    def _in_flight(
        self,
        context: RequestContext,
        decision: Decision,
        chosen: Candidate,
        work: PrefillForecast,
        session: Session | None,
    ) -> InFlight:
        """Return the record of the request."""
        prompt, state, block_size = context.prompt, self._state, self._state.block_size
        announces = chosen.endpoint.events and prompt.source is not TokenSource.ESTIMATE
        whole = state.fleet.whole_blocks(decision.target, len(prompt.blocks))
        covers_new = whole * block_size > work.held_tokens
        awaited = prompt.blocks[whole - 1] if announces and covers_new else 0
        continues = session is not None and (announces or not prompt.model)
        from_host = context.prefix.from_host
        from_peer = decision.prefill or ((context.content or from_host) and decision.replicate_from)
        alone = (
            forecast_alone(decision, chosen, prompt.tokens, state.calibration.engine) if from_peer else None
        )
        patience_s = work.alone_s
        if alone and from_host:  # it is not late while its endpoint waits for one that hangs
            patience_s = alone.alone_s + HANGS_S
        elif context.content and decision.replicate_from:  # nor while it is held
            patience_s += self._held_s
        return InFlight(
            ticket=self._next_ticket(),
            target=decision.target,
            join=state.fleet.join(decision.target),
            started_at=context.now,
            sent_at=context.now,
            tenant=context.identity.tenant,
            prompt_tokens=prompt.tokens,
            session=session,
            final=context.identity.final,
            cache_key=prompt.cache_key,
            blocks=prompt.blocks,
            announced_tokens=chosen.overlap.device_tokens if announces and not from_peer else 0,
            claim_s=None if announces else APPROXIMATE_TTL_S,
            awaited=awaited,
            told=bool(awaited or (continues and chosen.endpoint.events)),
            expects_ratio=0.0 if awaited else max(1.0, chosen.ttft_ratio),
            patience_s=patience_s,
            forecast=work,
            alone=alone,
            content=context.content,
            learns=not decision.prefill,
            arrived_at=context.head.arrived_at,
            name=context.head.name,
            tally=context.place.tally if context.place else None,
            fell_back=context.fell_back,
        )

    def _priority(self, tenant: str, prefill_s: float) -> int | None:
        """Return the request's rank in the engine's queue; None: first come, first served."""
        ranks = self._engine_priority
        if not ranks.used:
            return None
        ahead_s = self._state.loads.share_of_queue_s(tenant) if ranks.fair_share else 0.0
        return engine_priority(self._wall_clock() + ahead_s, prefill_s, ranks.ageing_weight)

    def _engine_fields(self, context: RequestContext, target: str, priority: int | None) -> EngineFields:
        """Return what to write into the body of a request that was routed to `target`."""
        prompt, identity = context.prompt, context.identity
        if not prompt.model:
            return NO_FIELDS  # the body is not read
        if asked := self._state.reports.wanted(target):
            self._state.reports.asked(target)
        response_id = ""
        if prompt.names_response:
            response_id = self._aliases.response(identity.tenant, identity.session_id, target, context.seed)
        return EngineFields(priority, prompt.cache_salt, response_id, asked)

    def answered(self, routed: Routed, served: str) -> str:
        """Return the decision header of an answer. `served`: `ip:port` of the server that gave it, empty if
        unknown. The header names that endpoint, too, if Envoy sent the request to another one than the
        chosen."""
        if not routed.decision_header or served in ("", routed.destinations[0]):
            return routed.decision_header
        address = served if routed.rank is None else f"{served}#{routed.rank}"
        return f"{routed.decision_header}; served={self._named(address)}"

    def _named(self, address: str) -> str:
        """Return what clients are told of an endpoint."""
        return address if self._decision_header == "address" else self._aliases.endpoint(address)

    def _destinations(self, decision: Decision) -> tuple[str, ...]:
        """Return the target, then the cheapest other candidates as fallbacks."""
        by_cost = sorted(decision.costs, key=attrgetter("total"))
        return self._servers(decision.target, (cost.address for cost in by_cost))

    def _servers(self, target: str, others: Iterable[str]) -> tuple[str, ...]:
        """Return the `ip:port` of the target, then of its fallbacks. All get the same headers, so a fallback
        serves with the rank that was chosen."""
        rank = rank_of(target)
        alike = (address for address in others if address != target and rank_of(address) == rank)
        return server_of(target), *map(server_of, islice(alike, self._fallbacks))

    def _answer(
        self, head: RequestHead, request: InFlight, record: DecisionRecord, fields: EngineFields = NO_FIELDS
    ) -> Routed:
        """Complete the verdict. Return the answer for Envoy, with what comes from another endpoint."""
        self._state.facts.tell(Recorded(record, request))
        wants_header = head.headers.get(names.DECISION_HEADER, "") not in NO_DECISION_HEADER
        header = ""
        if wants_header and self._decision_header != "off":
            header = f"{self._named(record.target)}; {record.reason}; request={record.request_id}"
        transfer = request.transfer
        return Routed(
            ticket=request.ticket,
            destinations=record.destinations,
            request_id=record.request_id,
            decision_header=header,
            fields=fields,
            rank=rank_of(record.target),
            remote=transfer.remote if isinstance(transfer, Prefilling) else None,
            pull=transfer.pull if isinstance(transfer, Pull) else None,
            attachment=transfer.attachment if isinstance(transfer, PeerRead) else None,
        )
