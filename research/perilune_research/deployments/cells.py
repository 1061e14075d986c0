"""One simulation of the study: a deployment, a load, a policy and a seed, played by `perilune simulate`.

A cell's key is its fields and a fingerprint of the code that plays it: the simulator with the gateway's own
code, and this one policy. So a changed policy is played again, and no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import msgspec

from perilune_api.pool import MoveTrigger, Routing, SessionAdmission
from perilune_gateway.policy import POLICIES
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import STORE_BYTES_PER_S, Arm, Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20, with_store
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import Workload
from perilune_lab.terminal.policy_arguments import changed
from perilune_lab.traces.source import AGENTIC
from perilune_research.sources import REGISTRY, fingerprint, is_module

COMPUTES = (__name__,)
_BATCH = 8
"""Most cells of a batch, so that an interruption loses little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One simulation."""

    policy: str
    rate: float
    """Sessions per second; for a recorded trace, a factor on the recorded speed."""
    seed: int
    arm: Arm = Arm.NONE
    prefill: int = 0
    """So many of the endpoints only prefill for the others."""
    planner: bool = False
    """Whether the gateway also plans moves, with every trigger on."""
    admission: bool = False
    """Whether new sessions wait while active contexts fill the KV pools."""
    faults: Faults = Faults()
    gateways: int = 1
    endpoints: int = 8
    window_s: float = 1800.0
    warmup_s: float = 600.0
    trace: str = AGENTIC
    params: tuple[tuple[str, str], ...] = ()
    """Parameters of policies that differ from their defaults, as BLOCK.NAME and value."""

    @property
    def key(self) -> str:
        """JSON of everything that the result depends on."""
        return msgspec.json.encode({"code": code(self.policy), **asdict(self)}, order="sorted").decode()

    @property
    def deployment(self) -> Deployment:
        deployment = Deployment(
            arm=self.arm,
            endpoints=self.endpoints,
            prefill_endpoints=self.prefill,
            gateways=self.gateways,
        )
        if not deployment.stores:
            return deployment
        return replace(deployment, hardware=with_store(H20, STORE_BYTES_PER_S))

    @property
    def routing(self) -> Routing:
        routing = changed(Routing(), dict(self.params), "--param")
        if self.admission:
            waits = SessionAdmission(enabled=True, max_wait_seconds=60.0)
            routing = msgspec.structs.replace(routing, session_admission=waits)
        if not self.planner:
            return routing
        every = msgspec.structs.replace(routing.migration, triggers=tuple(MoveTrigger))
        return msgspec.structs.replace(routing, migration=every)

    def workload(self) -> Workload:
        recorded = self.trace != AGENTIC
        load = OfferedLoad(
            trace=self.trace,
            window_s=float("inf") if recorded else self.window_s,
            warmup_s=0.0 if recorded else self.warmup_s,
        )
        return load.workload(self.rate, self.seed, H20.engine)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one cell."""

    run: Run
    turns: int
    """Number of turns that were played, including those of the warm-up."""
    read: int
    """Number of turns whose body the gateway had to read."""
    transfers: Mapping[str, int]
    """Number of transfers of KV that have ended, by reason and outcome."""
    simulated_s: float
    cpu_s: float


@cache
def code(policy: str) -> str:
    """Return a fingerprint of the code that plays this policy."""
    modules = {f"{REGISTRY}{room}.{name}": name for name in POLICIES for room in ("", ".others")}
    mine = [module for module, name in modules.items() if name == policy and is_module(module)]
    return fingerprint((*COMPUTES, *mine), modules.keys() - set(mine))


def batches(cells: Sequence[Cell]) -> list[tuple[Cell, ...]]:
    """Group cells that play the same workload into batches."""
    found: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.trace, cell.rate, cell.window_s, cell.warmup_s, cell.seed].append(cell)
    return [tuple(group[at : at + _BATCH]) for group in found.values() for at in range(0, len(group), _BATCH)]


def compute(batch: Sequence[Cell]) -> list[tuple[Cell, Result]]:
    """Simulate the cells of a batch, which share one workload."""
    workload = batch[0].workload()
    return [(cell, _result(cell, workload)) for cell in batch]


def _result(cell: Cell, workload: Workload) -> Result:
    routing = cell.routing
    outcome = simulate(workload, cell.deployment, cell.policy, routing, cell.faults, seed=cell.seed)
    run = measure.run(outcome, workload, routing.policy.ear.cooldown_seconds)
    return Result(
        run=msgspec.structs.replace(run, per_endpoint=msgspec.UNSET),
        turns=len(outcome.requests),
        read=outcome.read,
        transfers=outcome.transfers,
        simulated_s=outcome.simulated_s,
        cpu_s=outcome.cpu_s,
    )
