"""Other traffic, other clients, and a gateway that refuses requests."""

from __future__ import annotations

from itertools import product
from statistics import median

from perilune_lab.terminal.formats import as_number
from perilune_research.evaluation import metrics
from perilune_research.evaluation.metrics import Metric
from perilune_research.evaluation.plan import DEFAULT, SPEEDS
from perilune_research.evaluation.pools import FACTORS, SPLIT, VARIED
from perilune_research.evaluation.summaries.figures import Column, Line, Pages, Played, grid, spread, whole
from perilune_research.table import Table


def recorded(pages: Pages) -> Table:
    """Return the default on recorded traffic beside the lowest of the others."""
    at_speed = [
        (trace, arm, words, f"{trace}-{arm}", load)
        for trace, arm in product(("conversation", "synthetic"), ("none", "store", *SPLIT))
        for words, load in zip(("half", "as recorded", "1.25 times"), SPEEDS, strict=True)
    ]
    timed = [
        (trace, arm, "its times", f"{trace}-{arm}-timed", "recorded speed")
        for trace, arm in product(("conversation", "synthetic"), ("none", "store"))
    ]
    rows = []
    for trace, arm, words, pool, load in (*at_speed, *timed):
        cells: list[str] = []
        for metric in (metrics.TTFT_P90, metrics.E2E_P90):
            figures = {
                policy: pages.values(Played("recorded", pool, load, policy), metric)[0]
                for policy in pages.policies("recorded", pool, load)
            }
            ours = figures.pop(DEFAULT)
            lowest = min(figures, key=lambda policy: figures[policy])
            cells += [metric.form(ours), f"{lowest} {metric.form(figures[lowest])}"]
        rows.append([trace, f"`{arm}`", words, *cells])
    return Table("", ["trace", "pool", "speed", "TTFT p90 s", "next", "E2E p90 s", "next"], rows)


def other_traffic(pages: Pages) -> Table:
    """Two policies over the default, in pairs of the same traffic and seed."""
    rows = []
    for arm, policy in product(("none", "store", *SPLIT), ("lmetric_plus_one", "sticky")):
        cells = []
        for metric in (metrics.TTFT_P90, metrics.E2E_P90):
            ratios = [
                ratio
                for pool in (f"{arm}-{parameter}-{factor}" for parameter in VARIED for factor in FACTORS)
                for ratio in pages.ratios(
                    Played("sensitivity", pool, "R", policy), Played("sensitivity", pool, "R"), metric
                )
            ]
            ahead = sum(ratio > 1 for ratio in ratios)
            cells += [spread(ratios), f"{ahead} of {len(ratios)}"]
        rows.append([f"`{arm}`", policy, *cells])
    wins = "default ahead in"
    return Table(
        "", ["pool", "policy", "TTFT p90: middle, range", wins, "E2E p90: middle, range", wins], rows
    )


def admission(pages: Pages) -> Table:
    """Return a pool with session admission over the same without it, seed by seed."""
    figures = (metrics.OUTPUT, metrics.SESSION_P90, metrics.SESSION_P99, metrics.LATER_TTFT_P90)
    shown = [
        *(("`none`", "none", "admission", load) for load in ("R", "1.25 R", "1.6 R")),
        *(
            (words, pool, "admission-elsewhere", load)
            for words, pool, loads in (
                ("four gateways", "none-four-gateways", ("1.25 R", "1.6 R")),
                ("sessions with more turns", "none-long", ("R", "1.25 R", "1.6 R")),
                ("two tenants, one with ten times the sessions", "none-tenants", ("1.25 R", "1.6 R")),
            )
            for load in loads
        ),
        *(
            (f"`{arm}`", arm, "admission-at-r" if load == "R" else "admission-elsewhere", load)
            for arm, loads in (
                ("handoff", ("R", "1.25 R", "1.6 R")),
                ("store", ("R", "1.6 R")),
                ("both", ("R", "1.6 R")),
                ("split", ("R",)),
                ("split-store", ("R",)),
            )
            for load in loads
        ),
    ]

    def cell(page: str, pool: str, load: str, metric: Metric) -> str:
        ratios = pages.ratios(Played(page, f"{pool}-admission", load), Played(page, pool, load), metric)
        worst = min(ratios) if metric.more_is_better else max(ratios)
        return f"{median(ratios):.2f}, worst {worst:.2f}"

    rows = [
        [words, load, *(cell(page, pool, load, metric) for metric in figures)]
        for words, pool, page, load in shown
    ]
    titles = ("output tokens/s", "session p90", "session p99", "TTFT p90 of later turns")
    return Table("", ["pool", "load", *titles], rows)


def giving_up(pages: Pages) -> Table:
    page = "giving-up"
    figures = (
        *(metrics.CLOSED._replace(form=whole), metrics.LOST._replace(form=whole), metrics.ANSWERED),
        *(metrics.TTFT_P90_OF_ALL, metrics.OUTPUT),
    )
    rows = []
    for arm, load in product(("none", "store", *SPLIT), ("R", "1.25 R")):
        for policy in pages.policies(page, f"{arm}-impatient", load):
            impatient = Played(page, f"{arm}-impatient", load, policy)
            patient = pages.text(impatient._replace(pool=arm), metrics.TTFT_P90_OF_ALL)
            cells = [pages.text(impatient, figure) for figure in figures]
            rows.append([f"`{arm}`", load, policy, *cells, patient])
    titles = (
        *("requests closed", "sessions lost", "answered"),
        *("TTFT p90 s", "output tokens/s", "patient: TTFT p90 s"),
    )
    return Table("", ["pool", "load", "policy", *titles], rows)


def early_rejection(pages: Pages) -> Table:
    refused = {
        "": "nothing",
        "-beginnings-refused": "the first request of a session (`--begin-within 10`)",
        "-all-refused": "any request (`--param limits.ttftSloSeconds=10`)",
    }
    lines = [
        Line((f"`{pool}`", load, words), Played("early-rejection", f"{pool}{suffix}", load))
        for pool in ("none", *SPLIT)
        for load in (("1.25 R", "1.6 R") if pool == "none" else ("R", "1.25 R"))
        for suffix, words in refused.items()
    ]
    return grid(
        pages,
        ["pool", "load", "refused may be"],
        lines,
        [
            Column("sessions lost", metrics.LOST._replace(form=whole)),
            Column("answered", metrics.ANSWERED),
            Column("TTFT p50 s", metrics.TTFT_P50),
            Column("TTFT p90 s", metrics.TTFT_P90_OF_ALL),
            Column("E2E p90 s of answered", metrics.E2E_P90),
            Column("output tokens/s", metrics.OUTPUT),
        ],
    )


def fairness(pages: Pages) -> Table:
    """Return the smaller tenant's TTFT p90 alone, in turn and with fair shares, in the order of the seeds."""
    played = (
        ("0.69, below saturation", "0.69", "1", ""),
        ("0.88, above it", "0.88", "1", ""),
        ("0.88", "0.88", "4", "four-"),
        ("0.69, capped", "0.69", "1", "capped-"),
        ("0.88, capped", "0.88", "1", "capped-"),
        ("0.69, separate prefill", "0.69", "1", "split-"),
    )
    rows = []
    for words, load, gateways, prefix in played:
        alone, in_turn, fair = (
            Played("fairness", prefix + name, load) for name in ("alone", "in-turn", "fair")
        )
        seconds = [
            f"{', '.join(map(as_number, pages.values(each, metrics.QUIET_TTFT_P90)))} s"
            for each in (alone, in_turn, fair)
        ]
        ratios = (
            pages.ratios(fair, alone, metrics.QUIET_TTFT_P90),
            pages.ratios(fair, in_turn, metrics.OUTPUT),
        )
        rows.append([words, gateways, *seconds, *(", ".join(map(as_number, each)) for each in ratios)])
    titles = ("alone", "in turn", "fair shares", "fair / alone", "output of both, fair / in turn")
    return Table("", ("sessions/s of both", "gateways", *titles), rows)
