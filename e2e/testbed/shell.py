"""Running programs, telling progress, waiting on conditions."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Args = Sequence[str | Path]


class ClusterError(RuntimeError):
    """Something of the cluster does not work; the message says what, and where to look."""


@contextmanager
def step(title: str) -> Iterator[None]:
    """Tell on stderr what is going on, and how long it took; several may be going on in threads."""
    began, said = time.monotonic(), "failed"
    _tell(title, f"{title} …", end="")
    try:
        yield
        said = f"{time.monotonic() - began:.1f} s"
    finally:
        _tell("", f" {said}" if _line_of == title else f"{title}: {said}")


_line_of = ""
"""The step whose line is not ended yet."""
_telling = threading.Lock()


def _tell(owner: str, words: str, end: str = "\n") -> None:
    global _line_of
    with _telling:
        if _line_of and not words.startswith(" "):
            print(file=sys.stderr)
        print(words, end=end, file=sys.stderr, flush=True)
        _line_of = owner


def run(
    args: Args,
    *,
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 600,
) -> str:
    """Run a program and return its standard output. Raises ClusterError with its last words when it fails."""
    text = stdin.encode() if isinstance(stdin, str) else stdin
    try:
        ended = subprocess.run(
            [str(a) for a in args], input=text, capture_output=True, env=env, cwd=cwd, timeout=timeout_s
        )
    except FileNotFoundError:
        raise ClusterError(f"{args[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{_words(args)}: not done after {timeout_s:g} s") from None
    if ended.returncode != 0:
        said = (ended.stderr or ended.stdout).decode(errors="replace").strip().splitlines()
        tail = "\n".join(f"    {line}" for line in said[-12:])
        raise ClusterError(f"{_words(args)}: exit status {ended.returncode}\n{tail}")
    return ended.stdout.decode(errors="replace")


def succeeds(args: Args, timeout_s: float = 10) -> bool:
    try:
        run(args, timeout_s=timeout_s)
    except ClusterError:
        return False
    return True


def launch(args: Args, log: Path) -> None:
    """Start a program that outlives us, in a session of its own; its output goes to `log`."""
    words = [str(a) for a in args]
    with log.open("ab") as sink, open(os.devnull, "rb") as nothing:
        to = [(os.POSIX_SPAWN_DUP2, nothing.fileno(), 0)]
        to += [(os.POSIX_SPAWN_DUP2, sink.fileno(), output) for output in (1, 2)]
        os.posix_spawnp(words[0], words, os.environ, file_actions=to, setsid=True)


def until(condition: Callable[[], T], what: str, timeout_s: float, every_s: float = 0.1) -> T:
    """Wait until `condition()` is truthy and return it. Raises ClusterError when time is over."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not after {timeout_s:g} s")
        time.sleep(every_s)
    return result


def _words(args: Args) -> str:
    words = " ".join(str(a) for a in args)
    return words if len(words) <= 200 else words[:197] + "…"
