"""One workload live and simulated: verdicts, options, reports."""

from io import StringIO
from pathlib import Path
from random import Random

import msgspec
import pytest
from rich.console import Console

from perilune_api.pool import SpecError
from perilune_lab.report import Quantiles, Run
from perilune_lab.terminal.exits import WRONG_CALL
from perilune_research.crosscheck import cli, compare, workload
from perilune_research.crosscheck.compare import Pair, Simulated
from perilune_research.crosscheck.play import Crosscheck
from perilune_research.crosscheck.workload import Options


def pair(
    policy: str,
    live_s: float,
    simulated_s: float,
    *,
    apc: float = 0.5,
    off: float = 0.0,
    spread: float = 0.0,
    waited_s: float = 0.0,
    plays: int = 1,
) -> Pair:
    times = Quantiles(live_s, live_s, live_s, live_s, live_s)
    live = Run(policy=policy, requests=10, succeeded=10, rejected=0, success_rate=1.0, apc=apc, ttft_s=times)
    return Pair(live, Simulated(simulated_s, simulated_s, 0.0, apc + off, spread), waited_s, plays)


ROBIN = pair("round_robin", 2.0, 2.2)


@pytest.mark.parametrize(
    ("pairs", "holds"),
    [
        pytest.param([ROBIN, pair("ear", 1.0, 0.85, off=0.019)], [True, True, True], id="agreement"),
        pytest.param([ROBIN, pair("ear", 1.0, 1.21)], [False, True, True], id="too slow"),
        pytest.param([ROBIN, pair("ear", 1.0, 0.79)], [False, True, True], id="too fast"),
        pytest.param([ROBIN, pair("ear", 1.0, 1.0, off=-0.021)], [True, False, True], id="fewer hits"),
        pytest.param(
            [ROBIN, pair("ear", 1.0, 1.0, off=-0.029, spread=0.005)], [True, True, True], id="chance"
        ),
        pytest.param(
            [ROBIN, pair("ear", 1.0, 1.0, off=0.031, spread=0.005)], [True, False, True], id="no chance"
        ),
        pytest.param(
            [ROBIN, pair("ear", 1.0, 1.0, off=-0.026, spread=0.005, plays=4)],
            [True, False, True],
            id="less chance in the mean of four plays",
        ),
        pytest.param([ROBIN, pair("ear", 2.3, 1.95)], [True, True, False], id="other order"),
        pytest.param([ROBIN, pair("ear", 2.1, 1.95)], [True, True, True], id="a tie has no order"),
        pytest.param(
            [ROBIN, pair("ear", float("inf"), 1.0)], [False, True, False], id="nothing measured live"
        ),
    ],
)
def test_a_verdict_compares_the_largest_difference_with_its_bar(pairs: list[Pair], holds: list[bool]):
    assert [verdict for verdict, _ in compare.verdicts(pairs)] == holds


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        (pair("ear", 1.0, 1.1), 0, "met: TTFT p90 within 20%: largest difference +10% (ear)"),
        (pair("ear", 1.0, 1.5), cli.FAILED, "MISSED: TTFT p90 within 20%"),
        (pair("ear", 1.0, 0.5, waited_s=0.3), cli.TOO_BUSY, "waited 300 ms for a CPU (ear)"),
        (pair("ear", 1.0, 1.0, waited_s=0.3), 0, "do not judge by this run"),
    ],
)
def test_table_and_verdicts_are_printed(found: Pair, status: int, said: str, tmp_path: Path):
    out = Console(width=200, file=StringIO(), record=True)
    file = tmp_path / "found.json"
    assert cli.conclude(Options(json=file), [found], out) == status
    assert said in out.export_text()
    assert msgspec.json.decode(file.read_bytes(), type=list[Pair]) == [found]


def test_both_ways_play_the_same_turns():
    trace = Options(seconds=5.0).trace()
    other = workload.renamed(trace, "ear/")
    assert [t.prompt_tokens for t in other.turns()] == [t.prompt_tokens for t in trace.turns()]
    keys = {segment.key for t in trace.turns() for segment in (*t.prompt, t.answer)}
    others = {segment.key for t in other.turns() for segment in (*t.prompt, t.answer)}
    assert others == {f"ear/{key}" for key in keys}


def test_jitter_delays_a_little():
    trace = Options(seconds=5.0).trace()
    late = workload.jittered(trace, Random(1))
    assert [s.session_id for s in late.sessions] == [s.session_id for s in trace.sessions]
    for before, after in zip(trace.sessions, late.sessions, strict=True):
        assert 0 <= after.start_s - before.start_s <= workload.JITTER_S
        for a, b in zip(before.turns, after.turns, strict=True):
            assert 0 <= b.gap_s - a.gap_s <= workload.JITTER_S
            assert a.prompt == b.prompt


def test_what_is_simulated_has_a_spread():
    small = Crosscheck(Options(policies=("round_robin",), seconds=8.0), Console(quiet=True))
    found = small.simulated("round_robin")
    assert 0 < found.ttft_p50_s < found.ttft_p90_s
    assert 0 < found.apc < 1
    assert found.ttft_p90_spread_s > 0


def test_verdicts_are_told_though_the_disk_is_full():
    out = Console(width=200, file=StringIO(), record=True)
    with pytest.raises(OSError, match="No space"):
        cli.conclude(Options(json=Path("/dev/full")), [ROBIN], out)
    assert "TTFT p90 within 20%" in out.export_text()


@pytest.mark.parametrize("argv", [["--seconds", "0.001"], ["--seconds", "0.5"], ["--rate", "0.001"]])
def test_too_few_turns_are_no_evidence(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(argv) == WRONG_CALL
    assert "turns are too few: at least 50 are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--policies", "static_pd"],
        ["--policies", "best"],
        ["--endpoints", "65"],
        ["--rate", "1e9"],
        ["--seconds", "1e9"],
    ],
)
def test_wrong_values_are_named(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SpecError):
        cli.parse(argv)
    assert cli.main(argv) == WRONG_CALL
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--rate", "0"], ["--seconds", "nan"], ["--endpoints", "0"]])
def test_wrong_numbers_are_named(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        cli.parse(argv)
    assert left.value.code == WRONG_CALL
    assert argv[0] in capsys.readouterr().err
