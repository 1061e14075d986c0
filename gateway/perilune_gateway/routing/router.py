"""Routes a request: gather → filter → decide → admit → record. Synchronous; here the steps meet.

    on_headers ─┬─▶ Routed       a known session that the policy keeps or places by the headers alone
                ├─▶ NeedBody ──▶ on_body ─┬─▶ Routed | Refusal
                └─▶ Refusal               └─▶ Encode ──▶ on_tokens ──▶ Routed | Refusal
    Routed ──▶ on_response (0 or 1 times) ──▶ finished (exactly once)

1. *gather* (`gather`): the session, the prompt's tokens and blocks, what each endpoint holds of them and has
   to do → values: `RequestView` and `Candidate`s.
2. *filter*: admission.BEFORE.
3. *decide*: the policy, a pure function.
4. *admit*: the prompt fits, the fleet is not overloaded, the SLOs can be kept.
5. *record* (`recording`): binding, load, speculative blocks, the decision's record and metrics; from then on
   the request is `in_flight`.

Time and dice come in through the constructor. Costs: with 64 endpoints about 0.2 ms besides tokenization.
Does not: know Envoy, wait, or choose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf, isnan
from random import Random
from typing import Protocol

from msgspec import Struct

from perilune_api import names
from perilune_api.pool import Pool, SpecError
from perilune_gateway.model import (
    NEED_BODY,
    Decision,
    Endpoint,
    EngineModel,
    Move,
    NeedBody,
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
    Verdict,
)
from perilune_gateway.moves.facts import MoveFacts
from perilune_gateway.moves.planner import Planner
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.policy import LIVE, SIMULATED_ONLY
from perilune_gateway.request import openai
from perilune_gateway.request.identity import from_headers, named, with_body
from perilune_gateway.request.known_bodies import KnownBodies
from perilune_gateway.request.openai import ParsedRequest
from perilune_gateway.routing import admission, in_flight
from perilune_gateway.routing.decide import decide
from perilune_gateway.routing.dice import SEED_BITS, Dice
from perilune_gateway.routing.gather import Asked, Gatherer, Laps, Prompt
from perilune_gateway.routing.in_flight import InFlight
from perilune_gateway.routing.known_prompts import KnownPrompt, KnownPrompts
from perilune_gateway.routing.recording import Recorder
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.sessions import Session, Sessions

_OBJECTIVES = frozenset({names.SLO_TTFT_HEADER, names.SLO_TPOT_HEADER, *names.OBJECTIVE_HEADERS})
"""Most requests carry none of these."""


class TokenizesNow(Protocol):
    """tokens.Tokenizer, as far as the router needs it."""

    @property
    def repeats(self) -> bool: ...
    def now(self, request: ParsedRequest) -> Tokens | None: ...


class Parity(in_flight.Parity, Protocol):
    """parity.ParityCheck, as far as the router needs it."""

    def forget(self, endpoint: str) -> None: ...


class Encode(Struct, frozen=True, gc=False):
    """The prompt's tokens come later, from a thread or an engine: `router.on_tokens` takes them."""

    head: RequestHead
    request: ParsedRequest
    body_bytes: int


class Router:
    """One pool's router."""

    def __init__(
        self,
        pool: Pool,
        fleet: Fleet,
        sessions: Sessions,
        index: PrefixIndex,
        tokenizer: TokenizesNow,
        decisions: Decisions,
        metrics: Metrics,
        *,
        parity: Parity | None = None,
        engine: EngineModel | None = None,
        calibration: Calibration | None = None,
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        rng: Random | None = None,
        conformance: bool = False,
    ) -> None:
        self.fleet = fleet
        self.sessions = sessions
        sessions.rebound = fleet.changed
        self.index = index
        self.tokenizer = tokenizer
        self.decisions = decisions
        self.metrics = metrics
        self.calibration = calibration or Calibration()
        self._parity = parity
        self._clock = clock
        self._stopwatch = stopwatch
        self._rng = rng or Random()
        self._dice = Dice(0)
        self.bodies = KnownBodies()
        self.prompts = KnownPrompts()
        self._conformance = conformance
        self._gatherer = Gatherer(fleet, sessions, index, self.calibration, engine or EngineModel())
        facts = MoveFacts(fleet, sessions, index, self.calibration, self._gatherer)
        self.planner = Planner(facts)
        self.in_flight = InFlight(
            fleet, sessions, index, self.calibration, self.planner, decisions, metrics, parity, clock
        )
        self._recorder = Recorder(
            fleet, sessions, self._gatherer, self.in_flight, decisions, metrics, wall_clock
        )
        # A request's way out, see in_flight; `on_applied`: a KV event went into the index.
        self.on_response = self.in_flight.on_response
        self.finished = self.in_flight.finished
        self.on_applied = self.in_flight.on_applied
        self.configure(pool)

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document; requests in flight go on. Raises SpecError for a policy
        that does not exist, or only in the simulator."""
        spec = pool.spec
        if problem := _unusable(spec.routing.policy):
            raise SpecError(f"{problem} - at `$.spec.routing.policy`")
        self.pool = pool
        self._routing = spec.routing
        self._block_size = spec.engine.block_size
        self._loras = {lora.name for lora in spec.model.loras}
        self._models = {spec.model.name, *spec.model.aliases, *self._loras}
        self.prompts.clear()
        self._gatherer.configure(pool)
        self.planner.configure(self._routing.migration, self._routing.policy, self._routing.params)
        self._recorder.configure(
            spec.engine.block_size, spec.routing.fallbacks, spec.routing.params.ageing_weight
        )
        self.in_flight.configure(spec.engine.block_size)
        gone = self.fleet.set_endpoints(
            [
                Endpoint(
                    e.address,
                    e.role,
                    spec.topology.place(e.node),
                    e.events,
                    e.replay,
                    e.ready,
                    e.draining,
                )
                for e in spec.endpoints
            ],
            spec.topology,
        )
        for address in gone:
            self.index.remove_endpoint(address)
            self.sessions.forget_host(address)
            self.metrics.forget(address)
            self.calibration.forget(address)
            self.in_flight.forget(address)
            if self._parity:
                self._parity.forget(address)

    # -- a request's way in ------------------------------------------------------------------------

    def on_headers(self, head: RequestHead) -> Routed | Refusal | NeedBody:
        """Decide from the headers, where they suffice."""
        started, now = self._stopwatch(), self._clock()
        identity = head.identity = from_headers(head.headers, self._routing.session)
        session = self.sessions.find(identity.key, now) if identity.session_id else None
        forced = self._conformance and names.CONFORMANCE_SELECTION_HEADER in head.headers
        for_model = head.has_body and head.method == "POST" and openai.is_model_path(head.path)
        if for_model and not forced:
            size_bytes = head.content_length
            if size_bytes > self._routing.limits.max_body_bytes:
                laps = Laps(self._stopwatch, started)
                return self._recorder.refused(head, self._too_large(size_bytes), laps)
            if session is None or not session.host or not size_bytes:
                return NEED_BODY  # a body of no told length may be too long
            if self._routing.params.ageing_weight:
                return NEED_BODY  # where the engine is told a priority, every body is rewritten
        laps = Laps(self._stopwatch, started)
        asked = Asked(head, now, laps, identity, session)
        self._gatherer.eligible(asked)
        if not asked.eligible:
            return self._nobody(asked)
        if forced:
            return self._forced(asked)
        if not for_model or session is None:
            return self._pass_through(asked)
        self._gatherer.by_tail(asked, session, size_bytes)
        laps.lap(Step.INDEX)
        return self._decide(asked)

    def on_body(self, head: RequestHead, body: bytes) -> Routed | Refusal | Encode:
        """The body is there."""
        laps = Laps(self._stopwatch)
        if len(body) > self._routing.limits.max_body_bytes:
            return self._recorder.refused(head, self._too_large(len(body)), laps)
        if known := self.prompts.find(head.path, body):
            laps.lap(Step.PARSE)
            return self._on_prompt(head, known, laps)
        request = self.bodies.parse(head.path, body)
        if isinstance(request, Refusal):
            return self._recorder.refused(head, request, laps)
        if request.model not in self._models:
            models = ", ".join(sorted(self._models))
            message = f"The model `{request.model[:200]}` does not exist here; known are: {models}"
            return self._recorder.refused(head, Refusal(RefuseReason.UNKNOWN_MODEL, message), laps)
        laps.lap(Step.PARSE)
        tokens = self.tokenizer.now(request)
        if tokens is None:
            return Encode(head, request, len(body))
        laps.lap(Step.TOKENIZE)
        asked_for = self._hashed(request, len(body), tokens, laps)
        if isinstance(asked_for, Refusal):
            return self._recorder.refused(head, asked_for, laps)
        if self.tokenizer.repeats:
            self.prompts.add(head.path, body, asked_for)
        return self._on_prompt(head, asked_for, laps)

    def on_tokens(self, encode: Encode, tokens: Tokens, waited_s: float = 0.0) -> Routed | Refusal:
        """Tokenization has answered after `waited_s`."""
        laps = Laps(self._stopwatch)
        laps.us[Step.TOKENIZE] = waited_s * 1e6
        asked_for = self._hashed(encode.request, encode.body_bytes, tokens, laps)
        if isinstance(asked_for, Refusal):
            return self._recorder.refused(encode.head, asked_for, laps)
        return self._on_prompt(encode.head, asked_for, laps)

    def refused(self, head: RequestHead, refusal: Refusal) -> None:
        """The exchange refused by itself; keep it with the others."""
        self._recorder.refused(head, refusal)

    def _hashed(
        self, request: ParsedRequest, body_bytes: int, tokens: Tokens, laps: Laps
    ) -> KnownPrompt | Refusal:
        if refusal := admission.fits_context(tokens, self.pool.spec.model.context_tokens):
            return refusal  # before the cost of a prompt grows with its length
        lora = request.model if request.model in self._loras else ""
        prompt = Prompt(
            tokens.count,
            tokens.source,
            self._gatherer.blocks(request, tokens, lora),
            request.model,
            request.max_output_tokens,
            request.priority,
            body_bytes,
            request.prompt_cache_key,
        )
        laps.lap(Step.HASH)
        return KnownPrompt(prompt, request.session_id, request.user)

    def _on_prompt(self, head: RequestHead, known: KnownPrompt, laps: Laps) -> Routed | Refusal:
        now, keys, prompt = self._clock(), self._routing.session, known.prompt
        identity = head.identity or from_headers(head.headers, keys)
        identity = with_body(identity, known.session_id, known.user, keys)
        session = None
        if identity.session_id:
            session = self.sessions.find(identity.key, now)
        elif keys.infer and prompt.blocks:
            session = self.sessions.infer(identity.tenant, prompt.blocks, prompt.tokens, now)
            name = self._inferred(session, identity.tenant, prompt.blocks[-1])
            identity = named(identity, name, inferred=True)
        asked = Asked(head, now, laps, identity, session, prompt=prompt)
        self._gatherer.eligible(asked)
        if not asked.eligible:
            return self._nobody(asked)
        matches = self._gatherer.exact(asked)
        laps.lap(Step.INDEX)
        verdict = self._decide(asked)
        assert not isinstance(verdict, NeedBody), "a policy asked for a body that it had seen"
        if isinstance(verdict, Routed):
            self.index.record_match(prompt.blocks, matches, now)
        return verdict

    def _inferred(self, session: Session | None, tenant: str, last_block: int) -> str:
        """The id of the session that nobody has named: that from which the prompt goes on, or a new one."""
        if session:
            return session.key.session_id
        return self.sessions.superseded(tenant, last_block) or f"inferred-{self._recorder.ordinal}"

    # -- decide ------------------------------------------------------------------------------------

    def _decide(self, asked: Asked) -> Routed | Refusal | NeedBody:
        head, policy = asked.head, self._routing.policy
        if self._routing.allow_policy_header and (wanted := head.headers.get(names.POLICY_HEADER)):
            if problem := _unusable(wanted):
                refusal = Refusal(RefuseReason.BAD_REQUEST, f"{problem} - in {names.POLICY_HEADER}")
                return self._recorder.refused(head, refusal, asked.laps, asked)
            policy = wanted
        if not _OBJECTIVES.isdisjoint(head.headers) and (problem := _wrong_slo(head.headers)):
            refusal = Refusal(RefuseReason.BAD_REQUEST, problem)
            return self._recorder.refused(head, refusal, asked.laps, asked)
        asked.dice = self._rng.getrandbits(SEED_BITS)
        view, verdict = self._choose(asked, policy)
        if isinstance(verdict, NeedBody):
            return verdict
        asked.laps.lap(Step.POLICY)
        if isinstance(verdict, Refusal):
            return self._recorder.refused(head, verdict, asked.laps, asked, view, policy)
        return self._recorder.routed(asked, view, verdict, policy)

    def weigh(
        self, head: RequestHead, prompt: Prompt | None, dice: int
    ) -> tuple[Asked, RequestView, Verdict]:
        """What would be decided now of a turn of a known session: by its headers alone, or by its prompt.
        Keeps nothing. Raises KeyError for a session that is not bound."""
        now = self._clock()
        identity = from_headers(head.headers, self._routing.session)
        session = self.sessions.find(identity.key, now)
        if session is None or not session.host:
            raise KeyError(identity.session_id)
        asked = Asked(head, now, Laps(self._stopwatch), identity, session, dice=dice)
        self._gatherer.eligible(asked)
        if prompt is None:
            self._gatherer.by_tail(asked, session, head.content_length)
        else:
            asked.prompt = prompt
            self._gatherer.exact(asked)
        return asked, *self._choose(asked, self._routing.policy)

    def _choose(self, asked: Asked, policy: str) -> tuple[RequestView, Verdict]:
        view = self._view(asked)
        self._dice.seed(asked.dice)
        verdict = decide(view, asked.candidates, policy, self._routing, self._dice)
        if isinstance(verdict, Decision) and (offer := self._offer(asked)):
            if view.phase is Phase.HEADERS:
                return view, NEED_BODY  # what its target holds of the prompt is known by the body only
            verdict = self.planner.apply(offer, verdict, view, asked.candidates, asked.now)
        return view, verdict

    def _offer(self, asked: Asked) -> Move | None:
        """The migration planner's, for this session, or for the prefix that a new one begins with."""
        if asked.session and asked.session.host:
            return self.planner.offer(asked.session.key, None)
        known = asked.prefix.tokens // self._block_size
        if not known:
            return None
        prefix = asked.prompt.blocks[known - 1]
        self.planner.saw(prefix, asked.prefix.tokens)
        return self.planner.offer(None, prefix)

    def _view(self, asked: Asked) -> RequestView:
        """The request as a policy sees it."""
        prompt, session = asked.prompt, asked.session
        return RequestView(
            self._recorder.request_id(asked.head),
            self._recorder.ordinal,
            prompt.tokens,
            Phase.BODY if prompt.model else Phase.HEADERS,
            self.sessions.view(session, asked.now) if session else self._new_session(asked),
            prompt.model or self.pool.spec.model.name,
            prompt.output_tokens,
            prompt.source,
            prompt.priority,
            *self._objectives(asked.head),
            asked.prefix,
            self._block_size,
        )

    def _new_session(self, asked: Asked) -> SessionView | None:
        identity = asked.identity
        if not identity.session_id:
            return None
        near = self.sessions.near_host(identity, asked.prompt.hint, asked.now)
        return SessionView(identity.session_id, parent_host=near)

    def _objectives(self, head: RequestHead) -> tuple[int, float, float]:
        """Priority level, TTFT and TPOT SLO in seconds: the request's own, or else the pool's."""
        limits, headers = self._routing.limits, head.headers
        if _OBJECTIVES.isdisjoint(headers):
            return 0, limits.ttft_slo_seconds, limits.tpot_slo_seconds
        named = next((headers[name] for name in names.OBJECTIVE_HEADERS if name in headers), "")
        return (
            limits.objectives.get(named, 0),
            _milliseconds(headers.get(names.SLO_TTFT_HEADER, "")) or limits.ttft_slo_seconds,
            _milliseconds(headers.get(names.SLO_TPOT_HEADER, "")) or limits.tpot_slo_seconds,
        )

    # -- without a policy --------------------------------------------------------------------------

    def _nobody(self, asked: Asked) -> Refusal:
        refusal = admission.nobody(asked.wanted, asked.excluded)
        return self._recorder.refused(asked.head, refusal, asked.laps, asked)

    def _pass_through(self, asked: Asked) -> Routed:
        eligible = asked.eligible
        target = min(eligible, key=lambda e: (e.load.in_flight, self._rng.random()))
        order = [target, *(e for e in eligible if e is not target)]
        return self._recorder.unprompted(asked, order, Reason.PASS_THROUGH)

    def _forced(self, asked: Asked) -> Routed | Refusal:
        named = [a.strip() for a in asked.head.headers[names.CONFORMANCE_SELECTION_HEADER].split(",")]
        by_address = {e.endpoint.address: e for e in asked.eligible}
        chosen = [by_address[address] for address in named if address in by_address]
        if not chosen:
            message = f"None of {', '.join(named)} is a ready endpoint of the pool"
            refusal = Refusal(RefuseReason.NO_ENDPOINT, message)
            return self._recorder.refused(asked.head, refusal, asked.laps, asked)
        return self._recorder.unprompted(asked, chosen, Reason.FORCED)

    def _too_large(self, size_bytes: int) -> Refusal:
        limit = self._routing.limits.max_body_bytes
        return Refusal(RefuseReason.BODY_TOO_LARGE, f"The body has {size_bytes} bytes, the limit is {limit}")

    # -- beside requests ---------------------------------------------------------------------------

    def plan_moves(self) -> None:
        """Once per `migration.interval_seconds`: which sessions and prefixes should move."""
        self.planner.plan(self._clock())


def _unusable(policy: str) -> str:
    """Why a gateway cannot route by it; empty: it can."""
    if policy in SIMULATED_ONLY:
        return f"Policy {policy!r} runs in the simulator only: {SIMULATED_ONLY[policy]}"
    if policy not in LIVE:
        return f"Unknown policy {policy!r}, known are {', '.join(LIVE)}"
    return ""


def _wrong_slo(headers: Mapping[str, str]) -> str:
    """Why a request's SLO cannot be told; empty: it can, or there is none. A typing error must not pass for a
    promise."""
    for name in (names.SLO_TTFT_HEADER, names.SLO_TPOT_HEADER):
        if name in headers and (text := headers[name]):
            try:
                wrong = isnan(float(text))
            except ValueError:
                wrong = True
            if wrong:
                return f"{text[:100]!r} is no number of milliseconds - in {name}"
    return ""


def _milliseconds(text: str) -> float:
    """A header's value in seconds; 0 when it is no number above 0."""
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value / 1000.0 if 0.0 < value < inf else 0.0
