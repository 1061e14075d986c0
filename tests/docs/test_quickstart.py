"""The quickstart without a cluster, as it is written, on ports of its own."""

import json
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pages import ROOT, blocks, commands

pytestmark = pytest.mark.processes

PATIENCE_S = 60
PORTS = ("8001", "8002", "5557", "5558", "5567", "5568", "9002", "9003", "10000")
DEFAULTS = {
    "perilune-gateway": "--listen 127.0.0.1:9002 --admin 127.0.0.1:9003",
    "perilune envoy": "--gateway 127.0.0.1:9002 --listen 127.0.0.1:10000",
    "perilune explain": "--gateway http://127.0.0.1:9003",
}
"""What the commands leave to be understood; here it has to be said, with other ports."""
READY = {"perilune engine": "perilune-engine ready", "perilune-gateway": "perilune-gateway ready"}


@pytest.fixture
def ports() -> dict[str, str]:
    """Return a free port for each port of the quickstart."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in PORTS]
        for taken in sockets:
            taken.bind(("127.0.0.1", 0))
        return {port: str(taken.getsockname()[1]) for port, taken in zip(PORTS, sockets, strict=True)}


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that a test starts; all have ended after it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in reversed(started):
        process.terminate()
    for process in started:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def said_until(process: subprocess.Popen[str], words: str) -> None:
    """Read lines until one contains these words."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return
    pytest.fail(f"ended without {words!r}: {lines}")


def wait_for_port(port: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", int(port))) == 0:
                return
        assert time.monotonic() < end, f"nobody listens on {port}"
        time.sleep(0.05)


def test_the_commands_lead_to_routed_and_explained_requests(tmp_path, ports, processes):
    def elsewhere(text: str) -> str:
        return re.sub(r":(\d+)\b", lambda found: f":{ports.get(found[1], found[1])}", text)

    document = tmp_path / "pool.yaml"
    document.write_text(elsewhere((ROOT / "examples/local/pool.yaml").read_text()))
    page = (ROOT / "docs" / "quickstart.md").read_text()
    answers, request_id = [], ""
    for words in (words for block in blocks(page) if block.run for words in commands(block)):
        name = words[0].removeprefix(".venv/bin/")
        name = f"perilune {words[1]}" if name == "perilune" else name
        words = [*words, *shlex.split(DEFAULTS.get(name, ""))]
        words = [elsewhere(word).replace("examples/local/pool.yaml", str(document)) for word in words]
        words = [request_id if word == "REQUEST_ID" else word for word in words]
        if words[0].startswith(".venv/bin/"):
            words[0] = str(Path(sys.executable).with_name(words[0].removeprefix(".venv/bin/")))
        if name in READY or name == "perilune envoy":
            processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            if name in READY:
                said_until(processes[-1], READY[name])
            else:
                wait_for_port(ports["10000"])
        else:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
            assert done.returncode == 0, done.stderr
            answers.append(done.stdout)
            if told := re.search(r"request=([0-9a-f-]+)", done.stdout):
                request_id = told[1]
    first, second, listed, explained, health = answers
    assert "200 OK" in first
    assert re.search(r"x-perilune-decision: 127\.0\.0\.1:\d+; cold; request=", first)
    assert re.search(r"x-perilune-decision: 127\.0\.0\.1:\d+; host; request=", second)
    assert "2 of the last 2 decisions" in listed
    assert "because it is the session's host" in explained
    assert json.loads(health)["endpoints_ready"] == 2
