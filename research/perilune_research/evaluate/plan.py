"""Lists what the evaluation simulates: named studies, each a list of points (a scenario and an arm), relative
to that at R.

    scenario at R ──study──▶ points ──× seeds──▶ cells

Points that several studies share are the same value, so they are simulated once. A figure, table or bar names
the studies that it reads (`NEEDS`); with `--only`, just these are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from perilune_api.policies import ConductorArm, ConductorParams, EarParams, PeriluneParams, PolicyParams
from perilune_research.evaluate.cells import Arm, Cell, Scenario
from perilune_research.evaluate.search import Search
from perilune_research.simulator.policies import POLICIES
from perilune_research.simulator.setting import PLANNER

OURS = Arm("perilune")
STAY = Arm("perilune", PolicyParams(perilune=PeriluneParams(least_gain_seconds=1e9)))
"""Our policy without migration: no move ever saves that much."""
AFFINITY_ONLY, BOTH = Arm("sticky"), Arm("ear")
STRONGEST = Arm("lmetric_plus_one")
EVERY = tuple(Arm(policy) for policy in POLICIES)
SOME = (OURS, BOTH, STRONGEST, AFFINITY_ONLY, Arm("lmetric"), Arm("dynamo"))
"""Policies of the sensitivities: a baseline of each kind."""

LOADS = {"R/2": 0.5, "R": 1.0, "1.25 R": 1.25, "1.6 R": 1.6}
BAR_LOADS = ("R/2", "R", "1.25 R")
OVERLOAD = "1.6 R"
STORE_BYTES_PER_S = 3e9

LINK_FACTORS = (0.4, 1.0, 3.0, 10.0)
OUTLIER_SHARES = (0.0, 0.05)
ZIPF_ALPHAS = (0.0, 0.3, 0.6, 0.9)
KV_TOKENS = (70_400, 140_800, 281_600, 563_200)
T_HOT_TOKENS = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
T_COOL_S = (0.0, 5.0, 10.0, 30.0, 60.0, 120.0)
LEAST_GAIN_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
GAPS_S = (0.0, None, 30.0)
"""Gaps of the chatbot control; None for the drawn ones."""
GAP_LOADS = ("R/2", "R")
SLOWDOWN = 1.1
"""Slowdown of the engines for the measured amplification."""
COUPLED = (OURS, BOTH, STRONGEST, AFFINITY_ONLY, Arm("lmetric"), Arm("least_loaded"))

CAPACITIES = {
    "perilune": (OURS, 0.0),
    "perilune, store": (OURS, STORE_BYTES_PER_S),
    "lmetric_plus_one": (STRONGEST, 0.0),
    "lmetric_plus_one, store": (STRONGEST, STORE_BYTES_PER_S),
    "dynamo": (Arm("dynamo"), 0.0),
    "sticky": (AFFINITY_ONLY, 0.0),
    "round_robin": (Arm("round_robin"), 0.0),
}


QUICK_SEEDS, FULL_SEEDS = 6, 32

BASE = Scenario(rate=0.8)
"""The evaluation's scenario; its rate is where the search for R begins."""


class Point(NamedTuple):
    scenario: Scenario
    arm: Arm


def scenario(at_r: Scenario, load: str = "R") -> Scenario:
    """The scenario at that load. The rate is rounded for readers and for the cache of results."""
    return replace(at_r, rate=round(at_r.rate * LOADS[load], 4))


def matrix(at_r: Scenario) -> list[Point]:
    """Every policy at every load that bars look at."""
    return [Point(scenario(at_r, load), arm) for load in BAR_LOADS for arm in EVERY]


def own(at_r: Scenario) -> list[Point]:
    """Our policies at every load of the bars, and the baseline whose wall-clock factor P6 names."""
    return [*(Point(scenario(at_r, load), OURS) for load in BAR_LOADS), Point(scenario(at_r), Arm("lmetric"))]


def overload(at_r: Scenario) -> list[Point]:
    """Every policy at the highest load, where simulations take longest."""
    return [Point(scenario(at_r, OVERLOAD), arm) for arm in (*EVERY, *ABLATION.values())]


def stores(at_r: Scenario) -> list[Point]:
    return [Point(with_store(scenario(at_r)), arm) for arm in (OURS, BOTH, STRONGEST)]


def with_store(base: Scenario) -> Scenario:
    return replace(base, store_bytes_per_s=STORE_BYTES_PER_S)


def links(at_r: Scenario) -> list[Point]:
    return [
        Point(link_scenario(at_r, factor, share), arm)
        for factor, share in product(LINK_FACTORS, OUTLIER_SHARES)
        for arm in (OURS, STAY)
    ]


def link_scenario(at_r: Scenario, factor: float, outlier_share: float) -> Scenario:
    return replace(scenario(at_r), link_factor=factor, outlier_share=outlier_share)


ABLATION: Mapping[str, Arm] = {
    "affinity only (sticky)": AFFINITY_ONLY,
    "migration only (least loaded, planner)": Arm("least_loaded" + PLANNER),
    "both (sticky, planner)": Arm("sticky" + PLANNER),
    "both in one (ear)": BOTH,
    "perilune": OURS,
}


def ablation(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r, load), arm) for load in BAR_LOADS for arm in ABLATION.values()]


def zipf(at_r: Scenario) -> list[Point]:
    return [Point(zipf_scenario(at_r, alpha), arm) for alpha in ZIPF_ALPHAS for arm in SOME]


def zipf_scenario(at_r: Scenario, alpha: float) -> Scenario:
    return replace(scenario(at_r), zipf_alpha=alpha)


def kv_pool(at_r: Scenario) -> list[Point]:
    return [Point(pool_scenario(at_r, tokens), arm) for tokens in KV_TOKENS for arm in SOME]


def pool_scenario(at_r: Scenario, tokens: int) -> Scenario:
    return replace(scenario(at_r), kv_tokens=tokens)


def t_hot_arm(tokens: int) -> Arm:
    return Arm("ear", PolicyParams(ear=EarParams(hot_pending_tokens=tokens)))


def t_hot(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r), t_hot_arm(tokens)) for tokens in T_HOT_TOKENS]


def t_cool_arm(seconds: float) -> Arm:
    return Arm("ear", PolicyParams(ear=EarParams(cooldown_seconds=seconds)))


def t_cool(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r), t_cool_arm(seconds)) for seconds in T_COOL_S]


def least_gain_arm(seconds: float) -> Arm:
    return Arm("perilune", PolicyParams(perilune=PeriluneParams(least_gain_seconds=seconds)))


def least_gain(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r), least_gain_arm(seconds)) for seconds in LEAST_GAIN_S]


def coupling(at_r: Scenario) -> list[Point]:
    """Each load with engines as they are and with slightly slower ones."""
    scenarios = [s for load in LOADS for s in (scenario(at_r, load), slower(scenario(at_r, load)))]
    return [Point(s, arm) for s in scenarios for arm in COUPLED]


def slower(base: Scenario) -> Scenario:
    return replace(base, slowdown=SLOWDOWN)


def gaps(at_r: Scenario) -> list[Point]:
    return [
        Point(gap_scenario(at_r, load, gap_s), arm)
        for load, gap_s in product(GAP_LOADS, GAPS_S)
        for arm in COUPLED
    ]


def gap_scenario(at_r: Scenario, load: str, gap_s: float | None) -> Scenario:
    return replace(scenario(at_r, load), gap_s=gap_s)


CONDUCTOR = {
    "no scheduling": Arm(
        "conductor", PolicyParams(conductor=ConductorParams(arm=ConductorArm.NO_SCHEDULING))
    ),
    "cache-aware": Arm("conductor", pullable=False),
    "cache-aware and hot migration": Arm("conductor"),
}


def conductor(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r), arm) for arm in CONDUCTOR.values()]


@dataclass(frozen=True, slots=True)
class Study:
    points: Callable[[Scenario], list[Point]]
    side: bool = True
    """Whether it has the smaller number of seeds; then read it from `Findings.side`."""


STUDIES: Mapping[str, Study] = {
    "matrix": Study(matrix, side=False),
    "own": Study(own, side=False),
    "overload": Study(overload),
    "stores": Study(stores, side=False),
    "links": Study(links),
    "ablation": Study(ablation, side=False),
    "zipf": Study(zipf),
    "kv_pool": Study(kv_pool),
    "t_hot": Study(t_hot),
    "t_cool": Study(t_cool),
    "least_gain": Study(least_gain),
    "coupling": Study(coupling),
    "gaps": Study(gaps),
    "conductor": Study(conductor),
}
CAPACITY = "capacity"
"""The study that searches rates instead of playing points."""

NEEDS: Mapping[str, tuple[str, ...]] = {
    "f1": ("matrix", "overload"),
    "f2": (),
    "f3": (),
    "f4": ("matrix",),
    "f5": (),
    "f6": ("matrix", "overload"),
    "f7": ("ablation", "overload"),
    "f8": ("coupling",),
    "f9": ("matrix", "overload", "zipf", "kv_pool", "t_hot", "t_cool", "least_gain"),
    "f10": (),
    "bars": ("matrix", "stores", "links", CAPACITY),
    "P1": ("own", "stores"),
    "P2": ("matrix",),
    "P3": (CAPACITY,),
    "P4": ("links",),
    "P5": ("own",),
    "P6": ("own",),
    "P7": ("own",),
    "P8": ("matrix",),
    "tables": (
        "matrix",
        "overload",
        "stores",
        "ablation",
        "t_hot",
        "t_cool",
        "least_gain",
        "coupling",
        "gaps",
        "conductor",
        CAPACITY,
    ),
}
"""Studies that each part of the evaluation needs. Each bar is a part, too, so that it can be simulated with
more seeds."""
EVERYTHING = tuple(name for name in NEEDS if not name.startswith("P"))
"""All parts; `bars` stands for all bars."""


@dataclass(frozen=True, slots=True)
class Size:
    """How thorough the evaluation is."""

    name: str
    seeds: tuple[int, ...]
    side_seeds: tuple[int, ...]

    def of(self, study: Study) -> tuple[int, ...]:
        return self.side_seeds if study.side else self.seeds


def size(quick: bool, seeds: int | None, first: int) -> Size:
    """Makes a size. `seeds`: those of the main studies. Side studies have half as many, in a quick evaluation
    a third."""
    number = seeds or (QUICK_SEEDS if quick else FULL_SEEDS)
    side = max(1, number // (3 if quick else 2))
    return Size(
        "quick" if quick else "full", tuple(range(first, first + number)), tuple(range(first, first + side))
    )


def cells(at_r: Scenario, studies: Iterable[str], size: Size) -> list[Cell]:
    """The cells of all these studies; a point of two studies has the seeds of the larger one."""
    found: dict[Cell, None] = {}
    for name in studies:
        study = STUDIES[name]
        for seed in size.of(study):
            for point in study.points(at_r):
                found[Cell(point.scenario, point.arm, seed)] = None
    return list(found)


def searches(at_r: Scenario, size: Size) -> list[Search]:
    found = []
    for arm, store in CAPACITIES.values():
        base = with_store(scenario(at_r)) if store else scenario(at_r)
        found += [Search(base, arm, seed) for seed in size.side_seeds]
    return found
