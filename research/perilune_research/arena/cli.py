"""`python -m perilune_research arena`: plays the same agentic sessions through Perilune and other routers.

1. Install the routers that are packages.
2. Play a cell for each seed, load and router, unless the file of played cells has it. Every cell has fresh
   engines and a fresh router, so nothing is cached from the cell before.
3. Print tables and the settings of the routers, or write them into a page; what Perilune loses comes first. A
   router that cannot be installed or does not start is left out and named under the tables.

Exit status: 0; 1 if no cell could be played; 2 for a wrong call; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import TypeVar

import uvloop

from perilune_api.pool import SpecError
from perilune_lab.load.bodies import Words
from perilune_lab.processes.stack import StackError
from perilune_lab.quantiles import mean
from perilune_lab.terminal.arguments import assignments, count, output, positive, url
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.traces.source import open_trace
from perilune_lab.vocabulary import Vocabulary
from perilune_research.arena import page
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
from perilune_research.arena.kept import file, key, played_by, read, rig, row, write
from perilune_research.arena.loads import LEVELS, SLOWDOWNS, Client, Halfway, Level, Setting
from perilune_research.arena.noise import NOISY, Noise, sample
from perilune_research.arena.play import FAILED_S, Cell, play
from perilune_research.arena.table import legend

PROGRAM = "python -m perilune_research arena"
NOTHING_PLAYED = 1
_HEADERS = {"with": True, "without": False}
_MOST_ENGINES, _MOST_PORT = 64, 65_535
_LOOK_EVERY_S = 5.0
"""How often to look whether the machine has become quiet."""
T = TypeVar("T")

_EPILOG = f"""\
routers (the first call installs those that are packages into {cache()}):
{chr(10).join(legend(CONTESTANTS))}

loads, in sessions that begin per second and engine:
  {(chr(10) + "  ").join(str(level) for level in LEVELS)}
Engines are simulated in real time. In turn, their times are those of an H20 multiplied by
{", ".join(f"{s:g}" for s in SLOWDOWNS)}, and they vary from step to step. No router knows of this.
A request that fails counts with a latency of {FAILED_S:g} s.
Close other programs, since they make every router's times longer. With --quiet the arena begins no cell while
they use more than {NOISY:.0%} of the CPUs, and keeps no cell during which they did, on average over the cell.
What a router by URL uses cannot be told from what others use, so none of its cells is refused.

A cell is played again if its router has another version since (Perilune's is a fingerprint of the gateway's
code), or if the code of engines, loads or client has changed. The version of a router by URL is not known:
delete its rows to play them again.

a router of your own: name it with --url and start it in front of the engines that the arena runs from
--engine-port on. Say with --restart how it is started afresh, or play one cell: it may believe in caches that
new engines do not have. docs/benchmarks.md says how to play one that needs an Envoy.

examples:
  {PROGRAM} --routers envoy-round-robin,perilune --loads knee --headers with --seeds 1
  {PROGRAM} --url mine=http://127.0.0.1:8080 --engine-port 18000 --routers perilune --loads ease
  {PROGRAM} --json arena.json --minutes 15
      plays for a quarter of an hour; the same command goes on where it stopped
  {PROGRAM} --loads recorded --trace mooncake_conversation.jsonl.gz
  {PROGRAM} --json arena.json --client aiperf
      keeps its cells in arena-aiperf.json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    contestants: tuple[Contestant, ...]
    levels: tuple[Level, ...]
    left_out: tuple[Level, ...]
    """Loads that need a recording, which the call does not name."""
    headers: tuple[bool, ...]
    """Whether requests name their session in a header; both values play both."""
    seeds: int
    """Number of seeds, from 0."""
    setting: Setting
    json: Path | None
    """Keep the rows here; those of another client than the lab's are beside it, see `kept.file`."""
    page: Path | None = None
    """Write the tables into this page."""
    quiet: bool = False
    """Play only while other programs leave the machine alone."""
    minutes: float = inf
    """Begin no cell that would end later than this."""

    def cells(self) -> Iterator[Cell]:
        """Yield the cells in the order of their worth: one seed of every load with session headers comes
        first, then further seeds, then all without headers. Routers take turns within a load, so that a busy
        minute of the machine does not hit only one of them. A router that only its owner can restart plays no
        load that restarts it."""
        for named in self.headers:
            for seed in range(self.seeds):
                for level in self.levels:
                    for contestant in self.contestants:
                        if level.halfway is not Halfway.RESTART or contestant.restarts:
                            yield Cell(contestant, level, named, seed)


class Arena:
    """Plays all cells, and keeps their results. `err`: where to print progress."""

    def __init__(self, options: Options, words: Words, err: Console) -> None:
        self.options = options
        self.words = words
        self.err = err
        self.programs: dict[Package, Path] = {}
        self.files = {client: file(options.json, client) for client in Client} if options.json else {}
        """Client → file of its rows; empty if they are not kept."""
        self.client = client = options.setting.client
        self.others = {other: read(path) for other, path in self.files.items() if other is not client}
        """Client that does not play now → its rows."""
        rows = read(self.files[client], options.setting) if self.files else []
        self.rows = {one.key: one for one in rows}
        self.left_out: dict[str, str] = {}
        """Router or load → why it does not take part, or no longer does."""

    def install(self) -> None:
        """Install the routers that are packages, and leave those out that cannot be installed. Raises
        NotInstalledError if the client cannot be installed."""
        for level in self.options.left_out:
            self._leave_out(level.name, "add --trace FILE, a recording with timestamps")
        if self.client is Client.AIPERF:
            self._say(f"{AIPERF}: installing it, unless it is installed (about 1 GB) …")
            self.programs[AIPERF] = executable(AIPERF, cache())
        for contestant in self.options.contestants:
            front = contestant.front
            if isinstance(front, Program | DynamoFrontend) and front.package not in self.programs:
                try:
                    self._say(f"{front.package}: installing it, unless it is installed …")
                    self.programs[front.package] = executable(front.package, cache())
                except NotInstalledError as error:
                    self._leave_out(contestant.name, f"{front.package} cannot be installed: {error}")

    async def run(self) -> None:
        """Play the cells that the JSON file lacks, and those whose row is stale. Raises SpecError if a
        recording cannot be read."""
        cells = [cell for cell in self.options.cells() if not self._done(cell)]
        self._say(f"{len(cells)} cells; at least {sum(map(self._lasts_s, cells)) / 60:.0f} minutes")
        ends_s = monotonic() + self.options.minutes * 60
        refused = 0
        for at, cell in enumerate(cells, 1):
            if cell.contestant.name in self.left_out:
                continue
            begins_until_s = ends_s - self._lasts_s(cell)
            if monotonic() > begins_until_s or not await self._is_quiet(begins_until_s):
                self._say(f"{len(cells) - at + 1 + refused} cells remain: the same command plays them")
                return
            noise = Noise()
            try:
                run = await play(cell, self.options.setting, self.programs, self.words)
            except StackError as error:
                self._leave_out(cell.contestant.name, f"from cell {at} on: {str(error).splitlines()[0]}")
                continue
            noise.end(tells=not isinstance(cell.contestant.front, Remote))
            said = f"{at}/{len(cells)} {cell}: {run.succeeded} of {run.requests} requests"
            if noise.is_noisy:
                said += f"; {noise}"
            if noise.is_noisy and self.options.quiet:
                refused += 1
                self._say(f"{said}: not kept")
                continue
            self.rows[key(cell)] = row(cell, self.options.setting, run, noise)
            self._write()
            self._say(said)
        if refused:
            self._say(f"{refused} cells were not kept: the same command plays them again")

    def _done(self, cell: Cell) -> bool:
        """Whether the cell need not be played."""
        if cell.contestant.name in self.left_out:
            return True
        played = self.rows.get(key(cell))
        now = played_by(cell.contestant), rig(self.client)
        return played is not None and (played.version, played.rig) == now

    def _lasts_s(self, cell: Cell) -> float:
        """Return how long the cell will take, by those of its load that were played."""
        took = [row.took_s for row in self.rows.values() if row.load == cell.level.name]
        return mean(took) if took else self.options.setting.seconds * 1.5 + 5

    async def _is_quiet(self, until_s: float) -> bool:
        """Wait until other programs leave the machine alone, if the options want that. Return whether they
        do."""
        said = False
        while self.options.quiet and (noise := await sample()).is_noisy:
            if not said:
                self._say(f"waiting for a quiet machine: {noise}")
                said = True
            if monotonic() > until_s:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    def _leave_out(self, name: str, cause: str) -> None:
        self.left_out[name] = cause
        self._say(f"{name} is left out: {cause}")

    def _say(self, line: str) -> None:
        self.err.print(line, highlight=False, markup=False, soft_wrap=True)

    def _write(self) -> None:
        """Write the JSON file, if there is one, so that an interrupted run loses at most one cell."""
        if self.files:
            write(self.files[self.client], list(self.rows.values()))

    def so_far(self) -> str:
        """Return a sentence that tells a user who interrupts whether the played cells are kept."""
        played, path = len(self.rows), self.files.get(self.client)
        total = len({key(cell) for cell in self.options.cells()} | self.rows.keys())
        if path is None:
            return f"{played} of {total} cells were played; with --json FILE they would be kept"
        return f"{played} of {total} cells are in {path}, so the same command goes on from there"

    def conclude(self) -> int:
        """Print the tables, or write them into the page; return the exit status."""
        rows = self.others | {self.client: list(self.rows.values())}
        text = page.section(rows.get(Client.LAB, []), page.notes(), rows.get(Client.AIPERF, []))
        if self.options.page:
            page.write(self.options.page, text)
        else:
            print(text)
        for name, cause in self.left_out.items():
            print(f"- Left out: {name}: {cause}")
        return 0 if self.rows else NOTHING_PLAYED


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        if options.page:
            page.place(options.page)
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


def _chosen(text: str, known: Mapping[str, T], option: str) -> tuple[T, ...]:
    """Parse `A,B` into known values. Raises SpecError for an unknown name."""
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise SpecError(f"unknown {name!r} (known: {', '.join(known)}) - at `{option}`")
    return tuple(known[name] for name in names)


def _remotes(texts: Sequence[str], restarts: Sequence[str]) -> tuple[Contestant, ...]:
    """Parse texts such as `NAME=URL` and `NAME=COMMAND` into the user's own routers. Raises SpecError for a
    wrong one."""
    found = []
    commands = {name: command for name, _, command in (text.partition("=") for text in restarts)}
    addresses = assignments(texts, "--url")
    for name, command in commands.items():
        if not command or name not in addresses:
            raise SpecError(f"{name!r} is not NAME=COMMAND with the name of a --url - at `--restart`")
    for name, address in addresses.items():
        front = partial(Remote, restart=commands.get(name, ""))
        try:
            found.append(Contestant(name, front(url(address)), f"run by the user at {address}"))
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
    add(
        "--restart",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="a shell command that starts the router of that --url afresh, and returns; repeatable",
    )
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
    add("--seeds", type=count, default=5, metavar="N", help="number of seeds of the traffic [%(default)s]")
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
        help="keep a row for every cell in FILE, and do not play cells again that it already has; those of"
        " --client aiperf are kept beside it, in FILE with -aiperf at the end of its name",
    )
    add(
        "--page",
        type=output,
        metavar="FILE",
        help="write the tables into this Markdown page, between its marks for the arena",
    )
    add(
        "--quiet",
        action="store_true",
        help="play only while other programs leave the machine alone, as far as that can be told",
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
    remotes = _remotes(args.url, args.restart)
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
    left_out = tuple(level for level in LEVELS if not args.loads and level not in chosen)
    if not args.trace and any(level.recorded for level in chosen):
        raise SpecError("a recorded load needs a recording: add --trace FILE - at `--loads`")
    if args.trace and not open_trace(args.trace).timed:
        raise SpecError(f"{args.trace} has no timestamps - at `--trace`")
    if args.client is not Client.LAB:
        left_out = ()
        chosen = tuple(level for level in chosen if not level.recorded and level.halfway is None)
        if not chosen:
            raise SpecError(f"{args.client} plays none of these loads - at `--loads`")
    return Options(
        contestants=_chosen(args.routers, known, "--routers") + remotes,
        levels=chosen,
        left_out=left_out,
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
        page=args.page,
        quiet=args.quiet,
        minutes=args.minutes,
    )
