"""KV that goes with requests in a simulation: what is fetched, what it costs, and the limits of a gateway."""

from collections.abc import Callable
from functools import partial

import pytest
from handing_rig import PAGES, Handing, text
from msgspec import structs
from router_rig import A, B, C, completion
from routing_objects import head

from perilune_api.pool import Pool, Pull, Routing
from perilune_gateway.model import Candidate, Decision, Move, MoveReason, Reason, RequestView, Unpulled
from perilune_gateway.model.handoff import GivenUp, HandoffOutcome, Leg
from perilune_gateway.policy.cost import host_of
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.workload import Task, Workload, prepare
from perilune_lab.traces.model import Segment, Session, Style, Trace, Turn
from perilune_research.simulator import request as requests
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.setting import PLANNER, Setting
from perilune_research.simulator.simulation import POLICIES, Simulation

HELD, PROMPT = 6_400, 6_500


def elsewhere(request: RequestView, candidates, params, rng) -> Decision:
    """Decide that a new session goes to the first endpoint, and a known one never to its host."""
    host = host_of(request, candidates)
    return Decision(next(c for c in candidates if c is not host).address, Reason.ROUND_ROBIN)


def second(request: RequestView, candidates: list[Candidate], params, rng) -> Decision:
    return Decision(candidates[1].address, Reason.ROUND_ROBIN)


def session(name: str, start_s: float, prompt: int, answers: tuple[int, ...], gap_s: float = 1.0) -> Session:
    turns: list[Turn] = []
    said: tuple[Segment, ...] = (Segment(f"task of {name}", prompt),)
    for n, tokens in enumerate(answers):
        turns.append(
            Turn(session=name, number=n, prompt=said, output_tokens=tokens, gap_s=gap_s, timestamp_s=start_s)
        )
        said = (*said, turns[-1].answer, Segment(f"tool {n} of {name}", 500))
    return Session(name, start_s, tuple(turns))


def simulated(
    *sessions: Session,
    arm: Deployment = Deployment.HANDOFF,
    rules: Pull = Pull(),  # noqa: B008
    endpoints: int = 2,
    policy: Callable[..., Decision] = elsewhere,
    host_tokens: int = 0,
) -> Simulation:
    workload = prepare(Trace("t", Style.TEXT, sessions), H20.engine)
    setting = Setting(policy="round_robin", routing=Routing(pull=rules), deployment=arm)
    fleet = SimulatedFleet(endpoints=endpoints, host_tokens=host_tokens)
    return Simulation(workload, setting, policy, fleet, Faults(), 1)


def turn_of(run: Simulation, name: str, number: int) -> SimulatedRequest:
    names = [job.name for job in run.workload.jobs]
    return next(r for r in run.done if (names[r.task.session], r.task.number) == (name, number))


def assert_nothing_is_left(run: Simulation) -> None:
    b, n = run.beliefs, run.fleet.endpoints
    assert (b.in_flight, b.pending_tokens, b.context_tokens) == ([0] * n, [0] * n, [0] * n)
    assert run.gateway.moves.planner.stats(run.now).in_flight == {}


class Unseen(requests.Leg):
    """A request that the gateway knows nothing of."""

    def prefilled(self) -> None: ...
    def finished(self) -> None: ...
    def lost(self) -> None: ...


# -- what is fetched ---------------------------------------------------------------------------------------


def busy_giver(arm: Deployment) -> Simulation:
    """Return a simulation in which the first endpoint holds the session `s` and decodes a long answer of
    another one."""
    run = simulated(session("s", 0.0, 20_000, (200, 200)), session("long", 2.0, 2_000, (5_000,)), arm=arm)
    run.run()
    return run


def test_a_request_goes_to_an_idle_endpoint_with_the_kv_of_a_busy_one() -> None:
    run, without = busy_giver(Deployment.HANDOFF), busy_giver(Deployment.NONE)
    first, moved, alone = turn_of(run, "s", 0), turn_of(run, "s", 1), turn_of(without, "s", 1)
    assert turn_of(run, "long", 0).finished_s > moved.finished_s, "the giver was busy all the time"
    assert (first.endpoint, moved.endpoint, moved.source) == (0, 1, 0)
    assert moved.cached_tokens > 0.95 * first.prompt_tokens
    assert 0.0 < moved.held_s <= 0.4
    assert (alone.endpoint, alone.cached_tokens) == (1, 0)
    assert moved.ttft_s < 0.5 * alone.ttft_s
    assert run.fabric.bytes >= H20.engine.kv_bytes(0.95 * first.prompt_tokens)
    assert run.gateway.seen.pulls == {HandoffOutcome.COPIED: 1}
    assert_nothing_is_left(run)


def test_the_giver_computes_a_block_and_has_it_as_load_while_it_gives() -> None:
    run = simulated(session("s", 0.0, 20_000, (200, 200)))
    seen: list[tuple[list[int], list[int]]] = []
    begin = run.pulling.begin

    def watched(*args) -> None:
        begin(*args)
        seen.append((list(run.beliefs.pending_tokens), list(run.beliefs.in_flight)))

    run.pulling.begin = watched
    run.run()
    ((pending, in_flight),) = seen
    assert (pending[0], in_flight) == (16, [1, 1])
    assert 500 <= pending[1] < 1_000, "the target computes the rest"


def test_a_giver_that_is_busier_than_known_costs_the_time_of_the_hold_and_a_recomputation() -> None:
    before = simulated(session("s", 0.0, 20_000, (200, 200), gap_s=5.0))
    before.run()
    on_time = turn_of(before, "s", 1)
    assert on_time.source == 0
    again = simulated(session("s", 0.0, 20_000, (200, 200), gap_s=5.0))
    runs = again.workload.runs
    own = runs.add(-1, 100_000)
    task = Task(
        session=-1,
        number=-1,
        run=own,
        prompt_tokens=100_000,
        answer_run=own,
        output_tokens=1,
        gap_s=0.0,
        timestamp_s=0.0,
    )
    at_s = on_time.submitted_s - 1.0
    unseen = Unseen(task, 10_000, at_s, at_s)
    again.at(at_s, partial(again.engines[0].add, unseen, at_s))
    again.run()
    late = turn_of(again, "s", 1)
    assert again.gateway.seen.pulls == {HandoffOutcome.EXPIRED: 1}
    assert (late.source, late.cached_tokens, late.held_s) == (-1, 0, pytest.approx(0.4))
    assert late.endpoint == 1
    assert_nothing_is_left(again)


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("arm", [Deployment.HANDOFF, Deployment.BOTH])
def test_an_endpoint_that_dies_ends_its_pulls_and_everything_else_is_served(
    dead: int, arm: Deployment, busy: Workload
) -> None:
    fleet = SimulatedFleet(endpoints=4, store=arm.reach.stores)
    setting = Setting(
        policy="round_robin" + PLANNER, routing=Routing(pull=Pull(max_seconds=1.0)), deployment=arm
    )
    faults = Faults(dead_endpoint=dead, dead_at_s=40.0)
    run = Simulation(busy, setting, POLICIES["round_robin"], fleet, faults, 1)
    run.run()
    assert len(run.done) == busy.requests
    assert run.gateway.seen.pulls[HandoffOutcome.COPIED] > 5 or arm is Deployment.BOTH
    assert_nothing_is_left(run)


@pytest.fixture(scope="module")
def busy() -> Workload:
    return OfferedLoad(window_s=80.0, warmup_s=0.0).workload(
        0.5, 3, SimulatedFleet(endpoints=4).hardware.engine
    )


# -- limits ------------------------------------------------------------------------------------------------


class Live(Handing):
    """A gateway: A holds the beginnings of some prompts, and requests go to B."""

    source, target = A, B

    def __init__(self, rules: Pull) -> None:
        self.rules = rules
        super().__init__(policy="round_robin", pages={**PAGES, C: "10.0.0.3:8998"})

    def pool(self, draining: str = "") -> Pool:
        made = super().pool(draining)
        routing = structs.replace(made.spec.routing, pull=self.rules)
        return structs.replace(made, spec=structs.replace(made.spec, routing=routing))

    def holds(self, number: int, *, announced: bool = True) -> None:
        ids = text(10 + number, HELD)
        if announced:
            self.announce(A, ids)
        else:
            self.stored(A, ids)

    def asks(self, number: int) -> Unpulled | None:
        ids = [*text(10 + number, HELD), *text(100 + number, PROMPT - HELD)]
        asked = head("/v1/completions", content_length=str(len(completion(ids))))
        asked.subset = frozenset({B})
        self.routed = self.route(ids, asked)
        return self.record(self.routed).unpulled

    def limits_fail(self, leg: Leg) -> None:
        assert self.routed.pull
        self.router.moves.pulling.failed(self.routed.ticket, self.routed.pull, leg, GivenUp.REFUSED)

    def has_queue(self, end: Leg, seconds: float) -> None:
        self.queue(A if end is Leg.GIVE else B, seconds)

    def sends(self, move: Move) -> None:
        self.router.moves.planner.transfer_began(move, 0.0)


class Simulated:
    """The same facts in a simulation."""

    def __init__(self, rules: Pull) -> None:
        sessions = [session(f"s{i}", 0.0, PROMPT, (10,)) for i in range(6)]
        self.run = simulated(*sessions, rules=rules, endpoints=3, policy=second)
        self.source, self.target, _ = (e.address for e in self.run.beliefs.endpoints)

    def _task(self, number: int) -> Task:
        (job,) = (job for job in self.run.workload.jobs if job.name == f"s{number}")
        return job.tasks[0]

    def holds(self, number: int, *, announced: bool = True) -> None:
        run, index = self._task(number).run, self.run.index
        if announced:
            index.changed(0, run, HELD, 0.0)
        else:
            index.claim(0, run, HELD, 0.0)

    def asks(self, number: int) -> Unpulled | None:
        asked = SimulatedRequest(self._task(number), self.run.next_number(), 0.0, 0.0)
        decision = self.run.gateway.route(asked, 0.0)
        assert isinstance(decision, Decision)
        if fetch := self.run.gateway.fetches.pop(asked, None):
            self.run.pulling.begin(asked, fetch)
        assert bool(decision.replicate_from) == (fetch is not None)
        return decision.unpulled

    def limits_fail(self, leg: Leg) -> None:
        self.run.gateway.moves.limits.failed(leg, self.source if leg is Leg.GIVE else self.target, 0.0)

    def has_queue(self, end: Leg, seconds: float) -> None:
        self.run.beliefs.prefill_starts(0 if end is Leg.GIVE else 1, 9_999, seconds)

    def sends(self, move: Move) -> None:
        self.run.gateway.moves.planner.transfer_began(move, 0.0)


@pytest.mark.parametrize("kind", [Live, Simulated])
@pytest.mark.parametrize(
    ("cause", "rules", "facts"),
    [
        pytest.param(None, Pull(), {}, id="nothing is in the way"),
        pytest.param(None, Pull(enabled=False), {}, id="the pool does not want it"),
        pytest.param(None, Pull(), {"nobody": True}, id="nobody holds anything"),
        pytest.param(Unpulled.SLOWER, Pull(), {Leg.GIVE: 5.0}, id="the giver's queue is long"),
        pytest.param(Unpulled.SLOW, Pull(), {Leg.TAKE: 0.5}, id="the target's queue is long"),
        pytest.param(Unpulled.SLOW, Pull(max_seconds=0.001), {}, id="a request may not be held for so long"),
        pytest.param(Unpulled.BUSY, Pull(), {"copies": 4}, id="the giver gives four already"),
        pytest.param(None, Pull(), {"copies": 3}, id="the giver gives three already"),
        pytest.param(Unpulled.BUDGET, Pull(), {"bytes": 10**12}, id="the link is full"),
        pytest.param(Unpulled.FAILED, Pull(), {"failed": Leg.GIVE}, id="the giver has just failed"),
        pytest.param(Unpulled.FAILED, Pull(), {"failed": Leg.TAKE}, id="the target has just failed"),
        pytest.param(Unpulled.TOKENS, Pull(), {"announced": False}, id="no event told the tokens"),
    ],
)
def test_the_gateway_and_the_simulator_refuse_for_the_same_reasons(
    kind: type[Live] | type[Simulated], cause: Unpulled | None, rules: Pull, facts: dict
) -> None:
    pool = kind(rules)
    if not facts.get("nobody"):
        pool.holds(0, announced=facts.get("announced", True))
    for number in range(1, 1 + facts.get("copies", 0)):
        pool.holds(number)
        assert pool.asks(number) is None
    if leg := facts.get("failed"):
        pool.holds(5)
        assert pool.asks(5) is None
        pool.limits_fail(leg)
    for end in Leg:
        if seconds := facts.get(end):
            pool.has_queue(end, seconds)
    if sent := facts.get("bytes"):
        pool.sends(
            Move(
                subject="other",
                reason=MoveReason.PULL,
                source=pool.source,
                target=pool.target,
                transfer_bytes=sent,
            )
        )
    assert pool.asks(0) is cause


# -- host memory that others read --------------------------------------------------------------------------


def test_a_busy_endpoint_is_read_at_once_and_nothing_is_held() -> None:
    run, without = busy_giver(Deployment.OFFLOAD), busy_giver(Deployment.NONE)
    first, moved, alone = turn_of(run, "s", 0), turn_of(run, "s", 1), turn_of(without, "s", 1)
    assert (first.endpoint, moved.endpoint, moved.source, moved.held_s) == (0, 1, 0, 0.0)
    assert moved.cached_tokens > 0.95 * first.prompt_tokens
    assert moved.ttft_s < 0.5 * alone.ttft_s
    read_s = moved.ready_s - moved.routed_s
    assert read_s > H20.transfer_s(moved.moved_tokens) + moved.loaded_s > moved.loaded_s > 0.0
    assert run.gateway.seen.pulls == {HandoffOutcome.COPIED: 1}
    assert_nothing_is_left(run)


def test_what_was_read_can_be_read_by_others() -> None:
    """It is in the reader's host memory, too."""
    run = simulated(session("s", 0.0, 20_000, (200, 200)), arm=Deployment.OFFLOAD)
    run.run()
    moved = turn_of(run, "s", 1)
    hosts = [engine.host for engine in run.engines]
    assert all(host and host.match(moved.run, moved.prompt_tokens) > 20_000 for host in hosts)


def test_no_transfer_is_too_slow_to_be_read() -> None:
    """Where KV is handed over, a request is held for it, for a while only."""
    long, rules = session("s", 0.0, 60_000, (200, 200)), Pull(max_seconds=0.2)
    read, held = (simulated(long, arm=arm, rules=rules) for arm in (Deployment.OFFLOAD, Deployment.HANDOFF))
    for run in (read, held):
        run.run()
    assert read.gateway.seen.pulls == {HandoffOutcome.COPIED: 1}
    assert held.gateway.seen.unpulled == {Unpulled.SLOW: 1}


def test_what_host_memory_has_dropped_is_not_read() -> None:
    run = simulated(session("s", 0.0, 20_000, (200, 200)), arm=Deployment.OFFLOAD, host_tokens=4_000)
    run.run()
    moved = turn_of(run, "s", 1)
    assert 0 < moved.moved_tokens <= moved.cached_tokens <= 4_000


def test_a_source_that_dies_costs_a_recomputation() -> None:
    run = simulated(session("s", 0.0, 20_000, (200, 200)), arm=Deployment.OFFLOAD)
    run.engines[0].host = None
    run.run()
    assert turn_of(run, "s", 1).source == -1
    assert_nothing_is_left(run)


def test_a_pool_that_reads_nothing_still_loads_its_own() -> None:
    run = simulated(session("s", 0.0, 20_000, (200, 200)), arm=Deployment.OFFLOAD, rules=Pull(enabled=False))
    run.run()
    assert (turn_of(run, "s", 1).source, run.gateway.seen.pulls) == (-1, {})
