"""`python -m perilune_research evaluate`: simulates every policy; writes all bars, figures and tables.

Steps: find R → simulate what the wanted parts need, as far as it is not already done → bars, figures, tables
→ files under `--out` → a summary. Ctrl-C loses nothing but the simulations under way: the next call goes on.
Nothing printed is a measurement of hardware.

Exit status: 0, also with missed bars; 2 for a wrong call or a file that cannot be written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as Grid

from perilune_api.pool import SpecError
from perilune_lab.arguments import count
from perilune_lab.console import Console
from perilune_lab.exits import wrong_call
from perilune_research.evaluate import document, plan, readme, tables
from perilune_research.evaluate.bars import Bar, judge
from perilune_research.evaluate.cells import Scenario
from perilune_research.evaluate.evaluation import evaluate
from perilune_research.evaluate.figures import FIGURES, Context
from perilune_research.evaluate.plan import EVERYTHING, NEEDS, Size
from perilune_research.evaluate.table import Table
from perilune_research.evaluate.traffic import traffic
from perilune_research.evaluate.work import Progress, Work, default_folder

_EVERY_S = 10.0

_EPILOG = f"""\
examples (after `python -m perilune_research`):
  evaluate --quick                   everything with {plan.QUICK_SEEDS} seeds: under 10 minutes
  evaluate                           everything with {plan.FULL_SEEDS} seeds: under an hour
  evaluate --seeds-from 1001         other seeds; the next `evaluate` says whether the verdicts agree
  evaluate --only bars,f8 --out DIR  some parts, written elsewhere
  evaluate --only P1,P3 --seeds 64   two bars with more seeds; printed, not written

parts (--only): {", ".join(NEEDS)}
R: sessions per second at which lmetric has TTFT p90 = 5 × the floor (every turn alone, its session's prefix
  cached); loads are R/2, R, 1.25 R and 1.6 R
an evaluation that was interrupted goes on: simulations are kept under --work until the code changes
"""


@dataclass(frozen=True, slots=True)
class Options:
    size: Size
    out: Path
    parts: tuple[str, ...]
    jobs: int
    work: Path
    base: Scenario = plan.BASE


def main(argv: Sequence[str]) -> int:
    try:
        shown = run(parse(argv), Console(stderr=True, soft_wrap=True))
    except BrokenPipeError:
        raise
    except SpecError as error:
        return wrong_call("python -m perilune_research evaluate", error)
    except OSError as error:
        return wrong_call("python -m perilune_research evaluate", f"{error} - under `--out` or `--work`")
    except KeyboardInterrupt:
        print("\ninterrupted: the next call goes on from here", file=sys.stderr)
        raise
    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for part in shown:
        out.print(part)
    return 0


def run(options: Options, err: Console) -> list[Grid | str]:
    """Simulates, writes the files, and returns what is to be printed. Raises SpecError, and OSError if a disk
    is full."""
    began = time.perf_counter()
    work = Work(_folder(options.work, "--work"), options.jobs, _progress(err))
    _folder(options.out, "--out")
    findings = evaluate(work, options.parts, options.size, options.base)
    seeds = len(options.size.seeds)
    some = f"{seeds} seed{'s' * (seeds != 1)}"
    shown: list[Grid | str] = [f"SIMULATED · R = {findings.r:g} sessions/s · {some}"]
    if "tables" in options.parts:
        shown += [_grid(tables.end_to_end(findings, load)) for load in plan.LOADS]
    context = Context(findings, traffic(options.size.seeds[0]))
    for name in [part for part in options.parts if part in FIGURES]:
        FIGURES[name].make(context, options.out, name)
        err.print(f"{name}: {options.out / name}.svg", highlight=False)
    if "bars" in options.parts:
        shown += _conclude(options, context)
    elif judged := judge(findings, options.parts):
        shown += [_grid(tables.bars(judged)), *map(_line, judged)]
    err.print(
        f"{work.computed} simulations and searches, {time.perf_counter() - began:.0f} s in all",
        highlight=False,
    )
    return shown


def _folder(path: Path, option: str) -> Path:
    """Makes the folder and checks that it can be written to, before the work begins."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror} - at `{option}`") from None
    return path


def _conclude(options: Options, context: Context) -> list[Grid | str]:
    """Writes the bars and, if every part was made, the documents; returns the bars, to be printed."""
    findings = context.findings
    judged = judge(findings)
    made = document.document(findings, judged, document.read(options.out))
    (options.out / document.RESULTS).write_bytes(document.encode(made))
    if set(options.parts) >= set(EVERYTHING):
        notes = readme.notes_of(options.out)
        page = readme.readme(findings, judged, made, context.traffic.stats, notes)
        (options.out / readme.README).write_text(page)
        (options.out / readme.TABLES).write_text(readme.all_tables(findings))
    agreement = [made.compared.agreement(made.bars)] if made.compared else []
    return [_grid(tables.bars(judged)), *agreement, *map(_line, judged)]


def _line(bar: Bar) -> str:
    return f"{bar.name} {bar.verdict}{'' if bar.clear else ' (within the interval)'}: {bar.goal}"


def _grid(table: Table) -> Grid:
    grid = Grid(title=f"SIMULATED · {table.title}", title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(table.header):
        grid.add_column(name, justify="right" if i else "left")
    for row in table.rows:
        grid.add_row(*(escape(cell.replace("**", "")) for cell in row))
    return grid


def _progress(err: Console) -> Callable[[Progress], None]:
    """Prints a line now and then, with the time that is left."""
    began: dict[str, float] = {}
    shown: dict[str, float] = {}

    def show(p: Progress) -> None:
        now = time.perf_counter()
        if p.first:
            began[p.what] = shown[p.what] = now
            return
        if now - shown[p.what] < _EVERY_S and p.done < p.total:
            return
        shown[p.what] = now
        left_s = (now - began[p.what]) / p.done * (p.total - p.done)
        err.print(f"{p.what}: {p.done}/{p.total}, {left_s / 60:.1f} min left", highlight=False)

    return show


def parse(argv: Sequence[str]) -> Options:
    """Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    parser = argparse.ArgumentParser(
        prog="python -m perilune_research evaluate",
        description="The whole evaluation on modelled engines: bars, ten figures, tables, as files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{plan.QUICK_SEEDS} seeds, not {plan.FULL_SEEDS}")
    add("--out", type=Path, default=Path("docs/evaluation"), metavar="DIR", help="[%(default)s]")
    add("--seeds", type=count, metavar="N", help="of the main comparison, paired; fewer for the rest")
    add("--seeds-from", type=count, default=1, metavar="N", help="first seed [%(default)s]")
    add("--only", metavar="A,B", help="some parts: no README then")
    add("--jobs", type=count, default=2, metavar="N", help="processes [%(default)s]")
    add(
        "--work",
        type=Path,
        default=default_folder(),
        metavar="DIR",
        help="finished simulations [%(default)s]",
    )
    args = parser.parse_args(argv)
    return Options(
        size=plan.size(args.quick, args.seeds, args.seeds_from),
        out=args.out,
        parts=_parts(args.only),
        jobs=args.jobs,
        work=args.work,
    )


def _parts(text: str | None) -> tuple[str, ...]:
    if text is None:
        return EVERYTHING
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in NEEDS:
            raise SpecError(f"Unknown part {name!r}, known are {', '.join(NEEDS)} - at `--only`")
    return names
