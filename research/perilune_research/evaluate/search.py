"""Searches the SLO capacity of a profile with one seed: the largest session rate with TTFT p90 ≤ 5 s and a
median stretch ≤ 1.25."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from perilune_research.evaluate.cells import Cell, Profile, Scenario
from perilune_research.simulator.capacity import Slo, slo_capacity

SLO = Slo()


@dataclass(frozen=True, slots=True)
class Search:
    """One search of a capacity."""

    scenario: Scenario
    """The scenario in which to search. Its rate is ignored."""
    profile: Profile
    seed: int

    @property
    def key(self) -> str:
        """Text of everything that the result depends on, besides the code."""
        cell = Cell(replace(self.scenario, rate=0.0), self.profile, self.seed)
        return f"capacity at {SLO.ttft_p90_s:g} s, stretch {SLO.stretch:g}: {cell.key}"


LEAST = 0.01
"""Sessions per second that stand for the capacity of a profile that meets the SLOs at no rate that is tried,
so that a ratio to it is a lower bound."""


class Found(msgspec.Struct, frozen=True):
    """The result of a search."""

    rate: float
    """Sessions per second, at least LEAST."""


def find(searches: Sequence[Search]) -> list[tuple[Search, Found]]:
    """Carry the searches out."""
    found = []
    for search in searches:
        (capacity,) = slo_capacity(search.scenario.comparison(search.profile), [search.seed], slo=SLO)
        found.append((search, Found(max(LEAST, capacity.rate))))
    return found
