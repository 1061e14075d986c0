"""Routes a request in five steps: gather, filter, decide, admit, record.

    on_headers ─┬─▶ Routed       a known session, if the headers suffice
                ├─▶ NeedBody ──▶ on_body ─┬─▶ Routed | Refusal
                └─▶ Refusal               └─▶ Encode ──▶ on_tokens ──▶ Routed | Refusal

`on_body` and `on_tokens` may also answer Queued: the session is new and has to wait (new_sessions.py) until
`due` names it; `on_begun` then routes it.

1. *Gather* (candidates.py): the session, the prompt's tokens and blocks, and for each endpoint what it holds
   of them and what it has to do, as a `RequestView` and `Candidate`s.
2. *Filter* (admission.py): endpoints that may not be chosen are left out.
3. *Decide* (decide.py): the policy, a pure function. A planned move may replace its choice.
4. *Admit* (decide.py): the prompt must fit, the fleet must not be overloaded, the SLOs must be within reach.
5. *Record* (lifecycle.py): binding, load, claims, the decision's record. From then on `lifecycle` follows
   the request to its end.

Synchronous. Time and randomness come in through the constructor. Knows nothing of Envoy and never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf, isnan
from random import Random
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from perilune_api import names
from perilune_api.pool import EndpointSpec, Pool, Role, Topology
from perilune_gateway.model import (
    NEED_BODY,
    Decision,
    Endpoint,
    Identity,
    Move,
    NeedBody,
    Outcome,
    Phase,
    Reason,
    Refusal,
    RefuseReason,
    RequestHead,
    RequestView,
    Routed,
    SessionView,
    Step,
    Tokens,
    Unsplit,
    Verdict,
)
from perilune_gateway.moves.facts import LiveFacts
from perilune_gateway.moves.handoff import Handoffs
from perilune_gateway.moves.planner import Planner
from perilune_gateway.policy import POLICIES
from perilune_gateway.request import openai
from perilune_gateway.request.aliases import Aliases
from perilune_gateway.request.identity import bounded, from_headers, inferred, with_body
from perilune_gateway.request.known_bodies import KnownBodies
from perilune_gateway.request.openai import ParsedRequest
from perilune_gateway.routing import admission
from perilune_gateway.routing.candidates import CandidateBuilder, wanted_by
from perilune_gateway.routing.context import Prompt, RequestContext, StepTimer
from perilune_gateway.routing.decide import decide
from perilune_gateway.routing.handing_over import HandingOver
from perilune_gateway.routing.lifecycle import Lifecycle, Observer
from perilune_gateway.routing.new_sessions import NewSessions, Queued
from perilune_gateway.routing.remote_prefills import RemotePrefills
from perilune_gateway.state.pool_state import PoolState

SEED_BITS = 53
"""Number of bits of a decision's random seed; JSON readers lose precision above it."""


class TokenizesNow(Protocol):
    """The part of request.tokens.Tokenizer that the router uses."""

    def now(self, request: ParsedRequest) -> Tokens | None:
        """None: tokenizing has to wait for a thread or an engine."""


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
        tokenizer: TokenizesNow,
        candidates: CandidateBuilder,
        planner: Planner,
        lifecycle: Lifecycle,
        handing_over: HandingOver,
        aliases: Aliases,
        remote_prefills: RemotePrefills,
        new_sessions: NewSessions,
        *,
        clock: Callable[[], float],
        stopwatch: Callable[[], float],
        rng: Random,
        conformance: bool = False,
    ) -> None:
        """`clock` and `stopwatch` give monotonic seconds; the second one times steps. `conformance`: obey the
        header by which conformance tests name an endpoint."""
        self.state = state
        self.planner = planner
        self.lifecycle = lifecycle
        self.handing_over = handing_over
        self.remote_prefills = remote_prefills
        self.new_sessions = new_sessions
        self._tokenizer = tokenizer
        self._candidates = candidates
        self._aliases = aliases
        self._clock = clock
        self._stopwatch = stopwatch
        self._rng = rng
        self._conformance = conformance
        self.bodies = KnownBodies()
        self.configure(pool)

    def configure(self, pool: Pool) -> Sequence[str]:
        """Take over a (changed) pool document; requests in flight go on. Returns the addresses of endpoints
        that left the pool."""
        spec = pool.spec
        self.pool = pool
        self._routing = spec.routing
        self._block_size = spec.engine.block_size
        self._loras = {lora.name for lora in spec.model.loras}
        self.models = {spec.model.name, *spec.model.aliases, *self._loras}
        self._candidates.configure(pool)
        self.planner.configure(self._routing.migration, self._routing.policy.name)
        self.lifecycle.configure(pool)
        self.handing_over.configure(pool)
        self.new_sessions.configure(self._routing.session_admission)
        endpoints = [endpoint for e in spec.endpoints for endpoint in _ranks(e, spec.topology)]
        self._by_alias = {self._aliases.endpoint(e.address): e.address for e in endpoints}
        gone = self.state.fleet.set_endpoints(endpoints, spec.topology)
        for address in gone:
            self.state.forget(address)
            self.lifecycle.forget(address)
        return gone

    # -- a request's way in ------------------------------------------------------------------------

    def on_headers(self, head: RequestHead) -> Routed | Refusal | NeedBody:
        """Decide from the headers if they suffice."""
        timer, now = StepTimer(self._stopwatch), self._clock()
        identity = head.identity = from_headers(head.headers, self._routing.session)
        session = self.state.sessions.find(identity.key, now) if identity.session_id else None
        forced = self._conformance and names.CONFORMANCE_SELECTION_HEADER in head.headers
        for_model = head.has_body and head.method == "POST" and openai.is_model_path(head.path)
        body_bytes = head.content_length
        if openai.is_engine_page(head.path):
            message = (
                f"{head.path[:200]} tells of one engine only. Ask the engine that you mean, not the pool"
            )
            return self.lifecycle.refused(head, Refusal(RefuseReason.NOT_FOUND, message), timer)
        if for_model and not forced:
            if body_bytes > self._routing.limits.max_body_bytes:
                return self.lifecycle.refused(head, self._too_large(body_bytes), timer)
            if session is None or not session.host or not body_bytes:
                return NEED_BODY  # a body of unknown length may be too long
            if openai.api_of(head.path) is openai.Api.RESPONSES:
                return NEED_BODY  # the body may name an earlier response, which one endpoint has
            if not self.state.knows(session, body_bytes) or self.lifecycle.asks(session.host):
                return NEED_BODY
            if self._routing.engine_priority.used or self._routing.cache_salt == "tenant":
                return NEED_BODY  # priority and salt for the engine are written into every body
        context = RequestContext(head, now, timer, identity, session)
        if not for_model and (stored := self._aliases.stored(identity.tenant, openai.response_of(head.path))):
            context.holder = self._by_alias.get(stored.endpoint, "")
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
        """The body has come."""
        timer = StepTimer(self._stopwatch)
        if len(body) > self._routing.limits.max_body_bytes:
            return self.lifecycle.refused(head, self._too_large(len(body)), timer)
        return self.on_request(head, self.bodies.parse(head.path, body), len(body), timer)

    def on_request(
        self, head: RequestHead, request: ParsedRequest | Refusal, body_bytes: int, timer: StepTimer
    ) -> Routed | Refusal | Encode | Queued:
        """The body has been parsed."""
        if isinstance(request, Refusal):
            return self.lifecycle.refused(head, request, timer)
        if request.model not in self.models:
            refusal = admission.unknown_model(request.model, self.models, "This pool")
            return self.lifecycle.refused(head, refusal, timer)
        timer.lap(Step.PARSE)
        tokens = self._tokenizer.now(request)
        if tokens is None:
            return Encode(head, request, body_bytes)
        timer.lap(Step.TOKENIZE)
        return self._on_prompt(head, request, body_bytes, tokens, timer)

    def on_tokens(self, encode: Encode, tokens: Tokens, waited_s: float = 0.0) -> Routed | Refusal | Queued:
        """The prompt's tokens have come, after `waited_s` seconds."""
        timer = StepTimer(self._stopwatch)
        timer.us[Step.TOKENIZE] = waited_s * 1e6
        return self._on_prompt(encode.head, encode.request, encode.body_bytes, tokens, timer)

    def on_begun(self, queued: Queued, refusal: Refusal | None) -> Routed | Refusal:
        """The session waits no longer: it begins, or is refused."""
        self.new_sessions.over(queued.ticket)
        timer, head = StepTimer(self._stopwatch), queued.head
        identity = head.identity or from_headers(head.headers, self._routing.session)
        context = self._with_session(head, queued.request, queued.prompt, timer, identity)
        context.queued_s = context.now - queued.since
        if refusal:
            return self.lifecycle.refused(head, refusal, timer, context)
        return self._route(context)

    def left(self, queued: Queued) -> None:
        """The client of a request that waited has gone."""
        self.new_sessions.over(queued.ticket)

    def refused(self, head: RequestHead, refusal: Refusal) -> None:
        """The exchange refused the request by itself; record it."""
        self.lifecycle.refused(head, refusal)

    def prefills_itself(self, ticket: int) -> None:
        """No other endpoint prefills the request's prompt after all, see lifecycle."""
        self.lifecycle.prefills_itself(ticket)

    # -- which pool, where one gateway has several --------------------------------------------------

    def identity(self, head: RequestHead, request: ParsedRequest | None = None) -> Identity:
        """The tenant and the session that headers and body name, by this pool's session keys."""
        keys = self._routing.session
        identity = from_headers(head.headers, keys)
        return with_body(identity, request.session_id, request.user, keys) if request else identity

    def is_bound(self, identity: Identity) -> bool:
        """Whether the session is bound to an endpoint of this pool."""
        session = self.state.sessions.find(identity.key, self._clock())
        return session is not None and bool(session.host)

    def stores(self, identity: Identity, response_id: str) -> bool:
        """Whether an endpoint of this pool has the response."""
        stored = self._aliases.stored(identity.tenant, response_id)
        return stored is not None and stored.endpoint in self._by_alias

    # -- a request's way out -----------------------------------------------------------------------

    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None:
        """The answer's head has come, see lifecycle."""
        self.lifecycle.on_response(ticket, status, served, streamed)

    def on_usage(self, ticket: int, cached_tokens: int) -> None:
        """The engine has reported how much of the prompt it had, see lifecycle."""
        self.lifecycle.on_usage(ticket, cached_tokens)

    def finished(self, ticket: int, outcome: Outcome) -> None:
        """The request has ended, see lifecycle."""
        self.lifecycle.finished(ticket, outcome)

    # -- prompt and session ------------------------------------------------------------------------

    def _on_prompt(
        self, head: RequestHead, request: ParsedRequest, body_bytes: int, tokens: Tokens, timer: StepTimer
    ) -> Routed | Refusal | Queued:
        # A prompt that cannot fit is refused before it costs time that grows with its length.
        if refusal := admission.fits_context(tokens, self.pool.spec.model.context_tokens):
            return self.lifecycle.refused(head, refusal, timer)
        lora = request.model if request.model in self._loras else ""
        identity = head.identity or from_headers(head.headers, self._routing.session)
        salt = ""
        if self._routing.cache_salt == "tenant":
            salt = self._aliases.cache_salt(identity.tenant, request.cache_salt)
            request = replace(request, cache_salt=salt)
        prompt = Prompt(
            tokens.count,
            tokens.source,
            self._candidates.hash_blocks(request, tokens, lora),
            request.model,
            request.max_output_tokens,
            request.priority,
            body_bytes,
            bounded(request.prompt_cache_key),
            salt,
            bool(request.previous_response_id),
            request.api is openai.Api.RESPONSES and not request.request_id,
            Unsplit.GROUPS if self.state.block_tokens.groups else request.unsplit,
        )
        timer.lap(Step.HASH)
        context = self._with_session(head, request, prompt, timer, identity)
        match self.new_sessions.arrive(context, request):
            case Refusal() as refusal:
                return self.lifecycle.refused(head, refusal, timer, context)
            case Queued() as queued:
                return queued
        return self._route(context)

    def _route(self, context: RequestContext) -> Routed | Refusal:
        """Decide with the prompt."""
        prompt, timer = context.prompt, context.timer
        self._candidates.find_eligible(context)
        if not context.eligible:
            return self._no_endpoint(context)
        matches = self._candidates.look_up(context)
        timer.lap(Step.INDEX)
        verdict = self._decide(context)
        assert not isinstance(verdict, NeedBody), "a policy asked for a body that it had seen"
        if isinstance(verdict, Routed):
            self.state.index.record_match(prompt.blocks, matches, context.now)
        return verdict

    def _with_session(
        self,
        head: RequestHead,
        request: ParsedRequest,
        prompt: Prompt,
        timer: StepTimer,
        identity: Identity,
    ) -> RequestContext:
        """The request with its session: named by headers or body, or inferred from an earlier prompt."""
        now, keys, sessions = self._clock(), self._routing.session, self.state.sessions
        identity = with_body(identity, request.session_id, request.user, keys)
        session = None
        stored = self._aliases.stored(identity.tenant, request.previous_response_id)
        if stored and not identity.session_id:
            identity = inferred(identity, stored.session_id)
        if identity.session_id:
            session = sessions.find(identity.key, now)
        elif keys.infer and prompt.blocks:
            session = sessions.infer(identity.tenant, prompt.blocks, prompt.tokens, now)
            if session:
                session_id = session.key.session_id
            else:
                session_id = sessions.superseded(identity.tenant, prompt.blocks[-1])
            identity = inferred(identity, session_id)
        holder = self._by_alias.get(stored.endpoint, "") if stored else ""
        return RequestContext(head, now, timer, identity, session, prompt=prompt, holder=holder)

    # -- decide ------------------------------------------------------------------------------------

    def _decide(self, context: RequestContext) -> Routed | Refusal | NeedBody:
        head, policy = context.head, str(self._routing.policy.name)
        if self._routing.allow_policy_header and (wanted := head.headers.get(names.POLICY_HEADER)):
            if wanted not in POLICIES:
                problem = f"Unknown policy {wanted[:100]!r}, known are {', '.join(POLICIES)}"
                refusal = Refusal(RefuseReason.BAD_REQUEST, f"{problem} - in {names.POLICY_HEADER}")
                return self.lifecycle.refused(head, refusal, context.timer, context)
            policy = wanted
        if problem := _wrong_slo(head.headers):
            refusal = Refusal(RefuseReason.BAD_REQUEST, problem)
            return self.lifecycle.refused(head, refusal, context.timer, context)
        context.seed = self._rng.getrandbits(SEED_BITS)
        view, verdict = self._choose(context, policy)
        if isinstance(verdict, NeedBody):
            return verdict
        context.timer.lap(Step.POLICY)
        if isinstance(verdict, Refusal):
            return self.lifecycle.refused(head, verdict, context.timer, context, view, policy)
        return self.lifecycle.routed(context, view, verdict, policy)

    def weigh(
        self, head: RequestHead, prompt: Prompt | None, seed: int
    ) -> tuple[RequestContext, RequestView, Verdict]:
        """What would be decided now for a turn of a known session: from its headers alone, or from its
        prompt. Records nothing. Raises KeyError for a session that is not bound."""
        now = self._clock()
        identity = from_headers(head.headers, self._routing.session)
        session = self.state.sessions.find(identity.key, now)
        if session is None or not session.host:
            raise KeyError(identity.session_id)
        context = RequestContext(head, now, StepTimer(self._stopwatch), identity, session, seed=seed)
        self._candidates.find_eligible(context)
        if prompt is None:
            self._candidates.estimate_from_session(context, session, head.content_length)
        else:
            context.prompt = prompt
            self._candidates.look_up(context)
        return context, *self._choose(context, self._routing.policy.name)

    def _choose(self, context: RequestContext, policy: str) -> tuple[RequestView, Verdict]:
        view = self._view(context)
        verdict = decide(view, context.candidates, policy, self._routing, Random(context.seed))
        if isinstance(verdict, Decision) and (offer := self._offer(context)):
            if view.phase is Phase.HEADERS:
                return view, NEED_BODY  # only the body tells what the offer's target holds of the prompt
            verdict = self.planner.apply(offer, verdict, view, context.candidates, context.now)
        return view, verdict

    def _offer(self, context: RequestContext) -> Move | None:
        """The planner's offer for this session, or for the prefix that a new session begins with."""
        if context.session and context.session.host:
            return self.planner.offer(context.session.key, None)
        known = context.prefix.tokens // self._block_size
        if not known:
            return None
        prefix = context.prompt.blocks[known - 1]
        self.planner.saw(prefix, context.prefix.tokens)
        return self.planner.offer(None, prefix)

    def _view(self, context: RequestContext) -> RequestView:
        """The request as a policy sees it."""
        prompt, session = context.prompt, context.session
        level, slo_ttft_s, slo_tpot_s = self._objectives(context.head)
        return RequestView(
            self.lifecycle.request_id(context.head),
            self.lifecycle.ordinal,
            prompt.tokens,
            Phase.BODY if prompt.model else Phase.HEADERS,
            self.state.sessions.view(session, context.now) if session else self._new_session(context),
            prompt.model or self.pool.spec.model.name,
            prompt.output_tokens,
            prompt.source,
            prompt.priority,
            level,
            slo_ttft_s,
            slo_tpot_s,
            context.prefix,
            self._block_size,
            unsplit=self._candidates.unsplit(context),
        )

    def _new_session(self, context: RequestContext) -> SessionView | None:
        identity = context.identity
        if not identity.session_id:
            return None
        near = self.state.sessions.near_host(identity, context.prompt.cache_key, context.now)
        return SessionView(identity.session_id, parent_host=near)

    def _objectives(self, head: RequestHead) -> tuple[int, float, float]:
        """Priority level, and SLOs for TTFT and TPOT in seconds: the request's own, or else the pool's."""
        limits, headers = self._routing.limits, head.headers
        objective = next((headers[name] for name in names.OBJECTIVE_HEADERS if name in headers), "")
        return (
            limits.objectives.get(objective, 0),
            _seconds(headers.get(names.SLO_TTFT_HEADER, "")) or limits.ttft_slo_seconds,
            _seconds(headers.get(names.SLO_TPOT_HEADER, "")) or limits.tpot_slo_seconds,
        )

    # -- without a policy --------------------------------------------------------------------------

    def _no_endpoint(self, context: RequestContext) -> Refusal:
        refusal = admission.no_endpoint(wanted_by(context), context.excluded)
        return self.lifecycle.refused(context.head, refusal, context.timer, context)

    def _pass_through(self, context: RequestContext) -> Routed:
        eligible = [e for e in context.eligible if e.endpoint.role is not Role.PREFILL]
        target = min(eligible, key=lambda e: (e.load.in_flight, self._rng.random()))
        order = [target, *(e for e in eligible if e is not target)]
        return self.lifecycle.unprompted(context, order, Reason.PASS_THROUGH)

    def _forced(self, context: RequestContext) -> Routed | Refusal:
        wanted = [a.strip() for a in context.head.headers[names.CONFORMANCE_SELECTION_HEADER].split(",")]
        serving = [e for e in context.eligible if e.endpoint.role is not Role.PREFILL]
        by_server = {e.endpoint.server: e for e in serving}
        chosen = [by_server[server] for server in wanted if server in by_server]
        if not chosen:
            message = f"None of {', '.join(wanted)[:200]} is a ready endpoint of the pool"
            refusal = Refusal(RefuseReason.NO_ENDPOINT, message)
            return self.lifecycle.refused(context.head, refusal, context.timer, context)
        return self.lifecycle.unprompted(context, chosen, Reason.FORCED)

    def _too_large(self, body_bytes: int) -> Refusal:
        limit = self._routing.limits.max_body_bytes
        return Refusal(RefuseReason.BODY_TOO_LARGE, f"The body has {body_bytes} bytes, the limit is {limit}")

    # -- beside requests ---------------------------------------------------------------------------

    def due(self) -> list[tuple[int, Refusal | None]]:
        """Return the tickets of the Queued requests that `on_begun` takes now; called several times per
        second."""
        return self.new_sessions.due(self._clock())

    def plan_moves(self, plans: bool = True) -> None:
        """Plan which sessions and prefixes should move; called every `migration.interval_seconds`. `plans`:
        whether this replica of the gateway is the one that plans. Another one withdraws its offers."""
        if plans:
            self.planner.plan(self._clock())
        else:
            self.planner.withdraw(self._clock())
        self.handing_over.planned()


def new_router(
    pool: Pool,
    state: PoolState,
    tokenizer: TokenizesNow,
    observer: Observer,
    *,
    clock: Callable[[], float] = time.monotonic,
    stopwatch: Callable[[], float] = time.perf_counter,
    wall_clock: Callable[[], float] = time.time,
    rng: Random | None = None,
    conformance: bool = False,
    secret: bytes = b"",
) -> Router:
    """A router with all its parts. `secret`: what clients may not know of endpoints and tenants' salts is
    derived from it."""
    candidates, handoffs, aliases = CandidateBuilder(state), Handoffs(), Aliases(secret)
    facts = LiveFacts(state, handoffs)
    planner = Planner(facts)
    handing_over = HandingOver(state, planner, handoffs, facts, observer, clock, wall_clock)
    remote_prefills = RemotePrefills(state, observer, clock, wall_clock)
    new_sessions = NewSessions(state)
    return Router(
        pool,
        state,
        tokenizer,
        candidates,
        planner,
        Lifecycle(
            *(state, candidates, planner, handing_over, remote_prefills, new_sessions),
            *(observer, aliases, clock, wall_clock),
        ),
        handing_over,
        aliases,
        remote_prefills,
        new_sessions,
        clock=clock,
        stopwatch=stopwatch,
        rng=rng or Random(),
        conformance=conformance,
    )


def _ranks(spec: EndpointSpec, topology: Topology) -> list[Endpoint]:
    """The endpoints of one server: itself, or its data-parallel ranks, which publish their own events."""
    place = topology.place(spec.node)
    rest = spec.ready, spec.draining, spec.bootstrap, spec.role
    if len(spec.events) < 2:
        return [Endpoint(spec.address, place, spec.events, spec.replay, *rest)]
    return [
        Endpoint(f"{spec.address}#{rank}", place, (url,), spec.replay[rank : rank + 1], *rest)
        for rank, url in enumerate(spec.events)
    ]


def _wrong_slo(headers: Mapping[str, str]) -> str:
    """Return why a request's SLO cannot be read; empty if it can, or if there is none."""
    for name in (names.SLO_TTFT_HEADER, names.SLO_TPOT_HEADER):
        if text := headers.get(name):
            try:
                wrong = isnan(float(text))
            except ValueError:
                wrong = True
            if wrong:
                return f"{text[:100]!r} is not a number of milliseconds - in {name}"
    return ""


def _seconds(milliseconds: str) -> float:
    """A header's value in seconds; 0 for the empty text and for values that are not above 0."""
    value = float(milliseconds or 0)
    return value / 1000.0 if 0.0 < value < inf else 0.0
