"""Simulates every policy at every rate with the same seeds, in parallel processes.

A piece of work is one rate with one seed: its workload is made once, and every policy plays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from msgspec import structs

from perilune_api.pool import Routing, SessionAdmission, SpecError
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.clients import Clients
from perilune_lab.simulate.deployment import Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.loads import OfferedLoad, find_r
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import Workload
from perilune_lab.terminal.processes import mapped
from perilune_lab.traces.source import AGENTIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Policies, traffic and pool of a comparison."""

    policies: tuple[str, ...]
    load: OfferedLoad = field(default_factory=OfferedLoad)
    deployment: Deployment = field(default_factory=Deployment)
    routing: Routing = field(default_factory=Routing)
    """The pool's routing; each of `policies` replaces the policy in it."""
    faults: Faults = field(default_factory=Faults)


class Played(NamedTuple):
    """The results of one simulation."""

    rate: float
    seed: int
    run: Run
    turns: int
    """Number of turns that were played, including those of the warm-up."""
    read: int
    """Number of turns whose body the gateway had to read."""
    transfers: Counter[str]
    simulated_s: float
    cpu_s: float
    policy_faults: Counter[str]
    """Decisions that a policy of a package got wrong, by what was wrong."""


def piece(comparison: Comparison, work: tuple[float, int]) -> list[Played]:
    """Play every policy at one rate with one seed. Raises SpecError for a request that could never run."""
    rate, seed = work
    c = comparison
    workload = c.load.workload(rate, seed, c.deployment.hardware.engine)
    _fits(workload, c.deployment.hardware.kv_pool_tokens)
    played = []
    for policy in c.policies:
        outcome = simulate(workload, c.deployment, policy, c.routing, c.faults, seed)
        run = measure.run(outcome, workload, c.routing.policy.ear.cooldown_seconds)
        played.append(
            Played(
                rate=rate,
                seed=seed,
                run=run,
                turns=len(outcome.requests),
                read=outcome.read,
                transfers=outcome.transfers,
                simulated_s=outcome.simulated_s,
                cpu_s=outcome.cpu_s,
                policy_faults=outcome.policy_faults,
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
    """Play every piece, all seeds of a rate before the next rate; yield the results of each piece, one per
    policy."""
    work = [(rate, seed) for rate in rates for seed in seeds]
    with mapped(partial(piece, comparison), work, jobs) as pieces:
        yield from pieces


def pooled(policies: Sequence[str], played: Iterable[Played]) -> list[Run]:
    """Pool the runs of each rate and policy over the seeds, all policies of a rate before the next rate."""
    rows = list(played)
    runs = []
    for rate in dict.fromkeys(row.rate for row in rows):
        for policy in policies:
            mine = [row for row in rows if row.rate == rate and row.run.policy == policy]
            if mine:
                runs.append(measure.pooled([row.run for row in mine], [row.seed for row in mine], rate))
    return runs


def first_guess(comparison: Comparison) -> float:
    """Return the rate with which a search begins."""
    return 0.1 * comparison.deployment.endpoints if comparison.load.trace == AGENTIC else 1.0


def r_of(comparison: Comparison, seeds: Sequence[int], reference: str, jobs: int = 1) -> float:
    """Find R with the reference policy on the comparison's traffic and pool, with patient clients and
    without session admission. Raises NoRateError."""
    every_session_begins = structs.replace(comparison.routing, session_admission=SessionAdmission())
    patient = replace(comparison.load, clients=Clients())
    alone = replace(comparison, policies=(reference,), routing=every_session_begins, load=patient)

    def runs_at(rate: float) -> list[Run]:
        return [played.run for (played,) in play(alone, [rate], seeds, jobs)]

    return find_r(runs_at, first_guess(comparison))
