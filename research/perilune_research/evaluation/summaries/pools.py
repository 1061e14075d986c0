"""The default policy in other pools than those with defaults."""

from __future__ import annotations

from itertools import product

from perilune_lab.simulate.deployment import Arm
from perilune_research.evaluation import metrics
from perilune_research.evaluation.plan import DEFAULT, LOADS, THREE
from perilune_research.evaluation.pools import ARMS, SPLIT
from perilune_research.evaluation.summaries.figures import (
    Column,
    Line,
    Pages,
    Played,
    by_load,
    grid,
    seed_by_seed,
    spread,
)
from perilune_research.table import Table


def never_moving(pages: Pages) -> Table:
    def line(arm: str) -> list[str]:
        moves = Played("never-moving", arm, "R")
        never = moves._replace(pool=f"{arm}-never")
        ratios = pages.ratios(never, moves, metrics.TTFT_P90)
        ttft = [f"{pages.text(each, metrics.TTFT_P90)} s" for each in (moves, never)]
        between = pages.of_means(never, moves, metrics.TTFT_P90)
        return [f"`{arm}`", *ttft, between, spread(ratios), pages.text(moves, metrics.MOVED)]

    return Table(
        "",
        [
            *("pool", "TTFT p90: moves", "never moves", "never / moves, of the means"),
            *("geometric mean over seeds, range", "turns that move"),
        ],
        [line(arm) for arm in ARMS],
    )


def separate_prefill_elsewhere(pages: Pages) -> Table:
    others = {
        "the default": ("", DEFAULT),
        "`ear`": ("", "ear"),
        "`sticky`": ("", "sticky"),
        "four gateways": ("-four-gateways", DEFAULT),
        "no session moves to save time": ("-never", DEFAULT),
        "engines are 10 % slower": ("-slower", DEFAULT),
        "session admission, from a session's first request": ("-admission", DEFAULT),
        "prefill believed to take twice as long, noisy": ("-told-double", DEFAULT),
        "half as long, noisy": ("-told-half", DEFAULT),
        "engines up to 1.5 times as fast or slow, noisy": ("-unequal", DEFAULT),
        "up to twice as fast or slow, believed to take half as long, noisier": ("-very-unequal", DEFAULT),
    }
    shown = (*product(("split",), ("R/2", "0.64", "R")), *product(("split-store",), ("R/2", "R")))

    def cell(pool: str, load: str, policy: str) -> str:
        return pages.text(Played("separate-prefill-elsewhere", pool, load, policy), metrics.TTFT_P90)

    rows = [
        [words, *(cell(f"{arm}{suffix}", load, policy) for arm, load in shown)]
        for words, (suffix, policy) in others.items()
    ]
    return Table("", ["pool", *(f"{arm}, {load}" for arm, load in shown)], rows)


def other_pools(pages: Pages) -> Table:
    pools = {
        "none": "`none`",
        "none-four-gateways": "four gateways instead of one",
        "none-admission-held": "session admission, new sessions held for up to a minute",
        "handoff": "`handoff`",
        "handoff-four-gateways": "four gateways",
        "planned": "moves planned with every trigger",
        "handoff-loaded-link": "a loaded network: 0.3 s and 3.5 GB/s",
        "handoff-best-link": "the fastest published link: 168 GB/s",
        "store": "`store`",
        "store-four-gateways": "four gateways",
        "both": "`both`",
        "both-four-gateways": "four gateways",
        "split": "half of the endpoints only prefill (`split`)",
        "split-loaded-link": "a loaded network",
        "split-best-link": "the fastest link",
        "split-store": "`split-store`",
    }
    lines = [Line((words,), Played("other-pools", pool, "")) for pool, words in pools.items()]
    return grid(pages, ["pool"], lines, by_load(metrics.TTFT_P90, THREE))


def four_gateways(pages: Pages) -> Table:
    """Return the default behind four gateways beside the default behind one, seed by seed."""
    pairs = [
        *(("4", *pair) for pair in product(("none", "store"), ("0.25", "0.4"))),
        *(("8", *pair) for pair in product(Arm, ("R", "1.25 R"))),
        *(("8", arm, "R") for arm in SPLIT),
    ]

    def line(endpoints: str, arm: str, load: str) -> list[str]:
        one = Played("gateways" if endpoints == "4" else "gateways-at-r", arm, load)
        four = one._replace(pool=f"{arm}-four-gateways")
        ttft = [pages.text(each, metrics.TTFT_P90) for each in (one, four)]
        figures = (metrics.TTFT_P90, metrics.E2E_P90, metrics.OUTPUT)
        return [
            endpoints,
            f"`{arm}`",
            load,
            *ttft,
            *(seed_by_seed(pages.ratios(four, one, f)) for f in figures),
        ]

    return Table(
        "",
        [
            *("GPUs", "pool", "load", "TTFT p90 s: one", "four"),
            *("four / one: TTFT p90", "E2E p90", "output"),
        ],
        [line(*pair) for pair in pairs],
    )


def engines(pages: Pages) -> Table:
    """Return TTFT p90 at R where engines differ from what the gateway believes."""
    policies = (DEFAULT, "lmetric_plus_one", "ear")
    beliefs = {
        "": "as in all other tables: prefill is believed to take 1.3 times as long",
        "-told-double": "prefill is believed to take twice as long, steps are noisy",
        "-told-half": "half as long, noisy",
        "-unequal": "up to 1.5 times as fast or slow as an H20, noisy",
        "-very-unequal": "up to twice as fast or slow, and believed to take half as long, noisier",
    }
    rows = [
        [
            *(words, f"`{arm}`"),
            *(
                pages.text(Played("beliefs", arm + name, "R", policy), metrics.TTFT_P90)
                for policy in policies
            ),
        ]
        for arm in ARMS
        for name, words in beliefs.items()
    ]
    return Table("", ["engines", "pool", *policies], rows)


def slower(pages: Pages) -> Table:
    """Return the turns in flight with engines that are 10 % slower over those with usual ones."""
    page = "coupling"

    def cell(usual: Played) -> str:
        slow = usual._replace(pool=f"{usual.pool}-slower")
        played = pages.values(usual, metrics.IN_FLIGHT)
        return pages.of_means(slow, usual, metrics.IN_FLIGHT) if played else ""

    return Table(
        "",
        ["pool", "policy", *LOADS],
        [
            [f"`{arm}`", policy] + [cell(Played(page, arm, load, policy)) for load in LOADS]
            for arm in ("none", "store", *SPLIT)
            for policy in pages.policies(page, arm, "R")
        ],
    )


def hot_hosts(pages: Pages) -> Table:
    shown = [*product(("none", "handoff", "store", *SPLIT), ("ear", DEFAULT))]
    shown.remove(("handoff", DEFAULT))

    def cell(played: Played) -> str:
        hot = pages.text(played, metrics.HOT)
        return f"{hot}, {pages.text(played, metrics.MOVED)}" if hot else ""

    rows = [
        [f"`{arm}`", policy, *(cell(Played("triggers", arm, load, policy)) for load in LOADS)]
        for arm, policy in shown
    ]
    return Table("", ["pool", "policy", *(f"{load}: hot, moved" for load in LOADS)], rows)


def waiting(pages: Pages) -> Table:
    """Return what waits at the endpoints at R, by rank."""
    figures = {metric.name: metric for metric in metrics.HEAT}
    rows = []
    for arm in ("none", "store", *SPLIT):
        for policy in pages.policies("heat", arm, "R"):
            played = Played("heat", arm, "R", policy)
            cells = [
                f"{pages.text(played, figures[f'{rank}: pending tokens'])},"
                f" {pages.text(played, figures[f'{rank}: time hot'])}"
                for rank in ("hottest", "fifth", "coolest")
            ]
            rows.append([f"`{arm}`", policy, *cells, f"{pages.text(played, metrics.WORST)} s"])
    ranks = ("hottest: tokens, time hot", "fifth", "coolest")
    return Table("", ["pool", "policy", *ranks, "worst endpoint: TTFT p90"], rows)


def overlap(pages: Pages) -> Table:
    lines = [
        Line((load, words), Played("overlap", pool, load))
        for load in ("R/2", "R")
        for words, pool in (("serial", "split"), ("overlapped", "split-overlap"))
    ]
    figures = (metrics.WAITS_FOR_KV, metrics.TTFT_P50, metrics.TTFT_P90, metrics.E2E_P90, metrics.OUTPUT)
    return grid(pages, ["load", "transfers"], lines, [Column(each.name, each) for each in figures])
