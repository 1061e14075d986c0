"""A whole evaluation on a tiny scenario: bars, every figure, tables, documents, and the command around it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC
from functools import partial
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from perilune_lab.simulate import measure
from perilune_lab.terminal.exits import WRONG_CALL
from perilune_research.evaluate import cells, cli, extra, page, plan, tables
from perilune_research.evaluate.bars import METRICS, judge, rivals
from perilune_research.evaluate.cells import Scenario
from perilune_research.evaluate.evaluation import evaluate
from perilune_research.evaluate.figures import FIGURES
from perilune_research.evaluate.findings import Findings
from perilune_research.evaluate.plan import NEEDS
from perilune_research.evaluate.traffic import traffic
from perilune_research.evaluate.work import Work
from perilune_research.simulator.deployment import Deployment

BASE = Scenario(rate=0.4, endpoints=2, window_s=25.0, warmup_s=5.0)
SIZE = plan.size(quick=True, seeds=2, first=1)
pytestmark = [pytest.mark.timeout(600), pytest.mark.heavy]


@pytest.fixture(autouse=True, scope="module")
def less_work() -> Iterator[None]:
    """Coarser intervals and a shorter look at the traffic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "RESAMPLES", 50)
        patch.setattr(cli, "traffic", partial(traffic, sessions=200))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def findings(folder: Path) -> Findings:
    return evaluate(Work(folder, 1), NEEDS, SIZE, BASE)


class Written(NamedTuple):
    out: Path
    shown: str


def tiny(options: cli.Options) -> cli.Options:
    small = replace(options.base, endpoints=2, window_s=25.0, warmup_s=5.0)
    recorded = small.trace != BASE.trace
    return replace(options, base=small if recorded else replace(small, rate=BASE.rate))


def play(work: Path, out: Path, *more: str) -> str:
    """`python -m perilune_research evaluate` on the tiny scenario; what it prints."""
    argv = ["--quick", "--seeds", "2", "--jobs", "1", "--out", str(out), "--work", str(work), *more]
    shown = Console(record=True, width=200, file=StringIO())
    for part in cli.run(tiny(cli.parse(argv)), Console(quiet=True)):
        shown.print(part)
    return shown.export_text()


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    out = tmp_path_factory.mktemp("out")
    return Written(out, play(folder, out))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_with_its_data_and_its_label(name: str, written: Written):
    data = json.loads((written.out / f"{name}.json").read_text())
    assert (data["figure"], data["simulated"]) == (name, True)
    assert "SIMULATED" in (written.out / f"{name}.svg").read_text()
    assert (written.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    sizes = {end: (written.out / f"{name}.{end}").stat().st_size for end in ("svg", "png", "json")}
    assert max(sizes.values()) < 300_000, sizes
    assert sizes["json"] < 40_000, sizes


def test_all_bars_are_judged(findings: Findings):
    bars = judge(findings)
    assert tuple(bar.name for bar in bars) == plan.BARS
    assert all(bar.checks for bar in bars)


def test_a_value_lies_inside_its_interval(findings: Findings):
    for bar in judge(findings):
        for check in bar.checks:
            assert check.low <= check.value <= check.high or check.low == check.high, check


def test_rivals_are_the_best_of_the_others_and_static_pd_has_no_say_in_tpot(findings: Findings):
    rows = rivals(findings, "R")
    assert [row.metric for row in rows] == list(METRICS)
    assert "perilune" not in {row.best for row in rows}
    assert "static_pd" not in {row.best for row in rows if row.metric.name.startswith("TPOT")}
    ttft = next(row for row in rows if row.metric.name == "TTFT p90")
    runs = [findings.pooled(plan.Point(plan.scenario(findings.at_r), profile)) for profile in plan.EVERY]
    others = {run.policy: run.ttft_s.p90 for run in runs if run.policy != "perilune"}
    assert ttft.best == min(others, key=others.__getitem__)


def test_the_side_view_has_the_side_seeds_only(findings: Findings):
    point = plan.Point(plan.scenario(findings.at_r), plan.OURS)
    assert list(findings.results(point)) == [1, 2]
    assert list(findings.side.results(point)) == [1]


def test_a_point_that_was_not_simulated_is_named(findings: Findings):
    with pytest.raises(KeyError, match="perilune was not simulated"):
        findings.results(plan.Point(replace(BASE, rate=9.0), plan.OURS))


def test_the_end_to_end_table_has_every_policy_lowest_ttft_first(findings: Findings):
    table = tables.end_to_end(findings, "R")
    assert {row[0] for row in table.rows} == {profile.policy for profile in plan.EVERY}
    p90 = [
        findings.pooled(plan.Point(plan.scenario(findings.at_r), plan.Profile(row[0]))).ttft_s.p90
        for row in table.rows
    ]
    assert p90 == sorted(p90)
    assert all(len(row) == len(table.header) for row in table.rows)


def test_everything_is_written_and_every_table_names_its_arm(written: Written, findings: Findings):
    names = {path.name for path in written.out.iterdir()}
    assert names == {
        "none.md",
        "none.json",
        *(f"{f}.{end}" for f in FIGURES for end in ("svg", "png", "json")),
    }
    text = (written.out / "none.md").read_text()
    assert "**simulated**" in text
    assert "--quick --seeds 2`" in text
    assert str(written.out) not in text
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(titles) == 2 + len(page.sections(findings, tuple(page.SECTIONS)))
    for table in page.sections(findings, tuple(page.SECTIONS)):
        assert "arm none, generated traffic" in table.title or "deployment arm" in table.header, table.title
    assert all(f"\n{name} " in written.shown for name in plan.BARS)


def test_the_data_file_names_arm_and_traffic_and_has_every_policy_at_every_load(written: Written):
    data = json.loads((written.out / "none.json").read_text())
    assert (data["simulated"], data["arm"], data["ships"], data["traffic"]) == (
        True,
        "none",
        True,
        "generated traffic",
    )
    played = {(row["policy"], row["load"]) for row in data["main"]}
    assert played == {(profile.policy, load) for profile in plan.EVERY for load in plan.BAR_LOADS}
    assert {(row["load"], row["admission"]) for row in data["admission"]} == {
        (load, on) for load in plan.LOADS for on in (False, True)
    }
    verdicts = {bar["name"]: bar["checks"] for bar in data["bars"]}
    assert tuple(verdicts) == plan.BARS


def test_a_session_that_was_lost_never_ends():
    cell = cells.Cell(replace(BASE, warmup_s=0.0), plan.OURS, 1)
    workload = cell.scenario.workload(1)
    outcome = cells.play(cell, workload)
    whole = extra.measure(outcome, workload, 1)
    assert whole.completion_p90_s
    firsts = [r for r in outcome.requests if r.task.number == 0]
    for first in firsts[: len(firsts) // 5]:
        first.rejected = True
    lossy = extra.measure(outcome, workload, 1)
    assert lossy.sessions == whole.sessions == len(firsts)
    assert not lossy.completion_p90_s


@pytest.mark.parametrize("arm", [Deployment.STORE, Deployment.PULL])
def test_other_arms_are_played_with_the_traffic_of_arm_none(arm: Deployment, folder: Path, tmp_path: Path):
    shown = play(folder, tmp_path, "--arm", arm, "--only", "moves", "--r", "0.5")
    assert {path.name for path in tmp_path.iterdir()} == {f"{arm}.md", f"{arm}.json"}
    assert f"arm {arm} · R = 0.5" in shown
    assert f"| arm | {arm}: {tables.MEANS[arm]} |" in (tmp_path / f"{arm}.md").read_text()


def test_a_recorded_trace_is_played_and_named_without_its_folder(folder: Path, tmp_path: Path):
    lines = [
        {"timestamp": 400 * i, "input_length": 2048, "output_length": 20, "hash_ids": [1, 2, 3, 10 + i]}
        for i in range(60)
    ]
    trace = tmp_path / "recorded.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    play(folder, out, "--trace", str(trace), "--only", "main", "--r", "2")
    text = (out / "recorded-none.md").read_text()
    assert "## End to end at R = 2 × recorded speed — arm none, recorded traffic recorded.jsonl" in text
    assert "--trace recorded.jsonl" in text
    assert str(tmp_path) not in text


def test_a_part_alone_writes_that_part_alone(folder: Path, tmp_path: Path):
    play(folder, tmp_path, "--only", "f5")
    assert {path.name for path in tmp_path.iterdir()} == {"f5.svg", "f5.png", "f5.json"}


def test_bars_alone_are_judged_as_with_all_others(folder: Path, tmp_path: Path, findings: Findings):
    shown = play(folder, tmp_path, "--only", "P6,P1")
    p1, p6 = judge(findings, ("P1", "P6"))
    assert (p1.name, p6.name) == ("P1", "P6")
    assert p6.checks == next(bar for bar in judge(findings) if bar.name == "P6").checks
    assert all(f"\n{bar.name} {bar.verdict}" in shown for bar in (p1, p6))
    assert "\nP2 " not in shown


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--only", "f99"]) == 2
    assert "Unknown part 'f99'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    assert cli.main(["--out", str(tmp_path / "file" / "out"), "--work", str(tmp_path)]) == 2
    assert "at `--out`" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--work"])
def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = {"--out": str(tmp_path), "--work": str(tmp_path)} | {option: "/proc"}
    assert cli.main([word for pair in argv.items() for word in pair]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m perilune_research evaluate: /proc: ")
    assert f"at `{option}`" in said


def test_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(*given: object) -> int:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "run", full)
    assert cli.main(["--out", str(tmp_path)]) == WRONG_CALL
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].endswith("No space left on device - under `--out` or `--work`")


def test_the_help_names_options_and_parts(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--quick", "--seeds-from", "--only", "goes on", *NEEDS))
