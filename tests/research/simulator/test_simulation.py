from dataclasses import replace
from random import Random

import pytest

from perilune_api.pool import Limits, Routing, SpecError
from perilune_gateway.model import Reason
from perilune_lab.simulate.faults import Faults, parse
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.workload import Workload, prepare
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.model import Mode, Segment, Session, Style, Trace, Turn
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.fabric import SimulatedFabric
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.harness import Comparison
from perilune_research.simulator.policies import POLICIES, SPLIT
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.simulation import SimulatedOutcome, simulate

LOAD = OfferedLoad(window_s=200.0, warmup_s=0.0)


@pytest.fixture(scope="module")
def busy() -> Workload:
    """Enough for queues, moves and evictions."""
    return LOAD.workload(1.6, 3, SimulatedFleet().hardware.engine)


def times(outcome: SimulatedOutcome) -> list[tuple[int, float, float, int]]:
    return [(s.number, s.first_token_s, s.finished_s, s.endpoint) for s in outcome.requests]


EVERYDAY = ("perilune", "round_robin", "ear", "dynamo", "static_pd")


@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=[pytest.mark.heavy] * (p not in EVERYDAY)) for p in POLICIES]
)
def test_every_policy_serves_everything(policy: str, busy: Workload):
    outcome = Comparison(policies=(policy,)).play(policy, busy, 1)
    assert len(outcome.requests) == busy.requests
    for s in outcome.requests:
        assert s.submitted_s < s.first_token_s <= s.finished_s
        assert 0 <= s.cached_tokens < s.prompt_tokens or policy in SPLIT
    turns = [(s.task.session, s.task.number) for s in sorted(outcome.requests, key=lambda s: s.submitted_s)]
    assert len(set(turns)) == len(turns)


def test_equal_arguments_give_equal_results(busy: Workload):
    faults = Faults(outlier_share=0.2)
    first, second = (simulate(busy, Setting(policy="ear"), faults=faults, seed=7) for _ in range(2))
    assert times(first) == times(second)
    other = simulate(busy, Setting(policy="random"), faults=faults, seed=8)
    assert times(other) != times(simulate(busy, Setting(policy="random"), faults=faults, seed=9))


def test_a_session_is_submitted_after_its_gap(busy: Workload):
    last: dict[int, float] = {}
    for s in sorted(simulate(busy, Setting(policy="sticky")).requests, key=lambda s: s.number):
        if s.task.number:
            assert s.submitted_s == pytest.approx(last[s.task.session] + s.task.gap_s)
        last[s.task.session] = s.finished_s


def chat(*timestamps: float) -> Trace:
    turns: list[Turn] = []
    prompt: tuple[Segment, ...] = (Segment("task", 30_000),)
    for n, at_s in enumerate(timestamps):
        turns.append(
            Turn(session="s", number=n, prompt=prompt, output_tokens=200, gap_s=1.0, timestamp_s=at_s)
        )
        prompt = (*prompt, turns[-1].answer, Segment(f"tool{n}", 500))
    return Trace("t", Style.TEXT, (Session("s", timestamps[0], tuple(turns)),))


@pytest.mark.parametrize("mode", Mode)
def test_turns_are_submitted_as_the_mode_says(mode: Mode):
    """The first answer takes longer than a second, so the modes part."""
    workload = prepare(chat(0.0, 1.0, 60.0), H20.engine, mode)
    outcome = simulate(workload, Setting(policy="sticky"))
    first, second, third = sorted(outcome.requests, key=lambda s: s.number)
    expected = {
        Mode.THINKTIME: (first.finished_s + 1.0, second.finished_s + 1.0),
        Mode.TIMESTAMPS: (1.0, 60.0),
        Mode.MAX: (first.finished_s, 60.0),
    }
    assert (second.submitted_s, third.submitted_s) == expected[mode]


def alone(policy: str = "sticky", fleet: SimulatedFleet | None = None) -> SimulatedOutcome:
    return simulate(prepare(chat(0.0, 1.0, 2.0), H20.engine), Setting(policy=policy), fleet)


def test_a_session_alone_runs_at_its_ideal():
    outcome = alone()
    for s in outcome.requests:
        assert s.finished_s - s.submitted_s == pytest.approx(s.task.ideal_s, rel=0.03)
        assert s.cached_tokens == pytest.approx(s.task.own_tokens, abs=16)


def test_a_shared_store_serves_what_another_endpoint_computed():
    without, with_store = alone("round_robin"), alone("round_robin", SimulatedFleet(store=True))
    assert sum(s.cached_tokens for s in without.requests) == 0
    assert sum(s.cached_tokens for s in with_store.requests) > 55_000
    assert sum(s.store_tokens for s in with_store.requests) > 55_000


def test_host_memory_keeps_what_the_device_has_evicted(busy: Workload):
    """With a small device everything that leaves it is found in DRAM again; the policy knows where."""
    small = replace(H20, engine=replace(H20.engine, kv_pool_tokens=140_000))
    without, tiered = (
        simulate(busy, Setting(policy="perilune"), SimulatedFleet(hardware=small, host_tokens=tokens))
        for tokens in (0, 2_000_000)
    )
    assert sum(s.host_tokens for s in without.requests) == 0
    assert sum(s.host_tokens for s in tiered.requests) > 100_000
    cached = [sum(s.cached_tokens for s in outcome.requests) for outcome in (without, tiered)]
    assert cached[0] < cached[1]
    assert len(tiered.requests) == busy.requests
    assert not any(s.failed for s in tiered.requests)


def test_prefill_and_decode_apart_send_every_prompt_over_the_fabric():
    outcome = simulate(
        prepare(chat(0.0, 1.0, 2.0), H20.engine),
        Setting(policy="static_pd"),
        SimulatedFleet(prefill_endpoints=4),
    )
    assert [s.reason for s in outcome.requests] == [Reason.SPLIT] * 3
    assert all(s.prefill_endpoint < 4 <= s.endpoint for s in outcome.requests)
    # the decoding endpoint may be the one before, which then holds what it had
    assert len(outcome.transfer_s) == 3
    assert outcome.moved_bytes >= H20.engine.kv_bytes(30_000)


def test_pulls_take_longer_on_slow_links(busy: Workload):
    setting = Setting(policy="ear", deployment=Deployment.PULL)
    usual = simulate(busy, setting)
    slow = simulate(busy, setting, faults=Faults(link_factor=10.0))
    none = simulate(busy, Setting(policy="ear"))
    assert len(usual.transfer_s) > 10 < len(slow.transfer_s)
    assert sum(slow.transfer_s) / len(slow.transfer_s) > 4 * sum(usual.transfer_s) / len(usual.transfer_s)
    assert none.transfer_s == []


def test_transfers_of_one_nic_follow_each_other():
    fabric = SimulatedFabric(H20, Faults(), Random(0))
    alone_s = H20.transfer_s(10_000)
    ends = [fabric.send(0, 5, 10_000, 0.0), fabric.send(1, 6, 10_000, 0.0), fabric.send(2, 7, 10_000, 0.0)]
    assert ends == pytest.approx([alone_s, 2 * alone_s, alone_s])
    assert fabric.bytes == 3 * H20.engine.kv_bytes(10_000)


def test_outliers_take_so_many_times_longer():
    alone_s = H20.transfer_s(10_000)
    fabric = SimulatedFabric(H20, Faults(outlier_share=0.25, outlier_factor=20.0), Random(5))
    times = [fabric.send(0, 5, 10_000, 1000.0 * n) - 1000.0 * n for n in range(400)]
    slow = [t for t in times if t > 2 * alone_s]
    assert 70 < len(slow) < 130
    assert slow == pytest.approx([20 * alone_s] * len(slow))


def test_unequal_engines_differ_by_at_most_their_spread():
    lone = prepare(chat(*(100.0 * n for n in range(60))), H20.engine)
    outcome = simulate(
        lone, Setting(policy="round_robin"), SimulatedFleet(endpoints=6), Faults(speed_spread=2.0), seed=3
    )
    alone_s = [
        s.first_token_s - s.submitted_s for s in simulate(lone, Setting(policy="round_robin")).requests
    ]
    factors = {
        s.endpoint: (s.first_token_s - s.submitted_s) / alone_s[0]
        for s in outcome.requests
        if not s.cached_tokens
    }
    assert len(factors) == 6
    assert 0.5 <= min(factors.values()) < 0.9
    assert 1.1 < max(factors.values()) <= 2.0


def test_a_dead_endpoint_loses_what_it_had_and_gets_no_more(busy: Workload):
    outcome = simulate(busy, Setting(policy="ear"), faults=Faults(dead_endpoint=2, dead_at_s=60.0))
    failed = [s for s in outcome.requests if s.failed]
    assert 0 < len(failed) < 30
    assert {s.endpoint for s in failed} == {2}
    after = [s for s in outcome.requests if s.submitted_s > 60.0]
    assert after
    assert all(s.endpoint != 2 for s in after)
    assert len(outcome.requests) == busy.requests


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(event_lag_s=2.0), id="late events"),
        pytest.param(Faults(token_error=0.2), marks=pytest.mark.heavy, id="estimated tokens"),
        pytest.param(Faults(outlier_share=0.05), marks=pytest.mark.heavy, id="outliers"),
        pytest.param(Faults(speed_spread=2.0), marks=pytest.mark.heavy, id="unequal engines"),
        pytest.param(Faults(step_noise=0.3), marks=pytest.mark.heavy, id="noisy steps"),
    ],
)
def test_what_the_gateway_does_not_know_costs_but_loses_nothing(faults: Faults, busy: Workload):
    setting = Setting(policy="ear", deployment=Deployment.PULL)
    outcome = simulate(busy, setting, faults=faults)
    assert len(outcome.requests) == busy.requests
    assert times(outcome) != times(simulate(busy, setting))
    assert not any(s.failed or s.rejected for s in outcome.requests)


def test_an_overloaded_fleet_refuses(busy: Workload):
    outcome = simulate(
        busy, Setting(policy="least_loaded", routing=Routing(limits=Limits(max_pending_seconds=2.0)))
    )
    refused = [s for s in outcome.requests if s.rejected]
    assert len(refused) == outcome.seen.refused > 0
    assert len(outcome.requests) == busy.requests
    idle = simulate(
        prepare(chat(0.0, 1.0), H20.engine),
        Setting(policy="ear", routing=Routing(limits=Limits(max_pending_seconds=0.1))),
    )
    assert not any(s.rejected for s in idle.requests)


@pytest.mark.heavy
def test_a_large_fleet_decides_from_a_shortlist_as_from_all():
    workload = replace(LOAD, window_s=40.0).workload(16.0, 1, SimulatedFleet(endpoints=100).hardware.engine)
    short = simulate(workload, Setting(policy="lmetric_plus_one"), SimulatedFleet(endpoints=100))
    whole = simulate(
        workload, Setting(policy="lmetric_plus_one", shortlist_above=1000), SimulatedFleet(endpoints=100)
    )
    assert short.seen.audited > whole.seen.audited == 0
    p90 = [
        sorted(s.first_token_s - s.submitted_s for s in o.requests)[-workload.requests // 10]
        for o in (short, whole)
    ]
    assert p90[0] == pytest.approx(p90[1], rel=0.1)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("slow-links=3", Faults(link_factor=3.0)),
        ("outliers", Faults(outlier_share=0.05)),
        ("dead=3", Faults(dead_endpoint=3, dead_at_s=60.0)),
        ("dead=3@120, lag=1.5", Faults(dead_endpoint=3, dead_at_s=120.0, event_lag_s=1.5)),
        ("estimates=0.1,link-belief=1", Faults(token_error=0.1, link_belief=1.0)),
        ("unequal,noise", Faults(speed_spread=1.5, step_noise=0.2)),
    ],
)
def test_faults_are_read_by_their_names(text: str, faults: Faults):
    assert parse(text) == faults


@pytest.mark.parametrize("text", ["slow", "outliers=x", "dead=a", "=3"])
def test_unknown_faults_are_refused(text: str):
    with pytest.raises(SpecError, match="--faults"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("slow-links=0", "above 0"),
        ("slow-links=inf", "above 0"),
        ("slow-links=nan", "above 0"),
        ("outliers=2", "from 0 to 1"),
        ("estimates=-0.1", "from 0 to 1"),
        ("lag=-1", "0 or above"),
        ("dead=1.5", "endpoint's number"),
        ("dead=1@-3", "0 or above"),
        ("lag=2@60", "only `dead` has a time"),
        ("unequal=0.5", "1 or above"),
    ],
)
def test_impossible_faults_are_refused(text: str, what: str):
    with pytest.raises(SpecError, match=f"{what}.* - at `--faults`"):
        parse(text)


def test_generated_traces_play_in_whole():
    workload = prepare(generate(Agentic(gap_scale=0.01), 1, 30), H20.engine)
    outcome = simulate(workload, Setting(policy="ear"), SimulatedFleet(endpoints=2))
    assert len(outcome.requests) == workload.requests
