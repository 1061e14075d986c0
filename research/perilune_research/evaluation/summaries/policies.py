"""The default policy beside others, in the arms."""

from __future__ import annotations

from itertools import product

from perilune_lab.quantiles import mean
from perilune_lab.terminal.formats import as_number
from perilune_research.evaluation import metrics
from perilune_research.evaluation.metrics import Metric
from perilune_research.evaluation.plan import DEFAULT, THREE
from perilune_research.evaluation.pools import ARMS, SPLIT
from perilune_research.evaluation.summaries.figures import (
    Column,
    Line,
    Pages,
    Played,
    grid,
    plain,
    seed_by_seed,
)
from perilune_research.table import Table

LEAST = 0.01
"""A policy is listed as ahead of the default if its mean is better by more than this share."""
COMPARED = (
    *(metrics.TTFT_P50, metrics.TTFT_P90, metrics.E2E_P90),
    *(metrics.TPOT_P99, metrics.APC, metrics.OUTPUT),
)


def arm(pages: Pages, name: str) -> Table:
    """Return every policy of an arm, the lowest TTFT p90 at R first."""
    page = "deployments"
    every = pages.policies(page, name, "R")
    every.sort(key=lambda policy: mean(pages.values(Played(page, name, "R", policy), metrics.TTFT_P90)))
    return grid(
        pages,
        ["policy"],
        [Line((policy,), Played(page, name, "", policy)) for policy in every],
        [
            *(Column(f"{load}: TTFT p90", metrics.TTFT_P90, load) for load in THREE),
            Column("R: E2E p90", metrics.E2E_P90, "R"),
            Column("R: TPOT p99 ms", metrics.TPOT_P99, "R"),
            Column("R: APC", metrics.APC, "R"),
            Column("R: output tokens/s", metrics.OUTPUT, "R"),
        ],
    )


def findings(pages: Pages) -> Table:
    """Return the TTFT p90 of every policy without and with a store, and at R that over the default's."""
    page = "deployments"

    def p90_s(arm: str, policy: str) -> float:
        return mean(pages.values(Played(page, arm, "R", policy), metrics.TTFT_P90))

    def cells(arm: str, policy: str) -> list[str]:
        shown = [pages.text(Played(page, arm, load, policy), metrics.TTFT_P90) for load in THREE]
        return [*shown, f"{p90_s(arm, policy) / p90_s(arm, DEFAULT):.2f}"]

    every = sorted(pages.policies(page, "none", "R"), key=lambda policy: p90_s("none", policy))
    rows = [(f"`{policy}`", *cells("none", policy), *cells("store", policy)) for policy in every]
    over = "R: over `perilune`'s"
    return Table("", ("policy", "none: R/2", *THREE[1:], over, "store: R/2", *THREE[1:], over), rows)


def separate_prefill(pages: Pages) -> Table:
    page = "separate-prefill"
    every = pages.policies(page, "split", "R")
    every.sort(key=lambda policy: mean(pages.values(Played(page, "split", "R", policy), metrics.TTFT_P90)))
    return grid(
        pages,
        ["policy"],
        [Line((policy,), Played(page, "split", "", policy)) for policy in every],
        [
            Column("split, R/2: TTFT p90", metrics.TTFT_P90, "R/2"),
            *(Column(f"{load}: TTFT p90", metrics.TTFT_P90, load) for load in THREE[1:]),
            Column("R/2: TPOT p99 ms", metrics.TPOT_P99, "R/2"),
            Column("R: E2E p90", metrics.E2E_P90, "R"),
            Column("R: output tokens/s", metrics.OUTPUT, "R"),
            Column("split-store, R/2: TTFT p90", metrics.TTFT_P90, "R/2", "split-store"),
            *(Column(f"{load}: TTFT p90", metrics.TTFT_P90, load, "split-store") for load in THREE[1:]),
            Column("R: E2E p90", metrics.E2E_P90, "R", "split-store"),
        ],
    )


def behind(pages: Pages) -> Table:
    """List what is better than the default in each seed, and by how much of the default's figure."""
    rows = []
    for pool, load in product(ARMS, THREE):
        ours = Played("separate-prefill" if pool in SPLIT else "deployments", pool, load)
        found = [text for metric in metrics.MAIN if (text := _ahead(pages, ours, metric))]
        rows.append([f"`{pool}`" if load == THREE[0] else "", load, ". ".join(found) or "nothing"])
    return Table("", ["pool", "load", "figure: who is better"], rows)


def _ahead(pages: Pages, ours: Played, metric: Metric) -> str:
    gains: dict[str, list[str]] = {}
    for policy in pages.policies(ours.page, ours.pool, ours.load):
        theirs = ours._replace(policy=policy)
        better = [_gain(ratio, metric) for ratio in pages.ratios(theirs, ours, metric)]
        gain = _gain(mean(pages.values(theirs, metric)) / mean(pages.values(ours, metric)), metric)
        if policy != DEFAULT and min(better) > 0 and gain > LEAST:
            gains.setdefault(f"{gain:.0%}".replace("%", " %"), []).append(f"`{policy}`")
    ordered = sorted(gains.items(), key=lambda gain: -int(gain[0].split()[0]))
    who = ", ".join(f"{', '.join(policies)} {by}" for by, policies in ordered)
    return f"{plain(metric)}: {who}" if who else ""


def _gain(ratio: float, metric: Metric) -> float:
    return ratio - 1 if metric.more_is_better else 1 - ratio


def sixteen_seeds(pages: Pages) -> Table:
    """Compare the default with its closest rivals at R."""
    rows = []
    for arm in ARMS:
        for rival in sorted({*pages.policies("more-seeds", arm, "R")} - {DEFAULT}):
            rows.append([arm, f"`{rival}`", "1–16", *_rival(pages, Played("more-seeds", arm, "R", rival))])
            if rival in pages.policies("held-back-seeds", arm, "R"):
                held_back = Played("held-back-seeds", arm, "R", rival)
                rows.append([arm, f"`{rival}`", "held back", *_rival(pages, held_back)])
    return Table("", _names("pool", "rival", "seeds"), rows)


def more_loads(pages: Pages) -> Table:
    """Compare them at R/2 and 1.25 R."""
    page = "more-loads"
    return Table(
        "",
        _names("pool", "load", "rival"),
        [
            [arm, load, f"`{rival}`", *_rival(pages, Played(page, arm, load, rival))]
            for arm, load in product(ARMS, ("R/2", "1.25 R"))
            for rival in sorted({*pages.policies(page, arm, load)} - {DEFAULT})
        ],
    )


def _rival(pages: Pages, rival: Played) -> list[str]:
    """Return the ratios of the default to a rival, seed by seed, one for each figure of `COMPARED`."""
    cells = []
    for metric in COMPARED:
        ratios = pages.ratios(rival._replace(policy=DEFAULT), rival, metric)
        text = seed_by_seed(ratios)
        if metric is metrics.TTFT_P90:
            text += f", lower in {sum(ratio < 1 for ratio in ratios)}"
        cells.append(text)
    return cells


def _names(*first: str) -> list[str]:
    return [*first, *map(plain, COMPARED)]


def capacity(pages: Pages) -> Table:
    """Return how many sessions per second the default serves, and that over what others serve."""
    rows = []
    for arm in ARMS:
        ours = Played("capacity", arm, "capacity")
        others = [policy for policy in pages.policies(*ours[:3]) if policy != DEFAULT]
        over = [_over(pages, ours, ours._replace(policy=policy)) for policy in others]
        rows.append([f"`{arm}`", pages.text(ours, metrics.CAPACITY), ". ".join(over)])
    return Table("", ("arm", "sessions/s", "over those of others: of the means, and by seed"), rows)


def _over(pages: Pages, ours: Played, theirs: Played) -> str:
    below = pages.values(theirs, metrics.CAPACITY)
    quotient = mean(pages.values(ours, metrics.CAPACITY)) / mean(below)
    each = [
        f"{one / other:.2f}" if other else "serves none"
        for one, other in zip(pages.values(ours, metrics.CAPACITY), below, strict=True)
    ]
    return f"`{theirs.policy}` {as_number(quotient)} ({', '.join(each)})"
