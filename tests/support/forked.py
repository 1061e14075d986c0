"""Starts a program as a fork of a process that has imported it: most of what a start costs is its imports.

    process = forked.start("perilune_operator.main", ["--namespace=n"], {"KUBECONFIG": "…"}, log)

One such process per module serves a test run. It reads an order from its standard input, a line of JSON, and
answers with a line: the pid of a new child, or how one ended. Children run `main(arguments)` of the module,
with everything that they print in their log, and die with it.

`spawn` does the same for the children of a `Stack`, for which it stands in for `child.spawn`.
"""

import asyncio
import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from perilune_lab.processes import child

SOON = {"perilune_gateway.main": ("fastokens", "tokenizers", "perilune_gateway.request.tokens.chat_template")}


class Forks:
    """The process that has imported a module, and what that imports as soon as it works."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-u", "-P", __file__, module, *SOON.get(module, ())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._one_at_a_time = threading.Lock()
        atexit.register(self._end)

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._one_at_a_time:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def _end(self) -> None:
        self._process.communicate()


_forks = functools.cache(Forks)


class Forked:
    """One program, as `subprocess.Popen` shows it."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid = pid
        self._forks = forks
        self._returncode: int | None = None

    def poll(self) -> int | None:
        if self._returncode is None:
            self._returncode = self._forks.ask(ended=self.pid)
        return self._returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            process = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([process], [], [], timeout)
            finally:
                os.close(process)
            if timeout is not None and not ended:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        code = self.poll()
        assert code is not None, "it has ended"
        return code


def start(module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
    """`env`: what differs from this process's environment."""
    log.write_bytes(b"")
    forks = _forks(module)
    order = {"start": list(arguments), "environ": {**os.environ, **env}, "out": str(log), "log": str(log)}
    return Forked(forks, forks.ask(**order))


class Popen:
    """A program and what it writes, as `subprocess.Popen(…, text=True)` shows them."""

    def __init__(self, module: str, arguments: Sequence[str], folder: Path | None = None) -> None:
        """`folder`: its working directory, else ours."""
        forks, pipes = _forks(module), [os.pipe() for _ in range(2)]
        out, log = (f"/proc/{os.getpid()}/fd/{here}" for _, here in pipes)
        order = {"start": list(arguments), "environ": dict(os.environ), "out": out, "log": log}
        order["folder"] = str(folder or Path.cwd())
        self._forked = Forked(forks, forks.ask(**order))
        self.pid = self._forked.pid
        for _, here in pipes:
            os.close(here)
        self.stdout, self.stderr = (os.fdopen(there) for there, _ in pipes)
        self.poll, self.send_signal = self._forked.poll, self._forked.send_signal

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        return self._forked.wait(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end. What it has written since fits into a pipe."""
        self.wait(timeout)
        written = (
            "" if self.stdout.closed else self.stdout.read(),
            "" if self.stderr.closed else self.stderr.read(),
        )
        self.stdout.close()
        self.stderr.close()
        return written


MODULES = ("perilune_gateway.main", "perilune_lab.engine.main")
IMPORTED_FROM = os.environ.get("PYTHONPATH")
_spawn = child.spawn
ENGINE = (sys.executable, "-P", "-m", "perilune_lab.cli", "engine")


class Spawned:
    """One child, as `asyncio.subprocess.Process` shows it."""

    def __init__(self, forked: Forked, stdout: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> None:
        self.pid = forked.pid
        self.stdout = stdout
        self._forked = forked
        self._pipe = pipe

    @property
    def returncode(self) -> int | None:
        return self._forked.poll()

    def send_signal(self, number: int) -> None:
        self._forked.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        if self.returncode is None:
            loop = asyncio.get_running_loop()
            process, ended = os.pidfd_open(self.pid), asyncio.Event()
            loop.add_reader(process, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(process)
                os.close(process)
        self._pipe.close()  # `stdout` keeps what has come
        code = self.returncode
        assert code is not None, "it has ended"
        return code


async def spawn(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Spawned | asyncio.subprocess.Process:
    """Stand in for `child.spawn`: a gateway or an engine is a fork, any other program is started as ever, and
    so is one that imports from elsewhere."""
    module, arguments = _module(command)
    if module not in MODULES or env.get("PYTHONPATH") != IMPORTED_FROM:
        return await _spawn(command, env, log)
    forks = _forks(module)
    there, here = os.pipe()
    out = f"/proc/{os.getpid()}/fd/{here}"
    order = {"start": arguments, "environ": dict(env), "out": out, "log": str(log)}
    try:
        forked = Forked(forks, await asyncio.to_thread(forks.ask, **order))
    finally:
        os.close(here)
    stdout = asyncio.StreamReader(limit=1 << 20)
    protocol = asyncio.StreamReaderProtocol(stdout)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: protocol, os.fdopen(there, "rb", buffering=0)
    )
    return Spawned(forked, stdout, pipe)


def _module(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return which module a command runs, with which arguments; none if it is not Python's own `-m`."""
    if tuple(command[: len(ENGINE)]) == ENGINE:
        return "perilune_lab.engine.main", list(command[len(ENGINE) :])
    if tuple(command[:3]) == ENGINE[:3]:
        return command[3], list(command[4:])
    return "", []


def _serve(main: Callable[[Sequence[str]], int]) -> None:
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if "ended" in order:
            pid, status = os.waitpid(order["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            written = (os.open(order[to], os.O_WRONLY | os.O_CREAT | os.O_APPEND) for to in ("out", "log"))
            files = [os.open(os.devnull, os.O_RDONLY), *written]
            if not (answer := os.fork()):
                os.chdir(order.get("folder", "."))
                _run(main, order["start"], order["environ"], files)
            for file in files:
                os.close(file)
        print(json.dumps(answer), flush=True)


def _run(
    main: Callable[[Sequence[str]], int], arguments: list[str], environ: dict[str, str], files: list[int]
) -> NoReturn:
    """`files`: its standard input, output and errors."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environ)
    code = 1
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    for soon in sys.argv[2:]:
        importlib.import_module(soon)
    _serve(importlib.import_module(sys.argv[1]).main)
