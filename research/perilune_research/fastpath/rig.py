"""Runs the gateway's router and simulated engines in one virtual time.

    conversations ─▶ router (headers, else body) ─▶ scheduler and KV cache of an engine ─▶ KV events ─▶ index

1. The router decides every turn of a session that it knows twice on the same state and with the same seed, by
   its headers alone and by its body (`Router.weigh`, which records nothing). The pair goes to `on_pair`.
2. Then the router routes the turn as in a gateway: by its headers, or by its body where they do not suffice.
3. The chosen engine runs it with the lab's scheduler and KV cache and the times of an H20. After
   `event_lag_s`, its KV events reach the index through vLLM's encoding and the gateway's decoder.
4. Engines restart now and then. A restart loses the cache, and the requests that run there fail and are sent
   again. The gateway hears of the restart when the engine is up again.

Takes about 3 ms per turn of 10,000 tokens. Envoy, request bytes and tokenization are not part of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from prometheus_client import CollectorRegistry

from perilune_api import names
from perilune_api.policies import PolicyChoice
from perilune_api.pool import EndpointSpec, Engine, Metadata, Model, Pool, Routing, Spec
from perilune_gateway.feeds import kv_events
from perilune_gateway.model import (
    EngineModel,
    NeedBody,
    Outcome,
    Refusal,
    RequestHead,
    RequestView,
    Routed,
    Tokens,
    TokenSource,
    Verdict,
)
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.recorder import Recorder
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.request.parsed import ParsedRequest, TokenPrompt
from perilune_gateway.request.paths import Api
from perilune_gateway.routing.context import Prompt, RequestContext
from perilune_gateway.routing.new_router import new_router
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.routing.router import Encode
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.pool_state import PoolState
from perilune_lab.engine.events import encode_batch
from perilune_lab.engine.request import Request as Running
from perilune_research.fastpath.engine import BLOCK, RigEngine, Sent
from perilune_research.fastpath.traffic import Conversation, Request, ids_of

MODEL = "agent"
RESEND_S = 0.5
"""Seconds until a failed or refused request is sent again."""
SCRAPE_S = 1.0
"""Seconds between two readings of the engines' metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The policy, the fleet, and what happens to the fleet."""

    policy: PolicyChoice
    endpoints: int = 8
    kv_tokens: int = 60_000
    restart_every_s: float = 120.0
    """Mean seconds between two restarts in the fleet; 0 for no restarts."""
    restart_s: float = 5.0
    """Seconds that a restart takes."""
    event_lag_s: float = 0.01
    bytes_per_token: float = 4.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """The two decisions on one turn of a known session, made on the same state."""

    policy: str
    by_headers: tuple[RequestContext, RequestView, Verdict]
    by_body: tuple[RequestContext, RequestView, Verdict]
    routing: Routing


class Rig:
    """A gateway's router with its engines and traffic. `on_pair` gets the two decisions on each turn."""

    def __init__(
        self, setting: Setting, traffic: Iterable[Conversation], on_pair: Callable[[Pair], None]
    ) -> None:
        self.setting = setting
        self.pairs = 0
        self.requests = 0
        self.restarts = 0
        self.resent = 0
        self.refused = 0
        self.now = 0.0
        self._on_pair = on_pair
        self._rng = Random(setting.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        addresses = [f"10.0.0.{i + 1}:8000" for i in range(setting.endpoints)]
        model = EngineModel(kv_pool_tokens=setting.kv_tokens)
        self._engines = {a: RigEngine(a, setting.kv_tokens, model) for a in addresses}
        self._traffic = iter(traffic)
        self._build(addresses)

    def _build(self, addresses: Sequence[str]) -> None:
        s = self.setting
        self._pool = Pool(
            Metadata("pool"),
            Spec(
                Model(
                    name=MODEL, context_tokens=1 << 20, bytes_per_token=s.bytes_per_token, tokenize="estimate"
                ),
                engine=Engine(block_size=BLOCK, kv_pool_tokens=s.kv_tokens),
                routing=Routing(policy=s.policy),
                endpoints=tuple(EndpointSpec(address=a, events=("tcp://there",)) for a in addresses),
            ),
        )
        state = PoolState.of(self._pool)
        self._index = state.index
        self._blocks = EngineBlocks(self._index, BLOCK, store=False)
        self.router = new_router(
            self._pool,
            state,
            _NoTokenizer(),
            (Recorder(Metrics(CollectorRegistry(), lambda: self.now), Decisions()),),
            clock=lambda: self.now,
            stopwatch=lambda: self.now,
            wall_clock=lambda: self.now,
            rng=Random(s.seed + 1),
        )

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, turns: int, progress: Callable[[int], None] | None = None) -> None:
        """Run until `turns` turns were decided twice, or the traffic ends. `progress` is called now and then
        with the number of these turns so far."""
        self._scrape()
        self._next_conversation()
        if self.setting.restart_every_s:
            self._plan_restart()
        reported = 0
        while self._events and self.pairs < turns:
            self.now, _, action = heapq.heappop(self._events)
            action()
            if progress and self.pairs >= reported + 100:
                reported = self.pairs
                progress(reported)

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._number), action))

    def _next_conversation(self) -> None:
        conversation = next(self._traffic, None)
        if conversation is None:
            return

        def begin() -> None:
            self._send(conversation, 0)
            self._next_conversation()

        self._at(max(self.now, conversation.start_s), begin)

    # -- a turn ------------------------------------------------------------------------------------

    def _send(self, conversation: Conversation, number: int) -> None:
        request = conversation.requests[number]
        if request.side:
            self._route(conversation, -1, request.side)
        self._route(conversation, number, request)

    def _route(self, conversation: Conversation, number: int, request: Request) -> None:
        tokens = request.tokens
        head = self._head(conversation, request)
        prompt = Prompt(
            tokens=len(tokens),
            source=TokenSource.LOCAL,
            blocks=blocks.chain(tokens, BLOCK, 0),
            model=MODEL,
            body_bytes=request.body_bytes,
        )
        self._weigh(head, prompt)
        self.requests += 1
        verdict: Routed | Refusal | NeedBody | Queued = self.router.on_headers(head)
        if isinstance(verdict, NeedBody):
            parsed = ParsedRequest(api=Api.CHAT, model=MODEL, prompt=TokenPrompt((tokens,)))
            ids = Tokens(count=len(tokens), source=TokenSource.LOCAL, ids=tokens)
            verdict = self.router.on_tokens(Encode(head, parsed, request.body_bytes), ids)
        assert not isinstance(verdict, NeedBody | Queued), "a new session begins at once by default"
        if isinstance(verdict, Refusal):
            self.refused += 1
            self._again(conversation, number, request)
            return
        self._run(verdict, conversation, number, request, tokens)

    def _head(self, conversation: Conversation, request: Request) -> RequestHead:
        headers = {"x-session-id": conversation.session_id, "content-length": str(request.body_bytes)}
        if conversation.parent_id:
            headers[names.PARENT_SESSION_HEADERS[-1]] = conversation.parent_id
        return RequestHead(method="POST", path="/v1/chat/completions", headers=headers)

    def _weigh(self, head: RequestHead, prompt: Prompt) -> None:
        seed = self._rng.getrandbits(32)
        try:
            by_headers = self.router.weigh(head, None, seed)
        except KeyError:
            return  # the gateway does not know the session, so it reads the body in any case
        self.pairs += 1
        by_body = self.router.weigh(head, prompt, seed)
        self._on_pair(Pair(self.setting.policy.name, by_headers, by_body, self._pool.spec.routing))

    def _run(
        self, routed: Routed, conversation: Conversation, number: int, request: Request, tokens: list[int]
    ) -> None:
        engine = self._engines[routed.destinations[0]]
        sent = Sent(routed.ticket, conversation, number, request)
        if not engine.up:
            self._failed(sent)
            return
        table = engine.scheduler.cache.open(tokens)
        running = Running(routed.request_id, table, ids_of(request.answer))
        engine.running[running] = sent
        engine.scheduler.add(running, self.now)
        self._plan(engine)

    def _failed(self, sent: Sent) -> None:
        self.router.finished(sent.ticket, Outcome.FAILED)
        self.resent += 1
        self._again(sent.conversation, sent.number, sent.request)

    def _again(self, conversation: Conversation, number: int, request: Request) -> None:
        self._at(self.now + RESEND_S, partial(self._route, conversation, number, request))

    # -- engines -----------------------------------------------------------------------------------

    def _plan(self, engine: RigEngine) -> None:
        engine.version += 1
        version, due = engine.version, engine.scheduler.next_s()

        def step() -> None:
            if version == engine.version:
                self._advance(engine)

        if due < float("inf"):
            self._at(max(self.now, due), step)

    def _advance(self, engine: RigEngine) -> None:
        for step in engine.scheduler.advance(self.now):
            if step.changes:
                payload = encode_batch(step.changes, BLOCK, self.now)
                self._at(self.now + self.setting.event_lag_s, partial(self._on_events, engine, payload))
            for running in step.emitted:
                if running.produced == 1:
                    self.router.on_response(engine.running[running].ticket, 200, engine.address, True)
            for running in step.finished:
                self._done(engine.running.pop(running))
        self._plan(engine)

    def _on_events(self, engine: RigEngine, payload: bytes) -> None:
        for event in kv_events.decode(payload).events:
            self.router.on_applied(self._blocks.apply(engine.address, event, self.now))

    def _done(self, sent: Sent) -> None:
        self.router.finished(sent.ticket, Outcome.COMPLETED)
        for child in sent.request.spawns:
            self._at(self.now, partial(self._send, child, 0))
        after = sent.number + 1
        if 0 < after < len(sent.conversation.requests):
            gap = sent.conversation.requests[after].gap_s
            self._at(self.now + gap, partial(self._send, sent.conversation, after))

    def _plan_restart(self) -> None:
        self._at(self.now + self._rng.expovariate(1 / self.setting.restart_every_s), self._restart)

    def _restart(self) -> None:
        engine = self._engines[self._rng.choice(list(self._engines))]
        self._plan_restart()
        if not engine.up:
            return
        self.restarts += 1
        lost = list(engine.running.values())
        engine.restart()
        engine.up = False
        engine.version += 1
        for sent in lost:
            self._failed(sent)
        self._at(self.now + self.setting.restart_s, partial(self._up, engine))

    def _up(self, engine: RigEngine) -> None:
        engine.up = True
        self.router.on_applied(self._blocks.reset(engine.address, self.now))

    def _scrape(self) -> None:
        for engine in self._engines.values():
            self.router.state.fleet.metrics(engine.address, engine.metrics() if engine.up else None, self.now)
        self._at(self.now + SCRAPE_S, self._scrape)


class _NoTokenizer:
    """A tokenizer that must not be called, since the rig has the token ids."""

    rewrites_answers = False

    def now(self, request: ParsedRequest) -> Tokens | None:
        raise AssertionError("the rig has the token ids")
