"""The evaluation's unit of work: one simulation, named by what it is made of.

    Scenario (what is played, on what) + Arm (how the gateway routes) + seed = Cell ──compute──▶ Result

A cell's key is its fields as JSON: equal keys, equal results, so a result is computed once and kept
(`work.py`). Cells that differ only in the arm play the same workload, which is made once (`batches`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from perilune_api.policies import PolicyChoice, PolicyParams
from perilune_api.pool import Routing
from perilune_lab.report import Run
from perilune_lab.traces.agentic import Agentic
from perilune_research.evaluate import extra
from perilune_research.evaluate.extra import Extra
from perilune_research.simulator import measure
from perilune_research.simulator.faults import Faults
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.h20 import H20, with_store
from perilune_research.simulator.harness import Comparison, OfferedLoad
from perilune_research.simulator.simulation import SimulatedOutcome
from perilune_research.simulator.workload import Workload

_BATCH = 12


@dataclass(frozen=True, slots=True)
class Scenario:
    """The traffic and the fleet of a cell: generated agentic traffic, closed loop, on modelled H20s."""

    rate: float
    """Sessions per second."""
    endpoints: int = 8
    window_s: float = 1800.0
    warmup_s: float = 600.0
    store_bytes_per_s: float = 0.0
    """Speed at which one engine reads the shared KV store; 0 without a store."""
    kv_tokens: int = H20.kv_pool_tokens
    """Tokens of one endpoint's KV pool."""
    slowdown: float = 1.0
    """Factor on every compute time; the turns that are played stay the same."""
    zipf_alpha: float = 0.0
    gap_s: float | None = None
    """Seconds between the turns of a session, instead of the drawn gaps; the turns stay the same."""
    link_factor: float = 1.0
    """Factor on the duration of every transfer."""
    outlier_share: float = 0.0
    """Share of the transfers that take another 20 times longer."""

    def comparison(self, arm: Arm) -> Comparison:
        hardware = replace(H20, engine=replace(H20.engine, kv_pool_tokens=self.kv_tokens))
        if self.store_bytes_per_s:
            hardware = with_store(hardware, self.store_bytes_per_s)
        hardware = replace(hardware, engine=hardware.engine.scaled(self.slowdown))
        return Comparison(
            policies=(arm.policy,),
            load=OfferedLoad(
                window_s=self.window_s,
                warmup_s=self.warmup_s,
                parameters=Agentic(zipf_alpha=self.zipf_alpha),
            ),
            fleet=SimulatedFleet(self.endpoints, hardware, store=bool(self.store_bytes_per_s)),
            faults=Faults(link_factor=self.link_factor, outlier_share=self.outlier_share),
            routing=Routing(PolicyChoice(**msgspec.structs.asdict(arm.params))),
            pullable=arm.pullable,
        )

    @property
    def workload_key(self) -> tuple[object, ...]:
        """Equal for scenarios that play the same workload."""
        return (self.rate, self.window_s, self.warmup_s, self.zipf_alpha, self.gap_s)

    def workload(self, seed: int) -> Workload:
        """The scenario's workload. Its ideal times are those of an engine without slowdown, so that a slower
        one plays the same turns."""
        comparison = replace(self, slowdown=1.0).comparison(Arm("round_robin"))
        workload = comparison.load.workload(self.rate, seed, comparison.fleet)
        return workload if self.gap_s is None else with_gaps(workload, self.gap_s)


@dataclass(frozen=True, slots=True)
class Arm:
    """How the gateway routes."""

    policy: str
    params: PolicyParams = PolicyParams()
    pullable: bool = True
    """Whether engines can pull KV from each other."""

    def __str__(self) -> str:
        changed = self.changed()
        return self.policy + "".join(f" {name}={value}" for name, value in changed.items())

    def changed(self) -> dict[str, Any]:
        """Settings that differ from the defaults: parameters by BLOCK.NAME, and whether engines can pull."""
        defaults = msgspec.to_builtins(PolicyParams())
        changed = {
            f"{block}.{name}": value
            for block, fields in msgspec.to_builtins(self.params).items()
            for name, value in fields.items()
            if value != defaults[block][name]
        }
        return changed if self.pullable else changed | {"pullable": False}


@dataclass(frozen=True, slots=True)
class Cell:
    scenario: Scenario
    arm: Arm
    seed: int

    @property
    def key(self) -> str:
        played = {f.name: getattr(self.scenario, f.name) for f in fields(self.scenario)}
        document = {"policy": self.arm.policy, "params": self.arm.changed(), "seed": self.seed, **played}
        return msgspec.json.encode(document, order="sorted").decode()


class Result(msgspec.Struct, frozen=True):
    """A cell's numbers."""

    run: Run
    extra: Extra
    simulated_s: float
    wall_s: float
    """Seconds of one core for the simulation alone."""


def with_gaps(workload: Workload, gap_s: float) -> Workload:
    """The same turns, with `gap_s` between an answer and the next turn."""
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
    """Groups cells by workload and otherwise keeps their order; groups are small, so that an interruption
    loses little."""
    found: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.scenario.workload_key, cell.seed].append(cell)
    return [tuple(group[at : at + _BATCH]) for group in found.values() for at in range(0, len(group), _BATCH)]


def compute(batch: Sequence[Cell]) -> list[tuple[Cell, Result]]:
    """Simulates cells that share one workload."""
    workload = batch[0].scenario.workload(batch[0].seed)
    return [(cell, _result(cell, workload)) for cell in batch]


def play(cell: Cell, workload: Workload) -> SimulatedOutcome:
    return cell.scenario.comparison(cell.arm).play(cell.arm.policy, workload, cell.seed)


def _result(cell: Cell, workload: Workload) -> Result:
    outcome = play(cell, workload)
    run = measure.run(outcome, workload, cell.arm.params.ear.cooldown_seconds)
    return Result(
        run=msgspec.structs.replace(run, per_endpoint=msgspec.UNSET),
        extra=extra.measure(outcome, workload, cell.scenario.kv_tokens),
        simulated_s=outcome.simulated_s,
        wall_s=outcome.wall_s,
    )
