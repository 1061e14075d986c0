"""The rows of a section's data file: one for each deployment, load and policy, with a figure for each seed.

Pages and tables are made of these rows alone, so a row that is not played again stays as it is. Each row
names its simulations and the code that played them: one of other code is *outdated*, and one of other
simulations is no row of the section any more.

    plan = planned(section)          what the rows are, and the simulations of each
    rows = of_plan(plan, read(path)) {(deployment, load, policy): row}
    rows[key] = row(section, plan, results)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from perilune_api.pool import SpecError
from perilune_lab.quantiles import mean
from perilune_research.evaluation import capacity, cells
from perilune_research.evaluation.capacity import Bounds, Search
from perilune_research.evaluation.cells import Cell, Result
from perilune_research.evaluation.metrics import (
    CAPACITY,
    GOALS,
    INTERFERENCE,
    REGRET,
    TTFT_MEAN,
    WALL_CLOCK,
    Metric,
    value,
)
from perilune_research.evaluation.plan import DEFAULT, Section

DATA = (REGRET, TTFT_MEAN, WALL_CLOCK, INTERFERENCE)
"""Further figures in the data of sections with tables apart."""


class Key(NamedTuple):
    """What a row tells of."""

    deployment: str
    load: str
    policy: str


Row = Mapping[str, Any]
"""A row as JSON has it: `Key`'s fields; `seeds`, `code` and `simulations` (see `Planned`); each figure by its
path, as a list with one value for each seed, null for infinity, and empty if a seed does not have it; what
`happened`."""
Rows = Mapping[Key, Row]
SCHEMA = "perilune.evaluation/v2"


@dataclass(frozen=True, slots=True)
class Planned:
    """A row that a section has."""

    key: Key
    items: tuple[Cell | Search, ...]
    """Its simulations or searches, one for each seed, in the order of the seeds."""
    figures: frozenset[str]
    """The paths of its figures."""

    @property
    def seeds(self) -> list[int]:
        return [_cell(item).seed for item in self.items]

    @property
    def code(self) -> str:
        """Fingerprint of the code that plays its policy."""
        return cells.code(self.key.policy)

    @property
    def simulations(self) -> str:
        """Fingerprint of its simulations, whatever code plays them. Fields that have their defaults do not
        count, so a new one changes no fingerprint. A trace counts by its file's name."""
        described = [_described(item) for item in self.items]
        return hashlib.sha256(msgspec.json.encode(described, order="sorted")).hexdigest()[:12]

    def is_outdated(self, row: Row | None) -> bool:
        """Return whether there is no such row, or one of other code or with fewer figures."""
        return row is None or row["code"] != self.code or not self.figures <= row.keys()


def _cell(item: Cell | Search) -> Cell:
    return item.cell if isinstance(item, Search) else item


def _described(item: object) -> object:
    """Return a dataclass as a mapping of the fields that differ from their defaults."""
    if isinstance(item, Cell):
        item = replace(item, trace=Path(item.trace).name)
    if not is_dataclass(item):
        return item
    values = ((field, getattr(item, field.name)) for field in fields(item))
    return {field.name: _described(value) for field, value in values if value != field.default}


def planned(section: Section) -> list[Planned]:
    """Return the rows of a section in the order of its data file."""
    seeds: dict[Key, set[int]] = {}
    for play in section.plays:
        for key in product(play.pools, play.loads or (capacity.LOAD,), play.policies):
            seeds.setdefault(Key(*key), set()).update(play.seeds)
    loads = section.loads or (capacity.LOAD,)
    order = {Key(*key): n for n, key in enumerate(product(section.pools, loads, section.policies))}
    return [_planned(section, key, sorted(seeds[key])) for key in sorted(seeds, key=order.__getitem__)]


def _planned(section: Section, key: Key, seeds: Sequence[int]) -> Planned:
    if section.searched:
        searches = tuple(capacity.search(section, key.deployment, key.policy, seed) for seed in seeds)
        return Planned(key, searches, frozenset([CAPACITY.path]))
    figures = frozenset(metric.path for metric in _stored(section, key.policy))
    return Planned(key, tuple(section.cell(*key, seed) for seed in seeds), figures)


def of_plan(plan: Iterable[Planned], rows: Rows) -> dict[Key, Row]:
    """Return those of the rows that are planned, in the order of the plan."""
    there = ((each, rows.get(each.key)) for each in plan)
    return {each.key: row for each, row in there if row and row.get("simulations") == each.simulations}


def row(section: Section, plan: Planned, results: Sequence[Result | Bounds]) -> Row:
    """Return a row with the results of its items, in their order."""
    head = {**plan.key._asdict(), "seeds": plan.seeds, "code": plan.code, "simulations": plan.simulations}
    told = {**head, **figures(section, plan.key.policy, results)}
    return told if section.searched else {**told, "happened": _happened(_simulated(results))}


def figures(section: Section, policy: str, results: Sequence[Result | Bounds]) -> dict[str, list[float]]:
    """Return each figure that the section tells of these results, by its path."""
    if section.searched:
        return {CAPACITY.path: [each.capacity for each in results if isinstance(each, Bounds)]}
    return {metric.path: _values(_simulated(results), metric) for metric in _stored(section, policy)}


def _simulated(results: Sequence[Result | Bounds]) -> list[Result]:
    return [each for each in results if isinstance(each, Result)]


def _stored(section: Section, policy: str) -> Sequence[Metric]:
    apart = (*DATA, *(GOALS if policy == DEFAULT else ())) if section.apart else ()
    return (*section.shown, *section.compared, *section.paired, *apart)


def _values(results: Sequence[Result], metric: Metric) -> list[float]:
    """Return the figure of each result; empty if one of them does not have it."""
    figures = [metric.without if (found := value(r, metric.path)) is None else found for r in results]
    known = [figure for figure in figures if figure is not None]
    return known if len(known) == len(figures) else []


def _happened(results: Sequence[Result]) -> dict[str, object]:
    """Return the share of measured turns that moved, the share of all turns whose body was read, the number
    of transfers by reason and outcome, and the CPU milliseconds of a turn."""
    turns = max(1, sum(result.turns for result in results))
    transfers: dict[str, int] = {}
    for result in results:
        for name, count in result.transfers.items():
            transfers[name] = transfers.get(name, 0) + count
    return {
        "moved": mean(value(result, "migrations.per_request") or 0.0 for result in results),
        "read": sum(result.read for result in results) / turns,
        "transfers": transfers,
        "cpu_ms": 1e3 * sum(result.cpu_s for result in results) / turns,
    }


def read(path: Path) -> dict[Key, Row]:
    """Return the rows of a data file. Raises OSError, SpecError."""
    try:
        return parsed(path.read_bytes())
    except (msgspec.DecodeError, KeyError, TypeError):
        raise SpecError(
            f"{path} is no data of a section ({SCHEMA}): delete it, and it is played anew"
        ) from None


def parsed(content: bytes) -> dict[Key, Row]:
    """Return the rows of the content of a data file. Raises DecodeError, KeyError or TypeError if it is
    none."""
    document = msgspec.json.decode(content)
    if document["schema"] != SCHEMA:
        raise KeyError(document["schema"])
    return {Key(*(each[field] for field in Key._fields)): each for each in document["rows"]}


def by_seed(row: Row, metric: Metric) -> dict[int, float]:
    """Return the figure of each seed, infinity where it is never reached; empty if a seed does not have it,
    or the row does not tell it."""
    found = row.get(metric.path, ())
    return {
        seed: inf if each is None else each for seed, each in zip(row["seeds"], found, strict=bool(found))
    }
