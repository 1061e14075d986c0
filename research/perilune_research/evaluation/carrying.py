"""Carries rows over to today's code without playing them all, after a change of the code that should leave
them as they are.

    every = carryable(section, outdated, rows)      rows of other code that have all figures
    some = sample(every, rng, n)                    rows by chance, each with one of its seeds
    different(one, result)                          the figures of this seed that are not those of the row

If none differs, `carried` says of every such row that today's code has played it. Compared are figures, not
what `happened`, which rows have for all seeds together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

import msgspec

from perilune_research.data import encode
from perilune_research.evaluation.capacity import Bounds, Search
from perilune_research.evaluation.cells import Cell, Result
from perilune_research.evaluation.plan import Section
from perilune_research.evaluation.rows import Key, Planned, Row, figures


class Outdated(NamedTuple):
    """A row of other code."""

    section: Section
    plan: Planned
    row: Row


class Sampled(NamedTuple):
    """One seed of such a row."""

    of: Outdated
    at: int
    """Index of the seed among those of the row."""

    @property
    def item(self) -> Cell | Search:
        return self.of.plan.items[self.at]

    def __str__(self) -> str:
        return f"{self.of.section.name}: {' '.join(self.of.plan.key)}, seed {self.of.plan.seeds[self.at]}"


def carryable(section: Section, outdated: Iterable[Planned], rows: Mapping[Key, Row]) -> list[Outdated]:
    """Return the outdated rows that are there with all of their figures."""
    there = (Outdated(section, each, rows[each.key]) for each in outdated if each.key in rows)
    return [each for each in there if each.plan.figures <= each.row.keys()]


def sample(every: Sequence[Outdated], rng: Random, n: int) -> list[Sampled]:
    """Return n of the rows by chance, or all if there are fewer, each with one of its seeds. Each policy has
    one if n allows."""
    order = rng.sample(every, len(every))
    firsts = {each.plan.key.policy: each for each in reversed(order)}
    later = [each for each in order if each is not firsts[each.plan.key.policy]]
    chosen = [*firsts.values(), *later][:n]
    return [Sampled(each, rng.randrange(len(each.plan.seeds))) for each in chosen]


def different(one: Sampled, result: Result | Bounds) -> list[str]:
    """Return in words each figure of the result that is not the row's."""
    row, at = one.of.row, one.at
    played = msgspec.json.decode(encode(figures(one.of.section, one.of.plan.key.policy, [result])))
    told = {path: row[path][at : at + 1] for path in played if row[path]}
    return [
        f"{path} is {_as_text(played[path])}, was {_as_text(was)}"
        for path, was in told.items()
        if played[path] != was
    ]


def _as_text(figure: Sequence[float | None]) -> str:
    return ", ".join("never" if each is None else f"{each:g}" for each in figure) or "missing"


def carried(every: Iterable[Outdated]) -> dict[Key, Row]:
    """Return rows as those of today's code."""
    return {each.plan.key: {**each.row, "code": each.plan.code} for each in every}
