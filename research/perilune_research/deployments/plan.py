"""What the study simulates: every deployment at every load with every policy, and with all seeds.

Loads are multiples of R, the rate at which a policy that knows no sessions has a TTFT p90 of five times the
floor in a pool with defaults. All deployments get the same traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from perilune_lab.simulate.deployment import Arm
from perilune_lab.simulate.faults import Faults
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
FAULTY_POLICIES = (DEFAULT, "lmetric_plus_one", "ear")
"""Policies that are played, at R alone, where engines are not what the gateway believes."""
LOADS: Mapping[str, float] = {"R/2": 0.5, "R": 1.0, "1.25 R": 1.25}


FAULTS: Mapping[str, tuple[str, Faults]] = {
    "told-double": (
        "prefill is believed to take twice as long as it does, step times are noisy",
        Faults(engine_belief=2.0, step_noise=0.2),
    ),
    "told-half": (
        "prefill is believed to take half as long as it does, step times are noisy",
        Faults(engine_belief=0.5, step_noise=0.2),
    ),
    "unequal": (
        "engines are up to 1.5 times as fast or slow as the gateway is told, noisy",
        Faults(speed_spread=1.5, step_noise=0.2),
    ),
    "very-unequal": (
        "engines are up to twice as fast or slow, believed to take half as long, noisier",
        Faults(speed_spread=2.0, step_noise=0.3, engine_belief=0.5),
    ),
}
"""How engines can differ from what the gateway believes, and the words that say it."""
LINKS: Mapping[str, tuple[str, Faults]] = {
    "fast-links": ("transfers take 0.4 times as long as believed", Faults(link_factor=0.4, link_belief=1.0)),
    "slow-links": ("transfers take 3 times as long as believed", Faults(link_factor=3.0, link_belief=1.0)),
    "crawling-links": (
        "transfers take 10 times as long as believed",
        Faults(link_factor=10.0, link_belief=1.0),
    ),
    "unsteady-links": (
        "one transfer in 20 takes 20 times as long",
        Faults(outlier_share=0.05, link_belief=1.0),
    ),
}
"""How links can differ from what the gateway believes at first, and the words that say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One deployment of the study."""

    means: str
    arm: Arm
    split: bool = False
    """Whether half of the endpoints only prefill for the others."""
    planner: bool = False
    admission: bool = False
    gateways: int = 1
    faults: Faults = Faults()
    links: bool = False
    """Whether it is links that differ from the belief."""


POOLS: Mapping[str, Pool] = {
    "none": Pool(means="a pool with defaults: what an engine does not hold, it computes", arm=Arm.NONE),
    "handoff": Pool(
        means="engines hand KV over (`mooncake.transfer: handoff`) with requests",
        arm=Arm.HANDOFF,
    ),
    "planned": Pool(
        means="the same, and the gateway plans moves with every trigger (`migration.triggers`)",
        arm=Arm.HANDOFF,
        planner=True,
    ),
    "store": Pool(
        means="all engines share one store of 3 GB/s for each engine (`mooncake.store`)", arm=Arm.STORE
    ),
    "both": Pool(means="hand-off and store", arm=Arm.BOTH),
    "split": Pool(
        means="half of the endpoints only prefill, and hand KV over to the others", arm=Arm.NONE, split=True
    ),
    "admission": Pool(
        means="defaults, and new sessions wait up to a minute (`sessionAdmission`)",
        arm=Arm.NONE,
        admission=True,
    ),
    **{
        f"{arm}-four-gateways": Pool(
            means=f"`{arm}`, but each request goes to one of four gateways by chance", arm=arm, gateways=4
        )
        for arm in (Arm.NONE, Arm.STORE)
    },
    **{
        f"{arm}-{name}": Pool(means=f"`{arm}`, but {means}", arm=arm, faults=faults)
        for arm in (Arm.NONE, Arm.STORE)
        for name, (means, faults) in FAULTS.items()
    },
    **{
        f"handoff-{name}": Pool(means=f"`handoff`, but {means}", arm=Arm.HANDOFF, faults=faults, links=True)
        for name, (means, faults) in LINKS.items()
    },
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
        """Return the cells of one deployment, load and policy that were played, one for each seed."""
        every = (cell(self.base, self.r, pool, load, policy, seed) for seed in self.size.seeds)
        return [each for each in every if each in self.results]


def cell(base: Cell, r: float, pool: str, load: str, policy: str, seed: int) -> Cell:
    kind = POOLS[pool]
    return replace(
        base,
        policy=policy,
        rate=round(r * LOADS[load], 4),
        seed=seed,
        arm=kind.arm,
        prefill=base.endpoints // 2 if kind.split else 0,
        planner=kind.planner,
        admission=kind.admission,
        gateways=kind.gateways,
        faults=kind.faults,
    )


def policies(size: Size, pool: str) -> tuple[str, ...]:
    """Return the policies that are played in this deployment."""
    kind = POOLS[pool]
    if kind.split:
        return tuple(dict.fromkeys((*(p for p in size.policies if p in SPLIT_POLICIES), SPLIT_POLICIES[-1])))
    if kind.planner or kind.admission or kind.gateways > 1 or kind.links:
        return tuple(p for p in size.policies if p == DEFAULT)
    return tuple(p for p in size.policies if kind.faults == Faults() or p in FAULTY_POLICIES)


def loads(size: Size, pool: str) -> tuple[str, ...]:
    """Return the loads at which this deployment is played."""
    return tuple(load for load in size.loads if POOLS[pool].faults == Faults() or load == "R")


def cells(base: Cell, r: float, size: Size) -> Iterable[Cell]:
    """Yield all cells of the study."""
    for seed in size.seeds:
        for pool in size.pools:
            for load in loads(size, pool):
                for policy in policies(size, pool):
                    yield cell(base, r, pool, load, policy, seed)


def find(kept: Kept, base: Cell, size: Size, r: float | None = None, play: bool = True) -> Found:
    """Find R unless it is given, and simulate what no earlier call has, or nothing but the search without
    `play`. Raises NoRateError, and OSError if results cannot be kept."""

    def runs_at(rate: float) -> list[Result]:
        wanted = [replace(base, rate=round(rate, 4), seed=seed) for seed in size.seeds]
        return list(kept.results(wanted, batches, compute, Result, "search of R").values())

    if r is None:
        r = round(find_r(lambda rate: [result.run for result in runs_at(rate)], base.rate), 4)
    wanted = [each for each in cells(base, r, size) if play or each in kept]
    return Found(base, r, size, kept.results(wanted, batches, compute, Result, "simulations"))
