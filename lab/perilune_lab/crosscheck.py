"""`perilune crosscheck`: one workload through real Envoy, gateway and engines in real time, and simulated.

Steps: generated agentic sessions, cut to a window → a stack with engines at their own speed plays them once
per policy, which each request names in a header (`Stack`, `run_load`); sessions and texts are renamed, so no
policy finds the caches of the one before → the simulator plays the same turns with the same policies, the
same engine model and beliefs that start right → a table side by side, and three verdicts: TTFT p90 within
20 %, hit rate within 2 points, the same order of policies.

Lengths are a quarter of real ones, gaps a twentieth and sessions alike, so that half a minute holds hundreds
of turns and tells a hit rate to a point; prompts go as text, so both sides count the same tokens. Engines do
not pull KV from each other, as the live ones cannot. A few milliseconds decide which endpoint a turn meets,
so no two live runs are equal: simulated figures are means over plays whose think times are up to 10 ms
longer, with their standard deviation.

Live times are wall times: a machine that has other things to do makes them longer. How long our processes
waited for a CPU is measured (Linux's schedstat), and said; a verdict of a busy machine is none.

Exit status: 0: everything agrees; 1: it does not, or the stack failed; 3: it does not, but the machine was
too busy to tell; 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, takewhile
from math import inf
from pathlib import Path
from random import Random
from statistics import stdev

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from perilune_api import names, pool
from perilune_api.pool import SpecError
from perilune_gateway.engine_model import H20_30B
from perilune_lab import report
from perilune_lab.arguments import count, positive
from perilune_lab.client import Load, Words, run_load
from perilune_lab.policy_arguments import live_policies
from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_lab.simulator import measure
from perilune_lab.simulator.faults import Faults
from perilune_lab.simulator.h20 import H20
from perilune_lab.simulator.routing import Setting
from perilune_lab.simulator.simulation import Fleet, simulate
from perilune_lab.simulator.workload import prepare
from perilune_lab.stack import EngineOptions, Stack, StackError
from perilune_lab.text import Vocabulary
from perilune_lab.traces.agentic import Agentic, describe, sessions
from perilune_lab.traces.model import Mode, Style, Trace, Turn

FAILED, WRONG_CALL, TOO_BUSY = 1, 2, 3
TTFT_WITHIN = 0.20
APC_WITHIN = 0.02
TIE = 0.10
"""Policies whose TTFT p90 differ by less are not in an order."""
PLAYS = 16
"""Simulations of each policy."""
JITTER_S = 0.01
WAITED = 0.25
"""Of all our processes for a CPU, per request, as a share of TTFT p50: above it live times say too much about
this machine."""
_DEFAULT = ("round_robin", "lmetric_plus_one", "sticky", "ear", "perilune", "dynamo")

_EPILOG = """\
examples:
  perilune crosscheck
  perilune crosscheck --policies ear,round_robin --seconds 20 --json crosscheck.json
"""


@dataclass(frozen=True, slots=True)
class Options:
    policies: tuple[str, ...] = _DEFAULT
    endpoints: int = 3
    seconds: float = 33.0
    """Of traffic; the last turns end a little later."""
    rate: float = 0.5
    """Sessions per second and endpoint."""
    seed: int = 1
    json: Path | None = None
    kv_tokens: int = 100_000
    context_tokens: int = 32_768

    def trace(self) -> Trace:
        """Turns that an unloaded system would see within the window."""
        p = Agentic(
            sessions_per_s=self.rate * self.endpoints,
            turns_alpha=8.0,
            turns_min=9,
            turns_max=14,
            first_prompt=(9.6, 0.4),
            tool_result=(6.9, 0.5),
            answer=(3.9, 0.5),
            compacted_share=0.0,
            length_scale=0.25,
            gap_scale=0.05,
        )
        started = takewhile(lambda s: s.start_s < self.seconds, sessions(p, self.seed))
        whole = Trace("agentic", Style.TEXT, tuple(started), {"seed": self.seed, **describe(p)})
        jobs = prepare(whole, H20_30B, window_s=self.seconds).jobs
        cut = (
            replace(session, turns=session.turns[: len(job.tasks)])
            for session, job in zip(whole.sessions, jobs, strict=True)
        )
        return replace(whole, sessions=tuple(session for session in cut if session.turns))


def renamed(trace: Trace, prefix: str) -> Trace:
    """The same with other session names and other texts of the same lengths."""

    def turn(t: Turn) -> Turn:
        prompt = tuple(segment._replace(key=f"{prefix}{segment.key}") for segment in t.prompt)
        return replace(t, session=prefix + t.session, prompt=prompt)

    sessions = (
        replace(s, session_id=prefix + s.session_id, turns=tuple(map(turn, s.turns))) for s in trace.sessions
    )
    return replace(trace, sessions=tuple(sessions))


def jittered(trace: Trace, dice: Random) -> Trace:
    """Every start and think time up to `JITTER_S` longer."""
    return replace(
        trace,
        sessions=tuple(
            replace(
                s,
                start_s=s.start_s + dice.uniform(0, JITTER_S),
                turns=tuple(replace(t, gap_s=t.gap_s + dice.uniform(0, JITTER_S)) for t in s.turns),
            )
            for s in trace.sessions
        ),
    )


class Simulated(msgspec.Struct, frozen=True):
    """Means over plays, and standard deviations."""

    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p90_spread_s: float
    apc: float
    apc_spread: float


class Pair(msgspec.Struct, frozen=True):
    """One policy both ways."""

    live: Run
    simulated: Simulated
    waited_s: float
    """Our processes for a CPU, per live request."""

    @property
    def policy(self) -> str:
        return self.live.policy

    @property
    def ttft_off(self) -> float:
        """Simulated / live TTFT p90, − 1."""
        return self.simulated.ttft_p90_s / p90_s(self.live) - 1.0

    @property
    def apc_off(self) -> float:
        """Simulated − live hit rate, 0–1."""
        return self.simulated.apc - (self.live.apc or 0.0)

    @property
    def agrees(self) -> bool:
        return abs(self.ttft_off) <= TTFT_WITHIN and abs(self.apc_off) <= APC_WITHIN

    @property
    def disturbed(self) -> bool:
        return self.waited_s > WAITED * (self.live.ttft_s.p50 if self.live.ttft_s else 0.0)


def p90_s(run: Run) -> float:
    """TTFT p90; inf where nothing was measured."""
    return run.ttft_s.p90 if run.ttft_s else inf


def swapped(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Policies that the simulation puts in another order than the live run, both times clearly."""
    found = []
    for a, b in combinations(pairs, 2):
        live = p90_s(a.live) / p90_s(b.live)
        simulated = a.simulated.ttft_p90_s / b.simulated.ttft_p90_s
        clear = all(not 1 - TIE < ratio < 1 / (1 - TIE) for ratio in (live, simulated))
        if clear and (live < 1) != (simulated < 1):
            found.append((a.policy, b.policy))
    return found


class Crosscheck:
    def __init__(self, options: Options, err: Console) -> None:
        self.options = options
        self.err = err
        self.trace = options.trace()
        self.words: Words = Vocabulary().words_for

    async def run(self) -> list[Pair]:
        """Raises StackError when a part of the live path dies."""
        o = self.options
        self.err.print(
            f"{self.trace.requests} turns of {len(self.trace.sessions)} sessions, {o.endpoints} engines,"
            f" {len(o.policies)} policies; about {len(o.policies) * (o.seconds + 3) + 20:.0f} s",
            highlight=False,
        )
        engines = EngineOptions(kv_tokens=o.kv_tokens, context_tokens=o.context_tokens)
        pairs = []
        async with Stack(o.endpoints, engines, pool.Routing(allow_policy_header=True)) as stack:
            for policy in o.policies:
                live, waited_s = await self._live(stack, policy)
                pairs.append(Pair(live, await asyncio.to_thread(self._simulated, policy), waited_s))
                self.err.print(
                    f"{policy}: {live.succeeded} of {live.requests} requests live, each waited"
                    f" {waited_s * 1e3:.1f} ms for a CPU",
                    highlight=False,
                )
        return pairs

    async def _live(self, stack: Stack, policy: str) -> tuple[Run, float]:
        trace = renamed(self.trace, f"{policy}/")
        load = Load(stack.url, stack.options.model, trace.style, headers=((names.POLICY_HEADER, policy),))
        pids = [os.getpid(), *(child.pid for child in stack.children.values())]
        before_s = _waited_s(pids)
        results = await run_load(trace.sessions, load, self.words)
        waited_s = (_waited_s(pids) - before_s) / len(results)
        measured = report.Measured(policy, results, trace.sessions, Mode.THINKTIME, engine=H20_30B)
        return report.run(measured), waited_s

    def _simulated(self, policy: str) -> Simulated:
        o = self.options
        hardware = replace(H20, engine=replace(H20.engine, kv_pool_tokens=o.kv_tokens))
        runs = []
        for play in range(PLAYS):
            workload = prepare(jittered(self.trace, Random(play)), hardware.engine)
            outcome = simulate(
                workload,
                Setting(policy, pullable=False),
                Fleet(o.endpoints, hardware),
                Faults(engine_belief=1.0, link_belief=1.0),
                play,
            )
            runs.append(measure.run(outcome, workload))
        p90, apc = [p90_s(run) for run in runs], [run.apc or 0.0 for run in runs]
        p50 = mean(run.ttft_s.p50 if run.ttft_s else inf for run in runs)
        return Simulated(p50, mean(p90), stdev(p90), mean(apc), stdev(apc))


def _waited_s(pids: Sequence[int]) -> float:
    """Seconds that the living threads of these processes have waited for a CPU; 0 where Linux does not
    tell."""
    waited_ns = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                waited_ns += int(file.read_text().split()[1])
            except OSError:
                pass  # the thread has ended
    return waited_ns / 1e9


# -- what is said ------------------------------------------------------------------------------------------


def table(pairs: Sequence[Pair]) -> Table:
    """A row per policy, lowest live TTFT p90 first."""
    grid = Table(title="live: real Envoy and gateway, simulated engines in real time · simulated: all of it")
    grid.add_column("policy", no_wrap=True)
    for name in (
        "TTFT p50 live",
        "simulated",
        "p90 live",
        "simulated",
        "off",
        "APC live",
        "simulated",
        "off",
    ):
        grid.add_column(name, justify="right", no_wrap=True)
    for pair in sorted(pairs, key=lambda pair: p90_s(pair.live)):
        live, simulated = pair.live, pair.simulated
        grid.add_row(
            pair.policy + ("" if pair.agrees else " (!)"),
            f"{live.ttft_s.p50 * 1e3:,.0f} ms" if live.ttft_s else "–",
            f"{simulated.ttft_p50_s * 1e3:,.0f} ms",
            f"{p90_s(live) * 1e3:,.0f} ms",
            f"{simulated.ttft_p90_s * 1e3:,.0f} ± {simulated.ttft_p90_spread_s * 1e3:,.0f} ms",
            f"{pair.ttft_off:+.0%}",
            f"{live.apc or 0:.1%}",
            f"{simulated.apc:.1%} ± {simulated.apc_spread * 100:.1f}",
            f"{pair.apc_off * 100:+.1f}",
        )
    return grid


def verdicts(pairs: Sequence[Pair]) -> list[tuple[bool, str]]:
    """(does it hold, in words)."""
    ttft, apc = (max(pairs, key=lambda pair: abs(getattr(pair, off))) for off in ("ttft_off", "apc_off"))
    wrong = swapped(pairs)
    order = ", ".join(f"{a} and {b}" for a, b in wrong) or "none"
    return [
        (
            abs(ttft.ttft_off) <= TTFT_WITHIN,
            f"TTFT p90 within {TTFT_WITHIN:.0%}: largest difference {ttft.ttft_off:+.0%} ({ttft.policy})",
        ),
        (
            abs(apc.apc_off) <= APC_WITHIN,
            f"hit rate within {APC_WITHIN * 100:.0f} points: largest difference"
            f" {apc.apc_off * 100:+.1f} ({apc.policy})",
        ),
        (not wrong, f"the same order of policies: swapped {order} (closer than {TIE:.0%} is a tie)"),
    ]


def conclude(options: Options, pairs: Sequence[Pair], out: Console) -> int:
    """Table, verdicts, JSON; the exit status."""
    out.print(table(pairs))
    found = verdicts(pairs)
    for holds, text in found:
        out.print(f"{'met' if holds else 'MISSED'}: {text}", highlight=False)
    busiest = max(pairs, key=lambda pair: pair.waited_s)
    if busiest.disturbed:
        out.print(
            f"This machine was busy with other things: a request waited {busiest.waited_s * 1e3:.0f} ms for a"
            f" CPU ({busiest.policy}). Live times are too long; do not judge by this run.",
            highlight=False,
        )
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(pairs), indent=2) + b"\n")
    if all(holds for holds, _ in found):
        return 0
    return TOO_BUSY if busiest.disturbed else FAILED


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        pairs = uvloop.run(Crosscheck(options, Console(stderr=True)).run())
    except SpecError as error:
        print(f"perilune crosscheck: {error}", file=sys.stderr)
        return WRONG_CALL
    except StackError as error:
        print(f"perilune crosscheck: {error}", file=sys.stderr)
        return FAILED
    return conclude(options, pairs, Console(width=None if sys.stdout.isatty() else 140))


def parse(argv: Sequence[str]) -> Options:
    """Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    default = Options()
    parser = argparse.ArgumentParser(
        prog="perilune crosscheck",
        description="Play one workload live (Envoy, gateway, engines in real time) and simulated; compare.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--policies", default=",".join(_DEFAULT), metavar="A,B", help="[%(default)s]")
    add("--endpoints", type=count, default=default.endpoints, metavar="N", help="[%(default)s]")
    add("--seconds", type=positive, default=default.seconds, metavar="S", help="of traffic [%(default)s]")
    add(
        "--rate",
        type=positive,
        default=default.rate,
        metavar="X",
        help="sessions/s and endpoint [%(default)s]",
    )
    add("--seed", type=int, default=default.seed, metavar="N", help="[%(default)s]")
    add("--json", type=Path, metavar="FILE", help="write both reports of each policy")
    args = parser.parse_args(argv)
    policies = live_policies(args.policies, "--policies")
    return Options(policies, args.endpoints, args.seconds, args.rate, args.seed, args.json)
