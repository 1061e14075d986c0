"""Lists what the evaluation simulates: named studies, each of which makes a list of points from the scenario
at R. A point is a scenario and a profile.

    scenario at R ──study──▶ points ──× seeds──▶ cells

Equal points of several studies are simulated once. `NEEDS` names the studies that each figure, table or bar
reads; with `--only`, nothing else is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from perilune_api.policies import ConductorArm, ConductorParams, EarParams, PeriluneParams, PolicyParams
from perilune_research.evaluate.cells import Cell, Profile, Scenario
from perilune_research.evaluate.search import Search
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.policies import POLICIES
from perilune_research.simulator.setting import PLANNER

OURS = Profile("perilune")
STAY = Profile("perilune", PolicyParams(perilune=PeriluneParams(least_gain_seconds=1e9)))
"""Our policy without migration: no move ever gains that many seconds."""
AFFINITY_ONLY, BOTH = Profile("sticky"), Profile("ear")
STRONGEST = Profile("lmetric_plus_one")
EVERY = tuple(Profile(policy) for policy in POLICIES)
SOME = (OURS, BOTH, STRONGEST, AFFINITY_ONLY, Profile("lmetric"), Profile("dynamo"), Profile("static_pd"))
"""Profiles of the sensitivities: a baseline of each kind."""

LOADS = {"R/2": 0.5, "R": 1.0, "1.25 R": 1.25, "1.6 R": 1.6}
"""Loads as multiples of R."""
BAR_LOADS = ("R/2", "R", "1.25 R")
"""Loads at which bars are judged."""
OVERLOAD = "1.6 R"

LINK_FACTORS = (0.4, 1.0, 3.0, 10.0)
OUTLIER_SHARES = (0.0, 0.05)
ZIPF_ALPHAS = (0.0, 0.3, 0.6, 0.9)
KV_TOKENS = (70_400, 140_800, 281_600, 563_200)
T_HOT_TOKENS = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
T_COOL_S = (0.0, 5.0, 10.0, 30.0, 60.0, 120.0)
LEAST_GAIN_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
GAPS_S = (0.0, None, 30.0)
"""Seconds between turns in the chatbot control; None for the trace's own gaps."""
GAP_LOADS = ("R/2", "R")
SLOWDOWN = 1.1
"""Factor on the engines' compute times for the measured amplification (f8)."""
COUPLED = (
    OURS,
    BOTH,
    STRONGEST,
    AFFINITY_ONLY,
    Profile("lmetric"),
    Profile("least_loaded"),
    Profile("dynamo"),
    Profile("static_pd"),
)

CAPACITIES = {
    "perilune": OURS,
    "lmetric_plus_one": STRONGEST,
    "dynamo": Profile("dynamo"),
    "sticky": AFFINITY_ONLY,
    "round_robin": Profile("round_robin"),
}


QUICK_SEEDS, FULL_SEEDS = 6, 32

BASE = Scenario(rate=0.8)
"""The evaluation's scenario; its rate is where the search for R begins."""


class Point(NamedTuple):
    """A scenario together with a profile. It is simulated once for each seed."""

    scenario: Scenario
    profile: Profile


def scenario(at_r: Scenario, load: str = "R") -> Scenario:
    """Return the scenario at that load. Its rate is rounded for readers, and so that results are found
    again."""
    return replace(at_r, rate=round(at_r.rate * LOADS[load], 4))


PLANNED = tuple(Profile(policy + PLANNER) for policy in ("sticky", "lmetric_plus_one", "mooncake", "llm_d"))
"""Policies that move no sessions themselves, with the planner and every trigger on."""


def every(at_r: Scenario) -> tuple[Profile, ...]:
    """Return the profiles of the main comparison: every policy, and where engines hand KV over, some of them
    also with the planner."""
    played = (*EVERY, *PLANNED) if at_r.deployment.reach.hands_over else EVERY
    wanted = at_r.compared
    return (
        tuple(profile for profile in played if profile.policy.removesuffix(PLANNER) in wanted)
        if wanted
        else played
    )


def matrix(at_r: Scenario) -> list[Point]:
    """Return every policy at every load of the bars."""
    return [Point(scenario(at_r, load), profile) for load in BAR_LOADS for profile in every(at_r)]


def own(at_r: Scenario) -> list[Point]:
    """Return our policy at every load of the bars, and the baseline that P6 names."""
    return [
        *(Point(scenario(at_r, load), OURS) for load in BAR_LOADS),
        Point(scenario(at_r), Profile("lmetric")),
    ]


def overload(at_r: Scenario) -> list[Point]:
    """Return every policy at the highest load, where simulations take longest."""
    return [Point(scenario(at_r, OVERLOAD), profile) for profile in (*every(at_r), *ABLATION.values())]


def admission(at_r: Scenario) -> list[Point]:
    """Return our policy at every load, without and with session admission."""
    return [Point(admission_scenario(at_r, load, on), OURS) for load in LOADS for on in (False, True)]


def admission_scenario(at_r: Scenario, load: str, on: bool) -> Scenario:
    return replace(scenario(at_r, load), admission=on)


QUEUES = ((1, 1), (4, 1), (1, 4), (4, 4))
"""Gateways and tenants."""
QUEUE_LOADS = ("1.25 R", OVERLOAD)
"""Loads at which new sessions wait."""


def queues(at_r: Scenario) -> list[Point]:
    """Return our policy with session admission, for several gateways and tenants."""
    return [
        Point(queue_scenario(at_r, load, gateways, tenants), OURS)
        for load, (gateways, tenants) in product(QUEUE_LOADS, QUEUES)
    ]


def queue_scenario(at_r: Scenario, load: str, gateways: int, tenants: int) -> Scenario:
    return replace(admission_scenario(at_r, load, on=True), gateways=gateways, tenants=tenants)


BELIEFS: Mapping[str, Mapping[str, float]] = {
    "told 0.5 ×": {"engine_belief": 0.5, "noise": 0.2},
    "told 0.75 ×": {"engine_belief": 0.75, "noise": 0.2},
    "told 1.5 ×": {"engine_belief": 1.5, "noise": 0.2},
    "told 2 ×": {"engine_belief": 2.0, "noise": 0.2},
    "unequal 1.5": {"unequal": 1.5, "noise": 0.2},
    "unequal 2, told 0.5 ×": {"unequal": 2.0, "noise": 0.3, "engine_belief": 0.5},
}
"""Name of a study's row → fields of a scenario in which engines differ from what the pool says."""
BELIEF_LOADS = ("R/2", "R")
BELIEVERS = (OURS, BOTH, Profile("mooncake"), STRONGEST, Profile("llm_d"))


def beliefs(at_r: Scenario) -> list[Point]:
    return [
        Point(belief(at_r, load, name), profile)
        for name, load in product(BELIEFS, BELIEF_LOADS)
        for profile in BELIEVERS
    ]


def belief(at_r: Scenario, load: str, name: str) -> Scenario:
    return replace(scenario(at_r, load), **BELIEFS[name])  # type: ignore[arg-type]


def links(at_r: Scenario) -> list[Point]:
    return [
        Point(link_scenario(at_r, factor, share), profile)
        for factor, share in product(LINK_FACTORS, OUTLIER_SHARES)
        for profile in (OURS, STAY)
    ]


def link_scenario(at_r: Scenario, factor: float, outlier_share: float) -> Scenario:
    return replace(scenario(at_r), link_factor=factor, outlier_share=outlier_share)


ABLATION: Mapping[str, Profile] = {
    "affinity only (sticky)": AFFINITY_ONLY,
    "migration only (least loaded, planner)": Profile("least_loaded" + PLANNER),
    "both (sticky, planner)": Profile("sticky" + PLANNER),
    "both in one (ear)": BOTH,
    "perilune": OURS,
}


def ablation(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r, load), profile) for load in BAR_LOADS for profile in ABLATION.values()]


def zipf(at_r: Scenario) -> list[Point]:
    return [Point(zipf_scenario(at_r, alpha), profile) for alpha in ZIPF_ALPHAS for profile in SOME]


def zipf_scenario(at_r: Scenario, alpha: float) -> Scenario:
    return replace(scenario(at_r), zipf_alpha=alpha)


def kv_pool(at_r: Scenario) -> list[Point]:
    return [Point(pool_scenario(at_r, tokens), profile) for tokens in KV_TOKENS for profile in SOME]


def pool_scenario(at_r: Scenario, tokens: int) -> Scenario:
    return replace(scenario(at_r), kv_tokens=tokens)


def t_hot_profile(tokens: int) -> Profile:
    return Profile("ear", PolicyParams(ear=EarParams(hot_pending_tokens=tokens)))


def t_hot(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r), t_hot_profile(tokens)) for tokens in T_HOT_TOKENS]


def t_cool_profile(seconds: float) -> Profile:
    return Profile("ear", PolicyParams(ear=EarParams(cooldown_seconds=seconds)))


def t_cool(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r), t_cool_profile(seconds)) for seconds in T_COOL_S]


def least_gain_profile(seconds: float) -> Profile:
    return Profile("perilune", PolicyParams(perilune=PeriluneParams(least_gain_seconds=seconds)))


def least_gain(at_r: Scenario) -> list[Point]:
    return [Point(scenario(at_r), least_gain_profile(seconds)) for seconds in LEAST_GAIN_S]


def coupling(at_r: Scenario) -> list[Point]:
    """Return each load with engines as they are, and with slightly slower ones."""
    scenarios = [s for load in LOADS for s in (scenario(at_r, load), slower(scenario(at_r, load)))]
    return [Point(s, profile) for s in scenarios for profile in COUPLED]


def slower(base: Scenario) -> Scenario:
    return replace(base, slowdown=SLOWDOWN)


def gaps(at_r: Scenario) -> list[Point]:
    return [
        Point(gap_scenario(at_r, load, gap_s), profile)
        for load, gap_s in product(GAP_LOADS, GAPS_S)
        for profile in COUPLED
    ]


def gap_scenario(at_r: Scenario, load: str, gap_s: float | None) -> Scenario:
    return replace(scenario(at_r, load), gap_s=gap_s)


CONDUCTOR = {
    "no scheduling": (
        Deployment.NONE,
        Profile("conductor", PolicyParams(conductor=ConductorParams(arm=ConductorArm.NO_SCHEDULING))),
    ),
    "cache-aware": (Deployment.NONE, Profile("conductor")),
    "cache-aware and hot migration": (Deployment.PULL, Profile("conductor")),
}
"""Deployment and profile of each variant of Conductor's experiment. It copies hot prefixes when a request
needs them, which is possible only in the hypothetical arm `pull`."""


def conductor(at_r: Scenario) -> list[Point]:
    return [conductor_point(at_r, name) for name in CONDUCTOR]


def conductor_point(at_r: Scenario, name: str) -> Point:
    deployment, profile = CONDUCTOR[name]
    return Point(replace(scenario(at_r), deployment=deployment), profile)


@dataclass(frozen=True, slots=True)
class Study:
    """A list of points, made from the scenario at R."""

    points: Callable[[Scenario], list[Point]]
    side: bool = True
    """Whether the study has the smaller number of seeds. Then read its results from `Findings.side`."""


STUDIES: Mapping[str, Study] = {
    "matrix": Study(matrix, side=False),
    "own": Study(own, side=False),
    "overload": Study(overload),
    "admission": Study(admission, side=False),
    "queues": Study(queues),
    "beliefs": Study(beliefs),
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
    "bars": ("matrix", "links", "admission", CAPACITY),
    "P1": ("own",),
    "P2": ("matrix",),
    "P3": (CAPACITY,),
    "P4": ("links",),
    "P5": ("own",),
    "P6": ("own",),
    "P7": ("own",),
    "P8": ("matrix",),
    "door": ("admission",),
    "main": ("matrix",),
    "overload": ("overload",),
    "rivals": ("matrix",),
    "moves": ("matrix",),
    "admission": ("admission",),
    "queues": ("queues",),
    "beliefs": ("beliefs", "matrix"),
    "capacity": (CAPACITY,),
    "ablation": ("ablation",),
    "conductor": ("conductor",),
    "decode": ("matrix", "overload"),
    "chatbot": ("gaps",),
    "thresholds": ("t_hot", "t_cool", "least_gain"),
}
"""Part of the evaluation → the studies that it needs. Each bar is a part of its own, too, so that it can be
judged with more seeds."""
BARS = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "door")
EVERYTHING = tuple(name for name in NEEDS if name not in BARS)
"""All parts; `bars` stands for all bars."""


@dataclass(frozen=True, slots=True)
class Size:
    """The seeds of an evaluation."""

    name: str
    seeds: tuple[int, ...]
    side_seeds: tuple[int, ...]
    """Seeds of the side studies, which have fewer."""

    def of(self, study: Study) -> tuple[int, ...]:
        """Return the seeds of a study."""
        return self.side_seeds if study.side else self.seeds


def size(quick: bool, seeds: int | None, first: int) -> Size:
    """Make a size. `seeds`: number of seeds of the main studies; None for the default. Side studies have half
    as many, or a third in a quick evaluation. `first`: the first seed."""
    number = seeds or (QUICK_SEEDS if quick else FULL_SEEDS)
    side = max(1, number // (3 if quick else 2))
    return Size(
        "quick" if quick else "full", tuple(range(first, first + number)), tuple(range(first, first + side))
    )


def cells(at_r: Scenario, studies: Iterable[str], size: Size) -> list[Cell]:
    """Return the cells of all these studies. A point that is in two studies has the seeds of both."""
    found: dict[Cell, None] = {}
    for name in studies:
        study = STUDIES[name]
        for seed in size.of(study):
            for point in study.points(at_r):
                found[Cell(point.scenario, point.profile, seed)] = None
    return list(found)


def searches(at_r: Scenario, size: Size) -> list[Search]:
    """Return the searches of SLO capacities."""
    return [
        Search(scenario(at_r), profile, seed) for profile in CAPACITIES.values() for seed in size.side_seeds
    ]
