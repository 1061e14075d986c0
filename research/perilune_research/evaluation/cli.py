"""`python -m perilune_research evaluation`: plays the sections (`sections.py`) that docs/evaluation tells.

1. Print how much is to be played, and the CPU time that it will take, about.
2. Play each section as `perilune simulate` does. What an earlier call has played with the same code is kept.
3. Write the page and the data of each section that is complete, and the tables of docs/policies.md
   and docs/evaluation/README.md.

Ctrl-C loses only the simulations under way. Nothing that it writes is a measurement of hardware.

Exit status: 0, also if the time was too short; 2 for a wrong call or a file that cannot be written; 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from perilune_api.pool import SpecError
from perilune_lab.simulate.loads import NoRateError
from perilune_lab.terminal.arguments import count, positive
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import listed
from perilune_research.evaluation import capacity, cells, page
from perilune_research.evaluation.capacity import Bounds, Search
from perilune_research.evaluation.cells import Cell, Result
from perilune_research.evaluation.cost import cpu_s
from perilune_research.evaluation.page import Found
from perilune_research.evaluation.plan import Section, quick
from perilune_research.evaluation.pools import TRACES
from perilune_research.evaluation.sections import SECTIONS
from perilune_research.evaluation.summaries import DOCUMENTS, filled
from perilune_research.kept import Kept, default_folder, printed

_PROGRAM = "python -m perilune_research evaluation"
_NAMES = tuple(section.name for section in SECTIONS)
_PAGES, _QUICK_PAGES = Path("docs/evaluation"), Path("build/evaluation")
_EPILOG = f"""\
examples (after `python -m perilune_research`):
  evaluation --quick                     every section in small, into build/evaluation: about 10 minutes
  evaluation --minutes 60                an hour of what is missing; the same command goes on
  evaluation --sections recorded --traces ~/traces
  evaluation --estimate                  only print what is missing, and what it takes

sections (--sections): {", ".join(_NAMES)}
An interrupted call goes on when it is repeated: finished simulations are kept until the code that plays them
changes. A section's page is written once all of its simulations are there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    sections: tuple[Section, ...]
    minutes: float
    """Minutes after which no simulation is begun."""
    only_estimate: bool
    only_kept: bool
    """Whether pages are made of what earlier calls have played, complete or not."""
    jobs: int
    out: Path
    work: Path


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. Raises SystemExit for `--help` and unknown options,
    KeyboardInterrupt after Ctrl-C."""
    try:
        run(parse(argv), Console(stderr=True, soft_wrap=True))
    except (SpecError, NoRateError, OSError) as error:
        return wrong_call(_PROGRAM, error)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("finished simulations are kept, so the same command goes on") from None
    return 0


def run(options: Options, err: Console) -> None:
    """Play, and write the files. Raises NoRateError, and OSError if a file cannot be written."""
    until = time.monotonic() + 60 * options.minutes
    kept = Kept(options.work / "evaluation.jsonl", options.jobs, printed(err), until)
    playable = []
    for section in options.sections:
        if absent := _absent(section):
            err.print(f"{section.name} is left out: {', '.join(absent)} - at `--traces`", highlight=False)
        else:
            playable.append(section)
    for line in estimate(playable, kept, options.jobs):
        err.print(line, highlight=False)
    if options.only_estimate:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for section in playable:
        err.print(_played(section, kept, options), highlight=False)
    for document in map(options.out.joinpath, DOCUMENTS):
        if document.is_file():
            document.write_text(filled(document.read_text(), options.out))
            err.print(f"{document.resolve()}: its tables", highlight=False)


def estimate(sections: Iterable[Section], kept: Kept, jobs: int) -> list[str]:
    """Say how much each section lacks, and what it takes. What several lack counts where it is played
    first."""
    lines, sum_s = [], 0.0
    seen: set[Cell | Search] = set()
    for section in sections:
        missing = {item for item in wanted(section) if item not in kept} - seen
        seen |= missing
        section_s = sum(map(cpu_s, missing))
        sum_s += section_s
        lines.append(f"{section.name}: {len(missing):,} to play, about {_minutes(section_s)} of CPU time")
    lines.append(f"in all about {_minutes(sum_s)} of CPU time, {_minutes(sum_s / jobs)} with --jobs {jobs}")
    return lines


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min"


def wanted(section: Section) -> Iterable[Cell | Search]:
    """Return what a section plays, some of it more than once."""
    return capacity.searches(section) if section.searched else section.cells()


def _absent(section: Section) -> list[str]:
    """Return the files that the section plays and that are not there."""
    files = (section.traces / name for name in TRACES.values()) if section.recorded else ()
    return [f"there is no file {file}" for file in files if not file.is_file()]


def _played(section: Section, kept: Kept, options: Options) -> str:
    """Play a section and write its files; return what to say of it."""
    every = [item for item in dict.fromkeys(wanted(section)) if item in kept or not options.only_kept]
    searches = [item for item in every if isinstance(item, Search)]
    simulations = [item for item in every if isinstance(item, Cell)]
    bounds = kept.results(searches, capacity.batches, capacity.compute, Bounds, f"{section.name}: searches")
    results = kept.results(simulations, cells.batches, cells.compute, Result, section.name)
    there = len(bounds) + len(results)
    if there < len(every):
        return (
            f"{section.name}: {there} of {len(every)}, so its page is not written; the same command goes on"
        )
    if not there:
        return f"{section.name}: nothing of it is kept"
    if section.searched:
        page.write_capacities(options.out, section, bounds)
    else:
        page.write(options.out, Found(section, results))
    return f"{options.out / section.name}.md"


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Play what docs/evaluation tells: the gateway's own code in front of modelled engines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--sections", default="all", metavar="A,B", help="sections; see below [all]")
    add(
        "--quick",
        action="store_true",
        help=f"every section in small, into {_QUICK_PAGES}: about 10 minutes with two processes",
    )
    add("--minutes", type=positive, default=inf, metavar="N", help="begin nothing after N minutes")
    add(
        "--traces",
        type=Path,
        default=Path("traces"),
        metavar="DIR",
        help=f"folder of {', '.join(TRACES.values())} [%(default)s]",
    )
    add("--estimate", action="store_true", help="only print what is missing, and the time that it takes")
    add("--kept", action="store_true", help="only make pages, of what earlier calls have played")
    add("--out", type=Path, metavar="DIR", help=f"folder of pages and data [{_PAGES}]")
    add("--jobs", type=count, default=2, metavar="N", help="number of parallel processes [%(default)s]")
    add(
        "--work",
        type=Path,
        default=default_folder("evaluate"),
        metavar="DIR",
        help="folder that keeps finished simulations [%(default)s]",
    )
    args = parser.parse_args(argv)
    names = listed(args.sections, _NAMES)
    for name in names:
        if name not in _NAMES:
            raise SpecError(f"unknown {name!r}, known are {', '.join(_NAMES)} - at `--sections`")
    chosen = (replace(section, traces=args.traces) for section in SECTIONS if section.name in names)
    return Options(
        sections=tuple(quick(section) if args.quick else section for section in chosen),
        minutes=args.minutes,
        only_estimate=args.estimate,
        only_kept=args.kept,
        jobs=args.jobs,
        out=args.out or (_QUICK_PAGES if args.quick else _PAGES),
        work=args.work,
    )
