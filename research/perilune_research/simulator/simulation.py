"""One simulation of a workload, a policy, a fleet and faults. Equal arguments give equal results.

One heap holds all events: submissions, looks at the new sessions that wait, the ends of engines' stretches,
news that reaches the gateway late, and the death of an engine. The mode says when a session's next turn is
submitted: when the previous one has ended and its gap has passed (thinktime), at its timestamp (timestamps),
or at the later of both (max).

If a decision names an endpoint to fetch the prefix from (`replicate_from`), the arm says what follows:

- Where engines hand KV over, the endpoint fetches the prefix before it gets the request (see `pulling`).
- Where engines read each other's host memory, and in arm `pull`, a transfer joins the queue of the source's
  NIC. The request waits for a serial transfer; only its first token waits for an overlapped one.

If a decision splits prefill and decode, one endpoint prefills and then sends the KV to the target.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from perilune_api.pool import Role
from perilune_gateway.model import Decision, Refusal
from perilune_gateway.model.handoff import GivenUp, HandoffOutcome
from perilune_gateway.model.handoff import Leg as LegKind
from perilune_gateway.policy import Policy
from perilune_gateway.routing.pull import ANSWER_S
from perilune_gateway.state.session_queue import Refused
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import Hardware
from perilune_lab.simulate.workload import Task, Workload
from perilune_lab.traces.model import Mode
from perilune_research.simulator.beliefs import Beliefs
from perilune_research.simulator.cache import RunCache
from perilune_research.simulator.engine import SimulatedEngine
from perilune_research.simulator.fabric import SimulatedFabric
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.handing_over import SimulatedHandingOver
from perilune_research.simulator.index import RunIndex
from perilune_research.simulator.new_sessions import LOOK_S, SimulatedNewSessions, retry_after_s
from perilune_research.simulator.policies import POLICIES
from perilune_research.simulator.policies.dynamo_disagg import QueuedPrefill
from perilune_research.simulator.pulling import Fetch, SimulatedPulling
from perilune_research.simulator.request import Leg, SimulatedRequest
from perilune_research.simulator.routing import CLAIM_TTL_S, Seen, SimulatedGateway
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.store import SimulatedStore

_QUEUE_SAMPLE_S = 1.0


@dataclass(slots=True, kw_only=True)
class SimulatedOutcome:
    """Result of a simulation: every request with its times, and the statistics of the run."""

    policy: str
    requests: list[SimulatedRequest]
    """Requests in the order of their ends."""
    addresses: list[str]
    """Addresses of the endpoints, in the order of their numbers."""
    moved_bytes: int = 0
    transfer_s: list[float] = field(default_factory=list)
    """Seconds of each KV transfer, including its wait."""
    queue_variance: list[float] = field(default_factory=list)
    """Variance of the queue length over endpoints, sampled evenly in time."""
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two tokens of one request, and the number of such gaps, after the warm-up."""
    seen: Seen = field(default_factory=Seen)
    handoffs: Counter[HandoffOutcome] = field(default_factory=Counter)
    """Number of the planned hand-offs that have ended, by outcome."""
    given_up: Counter[GivenUp] = field(default_factory=Counter)
    """Number of the planned hand-offs that were given up, by cause."""
    preemptions: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0

    @property
    def speed(self) -> float:
        """Simulated seconds per second of CPU time that the simulation took."""
        return self.simulated_s / self.wall_s if self.wall_s else 0.0


def simulate(
    workload: Workload,
    setting: Setting,
    fleet: SimulatedFleet | None = None,
    faults: Faults | None = None,
    seed: int = 0,
    stopwatch: Callable[[], float] = time.process_time,
) -> SimulatedOutcome:
    """Plays the whole workload. `stopwatch` returns seconds, by which the outcome tells the simulator's own
    speed; nothing else depends on it."""
    began = stopwatch()
    simulation = Simulation(
        workload, setting, POLICIES[setting.policy_name], fleet or SimulatedFleet(), faults or Faults(), seed
    )
    outcome = simulation.run()
    outcome.wall_s = stopwatch() - began
    return outcome


class Simulation:
    """The state of one simulation: engines, gateway, fabric and the heap of events."""

    def __init__(
        self,
        workload: Workload,
        setting: Setting,
        policy: Policy,
        fleet: SimulatedFleet,
        faults: Faults,
        seed: int,
    ) -> None:
        if not fleet.host_tokens:
            tokens = setting.deployment.host_tokens(fleet.hardware.engine.kv_bytes_per_token)
            fleet = replace(fleet, host_tokens=tokens)
        self.workload = workload
        self.fleet = fleet
        self.faults = faults
        self.setting = setting
        self.now = 0.0
        self.heap: list[tuple[float, int, int, int, Callable[[], None] | None]] = []
        """Events: (time, tie, engine, version, None) or (time, tie, -1, 0, action)."""
        self.tie = 0
        """Number of the last event; events of equal time happen in this order."""
        self.done: list[SimulatedRequest] = []
        self.open = 0
        """Number of requests that were routed and have not ended."""
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
        self.handing_over = SimulatedHandingOver(self, self.gateway.moves.handoffs)
        self.pulling = SimulatedPulling(self)
        self.new_sessions = SimulatedNewSessions(
            setting.routing.session_admission,
            self.beliefs,
            self.index,
            gateways=setting.gateways,
            tenants=setting.tenants,
        )
        self.submitted = 0
        self.waiting_legs: deque[SimulatedRequest] = deque()
        """The prefill queue: prefill legs that wait for a free prefill endpoint."""
        self.leg_of: dict[SimulatedRequest, SimulatedRequest] = {}
        """Prefill leg → the request whose prompt it prefills."""
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

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Has `action` called at that time, in seconds of the simulation."""
        self.tie += 1
        heapq.heappush(self.heap, (at_s, self.tie, -1, 0, action))

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> SimulatedOutcome:
        """Handle events until none is left."""
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
                    self.at(task.timestamp_s, partial(self._submit, task))
            elif job.tasks:
                first = job.tasks[0]
                self.at(
                    job.start_s if workload.mode is Mode.THINKTIME else first.timestamp_s,
                    partial(self._submit, first),
                )
        if 0 <= self.faults.dead_endpoint < self.fleet.endpoints:
            self.at(self.faults.dead_at_s, partial(self._die, self.engines[self.faults.dead_endpoint]))

        if self.gateway.moves.on:
            self.at(self.gateway.moves.interval_s, self._plan_moves)

    def _plan_moves(self) -> None:
        """Run the migration planner, and again after its interval if other events are pending."""
        moves = self.gateway.moves
        if self.open or moves.planner.offers:
            self.index.catch_up(self.now)
            moves.planner.plan(self.now)
            if moves.ahead:
                self.handing_over.planned()
        if self.heap:
            self.at(self.now + moves.interval_s, self._plan_moves)

    def _outcome(self) -> SimulatedOutcome:
        ends = [s.finished_s for s in self.done if not (s.failed or s.rejected)]
        starts = [s.submitted_s for s in self.done]
        return SimulatedOutcome(
            policy=self.setting.policy,
            requests=self.done,
            addresses=[e.address for e in self.beliefs.endpoints],
            moved_bytes=self.fabric.bytes,
            transfer_s=self.fabric.seconds,
            queue_variance=self.variances,
            gaps=[gap for engine in self.engines for gap in zip(engine.gap_s, engine.gaps, strict=True)],
            seen=self.gateway.seen,
            handoffs=self.handing_over.outcomes,
            given_up=self.handing_over.given_up,
            preemptions=sum(s.preemptions for s in self.done),
            simulated_s=max(ends) - min(starts) if ends else 0.0,
        )

    def _sample(self, now: float) -> None:
        """Sample queue lengths. The loop calls this once per interval in which an event happens."""
        lengths = [engine.running + engine.waiting for engine in self.engines]
        middle = sum(lengths) / len(lengths)
        self.variances.append(sum((n - middle) ** 2 for n in lengths) / len(lengths))
        self.sample_s = now + _QUEUE_SAMPLE_S * max(1, len(lengths) // 8)

    # -- requests ----------------------------------------------------------------------------------

    def _submit(self, what: Task) -> None:
        self._arrive(SimulatedRequest(what, self.next_number(), self.now, self.now))

    def next_number(self) -> int:
        """Return the number of the next request, in the order of submission."""
        self.submitted += 1
        return self.submitted - 1

    def _arrive(self, request: SimulatedRequest) -> None:
        """Receives a request at the gateway, for the first time or after a refusal."""
        idle = not len(self.new_sessions)
        verdict = self.new_sessions.arrive(request, self.now)
        if verdict is None:
            self._route(request, self.now)
        elif isinstance(verdict, Refused):
            self._refused(request, verdict)
        elif idle:
            self.at(self.now + LOOK_S, self._begin_sessions)

    def _begin_sessions(self) -> None:
        """Routes or refuses the first requests of new sessions that have waited long enough, and looks again
        later if others wait."""
        for request, refused in self.new_sessions.due(self.now):
            if refused:
                self._refused(request, refused)
            else:
                self._route(request, self.now)
        if len(self.new_sessions):
            self.at(self.now + LOOK_S, self._begin_sessions)

    def _refused(self, request: SimulatedRequest, refused: Refused) -> None:
        """Lets the client send the request again later, or give up its session."""
        request.refusals += 1
        after_s = retry_after_s(request, refused)
        if after_s is not None:
            self.at(self.now + after_s, partial(self._arrive, request))
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
        if isinstance(decision, QueuedPrefill) or (decision.prefill and decision.prefill != decision.target):
            self._split(request, decision, now)
            return
        if self._fetches(request):
            return
        self._pull(request, decision, request.endpoint, now)
        self.send(request, request.endpoint, now)

    def _fetches(self, request: SimulatedRequest) -> bool:
        """Start to fetch or read KV for a request that was just routed, if its decision says so. Return
        whether the request must wait until its endpoint has fetched it."""
        fetch = self.gateway.fetches.pop(request, None)
        if fetch is None:
            return False
        if self.gateway.reads:
            self._read(request, fetch)
            return False
        self.pulling.begin(request, fetch)
        return True

    def _read(self, request: SimulatedRequest, fetch: Fetch) -> None:
        """Start to read KV from another endpoint's host memory into that of the request's endpoint, from
        where it is loaded to the device. The endpoint computes what the source does not have any more."""
        limits, seen, now = self.gateway.moves.limits, self.gateway.seen, self.now
        move, ticket, target = fetch.move, limits.began(fetch.move, now), self.engines[request.endpoint]
        source = self.beliefs.number[move.source]
        run, depth, giver = request.run, request.prompt_tokens, self.engines[source].host
        held = giver.match(run, depth) if giver else 0
        device = target.cache.match(run, depth)
        there = max(device, target.host.match(run, depth) if target.host else 0)
        if held <= there:
            limits.ended(ticket)
            limits.failed(LegKind.GIVE, move.source, now)
            seen.pulls[HandoffOutcome.FAILED] += 1
            return
        request.loaded_s = self.fleet.hardware.host_s(held - device)
        ends_s = self._transfer(request, source, request.endpoint, held, held - there, now + ANSWER_S)
        self.at(ends_s, partial(self._has_read, target, run, held, ticket))
        limits.worked(move.source, move.target)
        seen.pulls[HandoffOutcome.COPIED] += 1

    def _has_read(self, target: SimulatedEngine, run: int, held: int, ticket: int) -> None:
        self.gateway.moves.limits.ended(ticket)
        if target.host is not None:
            target.host.put(run, held)

    def unreachable(self, e: int) -> None:
        """Lets the gateway learn that a connection to endpoint `e` has failed."""
        self.beliefs.dead(e)
        self.index.forget(e)

    def send(self, request: SimulatedRequest, e: int, now: float) -> None:
        """Send a routed request to engine `e`. If that engine is dead, route the request again."""
        engine = self.engines[e]
        if engine.alive:
            engine.add(request, now)
            return
        self.unreachable(e)
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
        if self.gateway.moves.on:
            self.gateway.moves.over(request)  # it was routed twice
        if request.held_s:
            request.source, request.moved_tokens = -1, 0  # what was fetched is lost
        if not self._fetches(request):
            self.send(request, request.endpoint, now)

    def _pull(self, request: SimulatedRequest, decision: Decision, target: int, now: float) -> None:
        """Start the transfer that the decision asks for in arm `pull`."""
        if not decision.replicate_from or self.gateway.reads:
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
    ) -> float:
        """Start a transfer of `tokens`, after which the target holds the first `reach` tokens of the prompt.
        Return the time at which they are on its device."""
        ends_s = self.fabric.send(source, target, tokens, now) + request.loaded_s
        request.source = source
        request.fetched_tokens = reach
        request.moved_tokens = tokens
        request.transfer_s = ends_s - now
        if self.fleet.overlapped:
            request.transfer_ends_s = ends_s
        else:
            request.ready_s = ends_s
        return ends_s

    def _first_token(self, request: SimulatedRequest, now: float) -> None:
        if isinstance(request, Leg):
            request.prefilled()
            return
        if request in self.leg_of:
            self._prefill_leg_done(request, now)
            return
        if self.faults.event_lag_s:
            self.at(now + self.faults.event_lag_s, partial(self._prefill_known, request))
        else:
            self._prefill_known(request)

    def _prefill_known(self, what: SimulatedRequest) -> None:
        """Lets the gateway learn that a prefill has ended."""
        if self._prefill_over(what) and what.prefill_endpoint == what.endpoint:
            self.beliefs.observe_prefill(what, self.now)
        self._move_over(what, arrived=True)

    def _move_over(self, request: SimulatedRequest, *, arrived: bool) -> None:
        """End the planned move that the request carries out, if any. `arrived`: the target has the KV."""
        if self.gateway.moves.on and (runs := self.gateway.moves.ended(request, self.now, arrived=arrived)):
            self.engines[request.moved_from].cache.release(runs)

    def _prefill_over(self, request: SimulatedRequest) -> bool:
        """Record that the request's prefill is no longer pending. Return False if the gateway knew it."""
        if request.prefill_known:
            return False
        request.prefill_known = True
        self.beliefs.prefill_done(request.prefill_endpoint, request.uncached_tokens, request.predicted_s)
        return True

    def _finished(self, request: SimulatedRequest, now: float) -> None:
        if isinstance(request, Leg):
            request.finished()
            return
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
            if self.gateway.moves.on and request.endpoint >= 0:
                self.gateway.moves.over(request)
        task, workload = request.task, self.workload
        tasks = workload.jobs[task.session].tasks
        if workload.mode is Mode.TIMESTAMPS:
            return
        if task.number + 1 == len(tasks):
            self.beliefs.unbind(self.gateway.sessions[task.session])
            return
        if self.gateway.moves.ahead:
            self.handing_over.turn_ended()
        after = tasks[task.number + 1]
        at_s = now + after.gap_s if workload.mode is Mode.THINKTIME else max(now, after.timestamp_s)
        self.at(at_s, partial(self._submit, after))

    # -- prefill and decode on separate endpoints --------------------------------------------------

    def _split(self, request: SimulatedRequest, decision: Decision, now: float) -> None:
        """Start a prefill leg on a prefill endpoint, or queue it. The request waits until the leg ends."""
        leg = SimulatedRequest(request.task, request.number, now, now)
        leg.output_tokens = 1
        leg.answer_run = leg.run
        self.leg_of[leg] = request
        if isinstance(decision, QueuedPrefill):
            self.waiting_legs.append(leg)
            self.gateway.prefill_queue = len(self.waiting_legs)
            self._feed_prefill(now)
            return
        e = self.beliefs.number[decision.prefill]
        leg.endpoint = e
        self._pull(leg, decision, e, now)
        self.engines[e].add(leg, now)

    def _feed_prefill(self, now: float) -> None:
        """Give the next prefill legs of the queue to free prefill endpoints."""
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
        self.at(whole.ready_s, partial(self._join_decode, whole))
        self.at(now, self._feed)

    def _feed(self) -> None:
        if self.waiting_legs:
            self._feed_prefill(self.now)

    def _join_decode(self, what: SimulatedRequest) -> None:
        self.engines[what.endpoint].add(what, self.now)

    # -- the death of an engine --------------------------------------------------------------------

    def _die(self, what: SimulatedEngine) -> None:
        e, now = what.number, self.now
        lost = what.die()
        self.index.forget(e)
        if lost:
            self.beliefs.dead(e)
        for request in lost:
            if isinstance(request, Leg):
                request.lost()
                continue
            whole = self.leg_of.pop(request, request)
            whole.failed = True
            whole.finished_s = now
            self._prefill_over(whole)
            self._move_over(whole, arrived=False)
            self.beliefs.finish(whole.endpoint, whole.prompt_tokens, 0.0)
            self.open -= 1
            self._ended(whole, now)
