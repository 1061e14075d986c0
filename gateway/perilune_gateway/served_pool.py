"""One pool with all its parts: state → router → feeds → what its requests wait for, and what its pages show.

`ServedPool.__init__` creates and connects them by hand; nothing runs before `start`. A gateway has one for
each of its pools; they share the process, its listeners and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from importlib.metadata import version
from math import inf
from random import Random
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING, Protocol

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry

from perilune_api import engine_calls, names
from perilune_api.pool import Engine, Pool, Selector, SpecError
from perilune_gateway.extproc.waiting import Waiting
from perilune_gateway.feeds import (
    bootstrap_pages,
    drained,
    engine_metrics,
    engine_words,
    handoff_legs,
    peer_ports,
    prefill_legs,
    pull_legs,
    sleep_calls,
    store_keys,
    store_leader,
    store_questions,
    store_segments,
    token_proofs,
)
from perilune_gateway.feeds.kubernetes import KubernetesPool
from perilune_gateway.feeds.leaving import Use
from perilune_gateway.feeds.pool_events import EventFeeds, EventSink
from perilune_gateway.feeds.shared_state import Server, SharedState
from perilune_gateway.model import EngineMetrics, server_of
from perilune_gateway.model.engine_facts import EngineFacts
from perilune_gateway.model.kv_reach import kv_reach
from perilune_gateway.model.shared import Names, SharedStats
from perilune_gateway.observe.admin import PoolData
from perilune_gateway.observe.decision_log import DecisionLog, RotatedFile
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.recorder import Recorder
from perilune_gateway.observe.shadow import Shadow
from perilune_gateway.observe.snapshot import Snapshots
from perilune_gateway.policy import POLICIES
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.metrics import TokenMetrics
from perilune_gateway.routing.new_router import new_router
from perilune_gateway.routing.trial import Trial
from perilune_gateway.state.context_digests import ContextDigests
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.facts import Unreached
from perilune_gateway.state.pool_state import PoolState, index_blocks
from perilune_gateway.state.prompt_names import PromptNames
from perilune_gateway.state.replicas import Replicas
from perilune_gateway.state.sharing import Sharing

if TYPE_CHECKING:
    from perilune_gateway.observe.otlp import Collector

log = logging.getLogger(__name__)

WARM_S = 1.5
"""Most seconds for which a gateway that starts reads what its engines had announced, before it serves. What
it decided without would bind sessions to engines that lack their KV."""
OTHERS_SERVE_S = 10.0
"""The same while other gateways of the pool serve."""
LOOK_S = 0.02
TICK_S = 0.1
TOKENS_SHARE = 0.9
"""Share of `decision_seconds` after which the tokenizer stops waiting for exact tokens and estimates them.
The rest of the time is left for its estimate, which is better than the one that streams make from bytes."""


class PoolSource(Protocol):
    """Where the pool comes from: a file or the Kubernetes API."""

    last_error: str
    """Why the newest document is not in force; empty when it is."""

    def run(self, on_pool: Callable[[Pool], None], use: Callable[[str], Use]) -> Coroutine[None, None, None]:
        """Pass every new pool to `on_pool` until cancelled. `on_pool` raises SpecError to refuse one.
        `use`: how this gateway uses the endpoint with that address."""


class ServedPool:
    """One pool of a gateway."""

    def __init__(
        self,
        pool: Pool,
        source: PoolSource,
        *,
        conformance: bool = False,
        seed: int | None = None,
        secret: str = "",
        previous_secret: str = "",
        authorization: str = "",
        log_file: RotatedFile | None = None,
        state_server: Server | None = None,
        state_key: str = "",
        state_cluster: str = "",
        traces: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret`: of the pool. If it is empty, this process draws one of its own. `previous_secret`: the
        one before, if ids of its responses are still to be read. `authorization`: the header that engines
        demand, in place of the clients' own. If it is empty, theirs pass. Every decision is written to
        `log_file`, if given. `state_server`: what the pool's gateways share their state through; `state_key`:
        the key of the hashes that name sessions there; `state_cluster`: a name of the cluster, if the server
        has pools of several. `traces`: URL of the collector of spans, if there is one."""
        spec = pool.spec
        engine_calls.check(spec.engine.tls)
        self._clock, self._rng = clock, Random(seed)
        self._key = {names.AUTHORIZATION_HEADER: authorization} if authorization else {}
        self._trust = {names.ENGINE_SECRET_HEADER: secret} if secret else {}
        self._began_at = clock()
        self.draining = False
        self._running: list[asyncio.Task[None]] = []
        """The feeds."""
        self.outdated = asyncio.Event()
        """Set when a new document has changed what only a new ServedPool can take."""
        self.source = source
        self._words = source.words if isinstance(source, KubernetesPool) else engine_words.EngineWords(clock)
        registry = CollectorRegistry()
        self.metrics = Metrics(registry, clock)
        self.decision_log = DecisionLog(log_file, pool, version("perilune"), time.time) if log_file else None
        decisions = Decisions()
        self.collector = _collector(traces, pool, self.metrics) if traces else None
        sharing, changed = None, asyncio.Event()
        places = state_cluster, pool.metadata.namespace, pool.metadata.name
        shared_as = "/".join(filter(None, places))
        if state_server:
            key = state_key or state_server.password or shared_as
            sharing = Sharing(token_hex(8), Names(key.encode()), clock, time.time, changed.set)
        self.state = PoolState.of(pool, sharing=sharing, keyed=bool(authorization))
        self.tokenizer = Tokenizer(
            spec.model,
            self._least_busy,
            timeout_s=TOKENS_SHARE * spec.routing.limits.decision_seconds,
            headers=self._key,
            tls=spec.engine.tls,
            media=self.state.media,
        )
        registry.register(TokenMetrics(self.tokenizer))
        self.proofs = token_proofs.TokenProofs(self.tokenizer, spec.model.name, clock)
        hashed = (
            spec.engine.hashing,
            spec.engine.block_size,
            {lora.name: lora.path for lora in spec.model.loras},
        )
        self._digests = ContextDigests(*hashed)
        self.blocks = EngineBlocks(
            self.state.index,
            spec.engine.block_size,
            store=kv_reach(spec).stores,
            max_names=2 * index_blocks(pool),
            prompt_names=PromptNames(*hashed),
            media=self.state.media,
        )
        self._legs_due = handoff_legs.Due()
        self.shadow = Shadow(pool, version("perilune"), clock, self._rng)
        self.router = new_router(
            pool,
            self.state,
            self.tokenizer,
            (
                self.blocks,
                self._legs_due,
                Recorder(
                    self.metrics,
                    decisions,
                    self.decision_log,
                    self.collector.send if self.collector else None,
                ),
                self.shadow,
            ),
            clock=clock,
            rng=self._rng,
            conformance=conformance,
            secret=secret.encode() or token_bytes(),
            previous_secret=previous_secret.encode(),
            engine_secret=secret,
            prompt_seen=self.blocks.prompt,
            # On Kubernetes the operator judges, by the sums of all gateways.
            trial=Trial(decides=not isinstance(source, KubernetesPool)),
        )
        state = self.state
        sink = EventSink(self.blocks, state.parity, self.router, clock, state.block_tokens)
        self.events = EventFeeds(sink, time.time, self._rng)
        state.ejection.hears = self.events.hears
        self.prefill_legs = prefill_legs.PrefillLegs(
            self.router.moves.remote_prefills, state.connectors, secret
        )
        self.pull_legs = pull_legs.PullLegs(self.router.moves.pulling, state.connectors)
        self.shared: SharedState | None = None
        if state_server and sharing:
            self.replicas = Replicas(state, self.router.new_sessions, self.router.moves.handing_over)
            self.shared = SharedState(state_server, shared_as, self.replicas, changed, clock, Random())
        self.waiting = Waiting(
            self.router,
            self.tokenizer,
            limits=spec.routing.limits,
            bytes_per_token=spec.model.bytes_per_token,
            giver=self.prefill_legs,
            fetcher=self.pull_legs,
        )
        snapshots = Snapshots(
            self.router,
            self.blocks,
            self.events,
            self.decision_log,
            clock,
            drained=self._drained,
            shared=self._shared_stats,
            told=self._told,
            shadow=self.shadow.stats,
            proofs=self.proofs,
        )
        self.metrics.mirror(snapshots.snapshot)
        self.metrics.describe(version("perilune"), spec.routing.policy.name)
        self.pages = PoolData(
            registry=registry,
            decisions=decisions,
            policies=POLICIES,
            params=lambda: self.router.pool.spec.routing.policy,
            endpoints=snapshots.endpoints,
            sessions=snapshots.sessions,
            index_stats=lambda: self.state.index.stats(clock()),
            moves=snapshots.moves,
            health=lambda: snapshots.health(self.source.last_error),
            ready=lambda: not self.draining and snapshots.serves(),
            about=snapshots.about,
            new_sessions=snapshots.new_sessions,
            handoffs=snapshots.handoffs,
            trying=snapshots.trying,
            sums=lambda: self.router.trial.sums,
            wall=time.time,
        )

    @property
    def name(self) -> str:
        """The pool's name in paths and labels."""
        return self.router.pool.metadata.name

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all feeds and the decision log, which `stop` ends."""
        if self.decision_log:
            tasks.create_task(self.decision_log.run())
        self._running += [tasks.create_task(feed) for feed in self._feeds()]
        self.events.follow(self.state.fleet.endpoints())

    async def warm(self) -> None:
        """Wait until it is known what other gateways know, and what the engines cache: for WARM_S at most, or
        for OTHERS_SERVE_S while others serve. Both are read at the same time."""
        shared = [self.shared.warm()] if self.shared else []
        await asyncio.gather(self._events_read(), *shared)

    async def _events_read(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self.events.caught_up():
            others_serve = self.shared is not None and self.replicas.peers
            if (waited_s := loop.time() - began) >= (OTHERS_SERVE_S if others_serve else WARM_S):
                log.warning("kv events not read in time, serving without them seconds=%g", waited_s)
                return
            await asyncio.sleep(LOOK_S)

    def stop(self) -> None:
        """End the feeds, and the decision log after the entries that wait."""
        for feed in self._running:
            feed.cancel()
        if self.decision_log:
            self.decision_log.stop()

    async def close(self) -> None:
        """Close what the feeds and requests used, when the feeds have ended."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.events.close()
        await self.tokenizer.close()
        if self.collector:
            await asyncio.to_thread(self.collector.close)

    def _feeds(self) -> Iterator[Coroutine[None, None, None]]:
        yield self.source.run(self.on_pool, lambda address: Use(*self.state.fleet.use(address)))
        yield engine_metrics.run(
            self.state.fleet.addresses,
            self.on_metrics,
            self._clock,
            self._rng,
            unreached=lambda address, now: self.state.facts.tell(Unreached(address, now)),
            block_size=lambda: self.router.pool.spec.engine.block_size,
            engine_rank=self.state.fleet.engine_rank,
            tls=self.router.pool.spec.engine.tls,
        )
        if not isinstance(self.source, KubernetesPool):  # which asks selected engines itself
            yield engine_words.run(
                self._words,
                lambda: self.router.pool.spec.endpoints,
                self.router.pool.spec.engine.tls,
                self._key,
            )
        if master := self.router.pool.spec.engine.store_master:
            yield store_leader.run(master, self._store_feeds, lambda: self.blocks.segments({}))
        if self.shared:
            yield self.shared.run()
        yield self.shadow.run()
        if self.tokenizer.has_tokens:
            yield token_proofs.run(
                self.proofs, self._ready_engines, self._key, self.router.pool.spec.engine.tls
            )
        yield self._tick()
        yield self._plan_moves()
        yield self._hand_over()

    def _store_feeds(self, master: str) -> Iterator[Coroutine[None, None, None]]:
        yield store_segments.run(master, self.blocks.segments)
        prefixes = store_keys.Prefixes()
        yield store_keys.run(master, self.blocks.listed, self.blocks.knows, self._clock, prefixes)
        yield store_questions.run(
            store_questions.Master(master, prefixes, self._digests),
            lambda: self.state.contexts(self._clock()),
            self.state.index.in_store,
            self.blocks.surveyed,
            self._clock,
        )

    async def _hand_over(self) -> None:
        """Ask the engines whether they hand KV over, send the legs of hand-offs, and have engines sleep and
        wake."""
        connectors = self.state.connectors
        async with engine_calls.session(
            self.router.pool.spec.engine.tls,
            self._key | self._trust,
            limit=0,
            timeout=aiohttp.ClientTimeout(),
        ) as http:
            await asyncio.gather(
                bootstrap_pages.run(self.state.fleet.endpoints, connectors, http),
                handoff_legs.run(self.router.moves.handing_over, self._legs_due, connectors, http),
                self.prefill_legs.run(http),
                self.pull_legs.run(http),
                peer_ports.run(self.state.fleet.endpoints, self.state.host_tiers),
                sleep_calls.run(
                    lambda: self.router.pool.spec.endpoints,
                    lambda: {v.endpoint.address: v for v in self.state.fleet.view(self._clock())},
                    self._plans,
                    http,
                    self._clock,
                ),
            )

    async def _tick(self) -> None:
        """Let time pass while no request comes, and waiting sessions begin."""
        while True:
            await asyncio.sleep(TICK_S)
            self.router.tick()
            self.waiting.begin_sessions()

    async def _plan_moves(self) -> None:
        """Run the migration planner at the interval of the pool document."""
        while True:
            await asyncio.sleep(self.router.pool.spec.routing.migration.interval_seconds)
            self.router.plan_moves(self._plans())

    def _plans(self) -> bool:
        """Return whether it is this gateway of the pool that plans for all."""
        return self.shared is None or self.replicas.plans

    def _told(self) -> Mapping[str, EngineFacts] | None:
        """Return what engines that the operator does not run told; None for the operator's own."""
        runs = isinstance(self.source, KubernetesPool) and self.router.pool.spec.engine.selector is None
        return None if runs else self._words.known

    def _drained(self) -> Mapping[str, str]:
        """Return the draining pods that this gateway no longer uses, with their marks."""
        if not isinstance(self.source, KubernetesPool):
            return {}
        state, now = self.state, self._clock()

        def is_idle(address: str) -> bool:
            return drained.is_idle(
                state.fleet,
                state.sessions,
                address,
                now,
                began_at=self._began_at,
                transfers=self.router.moves.handing_over.transfers,
            )

        return drained.drained(self.source.pods, is_idle)

    def on_pool(self, pool: Pool) -> None:
        """Apply a new pool document. Raise SpecError for a change that a running gateway cannot make."""
        now, new = self.router.pool.spec, pool.spec
        for field, here, there in (
            ("model", now.model, new.model),
            ("engine", _lasting(now.engine), _lasting(new.engine)),
        ):
            if here != there:
                self.outdated.set()
                raise SpecError(f"Cannot change while running: restart the gateway - at `$.spec.{field}`")
        self.router.configure(pool)
        if self.decision_log:
            self.decision_log.configure(pool)
        self.shadow.configure(pool)
        self.state.index.widen(index_blocks(pool))
        self.blocks.widen(2 * index_blocks(pool))
        self.state.sessions.max_sessions = new.routing.session.max_sessions
        self.state.sessions.idle_s = new.routing.session.idle_seconds
        self.tokenizer.timeout_s = TOKENS_SHARE * new.routing.limits.decision_seconds
        self.waiting.limits = new.routing.limits
        self.metrics.describe(version("perilune"), new.routing.policy.name)
        self.events.follow(self.state.fleet.endpoints())

    def on_metrics(self, address: str, metrics: EngineMetrics | None, now: float) -> None:
        """Record the result of a scrape; None when it failed. A restarted engine gets ready with its first
        good scrape, so what its old process cached is forgotten before, and so is what a sleeping engine
        cached."""
        before, at = self.state.fleet.engine_metrics(address), self.state.fleet.metrics_at(address)
        restarted = bool(before and metrics and metrics.restarted_since(before))
        if restarted and self.blocks.emptied_at.get(address, -inf) < at:  # else its events were faster
            log.warning("kv blocks forgotten endpoint=%s cause=restarted, by its metrics", address)
            self.state.parity.forget(address)
            self.proofs.forget(server_of(address))
            self.router.on_applied(self.blocks.reset(address, now))
        if metrics and metrics.asleep and not (before and before.asleep):
            log.warning("kv blocks forgotten endpoint=%s cause=asleep", address)
            self.router.on_applied(self.blocks.reset(address, now))
        self.state.fleet.metrics(address, metrics, now)
        if metrics is None and self.state.fleet.get(address):  # unless it has just left
            self.metrics.scrape_failed(address)

    def _ready_engines(self) -> Iterator[tuple[str, str]]:
        """Return servers and what is at them, of those that are ready and awake."""
        for view in self.state.fleet.view(self._clock()):
            if view.endpoint.ready and not view.asleep:
                yield view.endpoint.server, view.endpoint.instance

    def _shared_stats(self) -> SharedStats | None:
        return self.shared.stats(self._clock()) if self.shared else None

    def _least_busy(self, among: Collection[str] = ()) -> str:
        """Return the ready endpoint with the fewest requests in flight, which the tokenizer asks; one of
        these servers if any are given, and "" when none is ready."""
        ready = [v for v in self.state.fleet.view(self._clock()) if v.endpoint.ready]
        ready = [v for v in ready if not among or v.endpoint.server in among]
        return min(ready, key=lambda v: v.load.in_flight).endpoint.server if ready else ""


def _lasting(engine: Engine) -> Engine:
    """Return what a running gateway cannot change of the engine: all but which pods are selected, where some
    are."""
    if engine.selector is None:
        return engine
    return msgspec.structs.replace(engine, selector=Selector(labels={"any": "pod"}))


def _collector(url: str, pool: Pool, metrics: Metrics) -> Collector:
    """Import opentelemetry, which only a gateway with tracing needs."""
    from perilune_gateway.observe.otlp import Collector

    return Collector(url, f"{pool.metadata.namespace}/{pool.metadata.name}", metrics.count_spans())
