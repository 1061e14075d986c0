"""What the sweeps share: options, results that are kept, and a page of tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune_api.pool import SpecError
from perilune_lab.simulate.deployment import Arm
from perilune_lab.simulate.loads import NoRateError
from perilune_lab.terminal.arguments import count, positive
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import listed, live_policies
from perilune_research.deployments.cells import Cell
from perilune_research.deployments.cli import grid, repeatable
from perilune_research.deployments.plan import DEFAULT
from perilune_research.kept import Kept, default_folder, printed
from perilune_research.table import Table

_ARMS = (Arm.NONE, Arm.STORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    base: Cell
    """A cell of the sweep; policy, rate, seed and arm vary."""
    arms: tuple[Arm, ...]
    policies: tuple[str, ...]
    """The default is the first."""
    parameters: tuple[str, ...]
    """Parameters of the traffic that vary; empty for a sweep that varies none."""
    seeds: tuple[int, ...]
    play: bool
    jobs: int
    out: Path
    work: Path
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One command."""

    name: str
    """Name of the command, of its page and of the file that keeps its results."""
    title: str
    description: str
    note: str
    """What the page says about the tables."""
    policies: str
    """Policies to compare with the default."""
    tables: Callable[[Kept, Options], list[Table]]
    """Plays what no earlier call has, and returns the tables. Raises NoRateError and OSError."""
    parameters: Collection[str] = ()

    def main(self, argv: Sequence[str]) -> int:
        """Run the command and return the exit status. Raises SystemExit for `--help` and unknown options,
        KeyboardInterrupt after Ctrl-C."""
        try:
            tables = self.run(self.parse(argv), Console(stderr=True, soft_wrap=True))
        except (SpecError, NoRateError, OSError) as error:
            return wrong_call(self.program, error)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("what is finished is kept, so the same command goes on") from None
        out = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
        for table in tables:
            out.print(grid(table))
        return 0

    @property
    def program(self) -> str:
        return f"python -m perilune_research {self.name}"

    def run(self, options: Options, err: Console) -> list[Table]:
        """Play, write the page and return its tables. Raises NoRateError, and OSError if a file cannot be
        written."""
        options.out.mkdir(parents=True, exist_ok=True)
        kept = Kept(options.work / f"{self.name}.jsonl", options.jobs, printed(err))
        tables = self.tables(kept, options)
        page = options.out / f"{self.name}.md"
        page.write_text("\n".join([self._head(options), *(table.markdown("##") for table in tables)]))
        err.print(f"{page}; {kept.computed} new results", highlight=False)
        return tables

    def _head(self, options: Options) -> str:
        base = options.base
        return f"""\
# Evaluation: {self.title}

Everything on this page is **simulated** by `perilune simulate`, which runs the gateway's own code
([Simulator](../simulator.md)); no number is a measurement of hardware. [Evaluation](README.md) explains arms
and metrics, and says what follows from the figures.

`{options.command}` makes this page: {base.endpoints} modelled H20 GPUs, {base.window_s:g} s of generated
traffic, of which the first {base.warmup_s:g} s are not measured.
{self.note}
"""

    def parse(self, argv: Sequence[str]) -> Options:
        """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
        package, _, name = self.program.rpartition(" ")
        parser = argparse.ArgumentParser(
            prog=self.program,
            description=self.description,
            epilog=f"""\
examples (after `{package}`):
  {name} --seeds 1 --policies lmetric_plus_one
  {name} --kept        the page of what an interrupted call has finished

An interrupted call goes on when it is repeated: results are kept until the code that plays them changes.""",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = parser.add_argument
        add("--arms", default=",".join(_ARMS), metavar="A,B", help="deployment arms [%(default)s]")
        add(
            "--policies",
            default=self.policies,
            metavar="A,B",
            help=f"policies to compare with {DEFAULT} [%(default)s]",
        )
        if self.parameters:
            add(
                "--parameters",
                default="all",
                metavar="A,B",
                help=f"parameters to change, of {', '.join(self.parameters)} [%(default)s]",
            )
        add("--seeds", type=count, default=3, metavar="N", help="number of seeds [%(default)s]")
        add(
            "--window",
            type=positive,
            default=900.0,
            metavar="S",
            help="seconds of traffic; the first third is not measured [%(default)s]",
        )
        add("--kept", action="store_true", help="only make the page, of what earlier calls have played")
        add(
            "--out",
            type=Path,
            default=Path("docs/evaluation"),
            metavar="DIR",
            help="its folder [%(default)s]",
        )
        add("--jobs", type=count, default=2, metavar="N", help="number of parallel processes [%(default)s]")
        add(
            "--work",
            type=Path,
            default=default_folder("evaluate"),
            metavar="DIR",
            help="folder that keeps results [%(default)s]",
        )
        args = parser.parse_args(argv)
        return Options(
            base=Cell(policy=DEFAULT, rate=1.0, seed=1, window_s=args.window, warmup_s=args.window / 3),
            arms=tuple(map(Arm, _known(args.arms, tuple(Arm), "--arms"))),
            policies=tuple(dict.fromkeys((DEFAULT, *live_policies(args.policies, "--policies")))),
            parameters=_known(args.parameters, self.parameters, "--parameters") if self.parameters else (),
            seeds=tuple(range(1, args.seeds + 1)),
            play=not args.kept,
            jobs=args.jobs,
            out=args.out,
            work=args.work,
            command=repeatable(self.program, argv),
        )


def _known(text: str, every: Collection[str], option: str) -> tuple[str, ...]:
    names = listed(text, every)
    for name in names:
        if name not in every:
            raise SpecError(f"unknown {name!r}, known are {', '.join(every)} - at `{option}`")
    return names
