"""One simulation: a workload, a deployment, a policy. Equal arguments give equal results.

    session ─▶ headers, else body ─▶ Router ─▶ engine ─▶ KV events ─▶ EngineBlocks ─▶ PrefixIndex
                                       │
                                       ├─▶ legs of hand-offs, pulls, remote prefills ─▶ engines (`legs`)
                                       └─▶ Queued, refused: the client waits, or comes again

The gateway's clock is the loop's. What it does by itself, it does at the same intervals as live: it reads the
engines' metrics, lets time pass, plans moves. A turn comes as a client sends it: the session's name is in a
header, so that the body is read only where the gateway needs it, and a tenant of the trace is the credential.

The mode says when a session's next turn is submitted: when the previous one has ended and its gap has passed
(thinktime), at its timestamp (timestamps), or at the later of both (max). A client sends what was refused
with 429 or 503 again after `Retry-After`, for as many times as `clients.py` says. Then it gives up the
session. One whose patience ends before the first token (`clients.py`) closes its request, wherever that is,
and goes on in the same way; the tries of both kinds are counted together.

Costs about a millisecond of CPU for each turn, most of it in the gateway's own code and the engines' caches.
Not modelled: Envoy, the network between client and engine, tokenization in the gateway.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from random import Random

from perilune_api import names
from perilune_api.pool import Routing
from perilune_gateway.model import (
    NeedBody,
    Refusal,
    RefuseReason,
    RequestHead,
    Routed,
    Tokens,
    TokenSource,
)
from perilune_gateway.model.kv_events import Event
from perilune_gateway.request.parsed import ParsedRequest, TokenPrompt
from perilune_gateway.request.paths import Api
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.routing.router import Encode
from perilune_lab.engine.kv_cache import KvCache
from perilune_lab.engine.scheduler import Limits, Scheduler
from perilune_lab.simulate.deployment import MODEL, Deployment
from perilune_lab.simulate.drains import Drains
from perilune_lab.simulate.engine import SimulatedEngine
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.gateway import SimulatedGateway
from perilune_lab.simulate.loop import BEGIN_S, Loop
from perilune_lab.simulate.outcome import PlayedRequest, SimulatedOutcome
from perilune_lab.simulate.sent import PrefilledElsewhere, Pulled, Sent
from perilune_lab.simulate.texts import NamedByGateway, Texts
from perilune_lab.simulate.transfers import Fabric, SharedStore, SimulatedConnector
from perilune_lab.simulate.workload import Task, Workload
from perilune_lab.traces.model import Mode

SCRAPE_S = 1.0
"""Seconds between two readings of an engine's metrics."""
TICK_S = 0.1
LOOK_S = 0.25
"""Seconds between two looks at the new sessions that wait."""
STORE_ASKED_S = 15.0
"""Seconds within which a gateway hears what the store has evicted. A live one asks the store's master for the
contexts of all sessions between two turns (`feeds/store_questions.py`): some 12 s for a thousand of them, and
5 s later again."""
SAMPLE_S = 1.0
RETRY_S = 0.5
"""Seconds until a client sends a request again, at least."""
BYTES_PER_TOKEN = 4.0
_AGAIN = {
    RefuseReason.NO_ENDPOINT,
    RefuseReason.STARTING,
    RefuseReason.OVERLOADED,
    RefuseReason.NO_ROOM,
}
_REQUEST = ParsedRequest(api=Api.CHAT, model=MODEL, prompt=TokenPrompt(()), stream=True)


def simulate(
    workload: Workload,
    deployment: Deployment,
    policy: str,
    routing: Routing = Routing(),  # noqa: B008
    faults: Faults = Faults(),  # noqa: B008
    seed: int = 0,
    stopwatch: Callable[[], float] = time.process_time,
) -> SimulatedOutcome:
    """Play the whole workload. `stopwatch` gives the CPU seconds that the outcome tells; nothing else depends
    on it."""
    began = stopwatch()
    with _seldom_collected():
        outcome = Simulation(workload, deployment, policy, routing, faults, seed).run()
    outcome.cpu_s = stopwatch() - began
    return outcome


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Let Python look for garbage less often, which is a tenth of the time: little of it is in cycles, and
    what a simulation keeps is the more the longer it runs."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Simulation:
    """The parts of one simulation."""

    def __init__(
        self,
        workload: Workload,
        deployment: Deployment,
        policy: str,
        routing: Routing,
        faults: Faults,
        seed: int,
    ) -> None:
        self.workload = workload
        self.deployment = deployment
        self.faults = faults
        self.loop = Loop()
        self.outcome = SimulatedOutcome(
            policy=policy, deployment=deployment.name, addresses=deployment.addresses
        )
        rng = Random(seed)
        self.texts = Texts(workload.runs, deployment.block_tokens)
        dice = Random(rng.getrandbits(64))
        self.fabric = Fabric(self.loop, deployment.hardware, faults, dice, overlap=deployment.overlap)
        self.store = SharedStore(deployment.store_blocks) if deployment.stores else None
        self.engines = self._engines(Random(f"{seed} speeds and noise"), routing)
        self.pool = deployment.pool(policy, routing, faults)
        shares = deployment.gateways > 1
        self.gateways = [
            SimulatedGateway(
                number, self.pool, self.engines, self.loop, Random(rng.getrandbits(64)), shares=shares
            )
            for number in range(deployment.gateways)
        ]
        self._bytes = [self._bytes_per_token(rng) for _ in workload.jobs]
        """By session."""
        self._left = sum(bool(job.tasks) for job in workload.jobs)
        """Number of sessions, or in open loop of turns, that have not ended."""
        self._submitted = 0
        self._leaving: dict[PlayedRequest, Callable[[], None]] = {}
        """Turn that waits or was sent → what its client's leaving does."""
        self._queued: dict[tuple[SimulatedGateway, int], tuple[PlayedRequest, Queued]] = {}
        self._proxy = Random(rng.getrandbits(64))
        """Chooses the gateway of a request."""

    def _engines(self, uneven: Random, routing: Routing) -> dict[str, SimulatedEngine]:
        d, faults, engines = self.deployment, self.faults, {}
        blocks = d.hardware.kv_pool_tokens // d.block_tokens
        limits = Limits(
            max_sequences=d.hardware.max_sequences,
            tokens_per_step=d.hardware.engine.tokens_per_step,
            tokens_per_prompt=d.hardware.tokens_per_prompt or sys.maxsize,
            by_priority=routing.engine_priority.used,
            stretches=True,
            stores_answers=d.stores_answers,
        )
        noise = partial(uneven.lognormvariate, -(faults.step_noise**2) / 2, faults.step_noise)
        for number, address in enumerate(d.addresses):
            engine = SimulatedEngine(number, address, self.loop, self._announced)
            model = d.hardware.engine
            if faults.speed_spread > 1.0:
                model = model.scaled(faults.speed_spread ** uneven.uniform(-1.0, 1.0))
            engine.scheduler = Scheduler(
                KvCache(NamedByGateway(d.block_tokens), blocks + 1),  # one is vLLM's null block
                model,
                limits,
                self.store,
                SimulatedConnector(engine, self.fabric) if d.hands_over else None,
                noise if faults.step_noise else None,
            )
            engine.measured_from_s = BEGIN_S + self.workload.warmup_s
            engines[address] = engine
        return engines

    def _bytes_per_token(self, rng: Random) -> float:
        """Return the bytes of a session's bodies for each token, of which the gateway knows the mean."""
        error = self.faults.token_error
        return BYTES_PER_TOKEN * (1 + rng.uniform(-error, error)) if error else BYTES_PER_TOKEN

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> SimulatedOutcome:
        """Play everything."""
        loop, workload, faults = self.loop, self.workload, self.faults
        if workload.mode is Mode.TIMESTAMPS:
            self._left = workload.requests
        for job in workload.jobs:
            if not job.tasks:
                continue
            if workload.mode is Mode.TIMESTAMPS:
                for task in job.tasks:
                    loop.at(BEGIN_S + task.timestamp_s, partial(self._submit, task))
            else:
                first = job.tasks[0]
                at_s = job.start_s if workload.mode is Mode.THINKTIME else first.timestamp_s
                loop.at(BEGIN_S + at_s, partial(self._submit, first))
        if 0 <= faults.dead_endpoint < len(self.engines):
            victim = self.engines[self.deployment.addresses[faults.dead_endpoint]]
            loop.at(BEGIN_S + faults.dead_at_s, victim.die)
        Drains(loop, self.pool, self.gateways, self.engines).plan(faults)
        loop.every(SAMPLE_S, self._sample)
        if self.store is not None:
            loop.every(STORE_ASKED_S, partial(self._ask_store, self.store))
        for gateway in self.gateways:
            self._run(gateway)
        loop.run(lambda: not self._left)
        return self._told()

    def _run(self, gateway: SimulatedGateway) -> None:
        """Let a gateway do what it does by itself."""
        loop, routing = self.loop, self.pool.spec.routing
        gateway.scrape()
        loop.every(SCRAPE_S, gateway.scrape)
        loop.every(TICK_S, gateway.router.tick)
        loop.every(routing.migration.interval_seconds, gateway.plan_moves)
        if routing.session_admission.enabled:
            loop.every(LOOK_S, partial(self._begin_sessions, gateway))
        if others := [other for other in self.gateways if other is not gateway]:
            gateway.share(others)

    def _told(self) -> SimulatedOutcome:
        told, done = self.outcome, self.outcome.requests
        ends = [r.finished_s for r in done if r.succeeded]
        told.moved_bytes, told.transfer_s = self.fabric.bytes, self.fabric.seconds
        told.gaps = [gap for e in self.engines.values() for gap in zip(e.gap_s, e.gaps, strict=True)]
        for gateway in self.gateways:
            told.handed_over += gateway.handed_over
            for state in gateway.router.policies.states():
                told.policy_faults[f"{state.last or state.off} ({state.in_place} decided)"] += sum(
                    state.faults.values()
                )
        told.preemptions = sum(r.preemptions for r in done)
        told.simulated_s = max(ends) - min(r.submitted_s for r in done) if ends else 0.0
        return told

    def _ask_store(self, store: SharedStore) -> None:
        """Let the gateways know what the store has evicted."""
        lost = store.lost()
        for gateway in self.gateways:
            gateway.lost(lost)

    def _sample(self) -> None:
        lengths = [engine.load for engine in self.engines.values()]
        if any(lengths):
            middle = sum(lengths) / len(lengths)
            variance = sum((n - middle) ** 2 for n in lengths) / len(lengths)
            self.outcome.queue_variance.append(variance)

    def _announced(self, address: str, events: Sequence[Event]) -> None:
        if self.faults.event_lag_s:
            self.loop.at(self.loop.now + self.faults.event_lag_s, partial(self._heard, address, events))
        else:
            self._heard(address, events)

    def _heard(self, address: str, events: Sequence[Event]) -> None:
        for gateway in self.gateways:
            gateway.heard(address, events)

    # -- a turn ------------------------------------------------------------------------------------

    def _submit(self, task: Task) -> None:
        turn = PlayedRequest(task, self._submitted, self.loop.now)
        self._submitted += 1
        self._arrive(turn)

    def _arrive(self, turn: PlayedRequest) -> None:
        """Let the gateway decide a turn, by its headers or by its body."""
        clients = self.workload.clients
        if clients.patience_s < inf:
            self.loop.at(self.loop.now + clients.patience_s, partial(self._lose_patience, turn, turn.tries))
        gateway = self._proxy.choice(self.gateways)
        router, head = gateway.router, self._head(turn.task)
        verdict: Routed | Refusal | NeedBody | Queued = router.on_headers(head)
        if isinstance(verdict, NeedBody):
            self.outcome.read += 1
            ids = self.texts.prompt(turn.task)
            tokens = Tokens(count=len(ids), source=TokenSource.LOCAL, ids=ids)
            verdict = router.on_tokens(Encode(head, _REQUEST, self._body_bytes(turn.task)), tokens)
        self._follow(turn, gateway, verdict)

    def _body_bytes(self, task: Task) -> int:
        return int(task.prompt_tokens * self._bytes[task.session])

    def _head(self, task: Task) -> RequestHead:
        """Return a turn's method, path and headers."""
        job, within_s = self.workload.jobs[task.session], self.workload.clients.begin_within_s
        headers = {"x-session-id": job.name, "content-length": str(self._body_bytes(task))}
        if job.tenant:
            headers["authorization"] = f"Bearer {job.tenant}"
        if within_s and not task.number:
            headers[names.SLO_TTFT_HEADER] = f"{1e3 * within_s:g}"
        return RequestHead(method="POST", path="/v1/chat/completions", headers=headers)

    def _follow(
        self, turn: PlayedRequest, gateway: SimulatedGateway, verdict: Routed | Refusal | NeedBody | Queued
    ) -> None:
        match verdict:
            case Routed():
                self._routed(turn, gateway, verdict)
            case Refusal():
                self._refused(turn, verdict)
            case Queued():
                self._queued[gateway, verdict.ticket] = turn, verdict
                self._leaving[turn] = partial(self._leave_line, gateway, verdict)
            case NeedBody():
                raise AssertionError("the gateway asked for a body that it has")

    def _begin_sessions(self, gateway: SimulatedGateway) -> None:
        for ticket, refusal in gateway.router.due():
            turn, queued = self._queued.pop((gateway, ticket))
            self._follow(turn, gateway, gateway.router.on_begun(queued, refusal))

    def _leave_line(self, gateway: SimulatedGateway, queued: Queued) -> None:
        del self._queued[gateway, queued.ticket]
        gateway.router.left(queued)

    def _refused(self, turn: PlayedRequest, refusal: Refusal) -> None:
        """Let the client send the request again, or give up."""
        self._leaving.pop(turn, None)
        turn.refusals += 1
        if refusal.reason in _AGAIN and turn.tries <= self.workload.clients.retries:
            self._come_again(turn, refusal.retry_after_s)
            return
        turn.rejected = True
        self.ended(turn)

    def _lose_patience(self, turn: PlayedRequest, tries: int) -> None:
        """Let the client close its request, if this try of it has no token yet, and send it again or give
        up."""
        if turn.tries != tries or turn.first_token_s < inf or turn not in self._leaving:
            return
        self._leaving.pop(turn)()
        turn.abandoned += 1
        if turn.tries <= self.workload.clients.retries:
            self._come_again(turn)
            return
        turn.gave_up = True
        self.ended(turn)

    def _come_again(self, turn: PlayedRequest, after_s: float = 0.0) -> None:
        self.loop.at(self.loop.now + max(RETRY_S, after_s), partial(self._arrive, turn))

    def _routed(self, turn: PlayedRequest, gateway: SimulatedGateway, routed: Routed) -> None:
        """Send a turn to its endpoint, once that has what it fetches."""
        decided = gateway.decided
        assert decided, "a routed request was decided"
        turn.reason, turn.leg_cached_tokens = decided.decision.reason, -1
        host = decided.view.session.host if decided.view.session else ""
        most = self.pool.spec.routing.policy.ear.hot_pending_tokens
        turn.hot = any(c.load.pending_prefill_tokens > most for c in decided.candidates if c.address == host)
        sent = Sent(self, gateway, turn, routed)
        self._leaving[turn] = sent.leave
        if routed.pull:
            Pulled(sent, routed.pull).begin()
        elif routed.remote:
            PrefilledElsewhere(sent, routed.remote).begin()
        else:
            sent.send()

    def ended(self, turn: PlayedRequest) -> None:
        """Let the session's next turn come."""
        now, task, mode = self.loop.now, turn.task, self.workload.mode
        turn.finished_s = now
        self._leaving.pop(turn, None)
        self.outcome.requests.append(turn)
        tasks = self.workload.jobs[task.session].tasks
        if mode is Mode.TIMESTAMPS or task.number + 1 == len(tasks) or turn.is_last:
            self._left -= 1
            return
        after = tasks[task.number + 1]
        at_s = now + after.gap_s if mode is Mode.THINKTIME else BEGIN_S + after.timestamp_s
        self.loop.at(at_s, partial(self._submit, after))
