"""Ctrl-C ends a command that works, as a terminal sends it: to the command and to all that it has started.
One sentence says what becomes of the work so far."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
from run_processes import processes
from waiting import HANG

from perilune_lab.processes.stack import RUN_VARIABLE

pytestmark = pytest.mark.processes

PERILUNE, RESEARCH = (sys.executable, "-m", "perilune_lab.cli"), (sys.executable, "-m", "perilune_research")
GATEWAY = (sys.executable, "-m", "perilune_gateway.main")
DEFAULT = "import os, signal as s, sys; s.signal(s.SIGINT, s.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
"""Runs a command with SIGINT's default action. Tests that a shell runs in its background ignore SIGINT, which
their child processes inherit."""
POOL = Path(__file__).parents[2] / "examples" / "local" / "pool.yaml"


class Long(NamedTuple):
    """A command that would run for long. In its words, ENGINE, TMP and PIPE stand for what a test has."""

    command: tuple[str, ...]
    at_work: str
    """Words of the line after which it is interrupted."""
    says: str
    """Words of the sentence that follows."""
    status: int = 130


NOTHING = "interrupted: nothing is kept"
LONG = {
    "demo": Long(
        (*PERILUNE, "demo", "--endpoints", "1", "--compare", "", "--seconds", "60"),
        "watch it at",
        "interrupted: 0 of 1 runs were complete",
    ),
    "engine": Long((*PERILUNE, "engine", "--listen", "127.0.0.1:0"), "ready", ""),
    "envoy": Long(  # this process becomes Envoy, whose own first line tells that it minds signals
        (*PERILUNE, "envoy", "127.0.0.1:9", "--run", "--listen", "127.0.0.1:0"),
        "downstream connections",
        "",
        status=0,
    ),
    "replay": Long(
        (*PERILUNE, "replay", "--target", "ENGINE", "--trace", "agentic"), "requests, ", "stopped after 0 of "
    ),
    "bench-stream": Long(
        (*PERILUNE, "bench-stream", "--target", "ENGINE", "--prompt-tokens", "9999"), "s on one H20", NOTHING
    ),
    "bench-stream --simulated": Long(
        (*PERILUNE, "bench-stream", "--simulated", "--time-scale", "0.01"), "s on one H20", NOTHING
    ),
    "profile": Long((*PERILUNE, "profile", "--target", "ENGINE"), "s on one H20", NOTHING),
    "trace": Long((*PERILUNE, "trace", "stats", "PIPE"), "measuring it", NOTHING),
    "whatif": Long((*PERILUNE, "whatif", "--decisions", "PIPE"), "deciding each request again", NOTHING),
    "simulate": Long(
        (*PERILUNE, "simulate", "--policies", "ear,round_robin", "--rates", "1", "--seeds", "8"),
        "simulating 2 policies",
        "interrupted: 0 of 8 rates and seeds were simulated",
    ),
    "simulate, while it searches R": Long(
        (*PERILUNE, "simulate", "--policies", "ear", "--rates", "R", "--seeds", "8"), "searching R", NOTHING
    ),
    "evaluation": Long(
        (*RESEARCH, "evaluation", "--quick", "--sections", "gateways", "--out", "TMP", "--work", "TMP/work"),
        "gateways: 0/",
        "interrupted: finished simulations are kept, so the same command goes on",
    ),
    "arena": Long(
        (*RESEARCH, "arena", "--routers", "envoy-round-robin", "--loads", "ease", "--engines", "1"),
        "cells; at least",
        "interrupted: 0 of 10 cells were played; with --json FILE",
    ),
    "crosscheck": Long(
        (*RESEARCH, "crosscheck", "--policies", "ear"),
        "1 policies; about",
        "interrupted: 0 of 1 policies were compared",
    ),
    "gateway": Long(
        (*GATEWAY, "--pool", str(POOL), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
        "perilune-gateway ready",
        "",
        status=0,
    ),
}
"""Not here: `explain`, which waits for one answer for 5 s at most."""


def started(command: tuple[str, ...], run: str, tmp: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", DEFAULT, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, RUN_VARIABLE: run, "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp)},
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a simulated engine that is too slow to finish the work."""
    slow = (*PERILUNE, "engine", "--listen", "127.0.0.1:0", "--slowdown", "1000")
    with started(slow, "engine", tmp_path_factory.mktemp("engine")) as process:
        assert process.stdout
        yield "http://" + process.stdout.readline().split("http=")[1].split()[0]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG) in (0, 130), "this is a Ctrl-C, too"


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[str]:
    """Yield a file that never ends, and never begins."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    yield str(path)
    os.close(writer)


HEAVY = (
    "demo",
    "evaluation",
    "crosscheck",
    "simulate, while it searches R",
    "bench-stream --simulated",
    "profile",
    "arena",
)
"""Each like one of the others, and imports more."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.heavy] * (n in HEAVY)) for n in LONG])
def test_ctrl_c_ends_a_command_at_once_with_a_sentence(
    name: str, engine: str, pipe: str, tmp_path: Path
) -> None:
    long, run, out, tmp = LONG[name], uuid4().hex, tmp_path / "out", tmp_path / "tmp"
    out.mkdir(), tmp.mkdir()
    given = {"ENGINE": engine, "PIPE": pipe, "TMP": str(out), "TMP/work": str(out / "work")}
    command = tuple(given.get(word, word) for word in long.command)
    with started(command, run, tmp) as process:
        assert process.stdout
        before = ""
        while long.at_work not in before and (line := process.stdout.readline()):
            before += line
        os.killpg(process.pid, signal.SIGINT)
        try:
            after, _ = process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert long.at_work in before
    assert process.returncode == long.status, before + after
    assert "Traceback" not in before + after
    assert long.says in " ".join(after.split())
    assert processes(run) == []
    assert list(tmp.iterdir()) == []
