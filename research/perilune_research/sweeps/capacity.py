"""`python -m perilune_research capacity`: how many new sessions per second a pool serves under each policy
while TTFT p90 is at most 5 s.

For each arm, policy and seed it searches the largest such rate, to 5 % (`bisection`). All policies get the
same traffic, so their capacities are compared seed by seed.

Exit status: 0; 2 for a wrong call or a file that cannot be written; 130 after Ctrl-C.
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
from perilune_research.deployments import cells
from perilune_research.deployments.cells import Cell
from perilune_research.deployments.plan import DEFAULT
from perilune_research.kept import Kept
from perilune_research.sweeps.command import Options, Sweep
from perilune_research.table import Table

MOST_TTFT_S = 5.0
TOLERANCE = 0.05
GUESSES: Mapping[str, float] = {"dynamo": 1.0, "sticky": 0.8, "round_robin": 0.2}
"""Rates for eight endpoints at which a search begins, a little above what is expected: after a guess that is
too low the search plays twice that rate, and overload takes long to simulate."""
_GUESS = 1.2
_STORE = 1.6
"""How many times as much a pool with a store is expected to serve."""
BARS: Mapping[str, Mapping[str, float]] = {
    Arm.NONE: {"lmetric_plus_one": 1.1, "dynamo": 1.5, "sticky": 1.7, "round_robin": 10.0},
    Arm.STORE: {"lmetric_plus_one": 1.35},
}
"""Goals of the default's capacity over another policy's."""


class Bounds(msgspec.Struct, frozen=True):
    """The largest rate that was found to hold, and the smallest that was not."""

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
        """Play the search. Raises NoRateError if the capacity is not between 1/64 and 64 times the guess."""
        spent_s = []

        def holds(rate: float) -> bool:
            ((_, result),) = cells.compute([replace(self.cell, rate=rate)])
            spent_s.append(result.cpu_s)
            ttft = result.run.ttft_s
            return (ttft.p90 if ttft else inf) <= self.most_ttft_s

        low, high = last_that(holds, self.cell.rate, self.tolerance)
        if not low or high == inf:
            raise NoRateError(f"{self.cell.policy}: no capacity near {self.cell.rate:g} sessions/s")
        return Bounds(low, high, sum(spent_s))


def compute(batch: Sequence[Search]) -> list[tuple[Search, Bounds]]:
    """Play the searches of a batch."""
    return [(search, search.bounds()) for search in batch]


def _alone(searches: Sequence[Search]) -> list[tuple[Search]]:
    return [(search,) for search in searches]


def search(base: Cell, arm: Arm, policy: str, seed: int) -> Search:
    guess = GUESSES.get(policy, _GUESS) * (_STORE if arm is Arm.STORE else 1.0) * base.endpoints / 8
    return Search(cell=replace(base, arm=arm, policy=policy, seed=seed, rate=round(guess, 4)))


def tables(kept: Kept, options: Options) -> list[Table]:
    """Search what no earlier call has, and return a table for each arm."""
    every = [
        search(options.base, arm, policy, seed)
        for seed in options.seeds
        for policy in options.policies
        for arm in options.arms
    ]
    wanted = [each for each in every if options.play or each in kept]
    found = kept.results(wanted, _alone, compute, Bounds, "searches")
    by_arm = {arm: _capacities(found, arm) for arm in options.arms}
    return [_table(arm, capacities) for arm, capacities in by_arm.items() if capacities]


def _capacities(found: Mapping[Search, Bounds], arm: Arm) -> dict[str, dict[int, float]]:
    """Return the capacities of this arm by policy and seed."""
    capacities: dict[str, dict[int, float]] = {}
    for each, bounds in found.items():
        if each.cell.arm is arm:
            capacities.setdefault(each.cell.policy, {})[each.cell.seed] = bounds.capacity
    return capacities


def _table(arm: Arm, capacities: Mapping[str, Mapping[int, float]]) -> Table:
    rows = []
    ours = capacities.get(DEFAULT, {})
    for policy, theirs in sorted(capacities.items(), key=lambda row: -mean(row[1].values())):
        both = sorted(ours.keys() & theirs.keys()) if policy != DEFAULT else []
        rows.append(
            (
                policy,
                ", ".join(map(str, theirs)),
                ", ".join(map(as_number, theirs.values())),
                as_number(mean(theirs.values())),
                ", ".join(as_number(ours[seed] / theirs[seed]) for seed in both),
                as_number(sum(ours[s] for s in both) / sum(theirs[s] for s in both)) if both else "",
                as_number(bar) if (bar := BARS.get(arm, {}).get(policy)) else "",
            )
        )
    header = ("policy", "seeds", "sessions/s", "mean", f"{DEFAULT} / policy", "of the means", "goal")
    return Table(f"Arm {arm}", header, rows)


SWEEP = Sweep(
    name="capacity",
    title="capacity",
    description=f"Find the largest rate of new sessions at which TTFT p90 is at most {MOST_TTFT_S:g} s, for"
    " each arm, policy and seed.",
    note=f"*Sessions/s* is the largest rate of new sessions at which TTFT p90 is at most {MOST_TTFT_S:g} s,"
    f" to {100 * TOLERANCE:g} %, by seed.\n*Goal* is the least that the quotient of the means should be.",
    policies="lmetric_plus_one,dynamo,sticky,round_robin",
    tables=tables,
)
main = SWEEP.main
