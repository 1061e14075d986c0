"""What the study simulates: every deployment at every load with every policy, and with all seeds.

Loads are multiples of R, the rate at which a policy that knows no sessions has a TTFT p90 of five times the
floor in a pool with defaults. All deployments get the same traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from perilune_lab.simulate.deployment import Arm
from perilune_lab.simulate.loads import find_r
from perilune_research.deployments.cells import Cell, Result, batches, compute
from perilune_research.kept import Kept

DEFAULT = "perilune"
"""The policy of a pool that names none."""
REFERENCE = "lmetric"
"""The policy that defines R."""
POLICIES = (
    DEFAULT,
    "lmetric_plus_one",
    "lmetric",
    "ear",
    "mooncake",
    "conductor",
    "dynamo",
    "llm_d",
    "sticky",
)
QUICK_POLICIES = (DEFAULT, "lmetric_plus_one", "ear", "mooncake", "conductor")
SPLIT_POLICIES = (DEFAULT, "least_loaded")
"""Policies that are played where prefill has endpoints of its own."""
LOADS: Mapping[str, float] = {"R/2": 0.5, "R": 1.0, "1.25 R": 1.25}


class Pool(NamedTuple):
    """One deployment of the study."""

    means: str
    arm: Arm
    split: bool = False
    """Whether half of the endpoints only prefill for the others."""
    planner: bool = False


POOLS: Mapping[str, Pool] = {
    "none": Pool("a pool with defaults: what an engine does not hold, it computes", Arm.NONE),
    "handoff": Pool(
        "engines hand KV over (`mooncake.transfer: handoff`) with requests",
        Arm.HANDOFF,
    ),
    "planned": Pool(
        "the same, and the gateway plans moves with every trigger (`migration.triggers`)",
        Arm.HANDOFF,
        planner=True,
    ),
    "store": Pool("all engines share one store of 3 GB/s for each engine (`mooncake.store`)", Arm.STORE),
    "both": Pool("hand-off and store", Arm.BOTH),
    "split": Pool("half of the endpoints only prefill, and hand KV over to the others", Arm.NONE, split=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is simulated."""

    pools: tuple[str, ...] = tuple(POOLS)
    loads: tuple[str, ...] = tuple(LOADS)
    policies: tuple[str, ...] = POLICIES
    seeds: tuple[int, ...] = tuple(range(1, 17))


FULL = Size()
QUICK = Size(policies=QUICK_POLICIES, seeds=(1, 2))
BASE = Cell(policy=REFERENCE, rate=0.9, seed=0)
"""A cell of the study; its rate is where the search for R begins."""
QUICK_BASE = replace(BASE, window_s=600.0, warmup_s=200.0)


class Found(NamedTuple):
    """The results of the study."""

    base: Cell
    r: float
    size: Size
    results: Mapping[Cell, Result]

    def cells(self, pool: str, load: str, policy: str) -> list[Cell]:
        """Return the cells of one deployment, load and policy, one for each seed."""
        return [cell(self.base, self.r, pool, load, policy, seed) for seed in self.size.seeds]


def cell(base: Cell, r: float, pool: str, load: str, policy: str, seed: int) -> Cell:
    arm, split, planner = POOLS[pool][1:]
    return replace(
        base,
        policy=policy,
        rate=round(r * LOADS[load], 4),
        seed=seed,
        arm=arm,
        prefill=base.endpoints // 2 if split else 0,
        planner=planner,
    )


def policies(size: Size, pool: str) -> tuple[str, ...]:
    """Return the policies that are played in this deployment."""
    if not POOLS[pool].split:
        return size.policies
    return tuple(dict.fromkeys((*(p for p in size.policies if p in SPLIT_POLICIES), SPLIT_POLICIES[-1])))


def cells(base: Cell, r: float, size: Size) -> Iterable[Cell]:
    """Yield all cells of the study."""
    for seed in size.seeds:
        for load in size.loads:
            for pool in size.pools:
                for policy in policies(size, pool):
                    yield cell(base, r, pool, load, policy, seed)


def find(kept: Kept, base: Cell, size: Size, r: float | None = None) -> Found:
    """Find R unless it is given, and simulate what no earlier call has. Raises NoRateError, and OSError if
    results cannot be kept."""

    def runs_at(rate: float) -> list[Result]:
        wanted = [replace(base, rate=round(rate, 4), seed=seed) for seed in size.seeds]
        return list(kept.results(wanted, batches, compute, Result, "search of R").values())

    if r is None:
        r = round(find_r(lambda rate: [result.run for result in runs_at(rate)], base.rate), 4)
    return Found(base, r, size, kept.results(cells(base, r, size), batches, compute, Result, "simulations"))
