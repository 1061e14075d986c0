"""The evaluation's unit of work, a cell: one simulation, identified by its inputs.

    Scenario (traffic and fleet) + Profile (how the gateway routes) + seed = Cell ──compute──▶ Result

A cell's key is its fields as JSON. Cells with equal keys have equal results, so a result is computed once and
kept (`work.py`). Cells that differ only in the profile play the same workload, which is made once
(`batches`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from perilune_api.policies import PolicyChoice, PolicyParams
from perilune_api.pool import Routing, SessionAdmission
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20, with_store
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.workload import Workload
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.source import AGENTIC
from perilune_research.evaluate import extra
from perilune_research.evaluate.extra import Extra
from perilune_research.simulator.deployment import STORE_BYTES_PER_S, Deployment
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.harness import Comparison
from perilune_research.simulator.simulation import SimulatedOutcome

_BATCH = 12
"""Most cells of a batch, so that an interruption loses little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The traffic and the fleet of a cell: a closed loop on modelled H20 GPUs."""

    rate: float
    """Sessions per second; for a recorded trace, a factor on the recorded speed."""
    endpoints: int = 8
    window_s: float = 1800.0
    warmup_s: float = 600.0
    deployment: Deployment = Deployment.NONE
    """How KV gets from one engine to another."""
    admission: bool = False
    """Whether new sessions wait while active contexts fill the KV pools (session admission)."""
    gateways: int = 1
    tenants: int = 1
    """Gateways and tenants, as session admission distinguishes them."""
    trace: str = AGENTIC
    """`agentic` for generated traffic, or the file of a recorded trace."""
    compared: tuple[str, ...] = ()
    """Policies of the main comparison; empty for all. It has no effect on a cell's result or key."""
    engine_belief: float = Faults().engine_belief
    """Ratio of believed to true seconds of prefill, at the start."""
    unequal: float = 1.0
    """Engines' compute times differ by up to this factor in both directions. The gateway starts with the
    belief that they are equal."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a factor on each prefill step's time."""
    kv_tokens: int = H20.kv_pool_tokens
    """Tokens in one endpoint's KV pool."""
    slowdown: float = 1.0
    """Factor on every compute time. It does not change which turns are played."""
    zipf_alpha: float = 0.0
    """Zipf exponent of generated sessions; 0 for no skew."""
    gap_s: float | None = None
    """Seconds between the turns of a session, instead of the trace's gaps, for the same turns."""
    link_factor: float = 1.0
    """Factor on the duration of every transfer."""
    outlier_share: float = 0.0
    """Share of the transfers that take 20 times as long."""

    def comparison(self, profile: Profile) -> Comparison:
        """Return the simulator's input for this scenario and one profile."""
        hardware = replace(H20, engine=replace(H20.engine, kv_pool_tokens=self.kv_tokens))
        if self.deployment.reach.stores:
            hardware = with_store(hardware, STORE_BYTES_PER_S)
        hardware = replace(hardware, engine=hardware.engine.scaled(self.slowdown))
        return Comparison(
            policies=(profile.policy,),
            load=OfferedLoad(
                trace=self.trace,
                window_s=self.window_s,
                warmup_s=self.warmup_s,
                parameters=Agentic(zipf_alpha=self.zipf_alpha),
            ),
            fleet=SimulatedFleet(endpoints=self.endpoints, hardware=hardware),
            faults=Faults(
                link_factor=self.link_factor,
                outlier_share=self.outlier_share,
                engine_belief=self.engine_belief,
                speed_spread=self.unequal,
                step_noise=self.noise,
            ),
            routing=Routing(
                policy=PolicyChoice(**msgspec.structs.asdict(profile.params)),
                session_admission=SessionAdmission(enabled=self.admission),
            ),
            deployment=self.deployment,
            gateways=self.gateways,
            tenants=self.tenants,
        )

    @property
    def workload_key(self) -> tuple[object, ...]:
        """Equal for scenarios that play the same workload."""
        return (self.trace, self.rate, self.window_s, self.warmup_s, self.zipf_alpha, self.gap_s)

    def workload(self, seed: int) -> Workload:
        """Make the scenario's workload. Its ideal times are those of an engine without slowdown, so that
        slower engines play the same turns."""
        comparison = replace(self, slowdown=1.0).comparison(Profile("round_robin"))
        workload = comparison.load.workload(self.rate, seed, comparison.fleet.hardware.engine)
        return workload if self.gap_s is None else with_gaps(workload, self.gap_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """How the gateway routes: a policy with its parameters. The suffix `setting.PLANNER` adds the planner."""

    policy: str
    params: PolicyParams = PolicyParams()

    def __str__(self) -> str:
        changed = self.changed()
        return self.policy + "".join(f" {name}={value}" for name, value in changed.items())

    def changed(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults, by BLOCK.NAME."""
        defaults = msgspec.to_builtins(PolicyParams())
        return {
            f"{block}.{name}": value
            for block, fields in msgspec.to_builtins(self.params).items()
            for name, value in fields.items()
            if value != defaults[block][name]
        }


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of the evaluation."""

    scenario: Scenario
    profile: Profile
    seed: int

    @property
    def key(self) -> str:
        """JSON of everything that the result depends on, besides the code."""
        played = {
            f.name: getattr(self.scenario, f.name) for f in fields(self.scenario) if f.name != "compared"
        }
        document = {
            "policy": self.profile.policy,
            "params": self.profile.changed(),
            "seed": self.seed,
            **played,
        }
        return msgspec.json.encode(document, order="sorted").decode()


class Result(msgspec.Struct, frozen=True):
    """The figures of one cell."""

    run: Run
    extra: Extra
    simulated_s: float
    wall_s: float
    """CPU seconds of the simulation alone."""


def with_gaps(workload: Workload, gap_s: float) -> Workload:
    """Return a workload of the same turns, with `gap_s` seconds between an answer and the next turn. Change
    the given workload's tasks."""
    jobs = []
    for job in workload.jobs:
        at_s, tasks = job.start_s, []
        for task in job.tasks:
            task.gap_s = gap_s if task.number else 0.0
            at_s += task.gap_s
            task.ideal_at_s = at_s
            at_s += task.ideal_s
            tasks.append(task)
        jobs.append(replace(job, tasks=tuple(tasks)))
    return replace(workload, jobs=tuple(jobs))


def batches(cells: Iterable[Cell]) -> list[tuple[Cell, ...]]:
    """Group cells that play the same workload into batches of at most `_BATCH`, and otherwise keeps their
    order."""
    found: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.scenario.workload_key, cell.seed].append(cell)
    return [tuple(group[at : at + _BATCH]) for group in found.values() for at in range(0, len(group), _BATCH)]


def compute(batch: Sequence[Cell]) -> list[tuple[Cell, Result]]:
    """Simulate the cells of a batch, which share one workload."""
    workload = batch[0].scenario.workload(batch[0].seed)
    return [(cell, _result(cell, workload)) for cell in batch]


def play(cell: Cell, workload: Workload) -> SimulatedOutcome:
    """Simulate one cell with its workload."""
    return cell.scenario.comparison(cell.profile).play(cell.profile.policy, workload, cell.seed)


def _result(cell: Cell, workload: Workload) -> Result:
    outcome = play(cell, workload)
    run = measure.run(outcome, workload, cell.profile.params.ear.cooldown_seconds)
    tenants = cell.scenario.tenants if cell.scenario.admission else 0
    return Result(
        run=msgspec.structs.replace(run, per_endpoint=msgspec.UNSET),
        extra=extra.measure(outcome, workload, cell.scenario.kv_tokens, tenants),
        simulated_s=outcome.simulated_s,
        wall_s=outcome.wall_s,
    )
