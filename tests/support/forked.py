"""Starts a program as a fork of a process that has imported it: most of what a start costs is its imports.

    process = forked.start("perilune_operator.main", ["--namespace=n"], {"KUBECONFIG": "…"}, log)

One such process per module serves a test run. It reads an order from its standard input, a line of JSON, and
answers with a line: the pid of a new child, or how one ended. Children run `main(arguments)` of the module,
with everything that they print in their log, and die with it.
"""

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
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


class Forks:
    """The process that has imported a module."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-P", __file__, module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self._end)

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
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

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            process = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([process], [], [], timeout)
            finally:
                os.close(process)
            if not ended:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        code = self.poll()
        assert code is not None, "it has ended"
        return code


def start(module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
    """`env`: what differs from this process's environment."""
    forks = _forks(module)
    return Forked(forks, forks.ask(start=list(arguments), env=dict(env), log=str(log)))


def _serve(main: Callable[[Sequence[str]], int]) -> None:
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if "ended" in order:
            pid, status = os.waitpid(order["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            _run(main, order["start"], order["env"], order["log"])
        print(json.dumps(answer), flush=True)


def _run(
    main: Callable[[Sequence[str]], int], arguments: list[str], env: dict[str, str], log: str
) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, to in enumerate((os.open(os.devnull, os.O_RDONLY), out, out)):
        os.dup2(to, number)
    os.environ.update(env)
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
    _serve(importlib.import_module(sys.argv[1]).main)
