"""SLO capacity of one arm with one seed: the largest session rate with TTFT p90 ≤ 5 s and stretch ≤ 1.25."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from perilune_research.evaluate.cells import Arm, Cell, Scenario
from perilune_research.simulator.capacity import Slo, slo_capacity

SLO = Slo()


@dataclass(frozen=True, slots=True)
class Search:
    scenario: Scenario
    """The scenario; its rate is replaced."""
    arm: Arm
    seed: int

    @property
    def key(self) -> str:
        cell = Cell(replace(self.scenario, rate=0.0), self.arm, self.seed)
        return f"capacity at {SLO.ttft_p90_s:g} s, stretch {SLO.stretch:g}: {cell.key}"


LEAST = 0.01
"""Sessions per second assumed for an arm that meets the SLOs at no rate that is tried, so that a ratio to it
is a lower bound."""


class Found(msgspec.Struct, frozen=True):
    rate: float
    """Sessions per second, at least LEAST."""


def find(searches: Sequence[Search]) -> list[tuple[Search, Found]]:
    found = []
    for search in searches:
        (capacity,) = slo_capacity(search.scenario.comparison(search.arm), [search.seed], slo=SLO)
        found.append((search, Found(max(LEAST, capacity.rate))))
    return found
