"""Searches for bytes that a reader of `readers.py` does not bear, with coverage; needs atheris (`make fuzz`).

    python tests/fuzz/fuzz.py [KIND …] --minutes 10 [--seed N] [--folder build/fuzz]

Each kind runs in a process of its own: new inputs for so many minutes, then those that it kept again and
again, to see whether memory grows. An input that ends a reader, or takes it longer than SLOW_S, is kept in
the folder and named. Exits with 1 if any kind failed.
"""

import argparse
import gc
import logging
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

if "search" in sys.argv:
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
"""Seconds for which the inputs that were kept are read again."""
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
    parser.add_argument("--alone", choices=("search", "again"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    kinds: list[str] = arguments.kinds or list(TARGETS)
    if unknown := set(kinds) - set(TARGETS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    corpus = {kind: arguments.folder.resolve() / kind for kind in kinds}
    if arguments.alone == "search":
        search(kinds[0], corpus[kinds[0]], arguments.minutes, arguments.seed)
    if arguments.alone == "again":
        again(kinds[0], corpus[kinds[0]])
    failed = []
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes for each kind", flush=True)
    for kind in kinds:
        corpus[kind].mkdir(parents=True, exist_ok=True)
        for at, seed in enumerate(SEEDS[kind]):
            corpus[kind].joinpath(f"seed-{at}").write_bytes(seed)
        log = arguments.folder / f"{kind}.log"
        with log.open("wb") as written:
            for task in ("search", "again"):
                options = [
                    "--minutes",
                    f"{arguments.minutes}",
                    "--seed",
                    f"{arguments.seed}",
                    "--alone",
                    task,
                ]
                command = [sys.executable, __file__, kind, *options, "--folder", str(arguments.folder)]
                ended = subprocess.run(command, stdout=written, stderr=written, check=False)
                if ended.returncode:
                    failed.append(kind)
                    break
        lines = [
            line
            for line in log.read_text(errors="replace").splitlines()
            if line.startswith(("Done", "again"))
        ]
        outcome = "FAILED, see" if kind in failed else "fine:"
        print(f"{kind:10} {outcome} {log if kind in failed else '; '.join(lines)}", flush=True)
    sys.exit(bool(failed))


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


def again(kind: str, corpus: Path) -> NoReturn:
    """Play the inputs that were kept, in rounds. Exit with an error if memory grows after the first round."""
    inputs = [path.read_bytes() for path in sorted(corpus.iterdir())]
    sizes_mb, rounds, slowest_s = [], 0, 0.0
    end = time.monotonic() + ROUNDS_S
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
