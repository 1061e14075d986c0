"""`perilune demo`: what it asks, shows and leaves behind; small runs with real Envoy, gateway and engines."""

import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from run_processes import processes
from waiting import HANG

from perilune_lab import report
from perilune_lab.demo import live, text
from perilune_lab.demo.options import parse
from perilune_lab.demo.watch import Watch
from perilune_lab.load.result import Result
from perilune_lab.processes.stack import RUN_VARIABLE, Death, EngineOptions
from perilune_lab.terminal.exits import PIPE_CLOSED

UNDER_LOAD = " APC "
"""In every line of progress."""


# What is asked


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param([], {"endpoints": 8, "policy": "perilune", "compare": ("round_robin",)}, id="none"),
        pytest.param(["--compare", "round_robin,sticky"], {"compare": ("round_robin", "sticky")}, id="two"),
        pytest.param(["--compare", " sticky, ,sticky"], {"compare": ("sticky",)}, id="twice the same"),
        pytest.param(["--compare", ""], {"compare": ()}, id="nothing to compare with"),
        pytest.param(["--policy", "sticky", "--compare", "sticky,ear"], {"compare": ("ear",)}, id="itself"),
        pytest.param(["--time-scale", "0.5"], {"time_scale": 0.5}, id="time scale"),
        pytest.param(["--endpoints", "40"], {"time_scale": 0.5}, id="many endpoints live slower"),
        pytest.param(["--no-live", "--keep"], {"live": False, "keep": True}, id="flags"),
        pytest.param(["--overload"], {"overload": True}, id="overload"),
    ],
)  # fmt: skip
def test_options_have_defaults_and_fit_each_other(argv, expected):
    options = parse(argv)
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--compare", "robin"], "argument --compare: Unknown policy 'robin', known are "),
        (["--policy", "robin"], "argument --policy: Unknown policy 'robin', known are "),
        (["--endpoints", "0"], "must be at least 1"),
        (["--seconds", "nan"], "must be at least 1.0"),
        (["--time-scale", "-1"], "must be at least"),
        (["--json", "/nowhere/demo.json"], "/nowhere/demo.json: there is no folder /nowhere"),
        (["--png", "demo.bmp"], "demo.bmp must end in .png or .svg or .pdf"),
        (["--endpoints", "many"], "invalid int value: 'many'"),
        (["--overload", "--compare", "sticky"], "argument --compare: not allowed with argument --overload"),
    ],
)
def test_wrong_options_are_explained(capsys, argv, says):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_what_stays_up_runs_last():
    def order(*argv):
        return [arm.name for arm in parse(argv).order]

    assert order("--compare", "sticky") == ["perilune", "sticky"]
    assert order("--compare", "sticky", "--keep") == ["sticky", "perilune"]
    assert order("--overload", "--keep") == ["perilune", "perilune + admission"]


# What is shown


def quantiles(value: float) -> report.Quantiles:
    return report.Quantiles(value, value, value, value, value)


def test_gains_compare_the_first_run_with_each_other():
    def run(policy, apc, ttft_s):
        return report.Run(
            policy=policy,
            requests=10,
            succeeded=10,
            rejected=0,
            success_rate=1.0,
            apc=apc,
            ttft_s=quantiles(ttft_s),
        )

    runs = [run("ear", 0.8, 0.1), run("round_robin", 0.4, 0.4), run("sticky", 0.8, 0.2)]
    console = Console(width=120, file=StringIO())
    console.print(text.gains(runs))
    shown = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "ear / round_robin 2.00 × 0.25 × 0.25 ×" in shown
    assert "ear / sticky 1.00 × 0.50 × 0.50 ×" in shown


def a_watch() -> Watch:
    stack = SimpleNamespace(endpoints=("h:1", "h:2"), options=EngineOptions(time_scale=2.0), deaths=[])
    return Watch(stack, "ear", 10.0)


def a_result(**changes) -> Result:
    times = {"submitted_at_s": 0.0, "finished_at_s": 1.0, "due_at_s": 0.0, "ttft_s": 0.25}
    tokens = {"prompt_tokens": 100, "cached_tokens": 60}
    return Result(
        **{"session": "s", "turn": 0, "request_id": "r", "status": 200, **times, **tokens, **changes}
    )


def test_frame_adds_up_results_in_engine_seconds():
    watch = a_watch()
    for result in (a_result(), a_result(reason="moved", cached_tokens=20), a_result(error="502: gone")):
        watch.finished(result)
    frame = watch.frame()
    assert (frame.finished, frame.failed, frame.migrations) == (2, 1, 1)
    assert (frame.apc, frame.ttft_p90_s) == (0.4, 0.5)
    assert [row.name for row in frame.endpoints] == ["engine-0", "engine-1"]


def test_notes_name_dead_engines_and_errors():
    watch = a_watch()
    watch.stack.deaths.append(Death("engine-1", "h:2", "was killed by SIGKILL", time.monotonic()))
    for _ in range(2):
        watch.finished(a_result(error="502: gone"))
    assert watch.notes() == (
        "engine-1 (h:2) was killed by SIGKILL after 0 s; requests were routed around it",
        "2 requests failed: 502: gone",
    )
    assert [row.dead for row in watch.frame().endpoints] == ["", "was killed by SIGKILL"]


FRAME = live.Frame(
    policy="ear",
    elapsed_s=12.3,
    seconds=60,
    time_scale=2.0,
    finished=154,
    failed=1,
    open=9,
    prompt_tokens=1000,
    cached_tokens=710,
    migrations=3,
    ttft_p90_s=0.831,
    endpoints=[
        live.EndpointRow(
            name="engine-0",
            address="h:1",
            place="s0 rack-0",
            queue_s=1.2,
            hit_ratio=0.5,
            sessions=7,
            in_flight=3,
        ),
        live.EndpointRow(name="engine-1", address="h:2", place="s0 rack-1", dead="was killed by SIGKILL"),
    ],
    decisions=[
        live.DecisionRow(
            clock="12:01:02",
            session="s0-7",
            target="engine-0",
            reason="moved",
            prompt_tokens=8432,
            cached_tokens=4216,
            moved_from="engine-1",
        )
    ],
)


@pytest.mark.parametrize("columns", [80, 120])
def test_view_says_everything_within_a_terminal(columns):
    console = Console(width=columns, record=True, file=StringIO())
    console.print(live.render(FRAME))
    shown = console.export_text()
    for words in (
        *(
            "ear",
            "12 of 60 s",
            "simulated engines × 2",
            "requests 154 + 9 open",
            "APC 71%",
            "TTFT p90 0.83 s",
        ),
        *("moves 3", "failed 1", "1.20 s", "50%", "was killed by SIGKILL", "moved ← engine-1"),
        "8,432 tokens, 50% cached",
    ):
        assert words in shown
    assert "…" not in shown


def test_line_says_the_same():
    assert live.line(FRAME) == (
        "ear           12.3 s  requests  154  APC  71%  TTFT p90  0.83 s  moves 3  failed 1  dead endpoints 1"
    )


# What it leaves behind: the real thing, small


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Yield a marker of this test's processes; afterwards none is left and no run folder."""
    marker = f"demo-{os.getpid()}-{tmp_path.name}"
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv(RUN_VARIABLE, marker)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("COLUMNS", "120")
    yield marker
    assert [pid for pid in processes(marker) if pid != os.getpid()] == []


class Running:
    """`perilune demo` as a subprocess whose output is read line by line."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-m", "perilune_lab.cli", "demo", "--endpoints", "2", "--no-live", *argv]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []

    def until(self, words: str) -> str:
        """Read up to the first line with these words, and return it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} never came:\n{''.join(self.lines)}{self.process.stderr.read()}")

    def end(self) -> tuple[int, str, str]:
        out, errors = self.process.communicate(timeout=HANG)
        return self.process.returncode, "".join(self.lines) + out, errors


@pytest.fixture
def start(run):
    began: list[Running] = []

    def start(*argv: str) -> Running:
        began.append(Running(*argv))
        return began[-1]

    yield start
    for running in began:
        running.process.kill()
        running.process.communicate()


def gateway_pid(run: str) -> int:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes(run)}
    [pid] = [pid for pid, command in commands.items() if b"perilune_gateway.main" in command]
    return pid


@pytest.mark.processes
def test_runs_compares_reports_and_stays_until_ctrl_c(start, tmp_path):
    running = start(
        *("--seconds", "2", "--time-scale", "10", "--keep", "--json", str(tmp_path / "demo.json"))
    )
    running.until("stays up until Ctrl-C")
    assert "/v1/chat/completions" in running.until("curl")
    running.until("/metrics")
    running.process.send_signal(signal.SIGINT)
    status, out, errors = running.end()
    assert (status, errors) == (130, "")
    assert "Simulated engines" in out
    assert "perilune / round_robin" in out
    document = msgspec.json.decode((tmp_path / "demo.json").read_bytes(), type=report.Report)
    assert document.simulated
    assert [run.policy for run in document.runs] == ["perilune", "round_robin"]
    assert all(run.succeeded > 0 and run.success_rate == 1.0 for run in document.runs)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.processes
@pytest.mark.heavy
def test_overload_compares_one_policy_without_and_with_session_admission(start, tmp_path):
    status, out, errors = start(
        *("--overload", "--seconds", "3", "--time-scale", "10", "--json", str(tmp_path / "demo.json"))
    ).end()
    assert (status, errors) == (0, "")
    document = msgspec.json.decode((tmp_path / "demo.json").read_bytes(), type=report.Report)
    assert [run.policy for run in document.runs] == ["perilune", "perilune + admission"]
    table = out.partition("beyond saturation")[2]
    for row in ("sessions completed", "TTFT inside a session, p90", "first token from arrival, p50"):
        assert row in table


@pytest.mark.parametrize(
    ("number", "status", "moment"),
    [
        pytest.param(signal.SIGINT, 130, "starting 2 engines", id="Ctrl-C while starting"),
        pytest.param(signal.SIGTERM, 143, UNDER_LOAD, id="SIGTERM under load", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.processes
def test_a_signal_ends_it_and_leaves_nothing(start, tmp_path, number, status, moment):
    running = start("--seconds", "60", "--compare", "")
    running.until(moment)
    running.process.send_signal(number)
    ended, out, errors = running.end()
    assert (ended, errors) == (status, "")
    assert "interrupted" in out
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.processes
@pytest.mark.heavy
def test_reader_of_the_pipe_left(start, tmp_path):
    running = start("--seconds", "60", "--compare", "")
    running.until(UNDER_LOAD)
    running.process.stdout.close()
    status, errors = running.process.wait(HANG), running.process.stderr.read()
    assert (status, errors) == (PIPE_CLOSED, "")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.processes
@pytest.mark.heavy
def test_death_of_a_vital_part_ends_it_with_a_clear_line(start, run):
    running = start("--seconds", "60", "--compare", "")
    running.until(UNDER_LOAD)
    os.kill(gateway_pid(run), signal.SIGKILL)
    status, _, errors = running.end()
    assert status == 1
    assert errors.startswith("perilune demo: gateway (pid ")
    assert "was killed by SIGKILL" in errors.splitlines()[0]
