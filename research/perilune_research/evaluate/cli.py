"""`python -m perilune_research evaluate`: simulates every policy in one arm, and writes tables, bars and
figures.

1. Find R, unless it is given.
2. Simulate what the wanted parts need and an earlier call has not simulated yet.
3. Write the figures, a page of bars and tables, and its data under `--out`, and print the bars and tables.

Ctrl-C loses only the simulations under way: the next call goes on from there. Nothing that it prints is a
measurement of hardware.

Exit status: 0, also if bars are missed; 2 for a wrong call or a file that cannot be written; 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as Grid

from perilune_api.pool import SpecError
from perilune_lab.terminal.arguments import count, one_of, positive
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import listed
from perilune_research.evaluate import page, plan, tables
from perilune_research.evaluate.bars import Bar, judge
from perilune_research.evaluate.cells import Scenario
from perilune_research.evaluate.evaluation import evaluate
from perilune_research.evaluate.figures import FIGURES, Context
from perilune_research.evaluate.plan import BARS, EVERYTHING, NEEDS, Size
from perilune_research.evaluate.traffic import traffic
from perilune_research.evaluate.work import Work
from perilune_research.kept import default_folder, printed
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.policies import POLICIES
from perilune_research.table import Table

_EPILOG = f"""\
examples (after `python -m perilune_research`):
  evaluate --arm none --quick        everything with {plan.QUICK_SEEDS} seeds: under 10 minutes
  evaluate --arm store --only main,P1,P2
                                     the main tables and two bars of pools with a shared store
  evaluate --trace FILE --only main --seeds 2
                                     the main tables with recorded traffic
  evaluate --only admission,door --seeds 16 --name admission-none
  evaluate --only queues --seeds 6 --window 900 --name queues-none

arms (--arm): {", ".join(Deployment)} (see simulate --help); no pool can do {Deployment.PULL}
parts (--only): {", ".join(NEEDS)}
R: the rate at which TTFT p90 of lmetric in arm {Deployment.NONE} is 5 × the floor, which is TTFT p90 if every
  turn ran alone with its session's prefix cached. It is in sessions per second; for a recorded trace, it is a
  factor on the recorded speed. Loads are R/2, R, 1.25 R and 1.6 R.
An interrupted evaluation goes on when it is called again: --work keeps finished simulations until the code
  changes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    size: Size
    out: Path
    parts: tuple[str, ...]
    jobs: int
    """Number of parallel processes."""
    work: Path
    """Folder of the finished simulations."""
    deployment: Deployment = Deployment.NONE
    r: float | None = None
    """R, if it is known already."""
    name: str = "none"
    """Name of the page and its data file."""
    command: str = ""
    """The command that the page tells its readers."""
    base: Scenario = plan.BASE


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. Raises SystemExit for `--help` and unknown options,
    KeyboardInterrupt after Ctrl-C, and BrokenPipeError."""
    try:
        shown = run(parse(argv), Console(stderr=True, soft_wrap=True))
    except BrokenPipeError:
        raise
    except SpecError as error:
        return wrong_call("python -m perilune_research evaluate", error)
    except OSError as error:
        return wrong_call("python -m perilune_research evaluate", f"{error} - under `--out` or `--work`")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "finished simulations are kept, so the same command goes on from there"
        ) from None
    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for part in shown:
        out.print(part)
    return 0


def run(options: Options, err: Console) -> list[Grid | str]:
    """Simulate, write the files, and return what is to be printed. Raises SpecError if a folder cannot be
    written or there is no R, and OSError if a file cannot be written later."""
    began = time.perf_counter()
    work = Work(_folder(options.work, "--work"), options.jobs, printed(err))
    _folder(options.out, "--out")
    some = _some(len(options.size.seeds), "seed")
    err.print(
        f"{_some(len(options.parts), 'part')}, arm {options.deployment}, {some}; finished simulations are"
        f" kept in {options.work}, so an interrupted evaluation goes on",
        highlight=False,
        markup=False,
    )
    base = replace(options.base, deployment=options.deployment)
    findings = evaluate(work, options.parts, options.size, base, options.r)
    shown: list[Grid | str] = [f"SIMULATED · arm {options.deployment} · R = {findings.r:g} · {some}"]
    if figures := [part for part in options.parts if part in FIGURES]:
        context = Context(findings, traffic(options.size.seeds[0]))
        for name in figures:
            FIGURES[name].make(context, options.out, name)
            err.print(f"{name}: {options.out / name}.svg", highlight=False)
    names = BARS if "bars" in options.parts else options.parts
    judged = judge(findings, names)
    if judged or set(options.parts) & set(page.SECTIONS):
        page.write(options.out, options.name, options.command, findings, options.parts, judged)
        shown += [_grid(tables.bars(judged, tables.subject(findings))), *map(_line, judged)] if judged else []
        shown += map(_grid, page.sections(findings, options.parts))
    err.print(
        f"{work.computed} new simulations and searches, {time.perf_counter() - began:.0f} s in all",
        highlight=False,
    )
    return shown


def _some(n: int, one: str) -> str:
    return f"{n} {one}{'s' * (n != 1)}"


def _folder(path: Path, option: str) -> Path:
    """Make the folder and check that files can be written there. Raises SpecError if they cannot."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror} - at `{option}`") from None
    return path


def _line(bar: Bar) -> str:
    return f"{bar.name} {bar.verdict}{'' if bar.clear else ' (within the interval)'}: {bar.goal}"


def _grid(table: Table) -> Grid:
    grid = Grid(title=f"SIMULATED · {table.title}", title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(table.header):
        grid.add_column(name, justify="right" if i else "left")
    for row in table.rows:
        grid.add_row(*(escape(cell.replace("**", "")) for cell in row))
    return grid


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    parser = argparse.ArgumentParser(
        prog="python -m perilune_research evaluate",
        description="Evaluate policies on modelled engines in one arm: write tables, bars and figures.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--arm",
        type=one_of(Deployment),
        choices=list(Deployment),
        default=Deployment.NONE,
        help="how KV gets from one engine to another [%(default)s]",
    )
    add("--trace", type=Path, metavar="FILE", help="play a recorded trace instead of generated traffic")
    add("--policies", metavar="A,B", help="policies of the main comparison [all]")
    add("--r", type=positive, metavar="RATE", help="use this R instead of searching it")
    add("--name", metavar="NAME", help="name of the page and its data [names of trace and arm]")
    add("--quick", action="store_true", help=f"use {plan.QUICK_SEEDS} seeds instead of {plan.FULL_SEEDS}")
    add(
        "--out",
        type=Path,
        default=Path("docs/evaluation"),
        metavar="DIR",
        help="folder for page, data and figures [%(default)s]",
    )
    add(
        "--seeds",
        type=count,
        metavar="N",
        help="number of seeds of the main comparison; side studies have fewer",
    )
    add("--seeds-from", type=count, default=1, metavar="N", help="first seed [%(default)s]")
    add(
        "--window",
        type=positive,
        default=plan.BASE.window_s,
        metavar="SECONDS",
        help="traffic of each simulation, the first third of which is not measured [%(default)g]",
    )
    add("--only", metavar="A,B", help="make only these parts; see below [all]")
    add("--jobs", type=count, default=2, metavar="N", help="number of parallel processes [%(default)s]")
    add(
        "--work",
        type=Path,
        default=default_folder("evaluate"),
        metavar="DIR",
        help="folder that keeps finished simulations [%(default)s]",
    )
    args = parser.parse_args(argv)
    if args.trace and not args.trace.is_file():
        raise SpecError(f"{args.trace}: no such file - at `--trace`")
    base = replace(plan.BASE, trace=str(args.trace), rate=1.0) if args.trace else plan.BASE
    base = replace(base, window_s=args.window, warmup_s=args.window / 3)
    if args.name and Path(args.name).name != args.name:
        raise SpecError(f"{args.name!r} must be a name without a folder - at `--name`")
    compared = listed(args.policies, POLICIES) if args.policies else ()
    if unknown := [name for name in compared if name not in POLICIES]:
        raise SpecError(f"Unknown policy {unknown[0]!r}, known are {', '.join(POLICIES)} - at `--policies`")
    return Options(
        size=plan.size(args.quick, args.seeds, args.seeds_from),
        out=args.out,
        parts=_parts(args.only),
        jobs=args.jobs,
        work=args.work,
        deployment=args.arm,
        r=args.r,
        name=args.name or "-".join([*([args.trace.name.split(".")[0]] if args.trace else []), args.arm]),
        command=_command(argv),
        base=replace(base, compared=compared),
    )


def _command(argv: Sequence[str]) -> str:
    """Return the command as readers can repeat it: without options and paths of this machine."""
    words, kept = iter(argv), ["python -m perilune_research evaluate"]
    for word in words:
        if word in ("--out", "--work", "--jobs"):
            next(words)
        elif word == "--trace":
            kept += [word, Path(next(words)).name]
        else:
            kept.append(word)
    return " ".join(kept)


def _parts(text: str | None) -> tuple[str, ...]:
    if text is None:
        return EVERYTHING
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in NEEDS:
            raise SpecError(f"Unknown part {name!r}, known are {', '.join(NEEDS)} - at `--only`")
    return names
