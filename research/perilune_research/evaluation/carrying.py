"""Carries rows over to today's code without playing them all, after a change of the code that should leave
them as they are.

    some = sample(every, rng, n)       outdated rows by chance, each with one of its seeds
    different(one, result)             the figures of this seed that are not those of the row

If none differs, `carried` says of all outdated rows that today's code has played them.
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


class Old(NamedTuple):
    """An outdated row whose simulations are those of today."""

    section: Section
    plan: Planned
    row: Row


class Sampled(NamedTuple):
    """One seed of an outdated row."""

    old: Old
    at: int
    """Which of its seeds."""

    @property
    def item(self) -> Cell | Search:
        return self.old.plan.items[self.at]

    def __str__(self) -> str:
        return f"{self.old.section.name}: {' '.join(self.old.plan.key)}, seed {self.old.plan.seeds[self.at]}"


def old(section: Section, outdated: Iterable[Planned], rows: Mapping[Key, Row]) -> list[Old]:
    """Return the outdated rows that are there, of the same simulations."""
    there = ((each, rows[each.key]) for each in outdated if each.key in rows)
    return [Old(section, each, row) for each, row in there if row.get("simulations") == each.simulations]


def sample(every: Sequence[Old], rng: Random, n: int) -> list[Sampled]:
    """Return n of the rows by chance, or all if there are fewer, each with one of its seeds."""
    return [
        Sampled(each, rng.randrange(len(each.plan.seeds))) for each in rng.sample(every, min(n, len(every)))
    ]


def different(one: Sampled, result: Result | Bounds) -> list[str]:
    """Return in words each figure of the result that is not the row's."""
    old, at = one
    played = msgspec.json.decode(encode(figures(old.section, old.plan.key.policy, [result])))
    told = {path: old.row[path][at : at + 1] for path in played if old.row.get(path)}
    return [
        f"{path} is {as_text(played[path])}, was {as_text(was)}"
        for path, was in told.items()
        if played[path] != was
    ]


def as_text(figure: Sequence[float | None]) -> str:
    return ", ".join("never" if each is None else f"{each:g}" for each in figure) or "missing"


def carried(every: Iterable[Old]) -> dict[Key, Row]:
    """Return rows as those of today's code."""
    return {each.plan.key: {**each.row, "code": each.plan.code} for each in every}
