"""`python -m perilune_research arena`: plays the same agentic sessions through Perilune and other routers.

1. Install the routers that are packages.
2. Play a cell for each seed, load and router. Every cell has fresh engines and a fresh router, so nothing is
   cached from the cell before.
3. Print verdicts, a table, and the settings of the routers; what Perilune loses comes first. A router that
   cannot be installed or does not start is left out and named under the table.

Exit status: 0; 1 if no cell could be played; 2 for a wrong call; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import TypeVar

import msgspec
import uvloop

from perilune_api.pool import SpecError
from perilune_lab.load.bodies import Words
from perilune_lab.processes.stack import StackError
from perilune_lab.report import Run
from perilune_lab.terminal.arguments import assignments, count, output, positive, url
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.traces.source import open_trace
from perilune_lab.vocabulary import Vocabulary
from perilune_research.arena.contestants import (
    AIPERF,
    CONTESTANTS,
    Contestant,
    DynamoFrontend,
    Package,
    Program,
    Remote,
)
from perilune_research.arena.install import NotInstalledError, cache, executable
from perilune_research.arena.loads import LEVELS, SLOWDOWNS, Client, Halfway, Level, Setting
from perilune_research.arena.play import FAILED_S, Cell, play
from perilune_research.arena.table import legend, table, verdicts

PROGRAM = "python -m perilune_research arena"
NOTHING_PLAYED = 1
_HEADERS = {"with": True, "without": False}
_MOST_ENGINES, _MOST_PORT = 64, 65_535
T = TypeVar("T")

_EPILOG = f"""\
routers (the first call installs those that are packages into {cache()}):
{chr(10).join(legend(CONTESTANTS, {}))}

loads, in sessions that begin per second and engine:
  {(chr(10) + "  ").join(str(level) for level in LEVELS)}
Engines are simulated in real time. In turn, their times are those of an H20 multiplied by
{", ".join(f"{s:g}" for s in SLOWDOWNS)}, and they vary from step to step. No router knows of this.
A request that fails counts with a latency of {FAILED_S:g} s.
Close other programs, since they make every router's times longer.

a router of your own: name it with --url and start it in front of the engines that the arena runs from
--engine-port on. Restart it between cells, or play one cell: it may believe in caches that new engines do
not have.

examples:
  {PROGRAM} --routers envoy-round-robin,perilune --loads knee --headers with --seeds 1
  {PROGRAM} --url mine=http://127.0.0.1:8080 --engine-port 18000 --routers perilune --loads ease
  {PROGRAM} --seeds 5 --json arena.json --minutes 15
      plays for a quarter of an hour; the same command goes on where it stopped
  {PROGRAM} --loads recorded --trace mooncake_conversation.jsonl.gz
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    contestants: tuple[Contestant, ...]
    levels: tuple[Level, ...]
    headers: tuple[bool, ...]
    """Whether requests name their session in a header; both values play both."""
    seeds: int
    """Number of seeds, from 0."""
    setting: Setting
    json: Path | None
    minutes: float = inf
    """Begin no cell that would end later than this."""

    def cells(self) -> Iterator[Cell]:
        """Yield the cells in the order of play. Routers take turns within a seed, so that a busy minute of
        the machine does not hit only one of them. A router that the user runs plays no load that restarts
        it."""
        for seed in range(self.seeds):
            for level in self.levels:
                for named in self.headers:
                    for contestant in self.contestants:
                        if level.halfway is Halfway.RESTART and isinstance(contestant.front, Remote):
                            continue
                        yield Cell(contestant, level, named, seed)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One cell in the JSON file."""

    router: str
    load: str
    session_header: bool
    seed: int
    engines: int
    seconds: float
    client: Client = Client.LAB
    run: Run


class Arena:
    """Plays all cells, and keeps their results. `err`: where to print progress."""

    def __init__(self, options: Options, words: Words, err: Console) -> None:
        self.options = options
        self.words = words
        self.err = err
        self.programs: dict[Package, Path] = {}
        self.played = kept(options)
        self.left_out: dict[str, str] = {}
        """Router → why it does not take part, or no longer does."""

    def install(self) -> None:
        """Install the routers that are packages, and leave those out that cannot be installed. Raises
        NotInstalledError if the client cannot be installed."""
        if self.options.setting.client is Client.AIPERF:
            self._say(f"{AIPERF}: installing it, unless it is installed (about 1 GB) …")
            self.programs[AIPERF] = executable(AIPERF, cache())
        for contestant in self.options.contestants:
            front = contestant.front
            if isinstance(front, Program | DynamoFrontend) and front.package not in self.programs:
                try:
                    self._say(f"{front.package}: installing it, unless it is installed …")
                    self.programs[front.package] = executable(front.package, cache())
                except NotInstalledError as error:
                    self._leave_out(contestant, f"{front.package} cannot be installed: {error}")

    async def run(self) -> None:
        """Play the cells that the JSON file lacks. Raises SpecError if a recording cannot be read."""
        done = {_key(cell) for cell, _ in self.played}
        cells = [
            cell
            for cell in self.options.cells()
            if cell.contestant.name not in self.left_out and _key(cell) not in done
        ]
        cell_s = self.options.setting.seconds * 1.5 + 5
        self._say(f"{len(cells)} cells; at least {len(cells) * cell_s / 60:.0f} minutes")
        began_s = monotonic()
        for at, cell in enumerate(cells, 1):
            if cell.contestant.name in self.left_out:
                continue
            if monotonic() - began_s + cell_s > self.options.minutes * 60:
                self._say(f"{len(cells) - at + 1} cells remain: the same command plays them")
                return
            try:
                run = await play(cell, self.options.setting, self.programs, self.words)
            except StackError as error:
                self._leave_out(cell.contestant, f"from cell {at} on: {str(error).splitlines()[0]}")
                continue
            self.played.append((cell, run))
            self._write()
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

    def _write(self) -> None:
        """Write the JSON file, if there is one, so that an interrupted run loses at most one cell."""
        if self.options.json:
            setting = self.options.setting
            rows = [_row(cell, setting, run) for cell, run in self.played]
            self.options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")

    def so_far(self) -> str:
        """Return a sentence that tells a user who interrupts whether the played cells are kept."""
        played, path = len(self.played), self.options.json
        total = len({_key(cell) for cell in self.options.cells()} | {_key(cell) for cell, _ in self.played})
        if path is None:
            return f"{played} of {total} cells were played; with --json FILE they would be kept"
        return f"{played} of {total} cells are in {path}, so the same command goes on from there"

    def conclude(self) -> int:
        """Print table, verdicts and settings; return the exit status."""
        parts = (
            verdicts(self.played),
            table(self.played),
            legend(self.options.contestants, self.left_out),
        )
        print("\n\n".join("\n".join(part) for part in parts if part))
        return 0 if self.played else NOTHING_PLAYED


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        arena = Arena(options, Vocabulary().words_for, Console(stderr=True))
    except SpecError as error:
        return wrong_call(PROGRAM, error)
    try:
        arena.install()
    except NotInstalledError as error:
        return wrong_call(PROGRAM, SpecError(f"{AIPERF} cannot be installed: {error} - at `--client`"))
    try:
        uvloop.run(arena.run())
    except KeyboardInterrupt:
        arena.conclude()
        raise KeyboardInterrupt(arena.so_far()) from None
    return arena.conclude()


def _key(cell: Cell) -> tuple[str, str, bool, int]:
    """Return the first fields of a cell's row in the file, which identify the cell."""
    return cell.contestant.name, cell.level.name, cell.named, cell.seed


def _row(cell: Cell, setting: Setting, run: Run) -> Row:
    router, load, session_header, seed = _key(cell)
    return Row(
        router=router,
        load=load,
        session_header=session_header,
        seed=seed,
        engines=setting.engines,
        seconds=setting.seconds,
        client=setting.client,
        run=run,
    )


def kept(options: Options) -> list[tuple[Cell, Run]]:
    """Return the cells that the JSON file already has. Raises SpecError if it is another kind of file, or its
    cells were played with other numbers of engines or seconds."""
    path = options.json
    if path is None or not path.exists() or not path.stat().st_size:
        return []
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[Row])
    except msgspec.DecodeError as error:
        raise SpecError(f"{path} is no file of the arena ({error}) - at `--json`") from None
    setting = options.setting
    for row in rows:
        if (row.engines, row.seconds, row.client) != (setting.engines, setting.seconds, setting.client):
            raise SpecError(
                f"{path} has cells of {row.engines} engines, {row.seconds:g} seconds and the client"
                f" {row.client}: name another file"
                " - at `--json`"
            )
    contestants = {c.name: c for c in CONTESTANTS} | {c.name: c for c in options.contestants}
    levels = {level.name: level for level in LEVELS}
    return [
        (
            Cell(
                contestants.get(row.router) or Contestant(row.router, Remote(""), "of an earlier run"),
                levels[row.load],
                row.session_header,
                row.seed,
            ),
            row.run,
        )
        for row in rows
        if row.load in levels
    ]


def _chosen(text: str, known: Mapping[str, T], option: str) -> tuple[T, ...]:
    """Parse `A,B` into known values. Raises SpecError for an unknown name."""
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise SpecError(f"unknown {name!r} (known: {', '.join(known)}) - at `{option}`")
    return tuple(known[name] for name in names)


def _remotes(texts: Sequence[str]) -> tuple[Contestant, ...]:
    """Parse texts such as `NAME=URL` into the user's own routers. Raises SpecError for a wrong one."""
    found = []
    for name, address in assignments(texts, "--url").items():
        try:
            found.append(Contestant(name, Remote(url(address)), f"run by the user at {address}"))
        except argparse.ArgumentTypeError as error:
            raise SpecError(f"{error} - at `--url`") from None
    return tuple(found)


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    known = {contestant.name: contestant for contestant in CONTESTANTS}
    default = Setting()
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Compare routers: play the same agentic sessions through each of them, in front of equal"
        " simulated engines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--routers", default=",".join(known), metavar="A,B", help="routers that take part [all]")
    add("--url", action="append", default=[], metavar="NAME=URL", help="a router that you run; repeatable")
    add("--loads", metavar="A,B", help="loads to play; recorded ones need --trace [all]")
    add(
        "--trace",
        metavar="FILE",
        help="a recording with timestamps (Mooncake's, Qwen-Bailian's or our schema)",
    )
    add(
        "--headers",
        default=",".join(_HEADERS),
        metavar="A,B",
        help="play with or without a header that names the session [%(default)s]",
    )
    add("--seeds", type=count, default=3, metavar="N", help="number of seeds of the traffic [%(default)s]")
    add(
        "--seconds",
        type=positive,
        default=default.seconds,
        metavar="S",
        help="length of a cell's traffic, in seconds [%(default)s]",
    )
    add("--engines", type=count, default=default.engines, metavar="N", help="number of engines [%(default)s]")
    add("--engine-port", type=count, metavar="PORT", help="port of the first engine; the others follow [any]")
    add(
        "--client",
        type=Client,
        choices=list(Client),
        default=Client.LAB,
        help="who sends the requests and measures: the lab's own client, or NVIDIA's AIPerf [%(default)s]",
    )
    add(
        "--json",
        type=output,
        metavar="FILE",
        help="write every cell's report (docs/report.md), and do not play cells again that FILE already has",
    )
    add(
        "--minutes",
        type=positive,
        default=inf,
        metavar="M",
        help="stop before a cell that would end later than this [no limit]",
    )
    args = parser.parse_args(argv)
    if args.engines > _MOST_ENGINES:
        raise SpecError(f"{args.engines:,} engines: at most {_MOST_ENGINES} - at `--engines`")
    if args.engine_port and args.engine_port + args.engines > _MOST_PORT + 1:
        raise SpecError(
            f"{args.engines} engines from port {args.engine_port} on: above {_MOST_PORT} - at `--engine-port`"
        )
    remotes = _remotes(args.url)
    if remotes and not args.engine_port:
        raise SpecError(
            "a router of your own needs to know the engines' ports: add --engine-port - at `--url`"
        )
    for remote in remotes:
        if remote.name in known:
            raise SpecError(f"{remote.name!r} is the name of another router - at `--url`")
    levels = {level.name: level for level in LEVELS}
    usual = ",".join(name for name, level in levels.items() if args.trace or not level.recorded)
    chosen = _chosen(args.loads or usual, levels, "--loads")
    if not args.trace and any(level.recorded for level in chosen):
        raise SpecError("a recorded load needs a recording: add --trace FILE - at `--loads`")
    if args.trace and not open_trace(args.trace).timed:
        raise SpecError(f"{args.trace} has no timestamps - at `--trace`")
    if args.client is not Client.LAB:
        chosen = tuple(level for level in chosen if not level.recorded and level.halfway is None)
        if not chosen:
            raise SpecError(f"{args.client} plays none of these loads - at `--loads`")
    return Options(
        contestants=_chosen(args.routers, known, "--routers") + remotes,
        levels=chosen,
        headers=_chosen(args.headers, _HEADERS, "--headers"),
        seeds=args.seeds,
        setting=Setting(
            args.engines,
            args.seconds,
            args.engine_port or 0,
            Path(args.trace) if args.trace else None,
            args.client,
        ),
        json=args.json,
        minutes=args.minutes,
    )
