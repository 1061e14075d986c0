"""What is measured of a simulation."""

from dataclasses import replace

import msgspec
import pytest

from perilune_gateway.model import Reason
from perilune_lab import report
from perilune_lab.load.result import Result
from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import Deployment
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.harness import Comparison, piece, pooled, r_of
from perilune_lab.simulate.loads import NoRateError, OfferedLoad
from perilune_lab.simulate.outcome import SimulatedOutcome
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import Workload, prepare
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.model import Mode

SMALL = OfferedLoad(window_s=90.0, warmup_s=20.0)


def test_its_numbers_are_those_of_a_report():
    trace = generate(
        Agentic(sessions_per_s=1.5, gap_scale=0.05, same_task_share=0.0, system_prompts=1), 2, 120
    )
    workload = prepare(trace, H20.engine)
    outcome = simulate(workload, Deployment(), "ear")
    assert all(r.succeeded for r in outcome.requests)
    ours = measure.run(outcome, workload)
    theirs = report.run(
        report.Measured(
            policy="ear",
            results=as_client_results(outcome, workload),
            sessions=trace.sessions,
            mode=Mode.THINKTIME,
            engine=H20.engine,
        )
    )
    assert any(s.reason is Reason.MOVED for s in outcome.requests)
    same = msgspec.to_builtins(theirs)
    mine = msgspec.to_builtins(ours)
    for name in ("wall_clock_factor_legacy", "itl_s", "scheduling_ms"):
        same.pop(name, None)
    # who computed a prefix first depends on the order of submission, which the plan and the play see apart
    assert mine.pop("apc_ceiling")["intra_session"] == pytest.approx(
        same.pop("apc_ceiling")["intra_session"], abs=1e-3
    )
    for name, value in same.items():
        assert near(mine[name], value), name


def as_client_results(outcome: SimulatedOutcome, workload: Workload) -> list[Result]:
    """Return the requests, which all succeeded, as a load client would report them."""
    return [
        Result(
            session=workload.jobs[r.task.session].name,
            turn=r.task.number,
            request_id=str(r.number),
            submitted_at_s=r.submitted_s,
            finished_at_s=r.finished_s,
            due_at_s=r.due_s,
            status=200,
            endpoint=outcome.addresses[r.endpoint],
            reason=r.reason,
            simulated=True,
            ttft_s=r.first_token_s - r.submitted_s,
            tpot_s=(r.finished_s - r.first_token_s) / (r.output_tokens - 1) if r.output_tokens > 1 else None,
            e2e_s=r.finished_s - r.submitted_s,
            prompt_tokens=r.prompt_tokens,
            cached_tokens=r.cached_tokens,
            output_tokens=r.output_tokens,
        )
        for r in outcome.requests
    ]


def near(mine: object, theirs: object) -> bool:
    if isinstance(theirs, dict):
        return all(near(mine[key], value) for key, value in theirs.items())
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(near, mine, theirs))
    if isinstance(theirs, float):
        return mine == pytest.approx(theirs, rel=1e-3)
    return mine == theirs


def test_means_and_intervals_over_seeds():
    comparison = Comparison(policies=("sticky", "round_robin"), load=SMALL)
    rows = [row for seed in (1, 2, 3) for row in piece(comparison, (1.0, seed))]
    sticky, robin = pooled(comparison.policies, rows)
    p90 = [row.run.ttft_s.p90 for row in rows if row.run.policy == "sticky"]
    assert sticky.ttft_s.p90 == pytest.approx(sum(p90) / 3)
    low, high = sticky.intervals["ttft_s.p90"]
    assert min(p90) <= low < sticky.ttft_s.p90 < high <= max(p90)
    assert (sticky.rate, sticky.seeds) == (1.0, (1, 2, 3))
    assert sticky.requests == robin.requests == sum(r.run.requests for r in rows) / 2
    assert "requests" not in sticky.intervals


def test_seeds_are_paired():
    comparison = Comparison(policies=("sticky", "round_robin"), load=SMALL)
    a, b = piece(comparison, (1.0, 5))
    assert a.run.floor_ttft_s == b.run.floor_ttft_s


def test_the_interval_of_equal_values_is_a_point():
    assert measure.interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


@pytest.mark.heavy
def test_r_is_where_the_reference_is_five_times_above_the_floor():
    comparison = Comparison(policies=("ear",), load=OfferedLoad(window_s=150.0, warmup_s=0.0))
    rate = r_of(comparison, [1], "round_robin")
    regret = [
        piece(Comparison(policies=("round_robin",), load=comparison.load), (rate * x, 1))[0].run.regret
        for x in (0.8, 1.25)
    ]
    assert regret[0] < 5.0 < regret[1] * 1.2


def test_without_a_measured_request_there_is_no_r():
    nothing = OfferedLoad(window_s=0.002, warmup_s=0.001)
    with pytest.raises(NoRateError, match="no request is measured"):
        r_of(Comparison(policies=(), load=nothing), [1], "lmetric")


def test_gaps_between_tokens_are_pooled_over_sequences():
    trace = generate(Agentic(sessions_per_s=2.0, gap_scale=0.05), 3, 40)
    workload = prepare(trace, H20.engine)
    outcome = simulate(workload, Deployment(), "ear")
    run = measure.run(outcome, workload)
    tokens = sum(s.output_tokens - 1 for s in outcome.requests)
    assert sum(count for _, count in outcome.gaps) == tokens
    lasted_s = sum(s.finished_s - s.first_token_s for s in outcome.requests)
    assert run.itl_s.mean * tokens == pytest.approx(lasted_s, rel=1e-6)
    assert run.itl_s.p50 >= H20.engine.decode_floor_s * (1 - 1e-9)
    assert run.itl_s.p50 <= run.itl_s.p90 <= run.itl_s.p99
    assert max(outcome.gaps)[0] > 5 * run.itl_s.p50, "somebody's prefill"


def test_weighted_quantiles_equal_those_of_repeated_values():
    found = measure.weighted([(2.0, 90), (1.0, 5), (9.0, 5)])
    assert (found.p50, found.p90, found.p95, found.p99) == (2.0, 2.0, 2.0, 9.0)
    assert found.mean == pytest.approx(2.3)
    assert measure.weighted([]) is msgspec.UNSET


def test_goodput_counts_who_was_in_time_twice():
    load = replace(SMALL, window_s=60.0, warmup_s=0.0)
    (row,) = piece(Comparison(policies=("round_robin",), load=load), (1.5, 1))
    workload = load.workload(1.5, 1, H20.engine)
    outcome = simulate(workload, Deployment(), "round_robin", seed=1)
    good = [
        s
        for s in outcome.requests
        if s.first_token_s - s.submitted_s <= 5.0
        and (s.finished_s - s.first_token_s) <= 0.1 * (s.output_tokens - 1)
    ]
    assert 0 < len(good) < len(outcome.requests)
    assert row.run.goodput_per_s == pytest.approx(len(good) / outcome.simulated_s)


def test_the_legacy_factor_is_over_the_traces_own_span():
    (row,) = piece(Comparison(policies=("sticky",), load=SMALL), (1.0, 5))
    workload = SMALL.workload(1.0, 5, H20.engine)
    at_s = [task.ideal_at_s for job in workload.jobs for task in job.tasks]
    assert row.run.wall_clock_factor_legacy == pytest.approx(row.simulated_s / (max(at_s) - min(at_s)))
    assert row.run.wall_clock_factor_legacy > row.run.wall_clock_factor
