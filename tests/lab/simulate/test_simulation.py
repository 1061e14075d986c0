"""Whole simulations: the gateway's own code before modelled engines, in virtual time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from perilune_api.pool import Limits, Migration, MoveTrigger, Routing, SessionAdmission
from perilune_gateway.model import Reason
from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import BLOCK_TOKENS, Arm, Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.gateway import SimulatedGateway
from perilune_lab.simulate.h20 import GIB, H20, H20_480B
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.outcome import SimulatedOutcome
from perilune_lab.simulate.simulation import Simulation, simulate
from perilune_lab.simulate.workload import Workload, prepare
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.model import Mode, Trace
from perilune_lab.traces.reuse import ideal_ttft_s

LOAD = OfferedLoad(window_s=60.0, warmup_s=0.0)
FOUR = Deployment(endpoints=4)


@pytest.fixture(scope="module")
def busy() -> Workload:
    """More than four engines serve without queues."""
    return LOAD.workload(1.5, 3, H20.engine)


def play(
    workload: Workload,
    deployment: Deployment = FOUR,
    policy: str = "perilune",
    routing: Routing | None = None,
    **faults: float,
) -> SimulatedOutcome:
    return simulate(workload, deployment, policy, routing or Routing(), Faults(**faults), seed=1)


def fates(outcome: SimulatedOutcome) -> list[tuple[object, ...]]:
    return [
        (r.task.session, r.task.number, r.endpoint, r.reason, r.first_token_s, r.finished_s, r.cached_tokens)
        for r in outcome.requests
    ]


def test_every_turn_is_answered_after_its_predecessor(busy: Workload) -> None:
    outcome = play(busy)
    assert len(outcome.requests) == busy.requests
    assert all(r.succeeded for r in outcome.requests)
    assert all(r.submitted_s < r.first_token_s <= r.finished_s for r in outcome.requests)
    ended: dict[int, float] = {}
    for r in sorted(outcome.requests, key=lambda r: (r.task.session, r.task.number)):
        if r.task.number:
            assert r.submitted_s == pytest.approx(ended[r.task.session] + r.task.gap_s)
        ended[r.task.session] = r.finished_s


def test_equal_arguments_give_equal_results(busy: Workload) -> None:
    for policy in ("perilune", "power_of_two"):
        assert fates(play(busy, policy=policy)) == fates(play(busy, policy=policy))


def test_an_idle_engine_takes_the_ideal_time() -> None:
    workload = LOAD.workload(0.02, 4, H20.engine)
    outcome = play(workload, Deployment(endpoints=1))
    for r in outcome.requests:
        lost = 2 * FOUR.block_tokens  # the prompt's end, and where it leaves another prompt
        most_s = H20.engine.prefill_s(lost, r.prompt_tokens) + 0.03
        least_s = ideal_ttft_s(H20.engine, r.prompt_tokens, r.task.any_tokens)
        assert 0.999 * least_s <= r.ttft_s <= 1.1 * r.task.ideal_ttft_s + most_s


def test_policies_differ_by_what_engines_cache(busy: Workload) -> None:
    run = {p: measure.run(play(busy, policy=p), busy) for p in ("perilune", "round_robin")}
    assert run["perilune"].apc > 0.9 * run["perilune"].apc_ceiling.intra_session
    assert run["round_robin"].apc < run["perilune"].apc - 0.2
    assert run["round_robin"].ttft_s.p90 > 1.5 * run["perilune"].ttft_s.p90


def test_most_turns_of_known_sessions_are_decided_by_their_headers(busy: Workload) -> None:
    outcome = play(busy)
    first = sum(r.task.number == 0 for r in outcome.requests)
    assert first <= outcome.read < 0.7 * busy.requests


def test_reasons_are_the_gateways(busy: Workload) -> None:
    reasons = Counter(r.reason for r in play(busy, policy="sticky").requests)
    begun = sum(bool(job.tasks) for job in busy.jobs)
    assert reasons == {Reason.COLD: begun, Reason.HOST: busy.requests - begun}


def test_engines_hand_over_what_a_moved_session_needs(busy: Workload) -> None:
    routing = Routing(migration=Migration(triggers=tuple(MoveTrigger), hot_pending_seconds=0.2, worth=1.0))
    outcome = play(busy, replace(FOUR, arm=Arm.HANDOFF), "perilune", routing)
    done = outcome.transfers
    assert sum(n for name, n in done.items() if "switched" in name or "copied" in name) > 0, done
    assert outcome.moved_bytes > 0
    assert len(outcome.requests) == busy.requests
    assert all(r.succeeded for r in outcome.requests)
    assert not play(busy, FOUR, "perilune", routing).moved_bytes


def test_a_store_has_what_pools_with_defaults_give_it() -> None:
    """80 GiB of each GPU, and 96 KiB of KV for each token."""
    eight, large = Deployment(endpoints=8, arm=Arm.STORE), Deployment(endpoints=1, hardware=H20_480B)
    assert eight.store_blocks * BLOCK_TOKENS == pytest.approx(8 * 80 * GIB / 98_304, rel=1e-3)
    assert large.store_blocks * BLOCK_TOKENS == pytest.approx(8 * 80 * GIB / 253_952, rel=1e-3)
    assert Deployment(arm=Arm.STORE, store_tokens=1000).store_blocks == 3


def test_a_larger_store_and_one_with_answers_serve_more(busy: Workload) -> None:
    small, prompts, whole = (
        measure.run(play(busy, deployment, "round_robin"), busy).apc
        for deployment in (
            replace(FOUR, arm=Arm.STORE, store_tokens=20_000),
            replace(FOUR, arm=Arm.STORE, stores_answers=False),
            replace(FOUR, arm=Arm.STORE),
        )
    )
    assert small + 0.02 < prompts < whole


def test_the_gateway_hears_what_the_store_has_evicted(busy: Workload, monkeypatch) -> None:
    heard: list[int] = []
    lost = SimulatedGateway.lost

    def hear(gateway: SimulatedGateway, digests: Sequence[bytes]) -> None:
        heard.append(len(digests))
        lost(gateway, digests)

    monkeypatch.setattr(SimulatedGateway, "lost", hear)
    deployment = replace(FOUR, arm=Arm.STORE, store_tokens=20_000)
    simulation = Simulation(busy, deployment, "perilune", Routing(), Faults(), seed=1)
    simulation.run()
    (gateway,) = simulation.gateways
    assert simulation.store is not None
    assert len(heard) > 3
    assert sum(heard) > 500
    gateway.lost(simulation.store.lost())
    assert 0 < gateway.state.index.stats(simulation.loop.now).store <= deployment.store_blocks == 78


def test_a_store_serves_what_another_engine_computed(busy: Workload) -> None:
    none, store = (
        measure.run(play(busy, replace(FOUR, arm=arm), "round_robin"), busy) for arm in (Arm.NONE, Arm.STORE)
    )
    assert store.apc > none.apc + 0.2
    assert store.ttft_s.p90 < none.ttft_s.p90


def test_prompts_are_prefilled_on_endpoints_of_their_own(busy: Workload) -> None:
    outcome = play(busy, replace(FOUR, prefill_endpoints=2))
    elsewhere = [r for r in outcome.requests if r.leg_cached_tokens >= 0]
    assert elsewhere
    assert {r.endpoint for r in outcome.requests} == {2, 3}
    assert all(r.succeeded for r in outcome.requests)
    assert outcome.moved_bytes >= sum(H20.engine.kv_bytes(1) for _ in elsewhere)


def test_the_proxy_sends_what_a_dead_engine_cannot_take_to_another(busy: Workload) -> None:
    outcome = play(busy, dead_endpoint=1, dead_at_s=20.0)
    assert len(outcome.requests) == busy.requests
    lost = [r for r in outcome.requests if r.failed]
    assert all(r.endpoint == 1 for r in lost)
    assert len(lost) < busy.requests / 10
    late = [r for r in outcome.requests if r.submitted_s > 1_000 + 21.0]
    assert all(r.endpoint != 1 for r in late)


def test_new_sessions_wait_where_contexts_fill_the_pools() -> None:
    small = replace(H20, engine=replace(H20.engine, kv_pool_tokens=140_800))
    workload = LOAD.workload(2.0, 3, small.engine)
    deployment = Deployment(endpoints=2, hardware=small)
    admits = Routing(session_admission=SessionAdmission(enabled=True, max_wait_seconds=5.0))
    outcome = play(workload, deployment, routing=admits)
    gave_up = {r.task.session for r in outcome.requests if r.rejected}
    came_back = [r for r in outcome.requests if r.refusals and r.succeeded]
    assert gave_up or came_back
    assert all(r.refusals == 3 for r in outcome.requests if r.rejected)
    left_out = sum(len(workload.jobs[s].tasks) - 1 for s in gave_up)
    assert len(outcome.requests) == workload.requests - left_out


def test_an_overloaded_pool_refuses(busy: Workload) -> None:
    outcome = play(busy, routing=Routing(limits=Limits(max_pending_seconds=0.5)))
    assert any(r.refusals for r in outcome.requests)


def test_a_recorded_trace_is_played_at_its_times() -> None:
    sessions = generate(Agentic(sessions_per_s=1.0), 5, 12).sessions
    timed = tuple(
        replace(s, turns=tuple(replace(t, timestamp_s=s.start_s + 7.0 * t.number) for t in s.turns[:5]))
        for s in sessions
    )
    workload = prepare(Trace("recorded", "text", timed), H20.engine, Mode.TIMESTAMPS)
    outcome = play(workload)
    assert len(outcome.requests) == workload.requests
    assert all(r.submitted_s == pytest.approx(1_000 + r.task.timestamp_s) for r in outcome.requests)


def test_several_gateways_share_what_they_know() -> None:
    """Single plays of a full pool differ by chance, so the means of four count."""
    apc, ttft_p90_s = {1: 0.0, 4: 0.0}, {1: 0.0, 4: 0.0}
    for seed in range(1, 5):
        workload = LOAD.workload(1.5, seed, H20.engine)
        for gateways in (1, 4):
            run = measure.run(play(workload, replace(FOUR, gateways=gateways)), workload)
            assert run.succeeded == workload.requests
            apc[gateways] += run.apc / 4
            ttft_p90_s[gateways] += run.ttft_s.p90 / 4
    assert apc[4] == pytest.approx(apc[1], abs=0.03), "sessions stay, whichever gateway decides"
    assert ttft_p90_s[4] < 1.2 * ttft_p90_s[1], "each knows what the others have sent"
