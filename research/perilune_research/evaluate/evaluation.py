"""One evaluation: find R → simulate what the wanted parts need → findings.

The search's simulations are cells like all others, so an interrupted one goes on too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from perilune_api.pool import SpecError
from perilune_lab.report import Run
from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Arm, Cell, Scenario
from perilune_research.evaluate.findings import Findings
from perilune_research.evaluate.plan import CAPACITY, NEEDS, STUDIES, Size
from perilune_research.evaluate.work import Work
from perilune_research.simulator.harness import NoRateError, find_r

REFERENCE = Arm("lmetric")


def studies_of(parts: Iterable[str]) -> list[str]:
    """The studies that figures, tables and bars need, in the plan's order."""
    wanted = {study for part in parts for study in NEEDS[part]}
    return [name for name in (*STUDIES, CAPACITY) if name in wanted]


def evaluate(work: Work, parts: Iterable[str], size: Size, base: Scenario) -> Findings:
    """Finds R, simulates, and returns the findings. `base`: the scenario, whose rate is replaced. Raises
    SpecError if there is no R."""
    at_r = _at_r(work, size, base)
    wanted = studies_of(parts)
    played = [name for name in wanted if name != CAPACITY]
    cells = work.results(plan.cells(at_r, played, size), "simulations")
    found = work.found(plan.searches(at_r, size), "SLO capacities") if CAPACITY in wanted else {}
    return Findings(size, at_r, cells, found)


def _at_r(work: Work, size: Size, base: Scenario) -> Scenario:
    def runs_at(rate: float) -> list[Run]:
        scenario = replace(base, rate=round(rate, 4))
        results = work.results((Cell(scenario, REFERENCE, seed) for seed in size.seeds), "search of R")
        return [result.run for result in results.values()]

    try:
        return replace(base, rate=round(find_r(runs_at, base.rate), 4))
    except NoRateError as error:
        raise SpecError(f"{REFERENCE}: {error} - at `--seeds`") from None
