"""One child process of a stack: waits for its ready line, notices its end, keeps its log.

Steps:

1. `start` runs the command through `die_with_parent` (the kernel kills it when this process dies, even by
   kill -9), in a session of its own, so that Ctrl-C in the terminal reaches only this process.
2. Its stdout is read line by line and, with its stderr, written to one log file.
3. The line `NAME ready key=value …` fulfils `ready`.
4. `stop` sends SIGTERM, then SIGKILL.

Cost: about 15 ms over a bare start, and one task per child.
"""

import asyncio
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import getpid
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from perilune_lab.processes import die_with_parent

_READY = re.compile(r"^\S+ ready\b(?P<facts>.*)$")
_LINE_BYTES = 1 << 20


class StackError(RuntimeError):
    """A part of the stack did not start, or ended; the message names it and shows its last log lines."""


def ready_facts(line: str) -> dict[str, str] | None:
    """Parse `perilune-gateway ready ext_proc=127.0.0.1:1 admin=…` into its facts; None for any other line."""
    found = _READY.match(line.strip())
    if found is None:
        return None
    return dict(word.split("=", 1) for word in found["facts"].split() if "=" in word)


@dataclass(slots=True, eq=False)
class Child:
    """A running (or ended) child; `start` makes one."""

    name: str
    log: Path
    process: asyncio.subprocess.Process
    ready: asyncio.Future[dict[str, str]]
    """Facts of the ready line, set when the process has printed it."""
    ended: asyncio.Future[int] = field(init=False)
    """Done when the process has ended, with its return code (negative: the signal)."""
    stopping: bool = False
    """`stop` was called, so the end of the process is not an error."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of its log, indented."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (its log is empty)"

    def death(self) -> StackError:
        """Return the error that names this child's end."""
        return StackError(f"{self.name} (pid {self.pid}) {self.end}; its last log lines:\n{self.tail()}")

    def late(self, timeout_s: float) -> StackError:
        """Return the error for a child that is not ready in time."""
        return StackError(
            f"{self.name} (pid {self.pid}) was not ready after {timeout_s:g} s;"
            f" its last log lines:\n{self.tail()}"
        )

    async def until_ready(self, timeout_s: float) -> dict[str, str]:
        """Wait for the ready line. Raises StackError when the process ends before, or time is over."""
        either: set[asyncio.Future[Any]] = {self.ready, self.ended}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.ready.done():
            return self.ready.result()
        if self.ended.done():
            raise self.death()
        raise self.late(timeout_s)

    def signal(self, number: int) -> None:
        if self.alive:
            try:
                self.process.send_signal(number)
            except ProcessLookupError:
                pass  # ended since; `ended` will say so

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s`, and wait for the end of the process. If cancelled, kill
        at once."""
        self.stopping = True
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait({self.ended}, timeout=grace_s)
        finally:
            self.signal(signal.SIGKILL)
        await asyncio.wait({self.ended})


async def start(name: str, command: Sequence[str], env: Mapping[str, str], folder: Path) -> Child:
    """Run `command` (an absolute path first) as a child that dies with this process; its log is
    `folder/NAME.log`."""
    log = folder / f"{name}.log"
    process = await spawn(command, env, log)
    child = Child(name, log, process, asyncio.get_running_loop().create_future())
    child.ended = asyncio.create_task(_follow(child), name=f"follow {name}")
    return child


async def spawn(command: Sequence[str], env: Mapping[str, str], log: Path) -> asyncio.subprocess.Process:
    """Run a command in a session of its own, which dies with this process; its stderr goes to `log`."""
    with log.open("ab", buffering=0) as sink:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", die_with_parent.__file__, str(getpid()), *command,
            stdin=DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=sink,
            env=dict(env), start_new_session=True, limit=_LINE_BYTES,
        )  # fmt: skip


async def _follow(child: Child) -> int:
    """Copy stdout to the log, look for the ready line, and end with the process."""
    stdout = child.process.stdout
    assert stdout is not None
    with child.log.open("ab", buffering=0) as sink:
        while line := await stdout.readline():
            sink.write(line)
            if not child.ready.done() and (facts := ready_facts(line.decode(errors="replace"))) is not None:
                child.ready.set_result(facts)
    return await child.process.wait()
