"""`python -m perilune_research arena`: the same agentic sessions through other routers, beside ours.

    install what is a package ─▶ for each seed, load and router: play a cell ─▶ table, verdicts, settings

Every cell has fresh engines and a fresh router, so nothing is cached from the cell before. A router that
cannot be installed or does not start is left out and named under the table.

Exit status: 0; 1 if no cell could be played; 2 for a wrong call; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from perilune_api.pool import SpecError
from perilune_lab.arguments import assignments, count, output, positive, url
from perilune_lab.bodies import Words
from perilune_lab.console import Console
from perilune_lab.exits import wrong_call
from perilune_lab.report import Run
from perilune_lab.stack import StackError
from perilune_lab.vocabulary import Vocabulary
from perilune_research.arena.contestants import CONTESTANTS, Contestant, Package, Program, Remote
from perilune_research.arena.install import NotInstalledError, cache, executable
from perilune_research.arena.loads import LEVELS, SLOWDOWNS, Level, Setting
from perilune_research.arena.play import Cell, play
from perilune_research.arena.table import legend, table, verdicts

PROGRAM = "python -m perilune_research arena"
NOTHING_PLAYED = 1
_HEADERS = {"with": True, "without": False}
_MOST_ENGINES = 64
T = TypeVar("T")

_EPILOG = f"""\
routers (the first run installs those that are packages into {cache()}):
{chr(10).join(legend(CONTESTANTS, {}))}

loads, in sessions that begin per second and engine:
  {", ".join(f"{level.name} {level.sessions_per_s:g}" for level in LEVELS)}
Engines are simulated, in real time, {", ".join(f"{s:g}" for s in SLOWDOWNS)} times slower
than an H20 in turn, which no router is told. Close other programs: they make every router's times longer.

a router of your own: start it in front of engines whose ports you choose; the arena runs these engines.
Restart it between cells, or play one cell: it may believe in caches that new engines do not have.

examples:
  {PROGRAM} --routers envoy-round-robin,perilune --loads knee --headers with --seeds 1
  {PROGRAM} --url mine=http://127.0.0.1:8080 --engine-port 18000 --routers perilune --loads ease
  {PROGRAM} --seeds 5 --json arena.json
"""


@dataclass(frozen=True, slots=True)
class Options:
    contestants: tuple[Contestant, ...]
    levels: tuple[Level, ...]
    headers: tuple[bool, ...]
    """Whether requests name their session: both, or one of them."""
    seeds: int
    setting: Setting
    json: Path | None

    def cells(self) -> Iterator[Cell]:
        """Routers take turns within a seed, so a busy minute of the machine does not hit one router only."""
        for seed in range(self.seeds):
            for level in self.levels:
                for named in self.headers:
                    for contestant in self.contestants:
                        yield Cell(contestant, level, named, seed)


class Row(msgspec.Struct, frozen=True):
    """One cell in the JSON file."""

    router: str
    load: str
    session_header: bool
    seed: int
    run: Run


class Arena:
    """Plays all cells. `err`: where progress is printed."""

    def __init__(self, options: Options, words: Words, err: Console) -> None:
        self.options = options
        self.words = words
        self.err = err
        self.programs: dict[Package, Path] = {}
        self.played: list[tuple[Cell, Run]] = []
        self.left_out: dict[str, str] = {}
        """Router → why it does not take part, or no longer does."""

    def install(self) -> None:
        for contestant in self.options.contestants:
            front = contestant.front
            if isinstance(front, Program) and front.package not in self.programs:
                try:
                    self._say(f"{front.package}: looking for it, or installing it …")
                    self.programs[front.package] = executable(front.package, cache())
                except NotInstalledError as error:
                    self._leave_out(contestant, f"{front.package} cannot be installed: {error}")

    async def run(self) -> None:
        cells = [cell for cell in self.options.cells() if cell.contestant.name not in self.left_out]
        about_s = len(cells) * (self.options.setting.seconds * 1.5 + 5)
        self._say(f"{len(cells)} cells; at least {about_s / 60:.0f} minutes")
        for at, cell in enumerate(cells, 1):
            if cell.contestant.name in self.left_out:
                continue
            try:
                run = await play(cell, self.options.setting, self.programs, self.words)
            except StackError as error:
                self._leave_out(cell.contestant, f"from cell {at} on: {str(error).splitlines()[0]}")
                continue
            self.played.append((cell, run))
            header = "with" if cell.named else "without"
            self._say(
                f"{at}/{len(cells)} {cell.contestant.name}, {cell.level.name}, {header} session header,"
                f" seed {cell.seed}: {run.succeeded} of {run.requests} requests"
            )

    def _leave_out(self, contestant: Contestant, cause: str) -> None:
        self.left_out[contestant.name] = cause
        self._say(f"{contestant.name} is left out: {cause}")

    def _say(self, line: str) -> None:
        self.err.print(line, highlight=False, markup=False, soft_wrap=True)

    def conclude(self) -> int:
        """Writes the JSON file; prints the table; returns the exit status."""
        if self.options.json:
            rows = [Row(c.contestant.name, c.level.name, c.named, c.seed, run) for c, run in self.played]
            self.options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
        parts = (
            table(self.played),
            verdicts(self.played),
            legend(self.options.contestants, self.left_out),
        )
        print("\n\n".join("\n".join(part) for part in parts if part))
        return 0 if self.played else NOTHING_PLAYED


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
    except SpecError as error:
        return wrong_call(PROGRAM, error)
    arena = Arena(options, Vocabulary().words_for, Console(stderr=True))
    arena.install()
    uvloop.run(arena.run())
    return arena.conclude()


def _chosen(text: str, known: Mapping[str, T], option: str) -> tuple[T, ...]:
    """Parses `A,B`. Raises SpecError."""
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise SpecError(f"unknown {name!r} (known: {', '.join(known)}) - at `{option}`")
    return tuple(known[name] for name in names)


def _remotes(texts: Sequence[str]) -> tuple[Contestant, ...]:
    """Parses `NAME=URL`. Raises SpecError."""
    found = []
    for name, address in assignments(texts, "--url").items():
        try:
            found.append(Contestant(name, Remote(url(address)), f"run by the user at {address}"))
        except argparse.ArgumentTypeError as error:
            raise SpecError(f"{error} - at `--url`") from None
    return tuple(found)


def parse(argv: Sequence[str]) -> Options:
    """Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    known = {contestant.name: contestant for contestant in CONTESTANTS}
    default = Setting()
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Play the same agentic sessions through several routers in front of the same simulated"
        " engines; compare.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--routers", default=",".join(known), metavar="A,B", help="routers that take part [all]")
    add("--url", action="append", default=[], metavar="NAME=URL", help="a router that you run; repeatable")
    add("--loads", default=",".join(level.name for level in LEVELS), metavar="A,B", help="[%(default)s]")
    add(
        "--headers",
        default=",".join(_HEADERS),
        metavar="A,B",
        help="with, without a header that names the session [%(default)s]",
    )
    add("--seeds", type=count, default=3, metavar="N", help="traffic of N seeds [%(default)s]")
    add(
        "--seconds",
        type=positive,
        default=default.seconds,
        metavar="S",
        help="length of a cell's traffic [%(default)s]",
    )
    add("--engines", type=count, default=default.engines, metavar="N", help="engines [%(default)s]")
    add("--engine-port", type=count, metavar="PORT", help="port of the first engine; the others follow [any]")
    add("--json", type=output, metavar="FILE", help="write every cell's report (fields: docs/report.md)")
    args = parser.parse_args(argv)
    if args.engines > _MOST_ENGINES:
        raise SpecError(f"{args.engines:,} engines: at most {_MOST_ENGINES} - at `--engines`")
    remotes = _remotes(args.url)
    if remotes and not args.engine_port:
        raise SpecError(
            "a router of your own needs to know the engines' ports: add --engine-port - at `--url`"
        )
    for remote in remotes:
        if remote.name in known:
            raise SpecError(f"{remote.name!r} is the name of another router - at `--url`")
    return Options(
        contestants=_chosen(args.routers, known, "--routers") + remotes,
        levels=_chosen(args.loads, {level.name: level for level in LEVELS}, "--loads"),
        headers=_chosen(args.headers, _HEADERS, "--headers"),
        seeds=args.seeds,
        setting=Setting(args.engines, args.seconds, args.engine_port or 0),
        json=args.json,
    )
