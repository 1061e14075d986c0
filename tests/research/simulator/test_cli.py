import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG

from perilune_lab import report
from perilune_lab.terminal.exits import PIPE_CLOSED
from perilune_research.simulator.cli import main
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.options import parse

GENERATED = {"window_s", "warmup_s", "zipf_alpha", "context_tokens"}
QUICK = ["--window", "60", "--warmup", "0", "--jobs", "1", "--seeds", "2"]


def test_a_table_a_report_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = ["--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png")]
    assert main(["--policies", "ear,round_robin", "--rates", "0.5,1", *QUICK, *files]) == 0
    said = capsys.readouterr()
    assert said.out.count("SIMULATED") == 2
    assert "round_robin" in said.out
    assert "× real time per core" in said.out
    assert "4/4: rate 1, seed 2" in said.err
    document = report.decode((tmp_path / "r.json").read_bytes())
    assert document.simulated
    assert [(run.rate, run.policy, run.seeds) for run in document.runs] == [
        (0.5, "ear", (1, 2)),
        (0.5, "round_robin", (1, 2)),
        (1.0, "ear", (1, 2)),
        (1.0, "round_robin", (1, 2)),
    ]
    assert document.trace["faults"]["engine_belief"] == 1.3
    assert document.trace.keys() > GENERATED
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_recorded_trace_open_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = [
        {"timestamp": 100 * i, "input_length": 1024, "output_length": 9, "hash_ids": [0, i]}
        for i in range(40)
    ]
    path = tmp_path / "mooncake.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    argv = ["--trace", str(path), "--policies", "sticky", "--rates", "1,4", "--mode", "timestamps"]
    assert main([*argv, "--seeds", "1", "--jobs", "1", "--json", str(tmp_path / "r.json")]) == 0
    assert "4 × recorded speed" in capsys.readouterr().out
    trace = report.decode((tmp_path / "r.json").read_bytes()).trace
    assert trace.keys().isdisjoint(GENERATED)


@pytest.mark.parametrize(("kv_tokens", "status"), [(1032, 2), (1033, 0)])
def test_a_recorded_request_that_no_pool_holds(
    kv_tokens: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "mooncake.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [0, 1]}
    path.write_text(json.dumps(line))
    argv = ["--trace", str(path), "--policies", "sticky", "--rates", "1", "--mode", "timestamps"]
    assert main([*argv, "--seeds", "1", "--jobs", "1", "--kv-tokens", str(kv_tokens)]) == status
    said = capsys.readouterr().err
    assert ("a request of 1,033 tokens, with its answer, does not fit" in said) == bool(status)


def test_short_generated_requests_fit_small_pools(capsys: pytest.CaptureFixture[str]):
    argv = ["--policies", "ear", "--rates", "1", "--kv-tokens", "20000", "--context-tokens", "20000"]
    assert main([*argv, *QUICK]) == 0


def test_rates_may_be_multiples_of_r(capsys: pytest.CaptureFixture[str]):
    argv = ["--policies", "ear", "--rates", "R/2,R,1.25R", "--reference", "round_robin"]
    assert main([*argv, *QUICK[:-1], "1"]) == 0
    said = capsys.readouterr()
    assert "R = " in said.err
    assert said.out.count("SIMULATED") == 3


def test_where_engines_hand_kv_over_it_says_how_often_kv_was_fetched(
    capsys: pytest.CaptureFixture[str],
):
    argv = ["--policies", "round_robin", "--rates", "0.5", *QUICK]
    assert main(["--arm", "handoff", "--param", "pull.maxSeconds=1", *argv]) == 0
    said = capsys.readouterr().out
    before, _, counts = said.rpartition("prefix another endpoint cached, by what happened to it:")
    assert before.endswith("round_robin: requests whose ")
    assert "copied" in counts
    assert main(["--arm", "none", *argv]) == 0
    assert "another endpoint cached" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--policies", "best"], "Unknown policy 'best'"),
        (["--rates", "fast"], "at `--rates`"),
        (["--arm", "store", "--store", "3"], "at `--store`"),
        (["--store", "3GBps"], "arm none has no store, so it has no speed - at `--store`"),
        (["--faults", "fire"], "at `--faults`"),
        (["--param", "cooldown_seconds=-1"], "at `--param`"),
        (["--mode", "max"], "no timestamps"),
        (["--warmup", "1800"], "nothing is measured"),
        (["--rates", "0R"], "at `--rates`"),
        (["--rates", "R/0"], "at `--rates`"),
        (["--reference", "best"], "at `--reference`"),
        (["--reference", "ear,sticky"], "one policy - at `--reference`"),
        (["--faults", "dead=8@60"], "the last endpoint is 7 - at `--faults`"),
        (["--trace", "absent.jsonl"], "absent.jsonl: no such file - at `--trace`"),
        (["--trace", "/dev/null"], "/dev/null: no regular file - at `--trace`"),
        (["--trace", __file__, "--zipf", "1"], "is played as it was recorded - at `--zipf`"),
        (["--trace", __file__, "--context-tokens", "9"], "recorded - at `--context-tokens`"),
        (["--trace", __file__, "--window", "60"], "recorded - at `--window`"),
        (["--trace", __file__, "--warmup", "0"], "recorded - at `--warmup`"),
        (["--limit", "5"], "generated traffic ends with `--window` - at `--limit`"),
        (["--endpoints", "10001"], "10,001 endpoints: at most 10,000 - at `--endpoints`"),
        (["--rates", "1,1000000"], "1,800,000,000 sessions: at most 1,000,000 - at `--rates`, `--window`"),
        (["--kv-tokens", "131071"], "up to 131,072 tokens, which a KV pool of 131,071 does not hold"),
        (["--context-tokens", "500", "--kv-tokens", "499"], "`--context-tokens 499` - at `--kv-tokens`"),
        (["--rates", "0.0001", "--window", "2", "--warmup", "1", "--seeds", "1"], "no request"),
    ],
)
def test_wrong_calls_are_one_line(argv: list[str], what: str, capsys: pytest.CaptureFixture[str]):
    assert main([*argv, "--jobs", "1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("python -m perilune_research simulate: ")
    assert what in said[-1]


@pytest.mark.parametrize("option", ["--json", "--png"])
def test_a_full_disk_is_one_line(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    assert main(["--policies", "ear", "--rates", "1", *QUICK, option, str(full)]) == 2
    said = capsys.readouterr()
    assert "No space left on device" in said.err.splitlines()[-1]
    assert "SIMULATED" in said.out, "the table comes all the same"


def test_the_report_is_there_before_anybody_reads_the_table(tmp_path: Path):
    path = tmp_path / "r.json"
    argv = ["simulate", "--policies", "ear", "--rates", "1", *QUICK, "--json", str(path)]
    code = "import sys; from perilune_research.__main__ import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.stdout.close()
    assert process.wait(HANG) == PIPE_CLOSED
    assert [run.policy for run in report.decode(path.read_bytes()).runs] == ["ear"]


def test_assumptions_reach_the_plan():
    argv = "--store 5GBps --link loaded --kv-tokens 100000 --context-tokens 90000 --arm store --overlapped"
    argv += " --param ear.cooldown_seconds=10 --seeds-from 7 --seeds 2 --zipf 0.5"
    options = parse(argv.split())
    comparison = options.comparison
    hardware = comparison.fleet.hardware
    assert (hardware.engine.store_bytes_per_s, hardware.kv_pool_tokens) == (5e9, 100_000)
    assert hardware.link.fixed_s == 0.3
    assert (comparison.deployment, comparison.fleet.overlapped) == (Deployment.STORE, True)
    assert comparison.fleet_for("ear").store
    assert comparison.routing.policy.ear.cooldown_seconds == 10.0
    assert (comparison.load.parameters.zipf_alpha, comparison.load.parameters.context_tokens) == (0.5, 90_000)
    assert options.seeds == (7, 8)


def test_a_rate_given_twice_is_played_once(tmp_path: Path):
    path = tmp_path / "r.json"
    assert main(["--policies", "ear", "--rates", "1,1.0", *QUICK, "--json", str(path)]) == 0
    assert [run.seeds for run in report.decode(path.read_bytes()).runs] == [(1, 2)]
