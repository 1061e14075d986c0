"""Routes a request: gather → filter → decide → admit → record. Synchronous; here the steps meet.

    on_headers ─┬─▶ Routed       a known session that the policy keeps or places by the headers alone
                ├─▶ NeedBody ──▶ on_body ─┬─▶ Routed | Refusal
                └─▶ Refusal               └─▶ Encode ──▶ on_tokens ──▶ Routed | Refusal
    Routed ──▶ on_response (0 or 1 times) ──▶ finished (exactly once)

1. *gather*: the session, the prompt's tokens and blocks, what each endpoint holds of them and has to do →
   values: `RequestView` and `Candidate`s. Of a body that is not read, tokens are estimated from its length
   with the session's own ratio, and its host is taken to hold what the session's tail says.
2. *filter*: admission.BEFORE.
3. *decide*: the policy, a pure function.
4. *admit*: the prompt fits, the fleet is not overloaded, the SLOs can be kept.
5. *record*: binding, load, speculative blocks, the decision's record and metrics.

Time and dice come in through the constructor. Costs: with 64 endpoints about 0.2 ms besides tokenization.
Does not: know Envoy, wait, or choose.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from math import inf
from random import Random
from typing import Protocol

from perilune_api import names
from perilune_api.pool import Pool, SpecError
from perilune_api.topology import Link
from perilune_gateway import admission, blocks, openai
from perilune_gateway.engine_model import EngineModel
from perilune_gateway.explain import DecisionRecord, Decisions, sentence
from perilune_gateway.identity import Identity, from_headers, with_body
from perilune_gateway.metrics import Metrics, Step
from perilune_gateway.model import (
    NEED_BODY,
    NO_PREFIX,
    Candidate,
    Decision,
    Encode,
    Endpoint,
    Location,
    NeedBody,
    Outcome,
    Overlap,
    Phase,
    Prefix,
    Reason,
    Refusal,
    RefuseReason,
    RequestHead,
    RequestView,
    Routed,
    SessionView,
    Tier,
    Tokens,
    TokenSource,
)
from perilune_gateway.openai import ParsedRequest
from perilune_gateway.policy import LIVE, POLICIES, SIMULATED_ONLY
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.engine_blocks import Applied
from perilune_gateway.state.fleet import EndpointView, Fleet
from perilune_gateway.state.prefix_index import Matches, PrefixIndex
from perilune_gateway.state.sessions import Session, Sessions

EVENTS_LATE_S = 1.0
"""KV events of an ended prompt may come this late before parity counts them as missing."""
log = logging.getLogger(__name__)

NOT_ASKED = ("", "0", "false")
"""Values of x-perilune-decision that ask for nothing."""
APPROXIMATE_TTL_S = 600.0
"""How long a prompt counts as cached on an endpoint that publishes no events."""
MAX_LOCATIONS = 4
"""Holders of the longest prefix that a policy is told."""
TELLING_PREFILL_S = 0.25
"""A prefill predicted to be shorter says more of overheads and events on their way than of the engine."""


class TokenizesNow(Protocol):
    """tokens.Tokenizer, as far as the router needs it."""

    def now(self, request: ParsedRequest) -> Tokens | None: ...


class Parity(Protocol):
    """parity.ParityCheck, as far as the router needs it."""

    def request_blocks_seen(self, endpoint: str, seen: bool) -> None: ...
    def forget(self, endpoint: str) -> None: ...


@dataclass(slots=True)
class _Prompt:
    """A prompt as far as it is known."""

    tokens: int
    source: TokenSource
    blocks: Sequence[int] = ()
    model: str = ""
    output_tokens: int = 0
    priority: int = 0
    body_bytes: int = 0
    hint: str = ""
    """Its prompt_cache_key."""


@dataclass(slots=True)
class _Running:
    """A routed request until it ends."""

    request_id: str
    target: str
    started_at: float
    session: Session | None
    final: bool
    blocks: Sequence[int]
    awaited: int
    """The block whose store ends its prefill; 0: none is known."""
    prefill_s: float = 0.0
    """Of its prefill alone, predicted without correction."""
    ttft_s: float = 0.0
    """Queue and prefill, predicted."""
    prefilled_at: float = 0.0
    record: int = -1
    """Its number in the ring of decisions."""
    served: str = ""
    status: int = 0


class _Laps:
    """Microseconds by step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = self._last = clock()
        self.us: dict[str, float] = {}

    def lap(self, step: Step) -> None:
        now = self._clock()
        self.us[step] = (now - self._last) * 1e6
        self._last = now

    def total(self) -> dict[str, float]:
        self.us[Step.TOTAL] = (self._clock() - self._started) * 1e6
        return self.us


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
        self.index = index
        self.tokenizer = tokenizer
        self.decisions = decisions
        self.metrics = metrics
        self.parity = parity
        self.calibration = calibration or Calibration()
        self._clock = clock
        self._stopwatch = stopwatch
        self._wall_clock = wall_clock
        self._rng = rng or Random()
        self._conformance = conformance
        self._ordinal = 0
        self._running: dict[int, _Running] = {}
        self._unseen: deque[tuple[float, str, int]] = deque()
        """(when to look, endpoint, last block of a prompt that ended there)."""
        self._engine = engine or EngineModel()
        self._engines: dict[str, tuple[float, EngineModel]] = {}
        """By address: what was observed / predicted, and the model that says so."""
        self._prefilled_at: dict[str, float] = {}
        """By address: when its last prefill ended."""
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
        self._engine_here = replace(
            self._engine.scaled(spec.engine.prefill_scale), kv_bytes_per_token=spec.model.kv_bytes_per_token
        )
        self._engines.clear()
        gone = self.fleet.set_endpoints(
            [
                Endpoint(
                    e.address,
                    e.role,
                    spec.topology.place(e.node),
                    e.events,
                    e.replay,
                    draining=e.draining,
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
            if self.parity:
                self.parity.forget(address)

    # -- a request's way in ------------------------------------------------------------------------

    def on_headers(self, head: RequestHead) -> Routed | Refusal | NeedBody:
        """Decide from the headers, where they suffice."""
        laps, now = _Laps(self._stopwatch), self._clock()
        identity = from_headers(head.headers, self._routing.session)
        session = self.sessions.find(identity.key, now)
        host = session.host if session else ""
        forced = self._conformance and names.CONFORMANCE_SELECTION_HEADER in head.headers
        for_model = head.has_body and head.method == "POST" and openai.is_model_path(head.path)
        if for_model and not forced:
            if head.content_length > self._routing.limits.max_body_bytes:
                return self._refuse(head, self._too_large(head.content_length))
            if not host:
                return NEED_BODY
        wanted = admission.Wanted(head.subset, host)
        eligible, excluded = admission.split(self.fleet.view(now, self.sessions.bound), wanted)
        if not eligible:
            return self._refuse(head, admission.nobody(wanted, excluded), excluded)
        if forced:
            return self._forced(head, eligible, excluded, laps)
        if not for_model or session is None:
            return self._pass_through(head, eligible, excluded, laps)
        prompt = _Prompt(
            max(1, session.estimate_tokens(head.content_length, self.pool.spec.model.bytes_per_token)),
            TokenSource.ESTIMATE,
            body_bytes=head.content_length,
        )
        held = min(self._held(session, now), self._whole_blocks(prompt.tokens))
        prefix = Prefix((Location(host, held),)) if held else NO_PREFIX
        candidates = self._candidates(eligible, prompt, {host: Overlap(held, held, held)}, prefix, now)
        laps.lap(Step.INDEX)
        return self._decide(head, identity, session, prompt, candidates, prefix, excluded, laps, now)

    def on_body(self, head: RequestHead, body: bytes) -> Routed | Refusal | Encode:
        """The body is there."""
        laps = _Laps(self._stopwatch)
        if len(body) > self._routing.limits.max_body_bytes:
            return self._refuse(head, self._too_large(len(body)))
        request = openai.parse(head.path, body)
        if isinstance(request, Refusal):
            return self._refuse(head, request)
        if request.model not in self._models:
            known = ", ".join(sorted(self._models))
            message = f"The model `{request.model[:200]}` does not exist here; known are: {known}"
            return self._refuse(head, Refusal(RefuseReason.UNKNOWN_MODEL, message))
        laps.lap(Step.PARSE)
        tokens = self.tokenizer.now(request)
        if tokens is None:
            return Encode(head, request, len(body))
        laps.lap(Step.TOKENIZE)
        return self._on_prompt(head, request, len(body), tokens, laps)

    def on_tokens(self, encode: Encode, tokens: Tokens, waited_s: float = 0.0) -> Routed | Refusal:
        """Tokenization has answered after `waited_s`."""
        laps = _Laps(self._stopwatch)
        laps.us[Step.TOKENIZE] = waited_s * 1e6
        return self._on_prompt(encode.head, encode.request, encode.body_bytes, tokens, laps)

    def refused(self, head: RequestHead, refusal: Refusal) -> None:
        """The exchange refused by itself; keep it with the others."""
        self._refuse(head, refusal)

    def _on_prompt(
        self, head: RequestHead, request: ParsedRequest, body_bytes: int, tokens: Tokens, laps: _Laps
    ) -> Routed | Refusal:
        now, keys = self._clock(), self._routing.session
        if refusal := admission.fits_context(tokens, self.pool.spec.model.context_tokens):
            return self._refuse(head, refusal)  # before the cost of a prompt grows with its length
        lora = request.model if request.model in self._loras else ""
        prompt = _Prompt(
            tokens.count,
            tokens.source,
            self._blocks(request, tokens, lora),
            request.model,
            request.max_output_tokens,
            request.priority,
            body_bytes,
            request.prompt_cache_key,
        )
        laps.lap(Step.HASH)
        identity = with_body(from_headers(head.headers, keys), request.session_id, request.user, keys)
        session = self.sessions.find(identity.key, now)
        if identity.key is None and keys.infer and prompt.blocks:
            session = self.sessions.infer(identity.tenant, prompt.blocks, prompt.tokens, now)
            name = session.key.session_id if session else f"inferred-{self._ordinal}"
            identity = identity._replace(session_id=name)
        wanted = admission.Wanted(head.subset, session.host if session else "")
        eligible, excluded = admission.split(self.fleet.view(now, self.sessions.bound), wanted)
        if not eligible:
            return self._refuse(head, admission.nobody(wanted, excluded), excluded)
        matches = self.index.find_matches(prompt.blocks, now)
        overlaps = self._overlaps(matches, prompt)
        prefix = self._prefix(matches, prompt)
        stored = min(matches.store * self._block_size, self._whole_blocks(prompt.tokens))
        candidates = self._candidates(eligible, prompt, overlaps, prefix, now, stored)
        laps.lap(Step.INDEX)
        verdict = self._decide(head, identity, session, prompt, candidates, prefix, excluded, laps, now)
        assert not isinstance(verdict, NeedBody), "a policy asked for a body that it had seen"
        if isinstance(verdict, Routed):
            self.index.record_match(prompt.blocks, matches, now)
        return verdict

    # -- decide ------------------------------------------------------------------------------------

    def _decide(
        self,
        head: RequestHead,
        identity: Identity,
        session: Session | None,
        prompt: _Prompt,
        candidates: Sequence[Candidate],
        prefix: Prefix,
        excluded: Mapping[str, str],
        laps: _Laps,
        now: float,
    ) -> Routed | Refusal | NeedBody:
        policy = self._policy_name(head)
        if isinstance(policy, Refusal):
            return self._refuse(head, policy, excluded)
        phase = Phase.BODY if prompt.model else Phase.HEADERS
        view = RequestView(
            self._request_id(head),
            self._ordinal,
            prompt.tokens,
            phase,
            self._session_view(identity, session, prompt.hint, now),
            prompt.model or self.pool.spec.model.name,
            prompt.output_tokens,
            prompt.source,
            prompt.priority,
            *self._objectives(head),
            prefix,
            self._block_size,
        )
        verdict = POLICIES[policy](view, candidates, self._routing.params, self._rng)
        if isinstance(verdict, NeedBody):
            return verdict
        refusal = (
            verdict
            if isinstance(verdict, Refusal)
            else admission.not_overloaded(candidates, self._routing.limits, view.level)
        )
        if refusal is None and (refusal := admission.meets_slo(view, candidates)) and phase is Phase.HEADERS:
            return NEED_BODY  # what others hold of the prompt may tell otherwise
        laps.lap(Step.POLICY)
        if isinstance(verdict, Refusal) or refusal:
            assert refusal is not None
            return self._refuse(head, refusal, excluded, view, candidates, policy)
        return self._record(head, identity, view, verdict, prompt, candidates, excluded, policy, laps, now)

    def _overlaps(self, matches: Matches, prompt: _Prompt) -> dict[str, Overlap]:
        """Of the endpoints that hold something themselves."""
        limit, size = self._whole_blocks(prompt.tokens), self._block_size
        return {
            address: Overlap(*(min(held * size, limit) for held in matches.of(address)))
            for address in matches.reach
        }

    def _candidates(
        self,
        eligible: Sequence[EndpointView],
        prompt: _Prompt,
        overlaps: Mapping[str, Overlap],
        prefix: Prefix,
        now: float,
        stored_tokens: int = 0,
    ) -> list[Candidate]:
        """`stored_tokens`: in the shared store, for those that hold nothing themselves."""
        candidates, elsewhere = [], Overlap(0, 0, stored_tokens)
        for view in eligible:
            address = view.endpoint.address
            overlap = overlaps.get(address, elsewhere)
            cached, engine = overlap.device_tokens, self._engine_of(address, now)
            candidates.append(
                Candidate(
                    view.endpoint,
                    view.load,
                    overlap,
                    engine.prefill_s(prompt.tokens - cached, cached),
                    view.seconds_since_move,
                    self._links(view, prefix, now),
                    engine,
                    self.calibration.decode_s(address),
                    self.calibration.ttft_ratio(address, now),
                )
            )
        return candidates

    def _prefix(self, matches: Matches, prompt: _Prompt) -> Prefix:
        """Nobody asks an engine to pull from another yet, so it is not pullable."""
        limit = self._whole_blocks(prompt.tokens)
        longest = nlargest(MAX_LOCATIONS, matches.host.items(), key=lambda held: held[1])
        locations = (Location(a, min(held * self._block_size, limit)) for a, held in longest)
        return Prefix(
            tuple(location for location in locations if location.tokens),
            matches.hits,
            matches.frequency_score,
        )

    def _links(self, view: EndpointView, prefix: Prefix, now: float) -> Mapping[str, Link]:
        """To the prefix's locations, as slow as they were observed to be."""
        here, links = view.endpoint.address, {}
        for there, _ in prefix.locations:
            if link := view.links.get(there):
                slowdown = self.calibration.slowdown(there, here, now)
                links[there] = link if slowdown == link.slowdown else link._replace(slowdown=slowdown)
        return links

    def _engine_of(self, address: str, now: float) -> EngineModel:
        """As fast as it was observed to be, to a hundredth."""
        ratio = round(self.calibration.prefill_ratio(address, now), 2)
        known = self._engines.get(address)
        if known is None or known[0] != ratio:
            known = self._engines[address] = (ratio, self._engine_here.scaled(ratio))
        return known[1]

    def _objectives(self, head: RequestHead) -> tuple[int, float, float]:
        """Priority level, TTFT and TPOT SLO in seconds: the request's own, or else the pool's."""
        limits, headers = self._routing.limits, head.headers
        named = next((headers[name] for name in names.OBJECTIVE_HEADERS if name in headers), "")
        return (
            limits.objectives.get(named, 0),
            _milliseconds(headers.get(names.SLO_TTFT_HEADER, "")) or limits.ttft_slo_seconds,
            _milliseconds(headers.get(names.SLO_TPOT_HEADER, "")) or limits.tpot_slo_seconds,
        )

    def _pass_through(
        self,
        head: RequestHead,
        eligible: Sequence[EndpointView],
        excluded: Mapping[str, str],
        laps: _Laps,
    ) -> Routed:
        target = min(eligible, key=lambda e: (e.load.in_flight, self._rng.random()))
        return self._without_prompt(
            head, [target, *(e for e in eligible if e is not target)], excluded, Reason.PASS_THROUGH, laps
        )

    def _forced(
        self,
        head: RequestHead,
        eligible: Sequence[EndpointView],
        excluded: Mapping[str, str],
        laps: _Laps,
    ) -> Routed | Refusal:
        named = [a.strip() for a in head.headers[names.CONFORMANCE_SELECTION_HEADER].split(",")]
        by_address = {e.endpoint.address: e for e in eligible}
        chosen = [by_address[address] for address in named if address in by_address]
        if not chosen:
            message = f"None of {', '.join(named)} is a ready endpoint of the pool"
            return self._refuse(head, Refusal(RefuseReason.NO_ENDPOINT, message), excluded)
        return self._without_prompt(head, chosen, excluded, Reason.FORCED, laps)

    def _without_prompt(
        self,
        head: RequestHead,
        order: Sequence[EndpointView],
        excluded: Mapping[str, str],
        reason: Reason,
        laps: _Laps,
    ) -> Routed:
        now, target = self._clock(), order[0].endpoint.address
        ticket = self._start(head, target, None, final=False, now=now)
        self.fleet.start(ticket, target, uncached_tokens=0, prefill_s=0.0, context_tokens=0)
        decision = Decision(target, reason)
        destinations = tuple(e.endpoint.address for e in order[: 1 + self._routing.fallbacks])
        record = DecisionRecord(
            RequestView(self._running[ticket].request_id, ticket, 0, Phase.HEADERS),
            decision,
            "",
            excluded=excluded,
            destinations=destinations,
            timings_us=laps.total(),
            time=self._wall_clock(),
        )
        self._running[ticket].record = self._keep(record)
        return self._routed(head, ticket, record)

    # -- record ------------------------------------------------------------------------------------

    def _record(
        self,
        head: RequestHead,
        identity: Identity,
        view: RequestView,
        decision: Decision,
        prompt: _Prompt,
        candidates: Sequence[Candidate],
        excluded: Mapping[str, str],
        policy: str,
        laps: _Laps,
        now: float,
    ) -> Routed:
        target = decision.target
        chosen = next(c for c in candidates if c.address == target)
        cached = max(chosen.overlap.device_tokens, decision.cached_tokens)
        new = prompt.tokens - cached
        session = self._bind(identity, target, prompt, now)
        last = prompt.blocks[-1] if len(prompt.blocks) * self._block_size > cached else 0
        awaited = last if chosen.endpoint.events and prompt.source is not TokenSource.ESTIMATE else 0
        ticket = self._start(head, target, session, identity.final, now, prompt.blocks, awaited)
        prefill_s = chosen.engine.prefill_s(new, cached)
        running = self._running[ticket]
        running.prefill_s = self._engine_here.prefill_s(new, cached)
        running.ttft_s = chosen.load.pending_prefill_s + prefill_s
        self.fleet.start(
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
            self.sessions.hint(identity.tenant, prompt.hint, target)
        if decision.moved_from:
            self.fleet.moved(decision.moved_from, target, now)
        self._speculate(chosen.endpoint, prompt.blocks, now)
        record = DecisionRecord(
            view,
            decision,
            policy,
            tuple(candidates),
            excluded,
            self._destinations(decision, candidates),
            cached,
            laps.total(),
            self._wall_clock(),
            identity.tenant,
        )
        self._running[ticket].record = self._keep(record)
        return self._routed(head, ticket, record)

    def _bind(self, identity: Identity, target: str, prompt: _Prompt, now: float) -> Session | None:
        if identity.key is None:
            return None
        session = self.sessions.touch(identity.key, now, identity.parent_key)
        self.sessions.bind(session, target, now)
        session.turns += 1
        if prompt.model:
            self.sessions.read(session, prompt.tokens, prompt.body_bytes, prompt.blocks)
        else:
            self.sessions.unread(session, prompt.tokens, prompt.body_bytes)
        if prompt.blocks:
            self.sessions.cached(session, prompt.blocks[-1], len(prompt.blocks) * self._block_size)
        elif not self._publishes_events(target):
            self.sessions.cached(session, 0, self._whole_blocks(prompt.tokens))
        return session

    def _start(
        self,
        head: RequestHead,
        target: str,
        session: Session | None,
        final: bool,
        now: float,
        prompt_blocks: Sequence[int] = (),
        awaited: int = 0,
    ) -> int:
        ticket = self._ordinal
        self._running[ticket] = _Running(
            self._request_id(head), target, now, session, final, prompt_blocks, awaited
        )
        self._ordinal += 1
        return ticket

    def _routed(self, head: RequestHead, ticket: int, record: DecisionRecord) -> Routed:
        asked = head.headers.get(names.DECISION_HEADER, "") not in NOT_ASKED
        header = f"{record.target}; {record.reason}; request={record.request_id}" if asked else ""
        return Routed(ticket, record.destinations, record.request_id, header)

    def _destinations(self, decision: Decision, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """The target, then the candidates by cost."""
        by_cost = sorted(decision.costs, key=lambda cost: cost.total)
        others = [cost.address for cost in by_cost if cost.address != decision.target]
        return (decision.target, *others[: self._routing.fallbacks])

    def _refuse(
        self,
        head: RequestHead,
        refusal: Refusal,
        excluded: Mapping[str, str] | None = None,
        view: RequestView | None = None,
        candidates: Sequence[Candidate] = (),
        policy: str = "",
    ) -> Refusal:
        view = view or RequestView(self._request_id(head), self._ordinal, 0)
        self._keep(
            DecisionRecord(view, refusal, policy, tuple(candidates), excluded or {}, time=self._wall_clock())
        )
        self._ordinal += 1
        return refusal

    def _keep(self, record: DecisionRecord) -> int:
        self.metrics.decided(record)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("decision request_id=%s %s", record.request_id, sentence(record))
        return self.decisions.add(record)

    def _speculate(self, endpoint: Endpoint, prompt_blocks: Sequence[int], now: float) -> None:
        """What was just sent there counts as cached there: equal prompts that follow at once meet it."""
        if not prompt_blocks:
            return
        if endpoint.events:
            self.index.speculate(endpoint.address, prompt_blocks, now)
        else:
            self.index.speculate(endpoint.address, prompt_blocks, now, ttl_s=APPROXIMATE_TTL_S)

    # -- a request's way out -----------------------------------------------------------------------

    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None:
        """The answer's head. `served`: who really answers, empty if unknown."""
        running, now = self._running[ticket], self._clock()
        running.status, running.served = status, served
        if served and served != running.target and self.fleet.get(served):
            self._served_elsewhere(ticket, running, served, now)
        if not streamed:
            self.fleet.prefill_done(ticket)

    def _served_elsewhere(self, ticket: int, running: _Running, served: str, now: float) -> None:
        self.fleet.suspect(running.target, now)
        self.fleet.served_by(ticket, served)
        if running.session and running.session.ticket == ticket:
            self.sessions.bind(running.session, served, now)
        if endpoint := self.fleet.get(served):
            self._speculate(endpoint, running.blocks, now)
        running.target = served

    def finished(self, ticket: int, outcome: Outcome) -> None:
        """The request ended. Raises KeyError when it already had."""
        running, now = self._running.pop(ticket), self._clock()
        self.fleet.finish(ticket)
        if outcome is Outcome.FAILED and running.status in (0, 502, 503, 504):
            self.fleet.suspect(running.target, now)
        if running.prefilled_at and outcome is Outcome.COMPLETED:
            self.calibration.decoded(running.target, now - running.prefilled_at)
        if self.parity and running.awaited and outcome is Outcome.COMPLETED and running.status < 400:
            self._unseen.append((now + EVENTS_LATE_S, running.target, running.awaited))
        self._look_for_blocks(now)
        if running.final and running.session:
            self.sessions.free(running.session.key)
        self.decisions.finish(
            running.record, outcome, now - running.started_at, running.served, running.status
        )
        self.metrics.ended(running.target, outcome)

    def _look_for_blocks(self, now: float) -> None:
        """Did the prompts that ended a moment ago show up in their engines' stores? Else hashes or templates
        differ."""
        while self.parity and self._unseen and self._unseen[0][0] <= now:
            _, target, block = self._unseen.popleft()
            self.parity.request_blocks_seen(target, self.index.announced(target, block))

    # -- what engines announce ---------------------------------------------------------------------

    def on_applied(self, applied: Applied) -> None:
        """A KV event went into the index: release the load that it ends, move sessions' tails on."""
        if applied.cleared:
            self.sessions.forget_host(applied.endpoint)
        if not applied.stored or applied.tier is not Tier.DEVICE:
            return
        for ticket in self.fleet.blocks_stored(applied.endpoint, applied.stored):
            self._prefilled(self._running[ticket], self._clock())
        grown = self.sessions.blocks_stored(
            applied.endpoint, applied.parent, applied.stored, self._block_size
        )
        if grown:
            session, tokens = grown
            self.fleet.progress(session.ticket, tokens)

    def _prefilled(self, running: _Running, now: float) -> None:
        """Its prefill has just ended: learn from how long that took. Engines prefill one after the other, so
        it ran from the end of the one before, or from its own start."""
        before = self._prefilled_at.get(running.target, 0.0)
        running.prefilled_at = self._prefilled_at[running.target] = now
        if running.prefill_s >= TELLING_PREFILL_S:
            alone_s = now - max(running.started_at, before)
            self.calibration.prefill(running.target, alone_s, running.prefill_s, now)
            self.calibration.ttft(running.target, now - running.started_at, running.ttft_s, now)

    # -- small facts -------------------------------------------------------------------------------

    def _blocks(self, request: ParsedRequest, tokens: Tokens, lora: str) -> Sequence[int]:
        root = blocks.prefix_root(lora, request.cache_salt)
        if tokens.ids is not None:
            return blocks.chain(tokens.ids, self._block_size, root)
        model = self.pool.spec.model
        text = request.prefix_text()[: int(model.context_tokens * model.bytes_per_token)]
        return blocks.text_chain(text, int(self._block_size * model.bytes_per_token), root)

    def _whole_blocks(self, prompt_tokens: int) -> int:
        """The most tokens of a prompt that a cache can serve: whole blocks, never the last token."""
        return (prompt_tokens - 1) // self._block_size * self._block_size

    def _held(self, session: Session, now: float) -> int:
        """Tokens of the session's context that its host still holds, as far as one look tells: all up to the
        tail, or nothing once the tail was evicted."""
        if not self._publishes_events(session.host):
            return session.tail_tokens
        found = self.index.find_matches((session.tail,), now)
        return session.tail_tokens if session.host in found.device else 0

    def _publishes_events(self, address: str) -> bool:
        endpoint = self.fleet.get(address)
        return bool(endpoint and endpoint.events)

    def _session_view(
        self, identity: Identity, session: Session | None, hint: str, now: float
    ) -> SessionView | None:
        if session:
            return self.sessions.view(session, now)
        if identity.key is None:
            return None
        return SessionView(identity.session_id, parent_host=self.sessions.near_host(identity, hint, now))

    def _policy_name(self, head: RequestHead) -> str | Refusal:
        asked = head.headers.get(names.POLICY_HEADER, "")
        if not asked or not self._routing.allow_policy_header:
            return self._routing.policy
        if problem := _unusable(asked):
            return Refusal(RefuseReason.BAD_REQUEST, f"{problem} - in {names.POLICY_HEADER}")
        return asked

    def _too_large(self, size_bytes: int) -> Refusal:
        limit = self._routing.limits.max_body_bytes
        return Refusal(RefuseReason.BODY_TOO_LARGE, f"The body has {size_bytes} bytes, the limit is {limit}")

    def _request_id(self, head: RequestHead) -> str:
        return head.headers.get(names.REQUEST_ID_HEADER, "")[:128] or f"request-{self._ordinal}"


def _unusable(policy: str) -> str:
    """Why a gateway cannot route by it; empty: it can."""
    if policy in SIMULATED_ONLY:
        return f"Policy {policy!r} runs in the simulator only: {SIMULATED_ONLY[policy]}"
    if policy not in LIVE:
        return f"Unknown policy {policy!r}, known are {', '.join(LIVE)}"
    return ""


def _milliseconds(text: str) -> float:
    """A header's value in seconds; 0 when it is no number above 0."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value / 1000.0 if 0.0 < value < inf else 0.0
