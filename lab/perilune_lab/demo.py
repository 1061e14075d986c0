"""`perilune demo`: real Envoy, the gateway and simulated engines under agentic load; policies compared.

Steps, for each policy in turn: a fresh stack (`Stack`) → the same sessions for every policy, closed loop, for
`--seconds` of wall time (`client.run_load`) → meanwhile a view of the gateway's own admin pages (`watch`,
`live`) → end of the stack → one `report.Run`. Then the comparison table, the gains, and the report.

The workload (`agentic.demo_workload`) is a fleet at a quarter of its size, so that a laptop carries it: token
lengths and KV pools of a measured coding agent on H20 × 0.25, work at H20 speed × `--time-scale`, load in
proportion to the endpoints. Over a run the sessions of one endpoint hold several times what its KV pool does,
and spreading every session over all endpoints multiplies that: there routing matters.

Exit status: 0; 1 when Envoy or the gateway dies or nothing gets through; 130 after Ctrl-C. Ends its processes
in every case. An engine may die: the run goes on and says so.

Not done: more than one gateway, other engines than the simulated one. Its times are a model's.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import aiohttp
import uvloop
from msgspec import UNSET, UnsetType
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from perilune_api import names, pool
from perilune_gateway.engine_model import H20_30B
from perilune_gateway.policy import POLICIES
from perilune_lab import live, report
from perilune_lab.client import SESSION_HEADER, Load, run_load
from perilune_lab.stack import EngineOptions, Programs, Stack, StackError
from perilune_lab.text import Vocabulary
from perilune_lab.traces.agentic import demo_time_scale, demo_workload
from perilune_lab.traces.model import Mode
from perilune_lab.watch import Watch

Number = TypeVar("Number", int, float)

PROGRAMS = Programs()
MOST_TIME_SCALE = 2.5
"""Faster engines than that answer in milliseconds, which a busy machine blurs."""
COOLDOWN_S = 30.0
"""Between moves of one session, engine seconds."""
POLL_S = 0.25
BUSY = 0.8
"""Share of all cores above which times say more about this machine than about the engines."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    endpoints: int = 8
    policy: str = "ear"
    compare: tuple[str, ...] = ("round_robin",)
    seconds: float = 60.0
    time_scale: float = 0.0
    """0: as many endpoints as this machine carries decide."""
    seed: int = 0
    keep: bool = False
    live: bool = True
    json: Path | None = None
    png: Path | None = None

    @property
    def order(self) -> tuple[str, ...]:
        """Policies as they run: what stays up (--keep) runs last."""
        return (*self.compare, self.policy) if self.keep else (self.policy, *self.compare)


@dataclass(frozen=True, slots=True)
class Ran:
    """One policy's run and what it cost here."""

    run: report.Run
    cpu_share: float
    """Of all cores, 0–1."""
    notes: tuple[str, ...]
    ttft_s: tuple[float, ...]
    """Of every request that succeeded, engine seconds."""


class Demo:
    """From options to a comparison; `console` is where people read."""

    def __init__(self, options: Options, console: Console, programs: Programs = PROGRAMS) -> None:
        self.options = options
        self.console = console
        self.programs = programs
        self.load = demo_workload(options.endpoints, options.seed, options.seconds, options.time_scale)
        engine_s = options.seconds * options.time_scale
        self.sessions = tuple(takewhile(lambda s: s.start_s < engine_s, self.load.sessions()))
        self.words = Vocabulary().words_for
        self.ran: dict[str, Ran] = {}

    async def run(self) -> None:
        """All policies, the comparison, and with --keep until cancelled. Raises StackError when Envoy or
        the gateway dies."""
        self._print_parameters()
        order = self.options.order
        for policy in order:
            with ExitStack() as starting:
                starting.enter_context(self._starting(policy))
                async with self._stack(policy) as stack:
                    starting.close()
                    await self._play(stack, policy)
                    if self.options.keep and policy == order[-1]:
                        self._conclude()
                        self._print_urls(stack)
                        await asyncio.Event().wait()
        self._conclude()

    def _starting(self, policy: str) -> AbstractContextManager[object]:
        parts = f"{self.options.endpoints} engines, gateway and Envoy"
        if self.console.is_terminal and self.options.live:
            return self.console.status(f"{policy}: starting {parts} …")
        self.console.print(f"{policy}: starting {parts}")
        return nullcontext()

    def _stack(self, policy: str) -> Stack:
        o = self.options
        return Stack(
            engines=o.endpoints,
            options=EngineOptions(
                kv_tokens=self.load.kv_tokens,
                context_tokens=self.load.context_tokens,
                time_scale=o.time_scale,
            ),
            routing=pool.Routing(
                policy=policy, params=pool.PolicyParams(cooldown_seconds=COOLDOWN_S / o.time_scale)
            ),
            programs=self.programs,
        )

    async def _play(self, stack: Stack, policy: str) -> None:
        """One policy's load, watched."""
        o = self.options
        load = Load(
            target=stack.url,
            model=stack.options.model,
            mode=Mode.THINKTIME,
            time_scale=o.time_scale,
            seconds=o.seconds,
        )
        watch = Watch(stack, policy, o.seconds)
        cpu_s, began = _cpu_s(stack), time.monotonic()
        async with aiohttp.ClientSession(stack.admin_url, timeout=aiohttp.ClientTimeout(2.0)) as http:
            showing = asyncio.create_task(self._show(watch, http))
            try:
                await run_load(self.sessions, load, self.words, watch.finished)
            finally:
                showing.cancel()
                await asyncio.wait({showing})
            busy_s, took_s = _cpu_s(stack) - cpu_s, time.monotonic() - began
            await watch.ask_scheduling(http)
        share = busy_s / took_s / len(os.sched_getaffinity(0))
        self.ran[policy] = Ran(self._measured(watch), share, watch.notes(), tuple(watch.ttft_s()))
        self._print_end(self.ran[policy])

    async def _show(self, watch: Watch, http: aiohttp.ClientSession) -> None:
        """The live view, or a line now and then, until cancelled."""
        if not (self.console.is_terminal and self.options.live):
            every_s = max(1.0, min(5.0, self.options.seconds / 4))
            told = 1.0 - every_s  # the first line soon
            while True:
                await watch.poll(http)
                frame = watch.frame()
                if frame.elapsed_s - told >= every_s:
                    self.console.print(live.line(frame), highlight=False)
                    told = frame.elapsed_s
                await asyncio.sleep(POLL_S)
        with Live(console=self.console, auto_refresh=False) as view:
            try:
                while True:
                    await watch.poll(http)
                    view.update(live.render(watch.frame()), refresh=True)
                    await asyncio.sleep(POLL_S)
            finally:
                view.update(live.render(watch.frame()), refresh=True)

    def _measured(self, watch: Watch) -> report.Run:
        return report.run(
            report.Measured(
                policy=watch.policy,
                results=watch.results,
                sessions=self.sessions,
                mode=Mode.THINKTIME,
                time_scale=self.options.time_scale,
                complete=False,
                engine=H20_30B,
                cooldown_s=COOLDOWN_S,
                queue_samples=watch.queues,
                scheduling=watch.scheduling,
            )
        )

    def report(self) -> report.Report:
        """Of the policies that ran, in the order of the command line."""
        o = self.options
        return report.Report(
            simulated=True,
            mode=Mode.THINKTIME,
            endpoints=o.endpoints,
            time_scale=o.time_scale,
            trace={
                "name": "agentic",
                "sessions": len(self.sessions),
                "requests": sum(len(session.turns) for session in self.sessions),
                "seconds": o.seconds,
                **self.load.describe(),
            },
            runs=tuple(self.ran[policy].run for policy in (o.policy, *o.compare) if policy in self.ran),
        )

    def _conclude(self) -> None:
        """Table, gains, files."""
        document = self.report()
        self.console.print()
        self.console.print(report.table(document))
        if len(document.runs) > 1:
            self.console.print(gains(document.runs))
        self.console.print("Simulated engines: times come from a model of an H20, not from one.", style="dim")
        busiest = max(ran.cpu_share for ran in self.ran.values())
        if busiest > BUSY:
            self.console.print(
                f"This machine was {busiest:.0%} busy: take times with care, or use a smaller --time-scale.",
                style="yellow",
            )
        if self.options.json:
            self.options.json.write_bytes(report.encode(document))
            self.console.print(f"report: {self.options.json}")
        if self.options.png:
            from perilune_lab import figures  # matplotlib takes half a second

            figures.draw(document, self.options.png, {policy: ran.ttft_s for policy, ran in self.ran.items()})
            self.console.print(f"figure: {self.options.png}")

    def _print_parameters(self) -> None:
        o = self.options
        grid = Table.grid(padding=(0, 2))
        grid.add_row("policies", ", ".join(o.order) + f"; {o.seconds:g} s each, fresh engines each")
        grid.add_row(
            "engines",
            f"{o.endpoints} simulated (30B model on H20), KV pool {self.load.kv_tokens:,} tokens each,"
            f" time scale {o.time_scale:g}",
        )
        requests = sum(len(session.turns) for session in self.sessions)
        grid.add_row(
            "load", f"agentic, closed loop: {len(self.sessions)} sessions, up to {requests} requests"
        )
        values = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.load.describe().items()
            if name != "kv_tokens"
        ]
        grid.add_row("", Text(", ".join(values), style="dim"))
        self.console.print(grid, highlight=False)

    def _print_end(self, ran: Ran) -> None:
        for note in ran.notes:
            self.console.print(note, style="yellow", highlight=False)
        run = ran.run
        apc = "" if isinstance(run.apc, UnsetType) else f", APC {run.apc:.1%}"
        self.console.print(
            f"{run.policy}: {run.succeeded} requests{apc}; this machine was {ran.cpu_share:.0%} busy",
            highlight=False,
        )

    def _print_urls(self, stack: Stack) -> None:
        body = (
            f'{{"model": "{stack.options.model}", "max_tokens": 16,'
            ' "messages": [{"role": "user", "content": "hello"}]}'
        )
        self.console.print(
            f"""
Everything stays up until Ctrl-C. Send requests through Envoy:

  curl -i {stack.url}/v1/chat/completions -H 'content-type: application/json' \\
    -H '{SESSION_HEADER}: me' -H '{names.DECISION_HEADER}: 1' \\
    -d '{body}'

and ask the gateway why (the request id is in the answer's header {names.DECISION_HEADER}):

  {_command()} explain REQUEST_ID --gateway {stack.admin_url}
  {stack.admin_url}/api/decisions?n=5
  {stack.admin_url}/api/nodes/stats
  {stack.admin_url}/api/health
  {stack.admin_url}/metrics""",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


GAINS: tuple[tuple[str, Callable[[report.Run], float | UnsetType]], ...] = (
    ("APC", lambda run: run.apc),
    ("TTFT p50", lambda run: run.ttft_s.p50 if run.ttft_s else UNSET),
    ("TTFT p90", lambda run: run.ttft_s.p90 if run.ttft_s else UNSET),
    ("TTFT p99", lambda run: run.ttft_s.p99 if run.ttft_s else UNSET),
    ("TPOT p90", lambda run: run.tpot_s.p90 if run.tpot_s else UNSET),
    ("E2E p50", lambda run: run.e2e_s.p50 if run.e2e_s else UNSET),
    ("E2E p90", lambda run: run.e2e_s.p90 if run.e2e_s else UNSET),
)
"""Of APC more is better, of times less."""


def gains(runs: Sequence[report.Run]) -> Table:
    """The first run's numbers over each other's, a row each."""
    first, *others = runs
    table = Table(box=box.SIMPLE_HEAD, header_style="dim")
    table.add_column("")
    for name, _ in GAINS:
        table.add_column(name, justify="right")
    for other in others:
        pairs = ((value(first), value(other)) for _, value in GAINS)
        table.add_row(
            f"{first.policy} / {other.policy}", *(f"{a / b:.2f} ×" if a and b else "" for a, b in pairs)
        )
    return table


def _command() -> str:
    """How this program was called, so that the hint can be pasted."""
    return sys.argv[0] if Path(sys.argv[0]).name == "perilune" else "perilune"


def _cpu_s(stack: Stack) -> float:
    """Of the stack and of this process."""
    return sum(stack.cpu_s().values()) + time.process_time()


def parse(argv: Sequence[str]) -> Options:
    """Raises SystemExit(2) with a message for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="perilune demo",
        description="Real Envoy, the gateway and simulated engines under agentic load: watch requests go"
        " where their KV cache is, then see what that gains.",
        epilog="example: perilune demo --endpoints 4 --seconds 20 --compare round_robin,sticky --json FILE",
    )
    parser.add_argument("--endpoints", type=_at_least(1, int), default=8, metavar="N", help="default 8")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="ear", help="default ear")
    parser.add_argument(
        "--compare",
        type=_policies,
        default=("round_robin",),
        metavar="P,P",
        help="further policies, each with fresh engines; default round_robin, '' for none",
    )
    parser.add_argument("--seconds", type=_at_least(1.0, float), default=60.0, help="per policy; default 60")
    parser.add_argument(
        "--time-scale", type=_at_least(0.01, float), metavar="X",
        help=f"engine seconds per wall second; default at most {MOST_TIME_SCALE:g}, less for many endpoints",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="of the load; equal seeds, equal sessions; default 0"
    )
    parser.add_argument("--keep", action="store_true", help="stay up afterwards, until Ctrl-C")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the report (docs/report.md)")
    parser.add_argument("--png", type=_file, metavar="FILE", help="draw the comparison")
    parser.add_argument("--no-live", dest="live", action="store_false", help="lines instead of the live view")
    args = parser.parse_args(argv)
    compare = tuple(policy for policy in args.compare if policy != args.policy)
    scale = args.time_scale or min(MOST_TIME_SCALE, demo_time_scale(args.endpoints))
    return Options(**{**vars(args), "compare": compare, "time_scale": scale})


def _at_least(least: Number, kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def convert(text: str) -> Number:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    convert.__name__ = kind.__name__
    return convert


def _file(text: str) -> Path:
    """Better now than after the last run."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def _policies(text: str) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))
    for policy in wanted:
        if policy not in POLICIES:
            raise argparse.ArgumentTypeError(
                f"unknown policy {policy!r} (known: {', '.join(sorted(POLICIES))})"
            )
    return wanted


def main(argv: Sequence[str], programs: Programs = PROGRAMS) -> int:
    """Entry point of `perilune demo`. Returns the exit status; 128 + signal when interrupted."""
    options = parse(argv)
    console = Console()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    demo = Demo(options, console, programs)
    caught: list[int] = []

    async def body() -> None:
        this = asyncio.current_task()
        assert this is not None

        def interrupt(number: int) -> None:
            caught.append(number)
            this.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, interrupt, number)
        await demo.run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())
    except StackError as error:
        print(f"perilune demo: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        console.print("interrupted; everything has ended")
        return 128 + caught[0]
    if not all(ran.run.succeeded for ran in demo.ran.values()):
        print("perilune demo: no request got through", file=sys.stderr)
        return 1
    return 0
