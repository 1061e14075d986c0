"""`perilune simulate` as a user calls it."""

import io
from pathlib import Path

import fast_yaml
import pytest
from msgspec import UNSET

from perilune_lab import report
from perilune_lab.simulate import pool_file, tables
from perilune_lab.simulate.cli import main
from perilune_lab.terminal.console import Console
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.jsonl import write

SHORT = ["--window", "30", "--warmup", "5", "--rates", "0.5", "--seeds", "2", "--jobs", "1"]
QUICK = ["--endpoints", "2", *SHORT]


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
    assert found.trace["deployment"] == "arm handoff, 2 H20, 1 only prefill"
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
        (["--kv-tokens", "100"], "has no two blocks of 256 - at `--kv-tokens`, `--block-size`"),
        (["--endpoints", "5000"], "at most 1,000 - at `--endpoints`"),
        (["--rates", "0.0000001"], "at least 0.001 - at `--rates`"),
        (["--pool", "/absent.yaml"], "/absent.yaml: No such file or directory - at `--pool`"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(argv: list[str], says: str, capsys) -> None:
    assert main(argv) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--window", "--warmup"])
def test_a_file_has_no_window_even_as_long_as_that_of_generated_traffic(
    option: str, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "trace.jsonl"
    write(generate(Agentic(sessions_per_s=1.0), 3, 1), file)
    assert main(["--trace", str(file), option, "900" if option == "--window" else "300"]) == 2
    assert f"is played as it was recorded - at `{option}`" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_told_what_one_is(tmp_path: Path, capsys) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("timestamp,input_length\n1,2\n")
    assert main(["--trace", str(file)]) == 2
    assert "trace.csv:1: JSON is malformed" in (said := capsys.readouterr().err)
    assert "in the schema of Mooncake, Qwen-Bailian or Perilune - at `--trace`" in said


POOL = """\
kind: Service
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
---
apiVersion: perilune.dev/v1alpha1
kind: InferencePool
spec:
  model: {name: coder}
  replicas: 2
  prefillReplicas: 1
  engine: {kvPoolTokens: 200000}
  mooncake: {transfer: handoff, store: {enabled: true, segmentSize: 1Gi, saveDecodeCache: false}}
  routing:
    policy: {name: sticky}
    pull: {maxSeconds: 0.2}
    sessionAdmission: {maxWaitSeconds: 7}
    shadow: {policies: [ear]}
  gateway: {parent: {name: inference}, replicas: 3}
"""


def test_a_pool_gives_what_no_option_says(tmp_path: Path, capsys) -> None:
    file, report_file = tmp_path / "pool.yaml", tmp_path / "report.json"
    file.write_text(POOL)
    options = ["--pool", str(file), "--endpoints", "4", "--admission", "--json", str(report_file)]
    assert main([*SHORT, *options]) == 0
    found = report.decode(report_file.read_bytes())
    assert found.trace["deployment"] == "arm both, 4 H20, 1 only prefill, 3 gateways, answers are not stored"
    assert found.trace["store_tokens"] == 4 * 2**30 // 98_304 // 256 * 256
    assert found.trace["kv_tokens"] == 200_000
    routing = found.trace["pool"]["spec"]["routing"]
    assert routing["pull"]["maxSeconds"] == 0.2
    assert routing["sessionAdmission"] == {
        **routing["sessionAdmission"],
        "enabled": True,
        "maxWaitSeconds": 7.0,
    }
    assert not routing["shadow"]["policies"]
    assert {run.policy for run in found.runs} == {
        "sticky",
        "perilune",
        "lmetric_plus_one",
        "ear",
        "round_robin",
    }
    assert "every engine is simulated as one H20" in capsys.readouterr().err


def test_the_document_of_a_gateway_is_a_pool_as_well(capsys) -> None:
    assert main([*SHORT, "--policies", "perilune", "--pool", "examples/local/split.yaml"]) == 0
    assert "arm handoff, 3 H20, 1 only prefill · 0.5 sessions/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "options", "deployment"),
    [
        ("replicas: 3", [], "arm none, 3 H20, 2 gateways"),
        ("scaling: {minReplicas: 2, maxReplicas: 4}", [], "arm none, 2 H20, 2 gateways"),
        ("replicas: 9, scaling: {minReplicas: 2, maxReplicas: 4}", [], "arm none, 4 H20, 2 gateways"),
        (
            "gateway: {parent: {name: i}, replicas: 1, minReplicas: 3, maxReplicas: 5}",
            [],
            "arm none, 1 H20, 3 gateways",
        ),
        (
            "prefillReplicas: 1, mooncake: {transfer: handoff}",
            ["--prefill", "0", "--arm", "none", "--gateways", "1"],
            "arm none, 2 H20",
        ),
        ("prefillReplicas: 1, mooncake: {transfer: handoff}", ["--arm", "both"], "arm both, 2 H20, 1 only"),
    ],
)
def test_an_option_overrides_the_pool(
    spec: str, options: list[str], deployment: str, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(f"kind: InferencePool\nspec: {{model: {{name: m}}, {spec}}}")
    assert main([*SHORT, "--seeds", "1", "--policies", "sticky", "--pool", str(file), *options]) == 0
    assert f"SIMULATED · {deployment}" in capsys.readouterr().out


def test_a_pool_has_as_many_gateways_as_the_chart_gives_it() -> None:
    values = fast_yaml.load((Path(__file__).parents[3] / "charts/perilune/values.yaml").read_text())
    assert values["gatewayReplicas"] == pool_file.GATEWAYS


def test_a_pool_that_prefills_separately_is_not_played_without_hand_offs(tmp_path: Path, capsys) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(POOL)
    assert main([*SHORT, "--pool", str(file), "--arm", "store"]) == 2
    assert "leave them out with `--prefill 0` - at `--arm`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "pool.yaml is no YAML"),
        (
            "kind: Service",
            "pool.yaml has no objects of kind InferencePool (perilune.dev), needs one - at `--pool`",
        ),
        ("kind: InferencePool\nspec: [1]", "pool.yaml: must be an object - at `$.spec`"),
        (
            "kind: InferencePool\nspec: {model: {name: m}, routng: {}}",
            "pool.yaml: unknown field - at `$.spec.routng`",
        ),
        (
            "kind: InferencePool\nspec:\n  model: {name: m}\n"
            "  mooncake: {store: {enabled: true, segmentSize: '0'}}",
            "A store without room keeps nothing - at `$.spec.mooncake.store.segmentSize`",
        ),
        (
            "kind: InferencePool\nspec: {model: {name: m}, replicas: 0}",
            "A pool without endpoints answers nothing - at `$.spec.replicas`",
        ),
        (
            "kind: InferencePool\nspec: {model: {name: m}, mooncake: {transfer: offload}}",
            "is not simulated: take none or handoff - at `$.spec.mooncake.transfer`",
        ),
    ],
)
def test_a_wrong_pool_is_named_with_its_field(text: str, says: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(text)
    assert main(["--pool", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_a_narrow_terminal_gets_whole_columns() -> None:
    run = report.Run(
        policy="lmetric_plus_one",
        requests=9,
        succeeded=9,
        rejected=0,
        success_rate=1.0,
        rate=1.0,
        ttft_s=report.Quantiles(mean=0.2, p50=0.2, p90=0.2, p95=0.2, p99=0.2),
        intervals={"ttft_s.p90": (0.1, 0.3)},
    )
    for width in (60, 80, 200):
        (grid,) = tables.tables([run], "sessions/s", "arm none", width)
        out = Console(width=width, file=io.StringIO())
        out.print(grid)
        said = out.file.getvalue()
        assert "200 ms [100–300]" in said
        assert "…" not in said
        assert ("too narrow for regret" in " ".join(said.split())) == (width < 200)
