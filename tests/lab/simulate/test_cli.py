"""`perilune simulate` as a user calls it."""

from pathlib import Path

import pytest
from msgspec import UNSET

from perilune_lab import report
from perilune_lab.simulate.cli import main
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.jsonl import write

QUICK = [
    "--endpoints",
    "2",
    "--window",
    "30",
    "--warmup",
    "5",
    "--rates",
    "0.5",
    "--seeds",
    "2",
    "--jobs",
    "1",
]


def test_the_table_names_its_deployment_and_says_that_it_is_simulated(capsys) -> None:
    assert main([*QUICK, "--policies", "perilune,round_robin", "--arm", "store"]) == 0
    said = capsys.readouterr()
    assert "SIMULATED · arm store, 2 H20 · 0.5 sessions/s · 2 seeds" in said.out
    assert "ms of CPU per turn" in said.out
    assert all(policy in said.out for policy in ("perilune", "round_robin"))
    assert "2/2: rate 0.5, seed 2" in said.err


def test_the_report_holds_everything_that_was_assumed(tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    options = ["--policies", "perilune", "--prefill", "1", "--faults", "noise=0.2", "--json", str(file)]
    assert main([*QUICK, *options]) == 0
    found = report.decode(file.read_bytes())
    assert found.simulated
    assert found.trace["deployment"] == "arm none, 2 H20, 1 only prefill"
    assert found.trace["faults"]["step_noise"] == 0.2
    assert [e["role"] for e in found.trace["pool"]["spec"]["endpoints"]] == ["prefill", "decode"]
    (run,) = found.runs
    assert run.seeds == (1, 2)
    assert run.requests == run.succeeded > 0


def test_clients_that_leave_are_counted(tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    options = ["--policies", "round_robin", "--patience", "0.5", "--json", str(file)]
    assert main([*QUICK, "--rates", "2", *options]) == 0
    found = report.decode(file.read_bytes())
    assert found.trace["patience_s"] == 0.5
    (run,) = found.runs
    said = capsys.readouterr().out
    assert run.abandoned > 0
    assert f"clients closed {run.abandoned:,} requests, {run.sessions.lost:,} sessions lost" in said
    assert run.requests - run.succeeded >= run.requests / 10
    assert run.all_ttft_s is UNSET or run.all_ttft_s.p90 is UNSET
    assert "never" in said


def test_sessions_that_would_begin_late_are_refused(tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    options = ["--policies", "perilune", "--begin-within", "2", "--json", str(file)]
    assert main([*QUICK, "--rates", "2", *options]) == 0
    (run,) = report.decode(file.read_bytes()).runs
    assert run.rejected > 0
    assert run.requests - run.succeeded == run.rejected == run.sessions.lost
    assert "sessions lost" in capsys.readouterr().out


def test_a_file_is_played(tmp_path: Path, capsys) -> None:
    file = tmp_path / "trace.jsonl"
    write(generate(Agentic(sessions_per_s=1.0), 3, 10), file)
    assert main(["--trace", str(file), "--policies", "least_loaded", "--endpoints", "2", "--seeds", "1"]) == 0
    assert "1 × recorded speed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policies", "fastest"], "Unknown policy 'fastest'"),
        (["--prefill", "8"], "8 of 8 endpoints only prefill: none decodes - at `--prefill`"),
        (["--store", "3GBps"], "arm none has no store, so it has no speed - at `--store`"),
        (["--store-prompts-only"], "arm none has no store - at `--store-prompts-only`"),
        (["--store-tokens", "1000"], "arm none has no store - at `--store-tokens`"),
        (
            ["--arm", "store", "--store-tokens", "100"],
            "a store of 100 tokens has no block of 256 - at `--store-tokens`",
        ),
        (["--arm", "store", "--store", "fast"], "must be a speed such as 3GBps - at `--store`"),
        (["--trace", "/absent"], "/absent: no such file - at `--trace`"),
        (["--mode", "timestamps"], "generated traffic has no timestamps"),
        (["--warmup", "900"], "nothing is measured"),
        (["--rates", "fast"], "'fast' is neither a number above 0 nor a multiple of R - at `--rates`"),
        (["--faults", "dead=8"], "dead=8: the last endpoint is 7 - at `--faults`"),
        (["--faults", "drain=8@20"], "drain=8: the last endpoint is 7 - at `--faults`"),
        (["--faults", "drain=0.5"], "drain=0.5: must be an endpoint's number, from 0 - at `--faults`"),
        (["--faults", "rolling=20@1"], "rolling=20@1: only `dead` and `drain` have a time - at `--faults`"),
        (["--param", "ear.warp=1"], "ear has no parameter 'warp'"),
        (["--param", "limits.warp=1"], "limits has no parameter 'warp'"),
        (["--overlap"], "arm none hands no KV over, unless with `--prefill` - at `--overlap`"),
        (["--kv-tokens", "1000"], "which a KV pool of 1,000 does not hold"),
        (["--endpoints", "5000"], "at most 1,000 - at `--endpoints`"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(argv: list[str], says: str, capsys) -> None:
    assert main(argv) == 2
    assert says in capsys.readouterr().err
