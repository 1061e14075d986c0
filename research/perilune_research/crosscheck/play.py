"""Plays the workload live and simulated, policy by policy.

All live plays share one stack of processes. Each request names its policy in a header. Sessions and texts get
new names in each play, so that no play finds the caches of the one before. The simulation has the same engine
model and beliefs that are right from the start. In both, engines get no KV from each other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from statistics import stdev

from rich.console import Console

from perilune_api import names, pool
from perilune_gateway.model import H20_30B
from perilune_lab import report
from perilune_lab.load.bodies import Words
from perilune_lab.load.client import Load, run_load
from perilune_lab.load.result import Result
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import prepare
from perilune_lab.traces.model import Mode, Session
from perilune_lab.vocabulary import Vocabulary
from perilune_research.crosscheck.compare import Pair, Simulated, p90_s
from perilune_research.crosscheck.workload import Options, jittered, renamed

SIMULATED = 16
"""Number of simulated plays of each policy."""


class Crosscheck:
    """Plays every policy live and simulated. `err`: where to print progress."""

    def __init__(self, options: Options, err: Console) -> None:
        self.options = options
        self.err = err
        self.trace = options.trace()
        self.words: Words = Vocabulary().words_for
        self.pairs: list[Pair] = []
        """The results so far, one per policy."""

    async def run(self) -> list[Pair]:
        """Play every policy and return `pairs`. Raises StackError when a process of the live path ends."""
        o = self.options
        self.err.print(
            f"{self.trace.requests} turns of {len(self.trace.sessions)} sessions, {o.endpoints} engines,"
            f" {len(o.policies)} policies; about {len(o.policies) * o.plays * (o.seconds + 3) + 20:.0f} s",
            highlight=False,
        )
        engines = EngineOptions(kv_tokens=o.kv_tokens, context_tokens=o.context_tokens)
        async with Stack(
            engines=o.endpoints, options=engines, routing=pool.Routing(allow_policy_header=True)
        ) as stack:
            for policy in o.policies:
                live, waited_s = await self._live(stack, policy)
                simulated = await asyncio.to_thread(self.simulated, policy)
                self.pairs.append(Pair(live, simulated, waited_s, o.plays))
                self.err.print(
                    f"{policy}: {live.succeeded} of {live.requests} requests live, each waited"
                    f" {waited_s * 1e3:.1f} ms for a CPU",
                    highlight=False,
                )
        return self.pairs

    async def _live(self, stack: Stack, policy: str) -> tuple[Run, float]:
        """Play a policy live. Return the pooled run, and the seconds per request for which all processes
        waited for a CPU."""
        named = ((names.POLICY_HEADER, policy),)
        load = Load(target=stack.url, model=stack.options.model, style=self.trace.style, headers=named)
        pids = [os.getpid(), *(child.pid for child in stack.children.values())]
        before_s = _waited_s(pids)
        sessions: list[Session] = []
        results: list[Result] = []
        for play in range(self.options.plays):
            again = renamed(self.trace, f"{policy}/{play}/").sessions
            results += await run_load(again, load, self.words)
            sessions += again
        waited_s = (_waited_s(pids) - before_s) / len(results)
        measured = report.Measured(
            policy=policy,
            results=results,
            sessions=sessions,
            mode=Mode.THINKTIME,
            complete=self.options.plays == 1,
            engine=H20_30B,
        )
        return report.run(measured), waited_s

    def simulated(self, policy: str) -> Simulated:
        """Simulate a policy `SIMULATED` times."""
        o = self.options
        hardware = replace(H20, engine=replace(H20.engine, kv_pool_tokens=o.kv_tokens))
        deployment = Deployment(endpoints=o.endpoints, hardware=hardware, block_tokens=hardware.block_tokens)
        right, runs = Faults(engine_belief=1.0, link_belief=1.0), []
        for play in range(SIMULATED):
            workload = prepare(jittered(self.trace, Random(play)), hardware.engine)
            outcome = simulate(workload, deployment, policy, faults=right, seed=play)
            runs.append(measure.run(outcome, workload))
        p90, apc = [p90_s(run) for run in runs], [run.apc or 0.0 for run in runs]
        p50 = mean(run.ttft_s.p50 if run.ttft_s else inf for run in runs)
        return Simulated(p50, mean(p90), stdev(p90), mean(apc), stdev(apc))


def _waited_s(pids: Sequence[int]) -> float:
    """Return the seconds that the running threads of these processes have waited for a CPU; 0 if Linux does
    not report it."""
    waited_ns = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                waited_ns += int(file.read_text().split()[1])
            except OSError:
                pass  # the thread has ended
    return waited_ns / 1e9
