"""Runs the commands of a page as they are written, on ports of its own."""

import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from waiting import HANG

DEFAULTS = {
    "perilune-gateway": "--listen 127.0.0.1:9002 --admin 127.0.0.1:9003",
    "perilune envoy": "--gateway 127.0.0.1:9002 --listen 127.0.0.1:10000",
    "perilune explain": "--gateway http://127.0.0.1:9003",
}
"""What the commands leave to be understood; here it has to be said, with other ports."""
READY = {"perilune engine": "perilune-engine ready", "perilune-gateway": "perilune-gateway ready"}


class Shell:
    """Commands that run on are started, and ended with the shell; others are waited for."""

    def __init__(self, folder: Path, ports: Iterable[str]) -> None:
        """`folder`: where commands run. `ports`: those that the page names."""
        self.folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        with ExitStack() as held:
            ports = tuple(ports)
            sockets = [held.enter_context(socket.socket()) for _ in ports]
            for taken in sockets:
                taken.bind(("127.0.0.1", 0))
            own = (str(taken.getsockname()[1]) for taken in sockets)
            self._ports = dict(zip(ports, own, strict=True))

    def elsewhere(self, text: str) -> str:
        """Return a text with ports of this shell."""
        return re.sub(r":(\d+)\b", lambda found: f":{self._ports.get(found[1], found[1])}", text)

    def run(self, words: list[str], files: Mapping[str, str] | None = None, status: int = 0) -> str:
        """Run a command. Return what it printed; nothing of one that goes on. `files`: names of files in
        the page, and of those in their place."""
        name = words[0].removeprefix(".venv/bin/")
        program = name if name in ("curl", "jq") else str(Path(sys.executable).with_name(name))
        name = f"perilune {words[1]}" if name == "perilune" else name
        rest = [*words[1:], *shlex.split(DEFAULTS.get(name, ""))]
        rest = [self.elsewhere((files or {}).get(word, word)) for word in rest]
        rest, to = (rest[:-2], self.folder / rest[-1]) if ">" in rest else (rest, None)
        command = [program, *rest]
        if name in READY or name == "perilune envoy":
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.folder)
            self._processes.append(process)
            if name in READY:
                _said_until(process, READY[name])
            else:
                _listens(self._ports["10000"])
            return ""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HANG, cwd=self.folder, check=False
        )
        assert done.returncode == status, done.stderr
        if to is not None:
            to.write_text(done.stdout)
        return done.stdout

    def end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def shell(folder: Path, ports: Iterable[str]) -> Iterator[Shell]:
    made = Shell(folder, ports)
    try:
        yield made
    finally:
        made.end()


def _said_until(process: subprocess.Popen[str], words: str) -> None:
    """Read lines until one contains these words."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f"ended without {words!r}: {lines}")


def _listens(port: str) -> None:
    end = time.monotonic() + HANG
    while True:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", int(port))) == 0:
                return
        assert time.monotonic() < end, f"nobody listens on {port}"
        time.sleep(0.05)
