"""Simulates every policy at every rate with the same seeds, and finds the rate R.

A piece of work is one rate with one seed: its workload is made once, and every policy plays it. Up to `jobs`
pieces run in parallel processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple

from msgspec import structs

from perilune_api.pool import Routing, SessionAdmission, SpecError
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.loads import OfferedLoad, find_r
from perilune_lab.simulate.workload import Workload
from perilune_lab.terminal.processes import mapped
from perilune_lab.traces.source import AGENTIC
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.policies import SPLIT
from perilune_research.simulator.routing import Seen
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.simulation import SimulatedOutcome, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
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
    gateways: int = 1
    tenants: int = 1
    """Gateways and tenants, as session admission distinguishes them."""

    def fleet_for(self, policy: str) -> SimulatedFleet:
        """Return the fleet with a store if the deployment has one. For policies that split prefill and
        decode, the first half of the endpoints prefills and the rest decodes."""
        split = max(1, self.fleet.endpoints // 2) if policy in SPLIT else 0
        return replace(self.fleet, store=self.deployment.reach.stores, prefill_endpoints=split)

    def play(self, policy: str, workload: Workload, seed: int) -> SimulatedOutcome:
        """Simulate one policy."""
        setting = Setting(
            policy=policy,
            routing=self.routing,
            deployment=self.deployment,
            gateways=self.gateways,
            tenants=self.tenants,
        )
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
    """Plays every policy at one rate with one seed. Raise SpecError for a request that could never run."""
    rate, seed = work
    workload = comparison.load.workload(rate, seed, comparison.fleet.hardware.engine)
    _fits(workload, comparison.fleet.hardware.kv_pool_tokens)
    played = []
    for policy in comparison.policies:
        outcome = comparison.play(policy, workload, seed)
        run = measure.run(outcome, workload, comparison.routing.policy.ear.cooldown_seconds)
        peak = getrusage(RUSAGE_SELF).ru_maxrss * 1024
        played.append(
            Played(
                rate=rate,
                seed=seed,
                run=run,
                simulated_s=outcome.simulated_s,
                wall_s=outcome.wall_s,
                seen=outcome.seen,
                peak_bytes=peak,
            )
        )
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
    """Pools the runs of each rate and policy over the seeds. Return all policies of a rate before the next
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
    """Return the rate with which a search begins."""
    return 0.1 * comparison.fleet.endpoints if comparison.load.trace == AGENTIC else 1.0


def r_of(comparison: Comparison, seeds: Sequence[int], reference: str = "lmetric", jobs: int = 1) -> float:
    """Find R with the reference policy on the comparison's traffic and fleet, without session admission.
    Raise NoRateError."""
    every_session_begins = structs.replace(comparison.routing, session_admission=SessionAdmission())
    alone = replace(comparison, policies=(reference,), routing=every_session_begins)

    def runs_at(rate: float) -> list[Run]:
        return [played.run for (played,) in play(alone, [rate], seeds, jobs)]

    return find_r(runs_at, first_guess(comparison))
