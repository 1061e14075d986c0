"""Routes a request in five steps: gather, filter, decide, admit, record.

    on_headers ─┬─▶ Routed       a known session, if the headers suffice
                ├─▶ NeedBody ──▶ on_body ─┬─▶ Routed | Refusal
                └─▶ Refusal               └─▶ Encode ──▶ on_tokens ──▶ Routed | Refusal

`on_body` and `on_tokens` may also answer Queued: the session is new and has to wait (new_sessions.py) until
`due` names it; `on_begun` then routes it.

1. *Gather*: the session (conversations.py), the prompt's tokens and blocks (prompts.py), and for each
   endpoint what it holds of them and what it has to do (candidates.py), as a `RequestView` and `Candidate`s.
2. *Filter* (admission.py): endpoints that may not be chosen are left out.
3. *Decide* (deciding.py): the policy, a pure function (decide.py). A planned move may replace its choice.
4. *Admit* (decide.py): the prompt must fit, the fleet must not be overloaded, the SLOs must be within reach.
5. *Record* (verdicts.py): binding, load, claims, the decision's record. From then on lifecycle.py follows
   the request to its end.

Synchronous. Time and randomness come in through the constructor. Knows nothing of Envoy and never waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from perilune_api import names
from perilune_api.pool import EndpointSpec, Pool, Role, Topology
from perilune_gateway.model import (
    NEED_BODY,
    Endpoint,
    Identity,
    NeedBody,
    Outcome,
    Reason,
    Refusal,
    RefuseReason,
    RequestHead,
    RequestView,
    Routed,
    Step,
    Tokens,
    Verdict,
)
from perilune_gateway.model.applied import Applied
from perilune_gateway.policy import POLICIES
from perilune_gateway.request import paths
from perilune_gateway.request.known_bodies import KnownBodies
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.request.refusal_body import too_large
from perilune_gateway.routing import admission
from perilune_gateway.routing.candidates import wanted_by
from perilune_gateway.routing.context import Prompt, RequestContext, StepTimer, TimeAndDice
from perilune_gateway.routing.conversations import Conversations
from perilune_gateway.routing.deciding import Deciding
from perilune_gateway.routing.new_sessions import NewSessions, Queued
from perilune_gateway.routing.objectives import wrong_slo
from perilune_gateway.routing.prompts import Prompts
from perilune_gateway.routing.trial import Trial
from perilune_gateway.routing.verdicts import Verdicts
from perilune_gateway.state import resets
from perilune_gateway.state.facts import EndpointLeft
from perilune_gateway.state.pool_state import PoolState

SEED_BITS = 53
"""Number of bits of a decision's random seed; JSON readers lose precision above it."""


class Encode(Struct, frozen=True, gc=False):
    """The prompt's tokens come later, from a thread or an engine: `Router.on_tokens` takes them."""

    head: RequestHead
    request: ParsedRequest
    body_bytes: int


class Router:
    """One pool's router."""

    def __init__(
        self,
        pool: Pool,
        state: PoolState,
        *,
        conversations: Conversations,
        prompts: Prompts,
        deciding: Deciding,
        verdicts: Verdicts,
        new_sessions: NewSessions,
        trial: Trial,
        time: TimeAndDice,
        conformance: bool = False,
    ) -> None:
        """`conformance`: obey the header by which conformance tests name an endpoint."""
        self.state = state
        self.moves = deciding.moves
        self.policies = deciding.watch
        self.new_sessions = new_sessions
        self.trial = trial
        self.bodies = KnownBodies()
        self._conversations = conversations
        self._prompts = prompts
        self._deciding = deciding
        self._candidates = deciding.candidates
        self._verdicts = verdicts
        self._lifecycle = verdicts.lifecycle
        self._clock = time.clock
        self._stopwatch = time.stopwatch
        self._dice = time.dice
        self._conformance = conformance
        self.configure(pool)

    def configure(self, pool: Pool) -> Sequence[str]:
        """Take over a (changed) pool document; requests in flight go on. Returns the addresses of endpoints
        that left the pool, also of those that another one has replaced at their address."""
        spec = pool.spec
        self.pool = pool
        self._routing = spec.routing
        self._loras = {lora.name for lora in spec.model.loras}
        self.models = {spec.model.name, *spec.model.aliases, *self._loras}
        self._prompts.configure(pool)
        self._deciding.configure(pool)
        self.trial.configure(pool)
        self._verdicts.configure(pool)
        self.state.ejection.rules = self._routing.ejection
        self.state.loads.ranks_tenants = self._routing.engine_priority.fair_share
        start_s = self._routing.limits.start_seconds
        self.new_sessions.configure(self._routing.session_admission, start_s=start_s)
        endpoints = [endpoint for e in spec.endpoints for endpoint in _ranks(e, spec.topology)]
        self._conversations.configure(self._routing.session, endpoints)
        known = {endpoint.address: endpoint.instance for endpoint in self.state.fleet.endpoints()}
        gone = self.state.fleet.set_endpoints(endpoints, spec.topology, self._clock())
        if any(endpoint.ready and not endpoint.draining for endpoint in endpoints):
            self.state.starts.over()
        for address in gone:
            self.state.facts.tell(EndpointLeft(address))
        for endpoint in endpoints:
            if endpoint.instance and known.get(endpoint.address) != endpoint.instance:
                self.state.sessions.unbind(endpoint.address)  # they were another one's
        return gone

    # -- a request's way in ------------------------------------------------------------------------

    def arrived(self, head: RequestHead) -> float:
        """Return the time, which is that of the request's arrival."""
        head.arrived_at = self._now()
        return head.arrived_at

    def _now(self) -> float:
        """Return the time once all has happened that it alone brings about."""
        now = self._clock()
        self.state.pass_time(now)
        return now

    def on_headers(self, head: RequestHead) -> Routed | Refusal | NeedBody:
        """Decide from the headers if they suffice."""
        timer, now = StepTimer(self._stopwatch), self.arrived(head)
        identity = head.identity = self._conversations.identity(head)
        session = self._conversations.arrived(identity, now)
        if session:
            self.moves.handing_over.follow(session)
        forced = self._conformance and names.CONFORMANCE_SELECTION_HEADER in head.headers
        has_body = head.has_body and head.method == "POST"
        api = paths.api_of(head.path)
        for_model = has_body and api is not None
        body_bytes, response_id = head.content_length, "" if api else paths.response_of(head.path)
        if refusal := self.unsupported(head):
            return self._verdicts.refused(head, refusal, timer)
        if has_body and head.encoded and not response_id:
            return NEED_BODY  # engines cannot decode it
        if for_model and not forced:
            if body_bytes > self._routing.limits.max_body_bytes:
                return self._verdicts.refused(head, self._too_large(), timer)
            if session is None or not session.host or not body_bytes:
                return NEED_BODY  # a body of unknown length may be too long
            if api in (paths.Api.RESPONSES, paths.Api.POOLING):
                return NEED_BODY  # it may name an earlier response, which one endpoint has; or has no session
            if not self.state.knows(session, body_bytes) or self.state.reports.wanted(session.host):
                return NEED_BODY
            if self.state.announces(session) and (session.forked or self._prompts.rewrites_answers(api)):
                return NEED_BODY  # it may go on elsewhere than where the session's context ends
            if self._routing.engine_priority.used or self._routing.cache_salt == "tenant":
                return NEED_BODY  # priority and salt for the engine are written into every body
            head.name = resets.named_unread(identity.key, body_bytes)
            if left_s := self.state.resets.refused_s(head.name, now):
                return self._verdicts.refused(head, admission.resets(left_s), timer)
            if self.state.resets.watching(now):
                return NEED_BODY  # the body may be one at which engines break off
        context = RequestContext(head=head, now=now, timer=timer, identity=identity, session=session)
        if response_id:
            context.holder = self._conversations.holder(identity, session, response_id)
            if not context.holder:
                return self._verdicts.refused(head, admission.no_response(response_id), timer, context)
        self._candidates.find_eligible(context)
        if not context.eligible:
            return self._no_endpoint(context)
        if forced:
            return self._forced(context)
        if not for_model or session is None:
            return self._pass_through(context)
        self._candidates.estimate_from_session(context, session, body_bytes)
        timer.lap(Step.INDEX)
        return self._decide(context)

    def on_body(self, head: RequestHead, body: bytes) -> Routed | Refusal | Encode | Queued:
        """Decide from the body, which has come."""
        timer = StepTimer(self._stopwatch)
        if len(body) > self._routing.limits.max_body_bytes:
            return self._verdicts.refused(head, self._too_large(), timer)
        if not paths.is_model_path(head.path):  # it was compressed
            return self.to_any_endpoint(head)
        head.name = resets.named(body)
        return self.on_request(head, self.bodies.parse(head.path, body), len(body), timer)

    def to_any_endpoint(self, head: RequestHead) -> Routed | Refusal:
        """Route a request for another page than the model's to any endpoint, whatever its body says."""
        identity = self._conversations.identity(head)
        context = RequestContext(
            head=head, now=self._now(), timer=StepTimer(self._stopwatch), identity=identity, session=None
        )
        self._candidates.find_eligible(context)
        return self._pass_through(context) if context.eligible else self._no_endpoint(context)

    def unsupported(self, head: RequestHead) -> Refusal | None:
        """Return why no pool serves the request's path; None if one may. Conformance tests have paths of
        their own."""
        return None if self._conformance else admission.unsupported(head)

    def on_request(
        self, head: RequestHead, request: ParsedRequest | Refusal, body_bytes: int, timer: StepTimer
    ) -> Routed | Refusal | Encode | Queued:
        """Decide from the parsed body."""
        if body_bytes > self._routing.limits.max_body_bytes:
            return self._verdicts.refused(head, self._too_large(), timer)
        if isinstance(request, Refusal):
            return self._verdicts.refused(head, request, timer)
        if not request.model and not self._loras:
            request = replace(request, model=self.pool.spec.model.name)
        if not request.model:
            return self._verdicts.refused(head, admission.no_model(self.models, "This pool"), timer)
        if left_s := self.state.resets.refused_s(head.name, self._clock()):
            return self._verdicts.refused(head, admission.resets(left_s), timer)
        if request.model not in self.models:
            refusal = admission.unknown_model(request.model, self.models, "This pool")
            return self._verdicts.refused(head, refusal, timer)
        if request.previous_response_id:
            identity = head.identity or self._conversations.identity(head)
            request = self._prompts.continued(request, identity.tenant)
        timer.lap(Step.PARSE)
        tokens = self._prompts.tokens(request)
        if tokens is None:
            return Encode(head, request, body_bytes)
        timer.lap(Step.TOKENIZE)
        return self._on_prompt(head, request, body_bytes, tokens, timer)

    def on_tokens(self, encode: Encode, tokens: Tokens, waited_s: float = 0.0) -> Routed | Refusal | Queued:
        """Decide with the prompt's tokens, which have come after `waited_s` seconds."""
        timer = StepTimer(self._stopwatch)
        timer.us[Step.TOKENIZE] = waited_s * 1e6
        return self._on_prompt(encode.head, encode.request, encode.body_bytes, tokens, timer)

    def on_begun(self, queued: Queued, refusal: Refusal | None) -> Routed | Refusal:
        """Decide for a session that waits no longer: it begins, or is refused."""
        self.new_sessions.over(queued.ticket)
        timer, head = StepTimer(self._stopwatch), queued.head
        identity = head.identity or self._conversations.identity(head)
        context = self._with_session(head, queued.request, queued.prompt, timer, identity)
        context.queued_s = context.now - queued.since
        if refusal:
            return self._verdicts.refused(head, refusal, timer, context)
        return self._route(context, queued.request)

    def left(self, queued: Queued) -> None:
        """Record that the client of a request that waited has gone."""
        self.new_sessions.over(queued.ticket)
        self._verdicts.gave_up(queued.head, self._clock())

    def refused(self, head: RequestHead, refusal: Refusal) -> None:
        """Record that the exchange refused the request by itself."""
        self._verdicts.refused(head, refusal)

    def prefills_itself(self, ticket: int) -> None:
        """Record that no other endpoint prefills the request's prompt after all, see lifecycle."""
        self._lifecycle.prefills_itself(ticket)

    def fetched(self, ticket: int) -> None:
        """Record that the request's endpoint has fetched its KV, see lifecycle."""
        self._lifecycle.fetched(ticket)

    # -- which pool, where one gateway has several --------------------------------------------------

    def identity(self, head: RequestHead, request: ParsedRequest | None = None) -> Identity:
        """Return the tenant and the session that headers and body name, by this pool's session keys."""
        return self._conversations.identity(head, request)

    def is_bound(self, identity: Identity) -> bool:
        """Return whether the session is bound to an endpoint of this pool."""
        session = self._conversations.find(identity, self._clock())
        return session is not None and bool(session.host)

    def stores(self, identity: Identity, response_id: str) -> bool:
        """Return whether an endpoint of this pool has the response, as far as its id, or else its session,
        tells."""
        session = self._conversations.find(identity, self._clock())
        return bool(self._conversations.holder(identity, session, response_id))

    # -- a request's way out -----------------------------------------------------------------------

    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None:
        """Record that the answer's head has come, see lifecycle."""
        self._lifecycle.on_response(ticket, status, served, streamed)

    def on_reset(self, ticket: int, served: str) -> None:
        """Record that an endpoint broke off before it answered, see lifecycle."""
        self._lifecycle.on_reset(ticket, served)

    def decision_header(self, routed: Routed, served: str) -> str:
        """Return the answer's header that names the decision, see verdicts; empty if it has none."""
        return self._verdicts.answered(routed, served)

    def on_usage(self, ticket: int, cached_tokens: int) -> None:
        """Record that the engine has reported how much of the prompt it had, see lifecycle."""
        self._lifecycle.on_usage(ticket, cached_tokens)

    def on_output(self, ticket: int, tokens: int) -> None:
        """Record that the engine has reported how many tokens its answer has, see lifecycle."""
        self._lifecycle.on_output(ticket, tokens)

    def finished(self, ticket: int, outcome: Outcome) -> None:
        """Record that the request has ended, see lifecycle."""
        self._lifecycle.finished(ticket, outcome)

    # -- what engines announce ---------------------------------------------------------------------

    def on_applied(self, applied: Applied) -> None:
        """Record that a KV event has changed the index, see lifecycle."""
        self._lifecycle.on_applied(applied)

    def on_learning(self, endpoint: str, learning: bool) -> None:
        """Record whether blocks of the endpoint wait for others that are not known, see full_reports."""
        self.state.reports.learning(endpoint, learning)

    # -- prompt and session ------------------------------------------------------------------------

    def _on_prompt(
        self, head: RequestHead, request: ParsedRequest, body_bytes: int, tokens: Tokens, timer: StepTimer
    ) -> Routed | Refusal | Queued:
        # A prompt that cannot fit is refused before it costs time that grows with its length.
        longest = 0 if request.cut_to is not None else self.pool.spec.model.context_tokens
        if refusal := admission.fits_context(tokens, longest):
            return self._verdicts.refused(head, refusal, timer)
        identity = head.identity or self._conversations.identity(head)
        pooling = request.api is paths.Api.POOLING
        if pooling:  # it leaves nothing that a session could find again
            identity, request = Identity(identity.tenant), replace(request, session_id="", user="")
        prompt = self._prompts.of(
            head, request, tokens, tenant=identity.tenant, body_bytes=body_bytes, now=self._clock()
        )
        timer.lap(Step.HASH)
        context = self._with_session(head, request, prompt, timer, identity)
        if prompt.chained and not context.holder:
            refusal = admission.no_response(request.previous_response_id)
            return self._verdicts.refused(head, refusal, timer, context)
        match None if pooling else self.new_sessions.arrive(context, request):
            case Refusal() as refusal:
                return self._verdicts.refused(head, refusal, timer, context)
            case Queued() as queued:
                return queued
        return self._route(context, request)

    def _route(self, context: RequestContext, request: ParsedRequest) -> Routed | Refusal:
        """Decide with the prompt."""
        prompt, timer = context.prompt, context.timer
        self._candidates.find_eligible(context)
        if not context.eligible:
            return self._no_endpoint(context)
        self.state.starts.over()
        matches = self._candidates.look_up(context)
        timer.lap(Step.INDEX)
        verdict = self._decide(context)
        assert not isinstance(verdict, NeedBody), "a policy asked for a body that it had seen"
        if isinstance(verdict, Routed):
            self.state.index.record_match(prompt.blocks, matches, context.now)
            self._prompts.routed(request, verdict.fields.request_id, verdict.destinations[0])
        return verdict

    def _with_session(
        self,
        head: RequestHead,
        request: ParsedRequest,
        prompt: Prompt,
        timer: StepTimer,
        identity: Identity,
    ) -> RequestContext:
        """Return the request with its session, which is named or inferred from an earlier prompt."""
        now = self._now()
        identity, session = self._conversations.of_prompt(identity, request, prompt, now)
        if session:
            self.moves.handing_over.follow(session)
        holder = self._conversations.holder(identity, session, request.previous_response_id)
        if prompt.partial and session:
            prompt = replace(prompt, tokens=session.context_tokens + prompt.tokens)
        return RequestContext(
            head=head, now=now, timer=timer, identity=identity, session=session, prompt=prompt, holder=holder
        )

    # -- decide ------------------------------------------------------------------------------------

    def _decide(self, context: RequestContext) -> Routed | Refusal | NeedBody:
        head = context.head
        wanted = head.headers.get(names.POLICY_HEADER, "") if self._routing.allow_policy_header else ""
        if wanted and wanted not in POLICIES:
            problem = f"{POLICIES.why_not(wanted)} - in {names.POLICY_HEADER}"
            refusal = Refusal(RefuseReason.BAD_REQUEST, problem)
            return self._verdicts.refused(head, refusal, context.timer, context)
        if problem := wrong_slo(head.headers):
            refusal = Refusal(RefuseReason.BAD_REQUEST, problem)
            return self._verdicts.refused(head, refusal, context.timer, context)
        context.seed = self._dice.getrandbits(SEED_BITS)
        if not wanted:
            context.place = self.trial.place(context.identity, context.seed)
            context.by_canary = self.trial.by_canary(context.place)
        policy = wanted or self._deciding.policy(context)
        request_id, ordinal = self._verdicts.request_id(head), self._verdicts.ordinal
        choice = self._deciding.choose(context, policy, request_id, ordinal, watched=True)
        self._deciding.settle(choice, context.now)
        context.fell_back = choice.fell_back
        view, verdict, policy = choice.view, choice.verdict, choice.policy
        if isinstance(verdict, NeedBody):
            return verdict
        context.timer.lap(Step.POLICY)
        if isinstance(verdict, Refusal):
            return self._verdicts.refused(head, verdict, context.timer, context, view, policy)
        return self._verdicts.routed(context, view, verdict, policy)

    def weigh(
        self, head: RequestHead, prompt: Prompt | None, seed: int
    ) -> tuple[RequestContext, RequestView, Verdict]:
        """Return what would be decided now for a turn of a known session: from its headers alone, or from its
        prompt. Change nothing. Raise KeyError for a session that is not bound."""
        now = self._clock()
        identity = self._conversations.identity(head)
        session = self._conversations.find(identity, now)
        if session is None or not session.host:
            raise KeyError(identity.session_id)
        context = RequestContext(
            head=head,
            now=now,
            timer=StepTimer(self._stopwatch),
            identity=identity,
            session=session,
            seed=seed,
        )
        self._candidates.find_eligible(context)
        if prompt is None:
            self._candidates.estimate_from_session(context, session, head.content_length)
        else:
            context.prompt = prompt
            self._candidates.look_up(context)
        context.by_canary = self.trial.by_canary(self.trial.place(identity, seed))
        request_id, ordinal = self._verdicts.request_id(head), self._verdicts.ordinal
        policy = self._deciding.policy(context)
        choice = self._deciding.choose(context, policy, request_id, ordinal, watched=False)
        return context, choice.view, choice.verdict

    # -- without a policy --------------------------------------------------------------------------

    def _no_endpoint(self, context: RequestContext) -> Refusal:
        wanted, start_s = wanted_by(context), self._routing.limits.start_seconds
        starts = start_s and paths.is_model_path(context.head.path)
        if starts and admission.is_starting(wanted, context.excluded):
            refusal = admission.starting(self.state.starts.retry_after_s(start_s, context.now))
        else:
            refusal = admission.no_endpoint(wanted, context.excluded)
        return self._verdicts.refused(context.head, refusal, context.timer, context)

    def _pass_through(self, context: RequestContext) -> Routed:
        eligible = [e for e in context.eligible if e.endpoint.role is not Role.PREFILL]
        target = min(eligible, key=lambda e: (e.load.in_flight, self._dice.random()))
        order = [target, *(e for e in eligible if e is not target)]
        return self._verdicts.unprompted(context, order, Reason.PASS_THROUGH)

    def _forced(self, context: RequestContext) -> Routed | Refusal:
        """Return the endpoints that the conformance header names: `ip:port`, or an `ip` for all of its
        ports."""
        wanted = [a.strip() for a in context.head.headers[names.CONFORMANCE_SELECTION_HEADER].split(",")]
        serving = [e for e in context.eligible if e.endpoint.role is not Role.PREFILL]
        chosen = [e for a in wanted for e in serving if a in (e.endpoint.server, _ip_of(e.endpoint.server))]
        if not chosen:
            message = f"None of {', '.join(wanted)[:200]} is a ready endpoint of the pool"
            refusal = Refusal(RefuseReason.NO_ENDPOINT, message)
            return self._verdicts.refused(context.head, refusal, context.timer, context)
        return self._verdicts.unprompted(context, chosen, Reason.FORCED)

    def _too_large(self) -> Refusal:
        return too_large(self._routing.limits.max_body_bytes)

    # -- apart from requests ------------------------------------------------------------------------

    def due(self) -> list[tuple[int, Refusal | None]]:
        """Return the tickets of the Queued requests that `on_begun` takes now; called several times per
        second."""
        return self.new_sessions.due(self._clock())

    def tick(self) -> None:
        """Let time pass while no request comes; called several times per second."""
        self.trial.tick(self._now())

    def plan_moves(self, plans: bool = True) -> None:
        """Plan which sessions and prefixes should move; called every `migration.interval_seconds`. `plans`:
        whether this replica of the gateway is the one that plans. Another one withdraws its offers."""
        self.moves.plan(self._now(), plans=plans)


def _ranks(spec: EndpointSpec, topology: Topology) -> list[Endpoint]:
    """Return the endpoints of one server: itself, or its data-parallel ranks, which publish their own
    events."""
    server = Endpoint(
        address=spec.address,
        place=topology.place(spec.node),
        events=spec.events,
        replay=spec.replay,
        ready=spec.ready,
        draining=spec.draining,
        bootstrap=spec.bootstrap,
        role=spec.role,
        peer=spec.peer,
        instance=spec.instance,
        kv_name=spec.kv_name,
        superseded=spec.superseded,
        first_rank=spec.first_rank,
    )
    if len(spec.events) < 2:
        return [server]
    return [
        dataclasses.replace(
            server,
            address=f"{spec.address}#{rank}",
            events=(url,),
            replay=spec.replay[rank : rank + 1],
            peer=_next_port(spec.peer, rank),
        )
        for rank, url in enumerate(spec.events)
    ]


def _ip_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _next_port(address: str, rank: int) -> str:
    """Return the address of a rank whose port is so many above the first one's; empty if there is none."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if address else ""
