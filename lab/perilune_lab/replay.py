"""`perilune replay`: a trace, or generated agentic load, against any OpenAI-compatible URL.

Steps: open the trace → ask the target for its models (is it there?) → `client.run_load` with a progress bar →
a `report.Run` from the results and, where `--gateway` names it, the gateway's admin pages → table on stdout,
JSON and PNG if requested.

Exit status: 0; 1 when the target cannot be reached or nothing succeeded; 2 for a wrong call or trace; 130
after Ctrl-C, with what was measured until then.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp
import msgspec
from msgspec import UNSET
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from perilune_api.pool import SpecError
from perilune_gateway.model import H20_30B
from perilune_lab import admin_pages, report
from perilune_lab.load.bodies import Words
from perilune_lab.load.client import Load, TargetError, models, run_load
from perilune_lab.load.result import Result
from perilune_lab.report import Report
from perilune_lab.terminal.arguments import count, figure, one_of, output, positive, url
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import INTERRUPTED, wrong_call
from perilune_lab.terminal.loop import run
from perilune_lab.traces.model import Mode, Trace
from perilune_lab.traces.source import open_trace
from perilune_lab.vocabulary import Vocabulary

DOWN = 1
_LINE_EVERY_S = 5.0
_ERRORS_SHOWN = 10

_EPILOG = f"""\
examples:
  perilune replay --target http://127.0.0.1:10000 --trace agentic --limit 200
  perilune replay --target http://127.0.0.1:10000 --trace mooncake_conversation.jsonl.gz \\
      --limit 2000 --mode timestamps --speed 50 --gateway http://127.0.0.1:9003 --json report.json

modes (they give different answers; the report says which one ran):
  {Mode.THINKTIME:<11} closed loop: each turn a recorded gap after its session's previous answer
  {Mode.TIMESTAMPS:<11} open loop: each request at its recorded time
  {Mode.MAX:<11} at its recorded time, but not before its session's previous answer

--time-scale says how fast simulated engines run (engine seconds per second). The trace then runs as fast, and
times are reported in engine seconds. --speed plays the trace faster than it was recorded: more load.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: str
    trace: str
    limit: int | None
    sessions: int
    seed: int
    speed: float
    mode: Mode
    concurrency: int
    model: str
    time_scale: float
    gateway: str | None
    json: Path | None
    png: Path | None
    requests: Path | None


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    try:
        trace = open_trace(options.trace, options.limit, options.seed, options.sessions)
        if options.mode is not Mode.THINKTIME and not trace.timed:
            raise SpecError(
                f"{options.trace} has no timestamps, which mode {options.mode} needs - at `--mode`"
            )
    except SpecError as error:
        return wrong_call("perilune replay", error)
    replay = Replay(options, trace, Console(), Console(stderr=True), Vocabulary().words_for)
    try:
        return run(replay.run())
    except TargetError as error:
        print(f"perilune replay: nothing to measure at {options.target}: {error}", file=sys.stderr)
        return DOWN


class Replay:
    """Plays one trace against one target, and reports."""

    def __init__(self, options: Options, trace: Trace, out: Console, err: Console, words: Words) -> None:
        self.options = options
        self.trace = trace
        self.out = out
        self.err = err
        self.words = words
        self.results: list[Result] = []
        self.seen = admin_pages.Seen()

    async def run(self) -> int:
        """Play and report; return the exit status. Raises TargetError if the target cannot be reached."""
        o = self.options
        model = o.model or (await models(o.target) or [""])[0]
        if not model:
            raise TargetError("it serves no model; name one with --model")
        load = Load(
            target=o.target,
            model=model,
            style=self.trace.style,
            mode=o.mode,
            time_scale=o.time_scale,
            speed=o.speed,
            concurrency=o.concurrency,
        )
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        try:
            self.err.print(
                f"{self.trace.name}: {self.trace.requests} requests, {len(self.trace.sessions)} sessions; "
                f"mode {o.mode}, speed {o.speed:g}, time scale {o.time_scale:g}; {o.target}, model {model}",
                highlight=False,
            )
            await self._play(load, stop)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        self._conclude(complete=not stop.is_set())
        if stop.is_set():
            return INTERRUPTED
        return 0 if any(result.succeeded for result in self.results) else DOWN

    async def _play(self, load: Load, stop: asyncio.Event) -> None:
        timeout = aiohttp.ClientTimeout(total=5.0)
        with _Meter(self.err, self.trace.requests) as meter:

            def finished(result: Result) -> None:
                self.results.append(result)
                meter.finished(result)

            async with aiohttp.ClientSession(timeout=timeout) as http, self._watching(http):
                await run_load(self.trace.sessions, load, self.words, finished, stop)

    @asynccontextmanager
    async def _watching(self, http: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Sample the gateway's admin pages during the run, if `--gateway` names them."""
        url = self.options.gateway
        if url is None:
            yield
            return
        if cause := await admin_pages.unreadable(http, url):
            self.err.print(
                f"no gateway's admin pages at {url} ({cause}): the report will lack policy, endpoints, queues"
                " and scheduling times",
                style="yellow",
                highlight=False,
                soft_wrap=True,
            )
        watching = asyncio.create_task(admin_pages.watch(http, url, self.seen))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        await admin_pages.conclude(http, url, self.seen)

    def report(self, complete: bool) -> report.Report:
        """Return the report of the run. `complete`: the whole trace was played."""
        o = self.options
        simulated = any(result.simulated for result in self.results)
        measured = report.Measured(
            policy=self.seen.policy or "target",
            results=self.results,
            sessions=self.trace.sessions,
            mode=o.mode,
            time_scale=o.time_scale,
            speed=o.speed,
            complete=complete,
            engine=H20_30B if simulated else None,
            queue_samples=self.seen.queues,
            scheduling=self.seen.scheduling,
        )
        return report.Report(
            simulated=simulated,
            mode=o.mode,
            endpoints=self.seen.endpoints or UNSET,
            time_scale=o.time_scale,
            trace={
                "name": self.trace.name,
                "requests": self.trace.requests,
                "sessions": len(self.trace.sessions),
                "speed": o.speed,
                **self.trace.parameters,
            },
            runs=(report.run(measured),),
        )

    def _conclude(self, complete: bool) -> None:
        """Write the files; print the table and the errors."""
        document = self.report(complete)
        if not complete:
            self.err.print(f"stopped after {len(self.results)} of {self.trace.requests} requests")
        try:
            self._write(document)
        finally:  # the table comes all the same
            self.out.print(report.table(document))
        failed = Counter(result.error for result in self.results if not result.succeeded)
        for error, times in failed.most_common(_ERRORS_SHOWN):
            self.err.print(f"{times} × {error}", highlight=False, markup=False)

    def _write(self, document: Report) -> None:
        o = self.options
        if o.json:
            o.json.write_bytes(report.encode(document))
            self.err.print(f"report: {o.json}", highlight=False)
        if o.requests:
            lines = msgspec.json.Encoder().encode_lines(self.results)
            o.requests.write_bytes(lines)
            self.err.print(f"requests: {o.requests}", highlight=False)
        if o.png:
            from perilune_lab.report import figure as drawing  # matplotlib takes half a second

            ttft_s = [r.ttft_s * o.time_scale for r in self.results if r.ttft_s is not None]
            drawing.draw(document, o.png, {document.runs[0].policy: ttft_s})
            self.err.print(f"figure: {o.png}", highlight=False)


class _Meter:
    """Shows progress: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.total = total
        self.done = 0
        self.failed = 0
        self._printed_at = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[failed]}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> Self:
        if self._bar:
            self._task = self._bar.add_task("", total=self.total, failed="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        elif self.done:
            self._print_line()

    def finished(self, result: Result) -> None:
        self.done += 1
        self.failed += not result.succeeded
        if self._bar:
            self._bar.update(self._task, advance=1, failed=self._failures())
        elif time.monotonic() - self._printed_at >= _LINE_EVERY_S:
            self._print_line()

    def _print_line(self) -> None:
        self._printed_at = time.monotonic()
        self.console.print(f"{self.done}/{self.total} requests {self._failures()}".rstrip(), highlight=False)

    def _failures(self) -> str:
        return f"{self.failed} failed" if self.failed else ""


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) with a message for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="perilune replay",
        description="Send a trace, or generated agentic load, to any OpenAI-compatible URL and measure.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", required=True, type=url, metavar="URL", help="http://host:port, without /v1")
    add(
        "--trace",
        required=True,
        metavar="FILE|agentic",
        help="a trace (Mooncake's, Qwen-Bailian's or our schema), or generated traffic",
    )
    add("--limit", type=count, metavar="N", help="play only the first N requests")
    add("--sessions", type=count, default=100, metavar="N", help="agentic: number of sessions [%(default)s]")
    add("--seed", type=int, default=0, metavar="N", help="agentic: seed of the traffic [%(default)s]")
    add(
        "--mode",
        type=one_of(Mode),
        choices=list(Mode),
        default=Mode.THINKTIME,
        help="when turns are submitted, see below [%(default)s]",
    )
    add(
        "--speed",
        type=positive,
        default=1.0,
        metavar="X",
        help="play it X times faster than recorded [%(default)s]",
    )
    add(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="the simulated engines' own [%(default)s]",
    )
    add("--concurrency", type=count, default=256, metavar="N", help="most requests at a time [%(default)s]")
    add(
        "--model",
        default="",
        metavar="NAME",
        help="model that requests name [the first one that the target serves]",
    )
    add("--gateway", type=url, metavar="ADMIN_URL", help="admin address of the gateway, for its own metrics")
    add("--json", type=output, metavar="FILE", help="write the report (docs/report.md)")
    add("--png", type=figure, metavar="FILE", help="draw the report")
    add("--requests", type=output, metavar="FILE", help="write one JSON line per request (wall seconds)")
    return Options(**vars(parser.parse_args(argv)))
