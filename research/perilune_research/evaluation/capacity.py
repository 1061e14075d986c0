"""How many new sessions per second a pool serves under each policy while TTFT p90 is at most 5 s.

For each deployment, policy and seed the largest such rate is searched, to 5 % (`bisection`). All policies get
the same traffic, so their capacities are compared seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, sqrt

import msgspec

from perilune_lab.quantiles import mean
from perilune_lab.simulate.bisection import last_that
from perilune_lab.simulate.deployment import Arm
from perilune_lab.simulate.loads import NoRateError
from perilune_lab.terminal.formats import as_number
from perilune_research.evaluation import cells
from perilune_research.evaluation.cells import Cell
from perilune_research.evaluation.plan import DEFAULT, Section
from perilune_research.table import Table

LOAD = "capacity"
"""What tables call the load that is searched."""
MOST_TTFT_S = 5.0
TOLERANCE = 0.05
GUESSES: Mapping[str, float] = {"dynamo": 1.0, "sticky": 0.8, "round_robin": 0.2}
"""Rates for eight endpoints at which a search begins, a little above what is expected: after a guess that is
too low the search plays twice that rate, and overload takes long to simulate."""
_GUESS = 1.2
_STORE, _SPLIT = 1.6, 0.5
"""How many times as much a pool with a store, or with separate prefill, is expected to serve."""
BARS: Mapping[str, Mapping[str, float]] = {
    "none": {"lmetric_plus_one": 1.1, "dynamo": 1.5, "sticky": 1.7, "round_robin": 10.0},
    "store": {"lmetric_plus_one": 1.35},
}
"""Goals of the default's capacity over another policy's, by deployment."""


class Bounds(msgspec.Struct, frozen=True):
    """The largest rate that was found to hold, 0 if none did, and the smallest that did not."""

    low: float
    high: float
    cpu_s: float
    """CPU time of the search."""

    @property
    def capacity(self) -> float:
        """Sessions per second."""
        return sqrt(self.low * self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The search of one capacity."""

    cell: Cell
    """The simulation whose rate is searched. Its own rate is the first guess."""
    most_ttft_s: float = MOST_TTFT_S
    tolerance: float = TOLERANCE

    @property
    def key(self) -> str:
        """JSON of everything that the result depends on."""
        fields = {"code": cells.code(self.cell.policy), **asdict(self)}
        return msgspec.json.encode(fields, order="sorted").decode()

    def bounds(self) -> Bounds:
        """Play the search, down to 1/64 of the guess. Raises NoRateError if 64 times the guess holds."""
        spent_s = []

        def holds(rate: float) -> bool:
            ((_, result),) = cells.compute([replace(self.cell, rate=rate)])
            spent_s.append(result.cpu_s)
            ttft = result.run.ttft_s
            return (ttft.p90 if ttft else inf) <= self.most_ttft_s

        low, high = last_that(holds, self.cell.rate, self.tolerance)
        if high == inf:
            raise NoRateError(f"{self.cell.policy}: TTFT p90 is still within the limit at {low:g} sessions/s")
        return Bounds(low, high, sum(spent_s))


def compute(batch: Sequence[Search]) -> list[tuple[Search, Bounds]]:
    """Play the searches of a batch."""
    return [(search, search.bounds()) for search in batch]


def batches(searches: Sequence[Search]) -> list[tuple[Search]]:
    return [(search,) for search in searches]


def search(section: Section, pool: str, policy: str, seed: int) -> Search:
    cell = section.cell(pool, "R", policy, seed)
    guess = GUESSES.get(policy, _GUESS) * cell.endpoints / 8
    guess *= _STORE if cell.arm in (Arm.STORE, Arm.BOTH) else 1.0
    guess *= _SPLIT if cell.split else 1.0
    return Search(cell=replace(cell, rate=round(guess, 4)))


Capacities = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Deployment → policy → seed → sessions per second."""


def tables(served: Capacities) -> list[Table]:
    """Return a table for each deployment."""
    return [_table(pool, policies) for pool, policies in served.items()]


def _table(pool: str, served: Mapping[str, Mapping[int, float]]) -> Table:
    rows = []
    ours = served.get(DEFAULT, {})
    for policy, theirs in sorted(served.items(), key=lambda row: -mean(row[1].values())):
        both = sorted(ours.keys() & theirs.keys()) if policy != DEFAULT else []
        rows.append(
            (
                policy,
                ", ".join(map(str, theirs)),
                ", ".join(as_number(rate) if rate else "none" for rate in theirs.values()),
                as_number(mean(theirs.values())),
                ", ".join(_over(ours[seed], theirs[seed]) for seed in both),
                _over(sum(ours[s] for s in both), sum(theirs[s] for s in both)) if both else "",
                as_number(bar) if (bar := BARS.get(pool, {}).get(policy)) else "",
            )
        )
    header = ("policy", "seeds", "sessions/s", "mean", f"{DEFAULT} / policy", "of the means", "goal")
    return Table(f"Deployment {pool} at {LOAD}", header, rows)


def _over(ours: float, theirs: float) -> str:
    return as_number(ours / theirs) if theirs else "∞" if ours else ""


NOTE = (
    f"*Sessions/s* is the largest rate of new sessions at which TTFT p90 is at most {MOST_TTFT_S:g} s, to"
    f" {100 * TOLERANCE:g} %, by seed; *none* if no rate down to 1/64 of the first guess was found to"
    f" hold, which counts as 0 in the means. *Goal* is the least that the quotient of the means should be."
)
