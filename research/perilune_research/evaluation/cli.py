"""`python -m perilune_research evaluation`: plays the sections (`sections.py`) that docs/evaluation tells.

1. Read the rows of each section's data file. Those that other code has played are outdated.
2. Print how much is to be played for these and for missing ones, and the CPU time that it will take, about.
3. Play it as `perilune simulate` does. What an earlier call has played with the same code is kept.
4. Write the data of each section, the page that it makes, and the tables of docs/policies.md and
   docs/evaluation/README.md.

Ctrl-C loses only the simulations under way. Nothing that it writes is a measurement of hardware.

Exit status: 0, also if the time was too short; 1 if rows were to be carried over and were not; 2 for a wrong
call or a file that cannot be read or written; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from random import Random

from perilune_api.pool import SpecError
from perilune_lab.simulate.loads import NoRateError
from perilune_lab.terminal.arguments import count, positive
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import listed
from perilune_research.evaluation import capacity, carrying, cells, page
from perilune_research.evaluation.capacity import Bounds, Search
from perilune_research.evaluation.cells import Cell, Result
from perilune_research.evaluation.cost import cpu_s
from perilune_research.evaluation.plan import Section, quick
from perilune_research.evaluation.pools import POOLS, TRACES
from perilune_research.evaluation.rows import Key, Planned, Row, Rows, of_plan, planned, read, row
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
  evaluation --deployments 'split*'      only deployments of these names; other rows stay as they are
  evaluation --estimate                  only print what is outdated or missing, and what it takes
  evaluation --pages                     only make the pages and tables of the data
  evaluation --carry 60                  after a change that should leave all figures as they are

sections (--sections): {", ".join(_NAMES)}
Rows that today's code has played are not played again, unless `--out` is a folder without data. An
interrupted call goes on when it is repeated: finished simulations are kept until the code that plays them
changes. A section is written once each row that the call is to play is there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    sections: tuple[Section, ...]
    minutes: float
    """Minutes after which no simulation is begun."""
    only_estimate: bool
    only_pages: bool
    carry: int
    """How many outdated rows are played in one seed to see whether all are still true. 0: none."""
    deployments: tuple[str, ...]
    """Patterns of the names of deployments that are played."""
    jobs: int
    out: Path
    work: Path


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. Raises SystemExit for `--help` and unknown options,
    KeyboardInterrupt after Ctrl-C."""
    try:
        return run(parse(argv), Console(stderr=True, soft_wrap=True))
    except (SpecError, NoRateError, OSError) as error:
        return wrong_call(_PROGRAM, error)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("finished simulations are kept, so the same command goes on") from None


@dataclass(frozen=True, slots=True)
class Work:
    """A section, and what is to be played of it."""

    section: Section
    plan: Sequence[Planned]
    rows: dict[Key, Row]
    """Those of the data file that are planned."""
    outdated: Sequence[Planned]
    """Rows to play, which are outdated or missing."""

    @property
    def items(self) -> list[Cell | Search]:
        """The simulations of these rows."""
        return list(dict.fromkeys(item for each in self.outdated for item in each.items))


def run(options: Options, err: Console) -> int:
    """Play, write the files, and return the exit status. Raises NoRateError, and OSError if a file cannot be
    written."""
    every = []
    for section in options.sections:
        work = planned_work(section, options)
        if work.outdated and (absent := _absent(section)):
            err.print(f"{section.name} is left out: {', '.join(absent)} - at `--traces`", highlight=False)
        else:
            every.append(work)
    until = time.monotonic() + 60 * options.minutes
    kept = Kept(options.work / "evaluation.jsonl", options.jobs, printed(err), until)
    if options.carry:
        return _carried(every, kept, options, err)
    if not options.only_pages:
        for line in estimate(every, kept, options.jobs):
            err.print(line, highlight=False)
    if options.only_estimate:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for work in every:
        err.print(_played(work, kept, options), highlight=False)
    for document in map(options.out.joinpath, DOCUMENTS):
        if document.is_file():
            document.write_text(filled(document.read_text(), options.out))
            err.print(f"{document.resolve()}: its tables", highlight=False)
    return 0


def planned_work(section: Section, options: Options) -> Work:
    """Return what is to be played of a section. Raises OSError, and SpecError if its data are broken."""
    path = options.out / f"{section.name}.json"
    plan = planned(section)
    rows = of_plan(plan, read(path)) if path.exists() else {}
    outdated = [
        each
        for each in plan
        if not options.only_pages
        and each.is_outdated(rows.get(each.key))
        and any(fnmatchcase(each.key.deployment, pattern) for pattern in options.deployments)
    ]
    return Work(section, plan, rows, outdated)


def estimate(every: Iterable[Work], kept: Kept, jobs: int) -> list[str]:
    """Say how much each section lacks, and what it takes. What several lack counts where it is played
    first."""
    lines, sum_s = [], 0.0
    seen: set[Cell | Search] = set()
    for work in every:
        missing = {item for item in work.items if item not in kept} - seen
        seen |= missing
        section_s = sum(map(cpu_s, missing))
        sum_s += section_s
        lines.append(
            f"{work.section.name}: {len(missing):,} to play, about {_minutes(section_s)} of CPU time"
        )
    lines.append(f"in all about {_minutes(sum_s)} of CPU time, {_minutes(sum_s / jobs)} with --jobs {jobs}")
    return lines


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min"


def _absent(section: Section) -> list[str]:
    """Return the files that the section plays and that are not there."""
    files = (section.traces / name for name in TRACES.values()) if section.recorded else ()
    return [f"there is no file {file}" for file in files if not file.is_file()]


def _played(work: Work, kept: Kept, options: Options) -> str:
    """Play a section and write its files; return what to say of it."""
    section, rows = work.section, dict(work.rows)
    results = _results(work.items, kept, section.name)
    for each in work.outdated:
        if all(item in results for item in each.items):
            rows[each.key] = row(section, each, [results[item] for item in each.items])
    missing = sum(each.key not in rows for each in work.outdated)
    if missing:
        return f"{section.name}: {missing} rows are missing, so it is not written; the same command goes on"
    if not rows:
        return f"{section.name}: nothing of it was played"
    page.write(options.out, section, of_plan(work.plan, rows))
    return f"{options.out / section.name}.md{_still_outdated(work.plan, rows)}"


def _still_outdated(plan: Sequence[Planned], rows: Rows) -> str:
    """Return a clause on the rows that are not of today's code; empty if there are none."""
    old = sum(each.is_outdated(rows.get(each.key)) for each in plan)
    return f", {old} of its {len(plan)} rows played by other code or not at all" if old else ""


def _results(
    items: Iterable[Cell | Search], kept: Kept, what: str
) -> Mapping[Cell | Search, Result | Bounds]:
    """Return the results for which there was time."""
    every = list(items)
    searches = [item for item in every if isinstance(item, Search)]
    simulations = [item for item in every if isinstance(item, Cell)]
    bounds = kept.results(searches, capacity.batches, capacity.compute, Bounds, f"{what}: searches")
    figures = kept.results(simulations, cells.batches, cells.compute, Result, what)
    return dict([*bounds.items(), *figures.items()])


def _carried(every: Sequence[Work], kept: Kept, options: Options, err: Console) -> int:
    """Carry outdated rows over if a sample of them is still true, and return the exit status."""
    carryable = {
        work.section.name: carrying.carryable(work.section, work.outdated, work.rows) for work in every
    }
    outdated = [each for rows in carryable.values() for each in rows]
    if not outdated:
        err.print("There is no row to carry over.")
        return 0
    same_again = Random("".join(each.plan.code + each.plan.simulations for each in outdated))
    some = carrying.sample(outdated, same_again, options.carry)
    results = _results([one.item for one in some], kept, "sample")
    found = [(one, carrying.different(one, results[one.item])) for one in some if one.item in results]
    for one, different in found:
        err.print(f"{one}: {'; '.join(different) or 'the same'}", highlight=False)
    changed = sum(bool(different) for _, different in found)
    if changed or len(found) < len(some):
        err.print(
            f"{len(found)} of {len(some)} were played, and {changed} have changed: nothing is carried over."
        )
        return 1
    for work in every:
        if old := carryable[work.section.name]:
            rows = {**work.rows, **carrying.carried(old)}
            page.write(options.out, work.section, of_plan(work.plan, rows))
            left = _still_outdated(work.plan, rows)
            err.print(f"{work.section.name}: {len(old)} rows are of today's code{left}", highlight=False)
    return 0


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
    only = parser.add_mutually_exclusive_group().add_argument
    only(
        "--estimate",
        action="store_true",
        help="only print what is outdated or missing, and the time that it takes",
    )
    only(
        "--carry",
        type=count,
        default=0,
        metavar="N",
        help="play one seed of N outdated rows; if no figure differs, take all outdated rows for today's",
    )
    only("--pages", action="store_true", help="play nothing, only make the pages and tables of the data")
    add(
        "--deployments",
        default="all",
        metavar="A,B",
        help="names of deployments that are played, or patterns of them such as 'split*' [%(default)s]",
    )
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
    deployments = listed(args.deployments, POOLS)
    for pattern in deployments:
        if not any(fnmatchcase(pool, pattern) for pool in POOLS):
            raise SpecError(f"{pattern!r} fits no deployment, such as 'split' - at `--deployments`")
    chosen = (replace(section, traces=args.traces) for section in SECTIONS if section.name in names)
    return Options(
        sections=tuple(quick(section) if args.quick else section for section in chosen),
        minutes=args.minutes,
        only_estimate=args.estimate,
        only_pages=args.pages,
        carry=args.carry,
        deployments=deployments,
        jobs=args.jobs,
        out=args.out or (_QUICK_PAGES if args.quick else _PAGES),
        work=args.work,
    )
