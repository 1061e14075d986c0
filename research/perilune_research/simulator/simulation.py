"""One simulation: a workload, a policy, a fleet, faults. Deterministic: equal arguments give equal results.

Events in one heap: submissions, looks at the new sessions that wait, engines' stretches, late news for the
gateway, a death. A session's next turn
is submitted at finish + gap (thinktime), at its timestamp, or at the later of both (max). A decision that
pulls the prefix from elsewhere (`replicate_from`) starts a transfer in the source NIC's queue: serial: the
request waits for it; overlapped: its first token does. A decision that splits prefill and decode runs the
prefill where it says, then sends the KV to the target.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from perilune_api.pool import Role
from perilune_gateway.model import Decision, Refusal
from perilune_gateway.policy import Policy
from perilune_gateway.state.session_queue import Refused
from perilune_lab.traces.model import Mode
from perilune_research.simulator.beliefs import Beliefs
from perilune_research.simulator.cache import RunCache
from perilune_research.simulator.engine import SimulatedEngine
from perilune_research.simulator.fabric import SimulatedFabric
from perilune_research.simulator.faults import Faults
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.h20 import Hardware
from perilune_research.simulator.index import RunIndex
from perilune_research.simulator.new_sessions import LOOK_S, SimulatedNewSessions, retry_after_s
from perilune_research.simulator.policies import POLICIES
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.routing import CLAIM_TTL_S, Seen, SimulatedGateway
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.store import SimulatedStore
from perilune_research.simulator.workload import Task, Workload

_QUEUE_SAMPLE_S = 1.0


@dataclass(slots=True)
class SimulatedOutcome:
    """Result of a simulation: every request with its times, and the samples taken meanwhile."""

    policy: str
    requests: list[SimulatedRequest]
    """Requests in the order of their ends."""
    addresses: list[str]
    moved_bytes: int = 0
    transfer_s: list[float] = field(default_factory=list)
    queue_variance: list[float] = field(default_factory=list)
    """Variance of the queue length over endpoints, sampled evenly in time."""
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two tokens of one request, and the number of such gaps, after the warm-up."""
    seen: Seen = field(default_factory=Seen)
    preemptions: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0

    @property
    def speed(self) -> float:
        """Simulated seconds per wall second, of the simulation alone."""
        return self.simulated_s / self.wall_s if self.wall_s else 0.0


def simulate(
    workload: Workload,
    setting: Setting,
    fleet: SimulatedFleet | None = None,
    faults: Faults | None = None,
    seed: int = 0,
    stopwatch: Callable[[], float] = time.process_time,
) -> SimulatedOutcome:
    """Plays the whole workload. `stopwatch` measures the simulator's own speed; nothing else depends on
    it."""
    began = stopwatch()
    simulation = Simulation(
        workload, setting, POLICIES[setting.policy_name], fleet or SimulatedFleet(), faults or Faults(), seed
    )
    outcome = simulation.run()
    outcome.wall_s = stopwatch() - began
    return outcome


class Simulation:
    def __init__(
        self,
        workload: Workload,
        setting: Setting,
        policy: Policy,
        fleet: SimulatedFleet,
        faults: Faults,
        seed: int,
    ) -> None:
        self.workload = workload
        self.fleet = fleet
        self.faults = faults
        self.setting = setting
        self.now = 0.0
        self.heap: list[tuple[float, int, int, int, Callable[[], None] | None]] = []
        """(time, tie, engine, version, None) or (time, tie, -1, 0, action)"""
        self.tie = 0
        self.done: list[SimulatedRequest] = []
        self.open = 0
        h = fleet.hardware
        rng = Random(seed)
        self.store = SimulatedStore(workload.runs, fleet.store_tokens) if fleet.store else None
        self.index = RunIndex(workload.runs, CLAIM_TTL_S, faults.event_lag_s)
        self.fabric = SimulatedFabric(h, faults, Random(rng.getrandbits(64)))
        uneven = Random(f"{seed} speeds and noise")
        self.engines = [self._engine(e, h, uneven) for e in range(fleet.endpoints)]
        split = fleet.prefill_endpoints
        roles = [Role.BOTH if not split else Role.PREFILL if e < split else Role.DECODE for e in self._all()]
        self.beliefs = Beliefs(self.engines, h, faults, self.fabric, roles)
        self.gateway = SimulatedGateway(
            setting,
            policy,
            self.beliefs,
            self.index,
            faults,
            [job.name for job in workload.jobs],
            Random(rng.getrandbits(64)),
            block_tokens=h.block_tokens,
            store=self.store,
        )
        self.new_sessions = SimulatedNewSessions(setting.routing.session_admission, self.beliefs, self.index)
        self.submitted = 0
        self.waiting_legs: deque[SimulatedRequest] = deque()
        """The prefill queue: prefills for which no endpoint was chosen."""
        self.leg_of: dict[SimulatedRequest, SimulatedRequest] = {}
        """Maps a prefill leg to its request."""
        self.variances: list[float] = []
        self.sample_s = 0.0

    def _all(self) -> range:
        return range(self.fleet.endpoints)

    def _engine(self, e: int, hardware: Hardware, uneven: Random) -> SimulatedEngine:
        faults = self.faults
        if faults.speed_spread > 1.0:
            factor = faults.speed_spread ** uneven.uniform(-1.0, 1.0)
            hardware = replace(hardware, engine=hardware.engine.scaled(factor))
        noise = partial(uneven.lognormvariate, -(faults.step_noise**2) / 2, faults.step_noise)

        def schedule(at_s: float, version: int) -> None:
            self.tie += 1
            heapq.heappush(self.heap, (at_s, self.tie, e, version, None))

        def changed(run: int, depth: int) -> None:
            self.index.changed(e, run, depth, self.now)

        return SimulatedEngine(
            e,
            hardware,
            RunCache(self.workload.runs, hardware.kv_pool_tokens, changed),
            schedule=schedule,
            on_first_token=self._first_token,
            on_finish=self._finished,
            store=self.store,
            host=SimulatedStore(self.workload.runs, self.fleet.host_tokens)
            if self.fleet.host_tokens
            else None,
            measured_from_s=self.workload.warmup_s,
            noise=noise if faults.step_noise else None,
        )

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self.tie += 1
        heapq.heappush(self.heap, (at_s, self.tie, -1, 0, action))

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> SimulatedOutcome:
        self._begin()
        heap, engines, pop = self.heap, self.engines, heapq.heappop
        while heap:
            at_s, _, e, version, action = pop(heap)
            if at_s >= self.sample_s and self.open:
                self._sample(at_s)
            self.now = at_s
            if e >= 0:
                engines[e].event(at_s, version)
            elif action is not None:
                action()
        return self._outcome()

    def _begin(self) -> None:
        workload = self.workload
        for job in workload.jobs:
            if workload.mode is Mode.TIMESTAMPS:
                for task in job.tasks:
                    self._at(task.timestamp_s, partial(self._submit, task))
            elif job.tasks:
                first = job.tasks[0]
                self._at(
                    job.start_s if workload.mode is Mode.THINKTIME else first.timestamp_s,
                    partial(self._submit, first),
                )
        if 0 <= self.faults.dead_endpoint < self.fleet.endpoints:
            self._at(self.faults.dead_at_s, partial(self._die, self.engines[self.faults.dead_endpoint]))

        if self.gateway.moves.on:
            self._at(self.gateway.moves.interval_s, self._plan_moves)

    def _plan_moves(self) -> None:
        """Runs the migration planner at its interval, as long as other events are pending."""
        moves = self.gateway.moves
        if self.open or moves.planner.offers:
            self.index.catch_up(self.now)
            moves.planner.plan(self.now)
        if self.heap:
            self._at(self.now + moves.interval_s, self._plan_moves)

    def _outcome(self) -> SimulatedOutcome:
        ends = [s.finished_s for s in self.done if not (s.failed or s.rejected)]
        starts = [s.submitted_s for s in self.done]
        return SimulatedOutcome(
            self.setting.policy,
            self.done,
            [e.address for e in self.beliefs.endpoints],
            self.fabric.bytes,
            self.fabric.seconds,
            self.variances,
            [gap for engine in self.engines for gap in zip(engine.gap_s, engine.gaps, strict=True)],
            self.gateway.seen,
            sum(s.preemptions for s in self.done),
            max(ends) - min(starts) if ends else 0.0,
        )

    def _sample(self, now: float) -> None:
        """Samples queue lengths, once per sampling interval in which something happened."""
        lengths = [engine.running + engine.waiting for engine in self.engines]
        middle = sum(lengths) / len(lengths)
        self.variances.append(sum((n - middle) ** 2 for n in lengths) / len(lengths))
        self.sample_s = now + _QUEUE_SAMPLE_S * max(1, len(lengths) // 8)

    # -- requests ----------------------------------------------------------------------------------

    def _submit(self, what: Task) -> None:
        request = SimulatedRequest(what, self.submitted, self.now, self.now)
        self.submitted += 1
        self._arrive(request)

    def _arrive(self, request: SimulatedRequest) -> None:
        """The request comes to the gateway, for the first time or again."""
        idle = not len(self.new_sessions)
        verdict = self.new_sessions.arrive(request, self.now)
        if verdict is None:
            self._route(request, self.now)
        elif isinstance(verdict, Refused):
            self._refused(request, verdict)
        elif idle:
            self._at(self.now + LOOK_S, self._begin_sessions)

    def _begin_sessions(self) -> None:
        """Routes or refuses the first requests of sessions for which it is time; again while some wait."""
        for request, refused in self.new_sessions.due(self.now):
            if refused:
                self._refused(request, refused)
            else:
                self._route(request, self.now)
        if len(self.new_sessions):
            self._at(self.now + LOOK_S, self._begin_sessions)

    def _refused(self, request: SimulatedRequest, refused: Refused) -> None:
        """The client comes back later, or gives up its session."""
        request.refusals += 1
        after_s = retry_after_s(request, refused)
        if after_s is not None:
            self._at(self.now + after_s, partial(self._arrive, request))
            return
        request.rejected = True
        request.finished_s = self.now
        self.done.append(request)

    def _route(self, request: SimulatedRequest, now: float) -> None:
        decision = self.gateway.route(request, now)
        if isinstance(decision, Refusal):
            request.rejected = True
            request.finished_s = now
            self._ended(request, now)
            return
        self.open += 1
        self.new_sessions.turn_began(request)
        if decision.prefill_queued or (decision.prefill and decision.prefill != decision.target):
            self._split(request, decision, now)
            return
        self._pull(request, decision, request.endpoint, now)
        self._send(request, request.endpoint, now)

    def _send(self, request: SimulatedRequest, e: int, now: float) -> None:
        engine = self.engines[e]
        if engine.alive:
            engine.add(request, now)
            return
        self.beliefs.dead(e)
        self.index.forget(e)
        self.beliefs.prefill_done(request.prefill_endpoint, request.uncached_tokens, request.predicted_s)
        self.beliefs.finish(e, request.prompt_tokens, 0.0)
        self._move_over(request, arrived=False)
        self.open -= 1
        decision = self.gateway.route(request, now)  # the proxy tries another endpoint
        if isinstance(decision, Refusal):
            request.failed = True
            request.finished_s = now
            self._ended(request, now)
            return
        self.open += 1
        self._send(request, request.endpoint, now)

    def _pull(self, request: SimulatedRequest, decision: Decision, target: int, now: float) -> None:
        """Starts the transfer that the decision asks for."""
        if not decision.replicate_from:
            return
        source = self.beliefs.number[decision.replicate_from]
        held = self.engines[source].cache.match(request.run, request.prompt_tokens)
        there = self.engines[target].cache.match(request.run, request.prompt_tokens)
        for tier in (self.store, self.engines[target].host):
            if tier is not None:
                there = max(there, tier.match(request.run, request.prompt_tokens))
        if held <= there or not self.engines[source].alive:
            return
        self._transfer(request, source, target, held, held - there, now)

    def _transfer(
        self, request: SimulatedRequest, source: int, target: int, reach: int, tokens: int, now: float
    ) -> None:
        ends_s = self.fabric.send(source, target, tokens, now)
        request.source = source
        request.fetched_tokens = reach
        request.moved_tokens = tokens
        request.transfer_s = ends_s - now
        if self.fleet.overlapped:
            request.transfer_ends_s = ends_s
        else:
            request.ready_s = ends_s

    def _first_token(self, request: SimulatedRequest, now: float) -> None:
        if request in self.leg_of:
            self._prefill_leg_done(request, now)
            return
        if self.faults.event_lag_s:
            self._at(now + self.faults.event_lag_s, partial(self._prefill_known, request))
        else:
            self._prefill_known(request)

    def _prefill_known(self, what: SimulatedRequest) -> None:
        """The gateway learns that a prefill has ended."""
        if self._prefill_over(what) and what.prefill_endpoint == what.endpoint:
            self.beliefs.observe_prefill(what, self.now)
        self._move_over(what, arrived=True)

    def _move_over(self, request: SimulatedRequest, *, arrived: bool) -> None:
        """Ends the planned move that the request carries out: the target has the KV, or never will."""
        if self.gateway.moves.on and (runs := self.gateway.moves.ended(request, self.now, arrived=arrived)):
            self.engines[request.moved_from].cache.release(runs)

    def _prefill_over(self, request: SimulatedRequest) -> bool:
        """Records that the request's prefill is no longer pending; returns False if that was known."""
        if request.prefill_known:
            return False
        request.prefill_known = True
        self.beliefs.prefill_done(request.prefill_endpoint, request.uncached_tokens, request.predicted_s)
        return True

    def _finished(self, request: SimulatedRequest, now: float) -> None:
        if request in self.leg_of:
            del self.leg_of[request]
            return
        self._prefill_known(request)
        self.open -= 1
        self.beliefs.finish(request.endpoint, request.prompt_tokens, now - request.first_token_s)
        self._ended(request, now)

    def _ended(self, request: SimulatedRequest, now: float) -> None:
        self.done.append(request)
        if not request.rejected:
            self.new_sessions.turn_ended(request, now)
        task, workload = request.task, self.workload
        tasks = workload.jobs[task.session].tasks
        if workload.mode is Mode.TIMESTAMPS:
            return
        if task.number + 1 == len(tasks):
            self.beliefs.unbind(self.gateway.sessions[task.session])
            return
        after = tasks[task.number + 1]
        at_s = now + after.gap_s if workload.mode is Mode.THINKTIME else max(now, after.timestamp_s)
        self._at(at_s, partial(self._submit, after))

    # -- prefill and decode apart ------------------------------------------------------------------

    def _split(self, request: SimulatedRequest, decision: Decision, now: float) -> None:
        """Starts a separate prefill leg, for which the request itself waits."""
        leg = SimulatedRequest(request.task, request.number, now, now)
        leg.output_tokens = 1
        leg.answer_run = leg.run
        self.leg_of[leg] = request
        if decision.prefill_queued:
            self.waiting_legs.append(leg)
            self.gateway.prefill_queue = len(self.waiting_legs)
            self._feed_prefill(now)
            return
        e = self.beliefs.number[decision.prefill]
        leg.endpoint = e
        self._pull(leg, decision, e, now)
        self.engines[e].add(leg, now)

    def _feed_prefill(self, now: float) -> None:
        """Gives the next prefills of the queue to free prefill endpoints."""
        free = [
            e
            for e in range(self.fleet.prefill_endpoints)
            if self.engines[e].alive and not (self.engines[e].running or self.engines[e].waiting)
        ]
        for e in free:
            if not self.waiting_legs:
                break
            leg = self.waiting_legs.popleft()
            leg.endpoint = e
            self.engines[e].add(leg, now)
        self.gateway.prefill_queue = len(self.waiting_legs)

    def _prefill_leg_done(self, leg: SimulatedRequest, now: float) -> None:
        whole = self.leg_of[leg]
        self._prefill_over(whole)
        whole.leg_cached_tokens = leg.cached_tokens
        there = self.engines[whole.endpoint].cache.match(whole.run, whole.prompt_tokens)
        self._transfer(
            whole, leg.endpoint, whole.endpoint, whole.prompt_tokens, whole.prompt_tokens - there, now
        )
        whole.transfer_ends_s = 0.0  # there is nothing to overlap it with
        whole.ready_s = now + whole.transfer_s
        self._at(whole.ready_s, partial(self._join_decode, whole))
        self._at(now, self._feed)

    def _feed(self) -> None:
        if self.waiting_legs:
            self._feed_prefill(self.now)

    def _join_decode(self, what: SimulatedRequest) -> None:
        self.engines[what.endpoint].add(what, self.now)

    # -- a death -----------------------------------------------------------------------------------

    def _die(self, what: SimulatedEngine) -> None:
        e, now = what.number, self.now
        lost = what.die()
        self.index.forget(e)
        if lost:
            self.beliefs.dead(e)
        for request in lost:
            whole = self.leg_of.pop(request, request)
            whole.failed = True
            whole.finished_s = now
            self._prefill_over(whole)
            self._move_over(whole, arrived=False)
            self.beliefs.finish(whole.endpoint, whole.prompt_tokens, 0.0)
            self.open -= 1
            self._ended(whole, now)
