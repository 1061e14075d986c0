"""Simulates every policy at every rate with the same seeds, and finds the rate R.

A piece of work is one rate with one seed: its workload is made once, and every policy plays it. Up to `jobs`
pieces run in parallel processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from math import inf, sqrt
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple

from msgspec import structs

from perilune_api.pool import Routing, SessionAdmission, SpecError
from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.model import Mode, Style, Trace
from perilune_lab.traces.source import AGENTIC, open_trace
from perilune_research.processes import mapped
from perilune_research.simulator import measure
from perilune_research.simulator.bisection import last_that
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.faults import Faults
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.policies import SPLIT
from perilune_research.simulator.routing import Seen
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.simulation import SimulatedOutcome, simulate
from perilune_research.simulator.workload import Workload, prepare


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """The traffic that is played."""

    trace: str = AGENTIC
    """`agentic`, or a file's path."""
    mode: Mode = Mode.THINKTIME
    window_s: float = 1800.0
    """Generated traffic leaves out turns that an unloaded system would see at this time or later."""
    warmup_s: float = 600.0
    """Turns of generated traffic that an unloaded system would see before this time are not measured."""
    limit: int | None = None
    """Number of a file's requests to play, from the first; None: all."""
    parameters: Agentic = field(default_factory=Agentic)
    """Parameters of generated traffic."""

    def workload(self, rate: float, seed: int, fleet: SimulatedFleet) -> Workload:
        """Makes the workload. `rate` is in sessions per second for generated traffic, and for a file a factor
        on the recorded speed. The seed has no effect on a file. Raises SpecError if the file is no trace, or
        lacks the timestamps that the mode needs."""
        engine = fleet.hardware.engine
        if self.trace != AGENTIC:
            return prepare(open_trace(self.trace, self.limit), engine, self.mode, rate)
        p = replace(self.parameters, sessions_per_s=rate)
        started = takewhile(lambda s: s.start_s < self.window_s, agentic.sessions(p, seed))
        trace = Trace(AGENTIC, Style.CHAT, tuple(started), {"seed": seed, **agentic.describe(p)})
        return prepare(trace, engine, self.mode, window_s=self.window_s, warmup_s=self.warmup_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies, traffic and fleet of a comparison."""

    policies: tuple[str, ...]
    load: OfferedLoad = field(default_factory=OfferedLoad)
    fleet: SimulatedFleet = field(default_factory=SimulatedFleet)
    faults: Faults = field(default_factory=Faults)
    routing: Routing = field(default_factory=Routing)
    """Routing parameters; each of `policies` replaces the policy in it."""
    deployment: Deployment = Deployment.NONE
    """How KV gets from one engine to another."""

    def fleet_for(self, policy: str) -> SimulatedFleet:
        """Returns the fleet with a store if the deployment has one. For policies that split prefill and
        decode, the first half of the endpoints prefills and the rest decodes."""
        split = max(1, self.fleet.endpoints // 2) if policy in SPLIT else 0
        return replace(self.fleet, store=self.deployment.reach.stores, prefill_endpoints=split)

    def play(self, policy: str, workload: Workload, seed: int) -> SimulatedOutcome:
        """Simulates one policy."""
        setting = Setting(policy, self.routing, deployment=self.deployment)
        return simulate(workload, setting, self.fleet_for(policy), self.faults, seed)


class Played(NamedTuple):
    """The results of one simulation."""

    rate: float
    seed: int
    run: Run
    simulated_s: float
    wall_s: float
    """Seconds of one core for the simulation alone."""
    seen: Seen
    peak_bytes: int
    """Peak memory of the process so far, including the simulations that it ran before."""


def piece(comparison: Comparison, work: tuple[float, int]) -> list[Played]:
    """Plays every policy at one rate with one seed. Raises SpecError for a request that could never run."""
    rate, seed = work
    workload = comparison.load.workload(rate, seed, comparison.fleet)
    _fits(workload, comparison.fleet.hardware.kv_pool_tokens)
    played = []
    for policy in comparison.policies:
        outcome = comparison.play(policy, workload, seed)
        run = measure.run(outcome, workload, comparison.routing.policy.ear.cooldown_seconds)
        peak = getrusage(RUSAGE_SELF).ru_maxrss * 1024
        played.append(Played(rate, seed, run, outcome.simulated_s, outcome.wall_s, outcome.seen, peak))
    return played


def _fits(workload: Workload, kv_tokens: int) -> None:
    tasks = (task for job in workload.jobs for task in job.tasks)
    longest = max((task.prompt_tokens + task.output_tokens for task in tasks), default=0)
    if longest > kv_tokens:
        raise SpecError(
            f"a request of {longest:,} tokens, with its answer, does not fit into a KV pool of {kv_tokens:,}:"
            " enlarge the pool, or play shorter requests - at `--kv-tokens`"
        )


def play(
    comparison: Comparison, rates: Sequence[float], seeds: Sequence[int], jobs: int = 1
) -> Iterator[list[Played]]:
    """Plays every piece, all seeds of a rate before the next rate; yields the results of each piece, one per
    policy."""
    work = [(rate, seed) for rate in rates for seed in seeds]
    with mapped(partial(piece, comparison), work, jobs) as pieces:
        yield from pieces


def pooled(comparison: Comparison, played: Iterable[Played]) -> list[Run]:
    """Pools the runs of each rate and policy over the seeds. Returns all policies of a rate before the next
    rate."""
    rows = list(played)
    runs = []
    for rate in dict.fromkeys(row.rate for row in rows):
        for policy in comparison.policies:
            mine = [row for row in rows if row.rate == rate and row.run.policy == policy]
            if mine:
                runs.append(measure.pooled([row.run for row in mine], [row.seed for row in mine], rate))
    return runs


def first_guess(comparison: Comparison) -> float:
    """Returns the rate with which a search begins."""
    return 0.1 * comparison.fleet.endpoints if comparison.load.trace == AGENTIC else 1.0


REGRET_AT_R = 5.0
"""At R, the reference's TTFT p90 is this multiple of the floor."""
_TOLERANCE_OF_R = 0.03


class NoRateError(Exception):
    """No rate is R; the message says why."""


def find_r(runs_at: Callable[[float], Sequence[Run]], guess: float) -> float:
    """Finds R, to 3 %: the rate at which a policy's TTFT p90 is 5 times the unloaded floor, where both are
    means over the seeds.

    `runs_at` returns the policy's runs at a rate, one per seed. Raises NoRateError if R is not between 1/64
    and 64 times the guess.
    """

    def below(rate: float) -> bool:
        runs = runs_at(rate)
        floor_s = mean(run.floor_ttft_s.p90 if run.floor_ttft_s else 0.0 for run in runs)
        return mean(run.ttft_s.p90 if run.ttft_s else inf for run in runs) < REGRET_AT_R * floor_s

    low, high = last_that(below, guess, _TOLERANCE_OF_R)
    if not low:
        raise NoRateError(
            f"TTFT p90 is {REGRET_AT_R:g} × the floor or above at any load, or no request is measured"
        )
    if high == inf:
        raise NoRateError(f"TTFT p90 stays below {REGRET_AT_R:g} × the floor at any load")
    return sqrt(low * high)


def r_of(comparison: Comparison, seeds: Sequence[int], reference: str = "lmetric", jobs: int = 1) -> float:
    """Finds R with the reference policy on the comparison's traffic and fleet, without session admission.
    Raises NoRateError."""
    every_session_begins = structs.replace(comparison.routing, session_admission=SessionAdmission())
    alone = replace(comparison, policies=(reference,), routing=every_session_begins)

    def runs_at(rate: float) -> list[Run]:
        return [played.run for (played,) in play(alone, [rate], seeds, jobs)]

    return find_r(runs_at, first_guess(comparison))
