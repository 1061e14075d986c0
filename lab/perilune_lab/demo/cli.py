"""`perilune demo`: real Envoy, the gateway and simulated engines under agentic load; policies compared, or
with `--overload` one policy without and with session admission.

Steps, for each run in turn: a fresh stack (`Stack`) → the same sessions for every run, closed loop, for
`--seconds` of wall time (`client.run_load`) → meanwhile a view of the gateway's own admin pages (`watch`,
`live`) → end of the stack → one `report.Run`. Then the comparison table, the gains or what the overload did
(`overload.py`), and the report.

The load (`load.py`) is a fleet at a quarter of its size, so that a laptop carries it: token
lengths and KV pools of a measured coding agent on H20 × 0.25, work at H20 speed × `--time-scale`, load in
proportion to the endpoints. Over a run the sessions of one endpoint hold several times what its KV pool does,
and spreading every session over all endpoints multiplies that: there routing matters.

Exit status: 0; 1 when Envoy or the gateway dies or nothing gets through; 130 after Ctrl-C, with the
comparison of the runs that were complete. Ends its processes in every case. An
engine may die: the run goes on and says so.

Not done: more than one gateway, other engines than the simulated one. Its times are a model's.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import takewhile

import aiohttp
import uvloop
from msgspec import UnsetType
from rich.live import Live

from perilune_api import pool
from perilune_api.policies import PolicyChoice
from perilune_gateway.model import H20_30B
from perilune_lab import report
from perilune_lab.demo import live, overload, text
from perilune_lab.demo.load import OVERLOAD, demo_load
from perilune_lab.demo.options import Arm, Options, parse
from perilune_lab.demo.watch import Watch
from perilune_lab.load.client import Load, run_load
from perilune_lab.processes.stack import EngineOptions, Programs, Stack, StackError
from perilune_lab.report import Report
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.formats import as_percent
from perilune_lab.traces.model import Mode
from perilune_lab.vocabulary import Vocabulary

PROGRAMS = Programs()
POLL_S = 0.25
BUSY = 0.8
"""Share of all cores above which times say more about this machine than about the engines."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One run, and the CPU that it used on this machine."""

    run: report.Run
    cpu_share: float
    """Share of all cores, 0–1."""
    notes: tuple[str, ...]
    ttft_s: tuple[float, ...]
    """TTFT of every request that succeeded, in engine seconds."""
    outcome: overload.Outcome


class Demo:
    """Runs the policies and compares them; prints to `console`."""

    def __init__(self, options: Options, console: Console, programs: Programs = PROGRAMS) -> None:
        self.options = options
        self.console = console
        self.programs = programs
        times = OVERLOAD if options.overload else 1.0
        self.load = demo_load(options.endpoints, options.seed, options.seconds, options.time_scale, times)
        engine_s = options.seconds * options.time_scale
        self.sessions = tuple(takewhile(lambda s: s.start_s < engine_s, self.load.sessions()))
        self.words = Vocabulary().words_for
        self.ran: dict[str, Ran] = {}
        self.concluded = False

    async def run(self) -> None:
        """Run all policies and print the comparison; with --keep, then wait until cancelled. Raises
        StackError when Envoy or the gateway ends."""
        self.console.print(text.parameters(self.options, self.load, self.sessions), highlight=False)
        order = self.options.order
        for arm in order:
            with ExitStack() as starting:
                starting.enter_context(self._starting(arm.name))
                async with self._stack(arm) as stack:
                    starting.close()
                    self.console.print(
                        f"{arm.name}: watch it at {stack.admin_url}/console", highlight=False, soft_wrap=True
                    )
                    await self._play(stack, arm.name)
                    if self.options.keep and arm == order[-1]:
                        self._conclude()
                        self.console.print(text.urls(stack), highlight=False, markup=False, soft_wrap=True)
                        await asyncio.Event().wait()
        self._conclude()

    def _starting(self, name: str) -> AbstractContextManager[object]:
        parts = f"{self.options.endpoints} engines, gateway and Envoy"
        if self.console.is_terminal and self.options.live:
            return self.console.status(f"{name}: starting {parts} …")
        self.console.print(f"{name}: starting {parts}")
        return nullcontext()

    def _stack(self, arm: Arm) -> Stack:
        o = self.options
        admission = pool.SessionAdmission(enabled=arm.admission, max_wait_seconds=60.0 / o.time_scale)
        return Stack(
            engines=o.endpoints,
            options=EngineOptions(
                kv_tokens=self.load.kv_tokens,
                context_tokens=self.load.context_tokens,
                time_scale=o.time_scale,
            ),
            routing=pool.Routing(policy=PolicyChoice().of(arm.policy), session_admission=admission),
            programs=self.programs,
        )

    async def _play(self, stack: Stack, name: str) -> None:
        """Play the load on one run's stack and show the view meanwhile."""
        o = self.options
        load = Load(
            target=stack.url,
            model=stack.options.model,
            mode=Mode.THINKTIME,
            time_scale=o.time_scale,
            seconds=o.seconds,
            retry=o.overload,
        )
        watch = Watch(stack, name, o.seconds)
        cpu_s, began = _cpu_s(stack), time.monotonic()
        async with aiohttp.ClientSession(stack.admin_url, timeout=aiohttp.ClientTimeout(2.0)) as http:
            showing, stop = asyncio.create_task(self._show(watch, http)), asyncio.Event()
            showing.add_done_callback(lambda _: stop.set())
            try:
                await run_load(self.sessions, load, self.words, watch.finished, stop)
            finally:
                showing.cancel()
                await asyncio.wait({showing})
            if not showing.cancelled():
                showing.result()  # what ended the view travels up: a bug, or a closed pipe
            busy_s, took_s = _cpu_s(stack) - cpu_s, time.monotonic() - began
            await watch.ask_scheduling(http)
        share = max(busy_s, 0.0) / took_s / len(os.sched_getaffinity(0))
        outcome = overload.outcome(watch.results, self.sessions, o.seconds, o.time_scale)
        self.ran[name] = Ran(self._measured(watch), share, watch.notes(), tuple(watch.ttft_s()), outcome)
        self._print_result(self.ran[name])

    async def _show(self, watch: Watch, http: aiohttp.ClientSession) -> None:
        """Show the live view, or print a line now and then, until cancelled."""
        if not (self.console.is_terminal and self.options.live):
            every_s = max(1.0, min(5.0, self.options.seconds / 4))
            printed_s = 1.0 - every_s  # the first line soon
            while True:
                await watch.poll(http)
                frame = watch.frame()
                if frame.elapsed_s - printed_s >= every_s:
                    self.console.print(live.line(frame), highlight=False, soft_wrap=True)
                    printed_s = frame.elapsed_s
                await asyncio.sleep(POLL_S)
        with Live(console=self.console, auto_refresh=False) as view:
            try:
                while True:
                    await watch.poll(http)
                    view.update(live.render(watch.frame()), refresh=True)
                    await asyncio.sleep(POLL_S)
            finally:
                view.update(live.render(watch.frame()), refresh=True)

    def _print_result(self, ran: Ran) -> None:
        """Print one line at the end of a run, and what went wrong in it."""
        for note in ran.notes:
            self.console.print(note, style="yellow", highlight=False, soft_wrap=True)
        run = ran.run
        apc = "" if isinstance(run.apc, UnsetType) else f", APC {as_percent(run.apc)}"
        used = f"{ran.cpu_share:.0%} of this machine's CPUs"
        self.console.print(f"{run.policy}: {run.succeeded} requests{apc}; used {used}", highlight=False)

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
                queue_samples=watch.queues,
                scheduling=watch.scheduling,
            )
        )

    def report(self) -> report.Report:
        """Return the report of the runs, in the order of the command line."""
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
            runs=tuple(self.ran[arm.name].run for arm in o.arms if arm.name in self.ran),
        )

    def interrupted(self) -> None:
        """Conclude with the runs that were complete, if that was not done yet."""
        if self.ran and not self.concluded:
            self._conclude()
        complete = f"{len(self.ran)} of {len(self.options.arms)} runs were complete"
        self.console.print(f"interrupted: {complete}, everything has ended", highlight=False, soft_wrap=True)

    def _conclude(self) -> None:
        """Write the files; print the table and the gains."""
        self.concluded = True
        document = self.report()
        try:
            self._write(document)
        finally:  # the table comes all the same
            self.console.print()
            self.console.print(report.table(document))
        if self.options.overload:
            self.console.print(overload.table({name: ran.outcome for name, ran in self.ran.items()}))
        elif len(document.runs) > 1:
            self.console.print(text.gains(document.runs))
        self.console.print("Simulated engines: times come from a model of an H20, not from one.", style="dim")
        busiest = max(ran.cpu_share for ran in self.ran.values())
        if busiest > BUSY:
            self.console.print(
                f"The run used {busiest:.0%} of this machine's CPUs: take times with care, or choose"
                " a smaller --time-scale.",
                style="yellow",
            )

    def _write(self, document: Report) -> None:
        if self.options.json:
            self.options.json.write_bytes(report.encode(document))
            self.console.print(f"report: {self.options.json}")
        if self.options.png:
            from perilune_lab.report import figure as drawing  # matplotlib takes half a second

            drawing.draw(document, self.options.png, {policy: ran.ttft_s for policy, ran in self.ran.items()})
            self.console.print(f"figure: {self.options.png}")


def _cpu_s(stack: Stack) -> float:
    """Return the CPU seconds of the stack and of this process."""
    return sum(stack.cpu_s().values()) + time.process_time()


def main(argv: Sequence[str], programs: Programs = PROGRAMS) -> int:
    """Run `perilune demo`, and return the exit status; 128 + signal when interrupted."""
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
        demo.interrupted()
        return 128 + caught[0]
    if not all(ran.run.succeeded for ran in demo.ran.values()):
        print("perilune demo: no request got through", file=sys.stderr)
        return 1
    return 0
