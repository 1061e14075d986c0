"""A whole evaluation on a tiny scenario: bars, every figure, tables, documents, and the command around it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC
from functools import partial
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from msgspec import UNSET
from rich.console import Console

from perilune_lab.exits import WRONG_CALL
from perilune_lab.formats import as_number
from perilune_research.evaluate import cli, document, plan, readme, tables, thresholds
from perilune_research.evaluate.bars import METRICS, Bar, Check, judge, rivals
from perilune_research.evaluate.cells import Scenario
from perilune_research.evaluate.evaluation import evaluate
from perilune_research.evaluate.figures import FIGURES
from perilune_research.evaluate.findings import Findings
from perilune_research.evaluate.plan import NEEDS
from perilune_research.evaluate.traffic import traffic
from perilune_research.evaluate.work import Work
from perilune_research.simulator import measure

BASE = Scenario(rate=0.4, endpoints=2, window_s=50.0, warmup_s=5.0)
SIZE = plan.size(quick=True, seeds=2, first=1)
pytestmark = pytest.mark.timeout(600)
BARS = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8")


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


def play(work: Path, out: Path, *more: str) -> str:
    """`python -m perilune_research evaluate` on the tiny scenario; what it prints."""
    argv = ["--quick", "--seeds", "2", "--jobs", "1", "--out", str(out), "--work", str(work), *more]
    shown = Console(record=True, width=200, file=StringIO())
    for part in cli.run(replace(cli.parse(argv), base=BASE), Console(quiet=True)):
        shown.print(part)
    return shown.export_text()


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    out = tmp_path_factory.mktemp("out")
    (out / readme.NOTES).write_text("P9 was tried twice.")
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
    assert tuple(bar.name for bar in bars) == BARS
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
    runs = [findings.pooled(plan.Point(plan.scenario(findings.at_r), arm)) for arm in plan.EVERY]
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
    assert {row[0] for row in table.rows} == {arm.policy for arm in plan.EVERY}
    p90 = [
        findings.pooled(plan.Point(plan.scenario(findings.at_r), plan.Arm(row[0]))).ttft_s.p90
        for row in table.rows
    ]
    assert p90 == sorted(p90)
    assert all(len(row) == len(table.header) for row in table.rows)


def test_everything_is_written_and_read_again(written: Written):
    out = written.out
    names = {path.name for path in out.iterdir()}
    assert names >= {"README.md", "tables.md", "results.json", *(f"{f}.svg" for f in FIGURES)}
    page = (out / readme.README).read_text()
    assert "**simulated**" in page
    assert "P9 was tried twice." in page
    assert "- Sessions per second within the SLO, highest first: " in page
    assert "begin per simulation at R" in page
    assert all(f"![{name}, simulated]({name}.svg)" in page for name in FIGURES)
    assert all(f"\n{name} " in written.shown for name in BARS)
    assert "agree with those of" not in written.shown  # there was nothing to compare with
    table = (out / readme.TABLES).read_text()
    assert all(f"## End to end at {load} = " in table for load in plan.LOADS)
    kept = document.read(out)
    assert kept is not None
    assert tuple(kept.verdicts) == BARS


def test_verdicts_survive_writing_and_reading(written: Written, findings: Findings):
    kept = document.read(written.out)
    assert kept is not None
    judged = judge(findings)
    assert [(bar.verdict, bar.clear) for bar in kept.bars] == [(bar.verdict, bar.clear) for bar in judged]


def test_other_seeds_say_whether_verdicts_agree(written: Written, findings: Findings):
    before = document.read(written.out)
    assert before is not None
    assert before.compared is UNSET
    other = msgspec.structs.replace(before, seeds=(11, 12))
    made = document.document(findings, before.bars, other)
    close = tuple(bar.name for bar in before.bars if not bar.clear)
    assert made.compared == document.Compared("quick", (11, 12), other.r, other.verdicts, close)
    again = document.document(findings, before.bars, made)
    assert again.compared == made.compared  # equal seeds prove nothing: what was compared is kept


@pytest.mark.parametrize("seeds", [(11, 12), None], ids=["other seeds", "the same seeds"])
def test_what_other_code_found_is_not_compared(
    written: Written, findings: Findings, seeds: tuple[int, ...] | None
):
    before = document.read(written.out)
    assert before is not None
    assert before.code
    compared = document.Compared("quick", (11, 12), 1.0, before.verdicts)
    other = msgspec.structs.replace(before, seeds=seeds or before.seeds, code="other", compared=compared)
    assert document.document(findings, before.bars, other).compared is UNSET


def test_the_text_names_the_thresholds_that_were_chosen(findings: Findings, written: Written):
    page = (written.out / readme.README).read_text()
    for choice in thresholds.choices(findings):
        assert f"- {choice.name}: {as_number(choice.chosen)}, {choice.reason}." in page


def test_the_text_says_at_every_load_where_others_are_better(findings: Findings, written: Written):
    page = (written.out / readme.README).read_text()
    for load in plan.LOADS:
        starts = (f"- At {load}, other policies are better in ", f"- At {load}, no policy is better ")
        (line,) = (row for row in page.splitlines() if row.startswith(starts))
        for rival in rivals(findings, load):
            assert (f"{rival.metric.name} ({rival.best}, " in line) == (rival.worse.value > 0)
        unsure = sum(rival.worse.value > 0 >= rival.worse.low for rival in rivals(findings, load))
        assert line.count("within the interval") == unsure
    assert "- At R with a shared store of 3 GB/s, the TTFT p90 of perilune is " in page


def test_a_part_alone_writes_that_part_alone(folder: Path, tmp_path: Path):
    play(folder, tmp_path, "--only", "f5")
    assert {path.name for path in tmp_path.iterdir()} == {"f5.svg", "f5.png", "f5.json"}


def bar(name: str, value: float, low: float, high: float) -> Bar:
    return Bar(name, "at most 1", (Check("it", value, low, high, 1.0, at_most=True),))


MET, CLOSE, MISSED = (0.5, 0.4, 0.6), (0.9, 0.8, 1.1), (1.5, 1.4, 1.6)


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        pytest.param({"P1": MET, "P2": MISSED, "P3": MET}, "All verdicts agree with those of", id="all"),
        pytest.param(
            {"P1": MET, "P2": MET}, "contradict those of seeds 1–8 (full, R = 1.2) for P2.", id="one"
        ),
        pytest.param(
            {"P1": MET, "P2": CLOSE},
            "differ from those of seeds 1–8 (full, R = 1.2) for P2, where the limit lies within an interval",
            id="within the interval here",
        ),
        pytest.param(
            {"P2": MISSED, "P3": MISSED},
            "differ from those of seeds 1–8 (full, R = 1.2) for P3, where the limit lies within an interval",
            id="within the interval there",
        ),
        pytest.param(
            {"P1": MISSED, "P2": CLOSE}, "for P1. Verdicts differ for P2, where the limit", id="one of each"
        ),
    ],
)
def test_agreement_with_other_seeds_is_put_into_words(mine: dict[str, tuple[float, float, float]], says: str):
    verdicts = {"P1": "met", "P2": "missed", "P3": "met"}
    before = document.Compared("full", tuple(range(1, 9)), 1.2, verdicts, close=("P3",))
    assert says in before.agreement(bar(name, *values) for name, values in mine.items())


def test_bars_alone_are_judged_as_with_all_others_and_written_nowhere(
    folder: Path, tmp_path: Path, findings: Findings
):
    shown = play(folder, tmp_path, "--only", "P6,P1")
    assert not list(tmp_path.iterdir())
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
