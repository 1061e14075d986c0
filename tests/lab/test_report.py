"""Reports compare runs in tables, figures and JSON."""

import io
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET
from rich.console import Console

from perilune_gateway.model import H20_30B
from perilune_lab import report
from perilune_lab.load.result import Result
from perilune_lab.report import Ceiling, Hotspot, Measured, Migrations, Quantiles, Scheduling
from perilune_lab.traces.model import Mode, Segment, Session, Turn
from perilune_lab.traces.reuse import ideal_turn_s


def result(session: str = "a", turn: int = 0, at: float = 0.0, **changes: object) -> Result:
    """100 prompt tokens, 3 of output; first token 1 s after submission, then one a second."""
    base = Result(
        session=session,
        turn=turn,
        request_id=f"{session}{turn}",
        submitted_at_s=at,
        finished_at_s=at + 3.0,
        due_at_s=at,
        status=200,
        endpoint="e1",
        reason="host",
        ttft_s=1.0,
        tpot_s=1.0,
        itl_s=(1.0, 1.0),
        e2e_s=3.0,
        prompt_tokens=100,
        cached_tokens=50,
        output_tokens=3,
        counted=True,
    )
    return replace(base, **changes)


def session(name: str = "a", turns: int = 1, gap_s: float = 2.0, start_s: float = 0.0) -> Session:
    """Prompts of 100, 203, 306 … tokens."""
    prompt: tuple[Segment, ...] = (Segment(f"{name}0", 100),)
    made = []
    for number in range(turns):
        made.append(
            Turn(session=name, number=number, prompt=prompt, output_tokens=3, gap_s=gap_s if number else 0.0)
        )
        prompt = (*prompt, made[-1].answer, Segment(f"{name}{number + 1}", 100))
    return Session(name, start_s, tuple(made))


def measured(*results: Result, sessions: tuple[Session, ...] = (), **changes: object) -> Measured:
    values = {"policy": "ear", "results": results, "sessions": sessions, "mode": Mode.THINKTIME}
    return Measured(**values | changes)


def run(*results: Result, **changes: object) -> report.Run:
    return report.run(measured(*results, **changes))


def same(value: float) -> Quantiles:
    return Quantiles(value, value, value, value, value)


def test_requests_are_counted_by_how_they_ended():
    found = run(
        result("a"),
        result("b", status=429, error="429: busy"),
        result("c", status=503, error="503"),
        result("d", status=0, error="timed out"),
    )
    assert (found.policy, found.requests, found.succeeded, found.rejected) == ("ear", 4, 1, 1)
    assert found.success_rate == 0.25


def test_times_are_engine_seconds():
    found = run(result(), result("b", due_at_s=-1.0), time_scale=10.0)
    assert found.ttft_s == same(10.0)
    assert found.tpot_s == same(10.0)
    assert found.itl_s == same(10.0)
    assert found.e2e_s == same(30.0)
    assert found.turn_s
    assert found.turn_s.mean == 35.0
    assert found.output_tokens_per_s == 6 / 30


def test_quantiles_are_linear_between_ranks():
    found = report.quantiles([4.0, 0.0, 1.0, 2.0, 3.0])
    assert found == Quantiles(2.0, 2.0, pytest.approx(3.6), pytest.approx(3.8), pytest.approx(3.96))
    assert report.quantiles([]) is UNSET


def test_apc_is_weighted_by_tokens_and_counts_only_what_is_told():
    rows = (
        result("a", prompt_tokens=300, cached_tokens=150),
        result("b", prompt_tokens=100, cached_tokens=0),
        result("c", cached_tokens=None),
        result("d", error="503"),
    )
    assert run(*rows).apc == 150 / 400
    assert run(result(cached_tokens=None)).apc is UNSET


def test_tokens_are_those_that_engines_counted():
    rows = (
        result("a", prompt_tokens=300, cached_tokens=None),
        result("b", prompt_tokens=100, cached_tokens=48),
        result("c", prompt_tokens=7, counted=False),
        result("d", error="503"),
    )
    assert run(*rows).tokens == report.Tokens(requests=2, prompt=400, completion=6, cached=48)
    assert run(result(cached_tokens=None)).tokens == report.Tokens(1, 100, 3)
    assert run(result(counted=False)).tokens is UNSET


def test_the_ceiling_is_an_infinite_caches():
    sessions = (session("a", 2), session("b", 1))
    found = run(result("a", 0), result("a", 1, at=5.0), result("b", 0, at=1.0), sessions=sessions)
    assert found.apc_ceiling == Ceiling(any=103 / 403, intra_session=103 / 403)
    shared = Session(
        "b", 0.0, (Turn(session="b", number=0, prompt=sessions[0].turns[0].prompt, output_tokens=3),)
    )
    found = run(result("a", 0), result("b", 0, at=1.0), sessions=(sessions[0], shared))
    assert found.apc_ceiling == Ceiling(any=0.5, intra_session=0.0)


def test_hotspot_is_over_endpoints():
    rows = [result(str(i), endpoint=f"e{i}", ttft_s=float(ttft)) for i, ttft in enumerate((1, 2, 6))]
    assert run(*rows).hotspot == Hotspot(2.0, 6.0, 3.0)
    assert run(result(endpoint="")).hotspot is UNSET
    assert run(result(endpoint="")).per_endpoint is UNSET


def test_each_endpoint_has_its_own_numbers():
    found = run(
        result("a"), result("b"), result("b", 1), result("c", endpoint="e0", cached_tokens=None)
    ).per_endpoint
    assert found
    first, second = found
    assert (first.endpoint, first.requests, first.sessions, first.apc) == ("e0", 1, 1, UNSET)
    assert (second.endpoint, second.requests, second.sessions, second.apc) == ("e1", 3, 2, 0.5)
    assert (second.prompt_tokens, second.output_tokens, second.ttft_s) == (300, 9, same(1.0))


def moves(*reasons: str) -> report.Run:
    rows = [result("a", i, at=10.0 * i, reason=reason) for i, reason in enumerate(reasons)]
    return run(*rows, cooldown_s=15.0)


@pytest.mark.parametrize(
    ("reasons", "total", "accuracy", "thrash"),
    [
        pytest.param(["cold", "host"], 0, UNSET, UNSET, id="none"),
        pytest.param(["cold", "moved", "host", "host", "host"], 1, 1.0, 0.0, id="a-good-one"),
        pytest.param(["cold", "moved", "not_worth", "host"], 1, 1.0, 0.0, id="another-is-a-little-cheaper"),
        pytest.param(["cold", "moved", "host", "hot_cooldown", "host"], 1, 0.0, 0.0, id="hot-again"),
        pytest.param(["cold", "moved", "host", "host", "host", "hot_nowhere"], 1, 1.0, 0.0, id="hot-later"),
        pytest.param(["cold", "moved"], 1, UNSET, 0.0, id="nothing-followed"),
        pytest.param(["cold", "moved", "moved", "host"], 2, 0.5, 0.5, id="thrash"),
        pytest.param(["cold", "moved", "host", "moved", "host"], 2, 0.5, 0.0, id="not-within-the-cooldown"),
    ],
)
def test_migrations_come_from_the_gateways_reasons(
    reasons: list[str], total: int, accuracy: float, thrash: float
):
    found = moves(*reasons).migrations
    assert found
    assert (found.total, found.accuracy, found.thrash_rate) == (total, accuracy, thrash)


def test_migrations_are_counted_with_their_rates():
    found = run(result("a", 0), result("a", 1, at=27.0, reason="moved"))
    assert found.migrations == Migrations(
        total=1, per_minute=2.0, per_request=0.5, accuracy=UNSET, thrash_rate=0.0
    )
    assert run(result(reason="")).migrations is UNSET


def test_queue_samples_give_the_node_load_variance():
    assert run(result(), queue_samples=[[0, 4], [1, 1]]).node_load_variance == 2.0
    assert run(result()).node_load_variance is UNSET


def test_wall_clock_factor_and_stretch_compare_with_turns_alone():
    one = session("a", 2, gap_s=2.0)
    ideal_s = sum(
        ideal_turn_s(H20_30B, turn, cached) for turn, cached in zip(one.turns, (0, 103), strict=True)
    )
    rows = (result("a", 0), result("a", 1, at=5.0))
    found = run(*rows, sessions=(one,), engine=H20_30B)
    assert found.wall_clock_factor == pytest.approx(8.0 / (ideal_s + 2.0))
    assert found.stretch == same(pytest.approx(8.0 / (ideal_s + 2.0)))
    faster = run(*rows, sessions=(one,), engine=H20_30B, speed=2.0, time_scale=3.0)
    assert faster.wall_clock_factor == pytest.approx(24.0 / (ideal_s + 1.0))


def test_the_ideal_makespan_is_that_of_the_latest_end():
    sessions = (session("a"), session("b", start_s=100.0))
    found = run(result("a"), result("b", at=100.0), sessions=sessions, engine=H20_30B)
    alone_s = ideal_turn_s(H20_30B, sessions[0].turns[0], 0)
    assert found.wall_clock_factor == pytest.approx(103.0 / (100.0 + alone_s))


def test_interference_is_tpot_over_tpot_alone():
    found = run(result(), sessions=(session(),), engine=H20_30B)
    assert found.interference == pytest.approx(1.0 / H20_30B.decode_step_s(1, 101))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"complete": False}, id="cut-by-time"),
        pytest.param({"mode": Mode.TIMESTAMPS}, id="open-loop"),
        pytest.param({"engine": None}, id="unknown-engine"),
    ],
)
def test_no_wall_clock_factor_where_it_would_mean_nothing(changes: dict):
    values = {"sessions": (session(),), "engine": H20_30B} | changes
    assert run(result(), **values).wall_clock_factor is UNSET


def test_a_session_with_a_failed_turn_has_no_stretch():
    sessions = (session("a", 2),)
    found = run(result("a", 0, error="503"), result("a", 1, at=5.0), sessions=sessions, engine=H20_30B)
    assert found.stretch is UNSET


def test_the_legacy_factor_is_against_the_traces_span():
    turns = tuple(
        Turn(session=name, number=0, prompt=(Segment(name, 1),), output_tokens=1, gap_s=0.0, timestamp_s=at)
        for name, at in (("a", 10.0), ("b", 14.0))
    )
    sessions = tuple(Session(turn.session, 0.0, (turn,)) for turn in turns)
    found = run(result("a"), result("b", at=5.0), sessions=sessions, mode=Mode.TIMESTAMPS, speed=2.0)
    assert found.wall_clock_factor_legacy == 8.0 / 2.0


def test_nothing_measured_is_a_run_with_nothing_known():
    assert json.loads(msgspec.json.encode(run())) == {
        "policy": "ear",
        "requests": 0,
        "succeeded": 0,
        "rejected": 0,
        "success_rate": 0.0,
    }


def document(*runs: report.Run) -> report.Report:
    return report.Report(
        simulated=True, mode="thinktime", time_scale=5.0, trace={"name": "agentic"}, runs=runs, endpoints=2
    )


FULL = run(
    result("a", 0),
    result("a", 1, at=5.0, reason="moved"),
    sessions=(session("a", 2),),
    engine=H20_30B,
    queue_samples=[[0, 1]],
    scheduling=Scheduling(0.1, 0.1, 0.3, {"index": 0.02}),
)


def test_a_document_reads_back_and_says_its_schema():
    text = report.encode(document(FULL, run()))
    assert report.decode(text) == document(FULL, run())
    raw = json.loads(text)
    assert next(iter(raw.items())) == ("schema", "perilune.report/v1")
    assert set(raw) == {"schema", "simulated", "mode", "endpoints", "time_scale", "trace", "runs"}
    only_simulations = {"rate", "seeds", "intervals", "floor_ttft_s", "regret", "preemptions", "sessions"}
    only_simulations |= {"abandoned", "all_ttft_s"}
    fields = {field.encode_name for field in msgspec.structs.fields(report.Run)}
    assert set(raw["runs"][0]) == fields - only_simulations - {"wall_clock_factor_legacy"}
    assert "null" not in text.decode()


def test_another_schema_is_refused():
    with pytest.raises(msgspec.ValidationError, match=r"Invalid enum value 'x' - at `\$.schema`"):
        report.decode(report.encode(document()).replace(b"perilune.report/v1", b"x"))


def test_the_documentation_names_every_field():
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    structs = (
        report.Report,
        report.Run,
        report.Ceiling,
        report.Migrations,
        report.Hotspot,
        report.Scheduling,
        report.PerEndpoint,
    )
    named = {field.encode_name for struct in structs for field in msgspec.structs.fields(struct)}
    assert {name for name in named if f"`{name}`" not in text} == set()


def printed(found: report.Report, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.table(found))
    return console.export_text()


def test_the_table_has_a_column_per_policy_and_no_unknown_rows():
    text = printed(document(FULL, replace_policy(run(result()), "sticky")))
    assert "simulated" in text
    assert "ear" in text
    assert "sticky" in text
    assert "TTFT p90" in text
    assert "wall-clock factor" in text
    assert "node-load variance" not in printed(document(run(result())))
    assert "simulated" not in printed(msgspec.structs.replace(document(FULL), simulated=False))


def test_three_policies_fit_into_80_columns():
    busy = replace_policy(FULL, "least_loaded")
    narrow = printed(document(*[busy] * 3), width=80)
    assert narrow.count("\n") == printed(document(*[busy] * 3), width=400).count("\n"), "a row was wrapped"
    assert "scheduling p50 / p99" in narrow


def replace_policy(found: report.Run, policy: str) -> report.Run:
    return msgspec.structs.replace(found, policy=policy)


@pytest.mark.parametrize(
    "ttft_s", [None, {"ear": [0.1, 0.5, 2.0]}], ids=["quantiles only", "whole distribution"]
)
def test_figures_are_drawn_from_whatever_is_known(tmp_path: Path, ttft_s: dict | None):
    path = tmp_path / "f.png"
    from perilune_lab.report import figure  # here, since matplotlib takes half a second

    figure.draw(document(FULL, replace_policy(run(), "round_robin")), path, ttft_s)
    assert path.read_bytes().startswith(b"\x89PNG")
