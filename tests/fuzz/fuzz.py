"""Searches for bytes that a reader of `readers.py` does not bear, with coverage; needs atheris (`make fuzz`).

    python tests/fuzz/fuzz.py [KIND …] --minutes 10 [--seed N] [--folder build/fuzz]

Each kind runs in a process of its own, JOBS of them at once: new inputs for so many minutes, then those that
it kept again and again, to see whether memory grows. An input that ends a reader, or takes it longer than
SLOW_S, is kept in the folder and named. Exits with 1 if any kind failed.
"""

import argparse
import gc
import logging
import os
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

if "--instrumented" in sys.argv:
    import atheris

    with atheris.instrument_imports(include=["perilune_gateway", "perilune_api", "perilune_operator"]):
        import readers  # noqa: F401
from readers import SEEDS, TARGETS

SLOW_S = 5
"""Seconds of the processor that one input may take."""
HANGS_S = 300
"""Seconds after which an input counts as one that hangs; a loaded machine needs some for any."""
MAX_BYTES = 4096
RSS_LIMIT_MB = 2048
ROUNDS_S = 10.0
"""Seconds for which the inputs that were kept are read again, at most half as long as the search lasts."""
GROWTH = 0.05
"""Share of its memory by which a process may grow meanwhile."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz every reader of bytes that others write.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"all, or some of: {', '.join(TARGETS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each kind (default: 10)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31) + 1, help="(default: a new one)")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/fuzz"), help="for inputs (default: build/fuzz)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="kinds at once (default: one for each core)"
    )
    parser.add_argument("--instrumented", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    kinds: list[str] = arguments.kinds or list(TARGETS)
    if unknown := set(kinds) - set(TARGETS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    corpus = {kind: arguments.folder.resolve() / kind for kind in kinds}
    if arguments.instrumented:
        search_all(corpus, arguments.minutes, arguments.seed, arguments.jobs)
        return
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes for each kind", flush=True)
    for kind, folder in corpus.items():
        folder.mkdir(parents=True, exist_ok=True)
        for at, seed in enumerate(SEEDS[kind]):
            folder.joinpath(f"seed-{at}").write_bytes(seed)
        log_of(folder).unlink(missing_ok=True)
    options = ("--minutes", "--seed", "--jobs", "--folder")
    values = (arguments.minutes, arguments.seed, arguments.jobs, arguments.folder)
    given = [word for pair in zip(options, map(str, values), strict=True) for word in pair]
    command = [sys.executable, __file__, *kinds, *given, "--instrumented"]
    rounds_s = min(ROUNDS_S, arguments.minutes * 60 / 2)
    failed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as searching:
        assert searching.stdout is not None
        for line in searching.stdout:
            kind, status = line.split()
            log = log_of(corpus[kind])
            if int(status) or ended(forked(log, again, kind, corpus[kind], rounds_s)):
                failed.append(kind)
            lines = [
                line
                for line in log.read_text(errors="replace").splitlines()
                if line.startswith(("Done", "again"))
            ]
            outcome = f"FAILED, see {log}" if kind in failed else f"fine: {'; '.join(lines)}"
            print(f"{kind:10} {outcome}", flush=True)
    sys.exit(bool(failed or searching.returncode))


def log_of(corpus: Path) -> Path:
    return corpus.with_name(f"{corpus.name}.log")


def search_all(corpus: Mapping[str, Path], minutes: float, seed: int, jobs: int) -> None:
    """Search in children of this process, which has instrumented all code once. Print how each ended."""
    waiting, running = list(corpus), dict[int, str]()
    while waiting or running:
        while waiting and len(running) < jobs:
            kind = waiting.pop(0)
            running[forked(log_of(corpus[kind]), search, kind, corpus[kind], minutes, seed)] = kind
        pid, status = os.wait()
        print(running.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


def forked(log: Path, task: Callable[..., NoReturn], *arguments: object) -> int:
    """Run a task in a child that writes into a log; return its pid."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    try:
        task(*arguments)
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code)
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def ended(pid: int) -> int:
    """Wait for a child; return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def search(kind: str, corpus: Path, minutes: float, seed: int) -> NoReturn:
    """Try new inputs until one fails or the time is over. What readers log costs time only."""
    logging.disable()
    options = {
        "max_total_time": round(minutes * 60),
        "seed": seed,
        "artifact_prefix": f"{corpus}.",
        "timeout": HANGS_S,
        "max_len": MAX_BYTES,
        "rss_limit_mb": RSS_LIMIT_MB,
    }
    atheris.Setup(
        [sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), str(corpus)],
        in_time(TARGETS[kind]),
    )
    atheris.Fuzz()
    sys.exit()


def in_time(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return the target wrapped so that it fails if it takes too much CPU time; other load does not count."""

    def run(data: bytes) -> None:
        began = time.process_time()
        target(data)
        if (took_s := time.process_time() - began) > SLOW_S:
            raise AssertionError(f"{len(data)} bytes took {took_s:.1f} s of CPU")

    return run


def again(kind: str, corpus: Path, rounds_s: float) -> NoReturn:
    """Play the inputs that were kept, in rounds. Exit with an error if memory grows after the first round."""
    inputs = [path.read_bytes() for path in sorted(corpus.iterdir())]
    sizes_mb, rounds, slowest_s = [], 0, 0.0
    end = time.monotonic() + rounds_s
    while rounds < 3 or time.monotonic() < end:
        for data in inputs:
            began = time.process_time()
            TARGETS[kind](data)
            slowest_s = max(slowest_s, time.process_time() - began)
        rounds += 1
        gc.collect()
        sizes_mb.append(rss_mb())
    print(
        f"again: {len(inputs)} inputs, {rounds} rounds, {sizes_mb[0]:.0f} -> {sizes_mb[-1]:.0f} MB,"
        f" slowest {slowest_s * 1000:.0f} ms",
        flush=True,
    )
    sys.exit("memory grows" if sizes_mb[-1] > sizes_mb[0] * (1 + GROWTH) else 0)


def rss_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main()
