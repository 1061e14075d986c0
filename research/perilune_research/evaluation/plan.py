"""What a section of the evaluation is, and its loads.

A section is a page with its data file under `docs/evaluation`. It has one or several plays: every one of some
deployments at every one of some loads with every one of some policies and seeds. Cells that several sections
share are played once.

R is one new session per second, which loads a pool with defaults of eight endpoints fully: there `lmetric`
has a TTFT p90 of six to nine times the floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from perilune_research.evaluation import metrics
from perilune_research.evaluation.cells import Cell
from perilune_research.evaluation.metrics import Metric
from perilune_research.evaluation.pools import POOLS

DEFAULT = "perilune"
"""The policy of a pool that names none."""

LOADS: Mapping[str, float] = {"R/2": 0.5, "R": 1.0, "1.25 R": 1.25, "1.6 R": 1.6}
THREE = ("R/2", "R", "1.25 R")
SPEEDS: Mapping[str, float] = {"half the speed": 0.5, "recorded speed": 1.0, "1.25 x the speed": 1.25}
"""Loads of recorded traffic."""


def rate(load: str) -> float:
    """Return the rate of a load: a name, or sessions per second as text."""
    named = {**LOADS, **SPEEDS}
    return named[load] if load in named else float(load)


def seeds(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


class Play(NamedTuple):
    """All of these deployments, at all of these loads, with all of these policies and seeds."""

    pools: Sequence[str]
    loads: Sequence[str]
    policies: Sequence[str]
    seeds: Sequence[int]


BASE = Cell(policy=DEFAULT, rate=1.0, seed=1)
SHORT = replace(BASE, window_s=900.0, warmup_s=300.0)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One page and its data."""

    name: str
    """Name of the page, of its data, and of the section in the command."""
    title: str
    plays: tuple[Play, ...]
    base: Cell = BASE
    """The cell that deployments, loads, policies and seeds change."""
    shown: tuple[Metric, ...] = metrics.MAIN
    """Figures of its tables."""
    compared: tuple[Metric, ...] = (metrics.TTFT_P90,)
    """Figures in which a deployment is compared with others, and a policy with the default."""
    paired: tuple[Metric, ...] = ()
    """Figures in which a deployment is compared with others seed by seed, by median and worst."""
    told: tuple[str, ...] = ()
    """Headings of docs/evaluation, mostly of README.md, that tell what follows from it."""
    apart: bool = False
    """Whether each deployment and load has a table of its own, and the default is held against its goals."""
    searched: bool = False
    """Whether the load is searched that each policy serves, see `capacity.py`. Then it has no loads."""
    note: str = ""
    """What else a reader of the figures needs to know."""
    traces: Path = Path()
    """Folder of the files of recorded traffic."""
    small: bool = False
    """Whether `quick` made it."""

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pool for play in self.plays for pool in play.pools))

    @property
    def loads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(load for play in self.plays for load in play.loads))

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(policy for play in self.plays for policy in play.policies))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({seed for play in self.plays for seed in play.seeds}))

    @property
    def recorded(self) -> bool:
        """Whether it needs the files of recorded traffic."""
        return any("trace" in POOLS[pool].changes for pool in self.pools)

    def cell(self, pool: str, load: str, policy: str, seed: int) -> Cell:
        changes = dict(POOLS[pool].changes)
        if "trace" in changes:
            changes["trace"] = str(self.traces / changes["trace"])
        return replace(self.base, policy=policy, rate=rate(load), seed=seed, **changes)


_MOST_POOLS = 5


def quick(section: Section) -> Section:
    """Return a section of a few minutes: a third of the traffic, one seed, one load, and the first of
    deployments and policies."""
    plays = tuple(
        Play(
            play.pools[:_MOST_POOLS],
            [load for load in play.loads if load in ("R", "recorded speed")] or play.loads[:1],
            play.policies[:2],
            play.seeds[:1],
        )
        for play in section.plays[:3]
    )
    base = section.base
    limit = 1_000 if section.recorded else None
    smaller = replace(base, window_s=base.window_s / 3, warmup_s=base.warmup_s / 3, limit=limit)
    return replace(section, plays=plays, base=smaller, small=True)
