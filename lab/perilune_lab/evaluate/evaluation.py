"""One evaluation: find R → simulate what the wanted parts need → findings.

R is the rate at which raw `lmetric` has TTFT p90 = 5 × the floor, found by bisection. Its simulations are
cells like all others, so an interrupted search goes on too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf, sqrt

from perilune_api.pool import SpecError
from perilune_lab.evaluate import plan
from perilune_lab.evaluate.cells import Arm, Cell, World
from perilune_lab.evaluate.findings import Findings
from perilune_lab.evaluate.plan import CAPACITY, NEEDS, STUDIES, Size
from perilune_lab.evaluate.work import Work
from perilune_lab.quantiles import mean
from perilune_lab.simulator.bisection import last_that
from perilune_lab.simulator.harness import REGRET_AT_R

REFERENCE = Arm("lmetric")
_TOLERANCE = 0.03


def studies_of(parts: Iterable[str]) -> list[str]:
    """Of figures, tables, bars; in the plan's order."""
    wanted = {study for part in parts for study in NEEDS[part]}
    return [name for name in (*STUDIES, CAPACITY) if name in wanted]


def evaluate(work: Work, parts: Iterable[str], size: Size, base: World) -> Findings:
    """`base`: the world but for its rate. Raises SpecError where there is no R."""
    at_r = find_r(work, size, base)
    wanted = studies_of(parts)
    played = [name for name in wanted if name != CAPACITY]
    cells = work.results(plan.cells(at_r, played, size), "simulations")
    found = work.found(plan.searches(at_r, size), "SLO capacities") if CAPACITY in wanted else {}
    return Findings(size, at_r, cells, found)


def find_r(work: Work, size: Size, base: World) -> World:
    """The world at R, to 3 %."""

    def below(rate: float) -> bool:
        world = replace(base, rate=round(rate, 4))
        results = work.results((Cell(world, REFERENCE, seed) for seed in size.seeds), "search of R")
        runs = [result.run for result in results.values()]
        p90 = mean(run.ttft_s.p90 if run.ttft_s else inf for run in runs)
        return p90 < REGRET_AT_R * mean(run.floor_ttft_s.p90 if run.floor_ttft_s else 0.0 for run in runs)

    low, high = last_that(below, base.rate, _TOLERANCE)
    if not low or high == inf:
        raise SpecError(
            f"TTFT p90 of {REFERENCE} never crosses {REGRET_AT_R:g} × the floor: no R - at `--seeds`"
        )
    return replace(base, rate=round(sqrt(low * high), 4))
