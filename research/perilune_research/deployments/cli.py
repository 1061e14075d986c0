"""`python -m perilune_research deployments`: what each deployment is worth, and which policy is ahead in it.

1. Find R, unless it is given.
2. Play every deployment at every load with every policy and seed, as `perilune simulate` does. What an
   earlier call has played with the same code is kept.
3. Write a page of tables and its data under `--out`, and print the tables.

Ctrl-C loses only the simulations under way. Nothing that it prints is a measurement of hardware.

Exit status: 0; 2 for a wrong call or a file that cannot be written; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as Grid

from perilune_api.pool import Routing, SpecError
from perilune_lab.simulate.loads import NoRateError
from perilune_lab.terminal.arguments import assignments, count, positive
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import changed, listed, live_policies
from perilune_research.deployments import page, plan
from perilune_research.deployments.cells import Cell
from perilune_research.deployments.plan import LOADS, POOLS, Size
from perilune_research.kept import Kept, default_folder, printed
from perilune_research.table import Table

_PROGRAM = "python -m perilune_research deployments"
_EPILOG = f"""\
examples (after `python -m perilune_research`):
  deployments --quick                    about 10 minutes
  deployments --pools store --loads R --policies perilune,lmetric_plus_one --seeds 8
  deployments --kept                     the page of what an interrupted call has finished
  deployments --trace conversation.jsonl.gz --pools none,store --name conversation
  deployments --policies perilune --param perilune.leastGainSeconds=2 --name less-gain

deployments (--pools): {", ".join(POOLS)}
loads (--loads): {", ".join(LOADS)}
An interrupted call goes on when it is repeated: finished simulations are kept until the code that plays them
changes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    base: Cell
    size: Size
    r: float | None
    jobs: int
    out: Path
    work: Path
    name: str
    command: str
    play: bool


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. Raises SystemExit for `--help` and unknown options,
    KeyboardInterrupt after Ctrl-C."""
    try:
        shown = run(parse(argv), Console(stderr=True, soft_wrap=True))
    except (SpecError, NoRateError, OSError) as error:
        return wrong_call(_PROGRAM, error)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("finished simulations are kept, so the same command goes on") from None
    out = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for table in shown:
        out.print(grid(table))
    return 0


def run(options: Options, err: Console) -> list[Table]:
    """Simulate, write the files and return the tables. Raises NoRateError, and OSError if a file cannot be
    written."""
    began = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.work / "deployments.jsonl", options.jobs, printed(err))
    found = plan.find(kept, options.base, options.size, options.r, options.play)
    page.write(options.out, options.name, options.command, found)
    took_s = time.perf_counter() - began
    err.print(f"{options.out / options.name}.md; {kept.computed} new simulations, {took_s:.0f} s in all")
    return page.tables(found)


def grid(table: Table) -> Grid:
    """Return the table for a terminal."""
    grid = Grid(title=f"SIMULATED · {table.title}", title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(table.header):
        grid.add_column(name, justify="right" if i else "left")
    for row in table.rows:
        grid.add_row(*map(escape, row))
    return grid


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Compare deployments and policies: the gateway's own code in front of modelled engines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="few policies and seeds, short traffic: some 10 minutes")
    add("--pools", default="all", metavar="A,B", help="deployments; see below [all]")
    add("--loads", default="all", metavar="A,B", help="loads; see below [all]")
    add("--policies", metavar="A,B", help="policies [those of the systems that are compared]")
    add("--seeds", type=count, metavar="N", help="number of seeds")
    add("--seeds-from", type=count, default=1, metavar="N", help="first seed [%(default)s]")
    add("--trace", type=Path, metavar="FILE", help="recorded traffic instead of generated agents, one seed")
    add("--kept", action="store_true", help="only make the page, of what earlier calls have simulated")
    add("--r", type=positive, metavar="RATE", help="use this R instead of searching it")
    add(
        "--param",
        action="append",
        default=[],
        metavar="BLOCK.NAME=V",
        help="a parameter of a policy, or of migration, enginePriority, pull or limits",
    )
    add("--name", default="deployments", metavar="NAME", help="name of page and data [%(default)s]")
    add("--out", type=Path, default=Path("docs/evaluation"), metavar="DIR", help="their folder [%(default)s]")
    add("--jobs", type=count, default=2, metavar="N", help="number of parallel processes [%(default)s]")
    add(
        "--work",
        type=Path,
        default=default_folder("evaluate"),
        metavar="DIR",
        help="folder that keeps finished simulations [%(default)s]",
    )
    args = parser.parse_args(argv)
    base, size = (plan.QUICK_BASE, plan.QUICK) if args.quick else (plan.BASE, plan.FULL)
    params = assignments(args.param, "--param")
    changed(Routing(), params, "--param")
    if args.trace:
        base = replace(base, trace=str(args.trace))
    seeds = args.seeds or (1 if args.trace else len(size.seeds))
    if Path(args.name).name != args.name:
        raise SpecError(f"{args.name!r} must be a name without a folder - at `--name`")
    return Options(
        base=replace(base, params=tuple(sorted(params.items()))),
        size=Size(
            pools=_known(args.pools, POOLS, "--pools"),
            loads=_known(args.loads, LOADS, "--loads"),
            policies=live_policies(args.policies, "--policies") if args.policies else size.policies,
            seeds=tuple(range(args.seeds_from, args.seeds_from + seeds)),
        ),
        r=args.r,
        jobs=args.jobs,
        out=args.out,
        work=args.work,
        name=args.name,
        command=repeatable(_PROGRAM, argv),
        play=not args.kept,
    )


def _known(text: str, every: Collection[str], option: str) -> tuple[str, ...]:
    names = listed(text, every)
    for name in names:
        if name not in every:
            raise SpecError(f"unknown {name!r}, known are {', '.join(every)} - at `{option}`")
    return names


def repeatable(program: str, argv: Sequence[str]) -> str:
    """Return the command as readers can repeat it: without options and paths of this machine."""
    words, kept = iter(argv), [program]
    for word in words:
        if word in ("--out", "--work", "--jobs"):
            next(words)
        elif word != "--kept":
            kept.append(word)
    return " ".join(kept)
