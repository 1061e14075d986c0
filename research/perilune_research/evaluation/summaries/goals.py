"""The project's goals, held against the figures of the default policy."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from perilune_lab.quantiles import mean
from perilune_lab.simulate import measure
from perilune_research.evaluation import metrics
from perilune_research.evaluation.metrics import Metric
from perilune_research.evaluation.plan import DEFAULT, THREE
from perilune_research.evaluation.pools import ARMS
from perilune_research.evaluation.summaries.figures import Pages, Played
from perilune_research.table import Table, ranged


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    NOT_DECIDED = "not decided"


class Goal(NamedTuple):
    words: str
    load: str
    metric: Metric
    bounds: Mapping[str, float]
    """The bound in each pool, which is met on the side where the figure is better."""
    policy: str = DEFAULT

    def is_met(self, figure: float, pool: str) -> bool:
        return figure >= self.bounds[pool] if self.metric.more_is_better else figure <= self.bounds[pool]


WALL_CLOCK = metrics.WALL_CLOCK._replace(form="{:.3f}".format)
"""With three digits, since its bound lies within the third."""


def _same(bound: float) -> dict[str, float]:
    return dict.fromkeys(ARMS, bound)


GOALS = (
    Goal(
        "P1: TTFT p90 at R at most 1.6 × the floor, with a store 1.25 ×",
        "R",
        metrics.REGRET,
        _same(1.6) | dict.fromkeys(("store", "both", "split-store"), 1.25),
    ),
    *(
        Goal(
            f"P5: APC at {load} at least {share} % of its ceiling", load, metrics.CEILING, _same(share / 100)
        )
        for load, share in zip(THREE, (97, 95, 90), strict=True)
    ),
    Goal("P6: wall-clock factor at R at most 1.05", "R", WALL_CLOCK, _same(1.05)),
    Goal(
        "P6: that of `lmetric` at least 1.4, as a sign that the pool is full",
        "R",
        WALL_CLOCK._replace(more_is_better=True),
        _same(1.4),
        "lmetric",
    ),
    Goal("P7: at R at most 3 % of the turns move", "R", metrics.MOVED, _same(0.03)),
    Goal("P7: 80 % of the moves lead to where it stays cool", "R", metrics.ACCURACY, _same(0.8)),
    Goal("P7: no move follows another within 30 s", "R", metrics.THRASH, _same(0.0)),
)


def goals(pages: Pages) -> Table:
    """Return the figures for which there are goals, of as many seeds as were played."""
    rows = [[goal.words, *(_judged(pages, goal, pool) for pool in ARMS)] for goal in GOALS]
    return Table("", ["goal", *(f"`{pool}`" for pool in ARMS)], rows)


def _judged(pages: Pages, goal: Goal, pool: str) -> str:
    """Return the verdict with its figures: of the page that has the most seeds, and of the seeds held back.
    A goal is met, or missed, if the whole 95 % intervals of both say so."""

    def played(page: str) -> list[float]:
        return pages.values(Played(page, pool, goal.load, goal.policy), goal.metric)

    sample = next(filter(None, map(played, ("more-seeds", "more-loads", "deployments", "separate-prefill"))))
    samples = [sample, *filter(None, [played("held-back-seeds")])]
    verdicts = {_verdict(goal, pool, measure.interval(each)) for each in samples}
    verdict = verdicts.pop() if len(verdicts) == 1 else Verdict.NOT_DECIDED
    found = [f"{ranged((mean(each), *measure.interval(each)), goal.metric.form)}" for each in samples]
    return f"{verdict}: {found[0]}, {len(sample)} seeds" + "".join(
        f"; held back {each}" for each in found[1:]
    )


def _verdict(goal: Goal, pool: str, interval: tuple[float, float]) -> Verdict:
    low, high = interval
    worst, best = (low, high) if goal.metric.more_is_better else (high, low)
    if goal.is_met(worst, pool):
        return Verdict.MET
    return Verdict.NOT_DECIDED if goal.is_met(best, pool) else Verdict.MISSED
