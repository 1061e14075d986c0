"""One evaluation: finds R, simulates what the wanted parts need, and returns the findings.

R is always that of arm `none`, so that all arms get the same traffic. The simulations of the search for R are
kept like all others, so an interrupted search goes on, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from perilune_api.pool import SpecError
from perilune_lab.report import Run
from perilune_lab.simulate.loads import NoRateError, find_r
from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Cell, Profile, Scenario
from perilune_research.evaluate.findings import Findings
from perilune_research.evaluate.plan import CAPACITY, NEEDS, STUDIES, Size
from perilune_research.evaluate.work import Work
from perilune_research.simulator.deployment import Deployment

REFERENCE = Profile("lmetric")
"""The profile that defines R."""


def studies_of(parts: Iterable[str]) -> list[str]:
    """Return the studies that these parts need, in the plan's order."""
    wanted = {study for part in parts for study in NEEDS[part]}
    return [name for name in (*STUDIES, CAPACITY) if name in wanted]


def evaluate(
    work: Work, parts: Iterable[str], size: Size, base: Scenario, r: float | None = None
) -> Findings:
    """Find R unless it is given, simulate, and return the findings. `base`: the scenario to evaluate, whose
    rate is where the search for R begins. Raises SpecError if there is no R, and OSError if results cannot be
    kept."""
    at_r = replace(base, rate=r) if r is not None else _at_r(work, size, base)
    wanted = studies_of(parts)
    played = [name for name in wanted if name != CAPACITY]
    cells = work.results(plan.cells(at_r, played, size), "simulations")
    found = work.found(plan.searches(at_r, size), "SLO capacities") if CAPACITY in wanted else {}
    return Findings(size, at_r, cells, found)


def _at_r(work: Work, size: Size, base: Scenario) -> Scenario:
    def runs_at(rate: float) -> list[Run]:
        scenario = replace(base, rate=round(rate, 4), deployment=Deployment.NONE)
        results = work.results((Cell(scenario, REFERENCE, seed) for seed in size.seeds), "search of R")
        return [result.run for result in results.values()]

    try:
        return replace(base, rate=round(find_r(runs_at, base.rate), 4))
    except NoRateError as error:
        raise SpecError(f"{REFERENCE}: {error} - at `--seeds`") from None
