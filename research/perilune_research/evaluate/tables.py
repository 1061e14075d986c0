"""The evaluation's tables, one function each: findings → rows of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from perilune_lab.formats import as_number, as_seconds
from perilune_lab.traces.stats import Spread, Stats
from perilune_research.evaluate import plan
from perilune_research.evaluate.bars import Bar, rivals
from perilune_research.evaluate.cells import Arm
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import BAR_LOADS, LOADS, OURS, Point
from perilune_research.evaluate.table import Cells, Table, percent, ranged
from perilune_research.simulator.h20 import H20

# -- bars --------------------------------------------------------------------------------------------------


def bars(judged: Sequence[Bar]) -> Table:
    rows = []
    for bar in judged:
        verdict = f"**{bar.verdict}**" + ("" if bar.clear else " (within the interval)")
        for i, check in enumerate(bar.checks):
            limit = f"{'≤' if check.at_most else '≥'} {as_number(check.limit)} {check.unit}".strip()
            found = ranged(Estimate(check.value, check.low, check.high))
            what = check.what + (f" ({check.detail})" if check.detail else "")
            mark = "met" if check.met else "missed"
            rows.append(
                (f"**{bar.name}**" if not i else "", verdict if not i else "", what, found, limit, mark)
            )
    return Table(
        "Bars",
        ("", "verdict", "figure", "value [95 %]", "limit", ""),
        rows,
        "A bar is met when every value is on the right side of its limit. *Within the interval* marks a bar"
        " whose deciding value has the limit inside its 95 % interval: other seeds may decide otherwise.",
    )


def dominance(f: Findings, load: str) -> Table:
    rows = []
    for rival in rivals(f, load):
        form = percent if rival.metric.name == "APC" else as_number
        change = ranged(Estimate(*(100 * x for x in rival.worse)))
        rows.append(
            (rival.metric.name, ranged(rival.ours, form), rival.best, ranged(rival.theirs, form), change)
        )
    return Table(
        f"perilune against the best of all others, {load}",
        ("metric", "perilune", "best other", "its value", "% worse (below 0: better)"),
        rows,
    )


def capacity(f: Findings) -> Table:
    rates = f.capacities
    rows = []
    for name, found in sorted(rates.items(), key=lambda row: -row[1].value):
        ratio = ranged(f.capacity_ratio("perilune", name)) if name != "perilune" else ""
        rows.append((name, ranged(found), ratio))
    return Table(
        "SLO capacity",
        ("", "sessions/s", "perilune (no store) / this"),
        rows,
        "The largest session rate with TTFT p90 ≤ 5 s and a median stretch ≤ 1.25, found by bisection per"
        " seed. *Store* means a shared KV store of 3 GB/s.",
    )


# -- end to end --------------------------------------------------------------------------------------------


def end_to_end(f: Findings, load: str) -> Table:
    scenario = plan.scenario(f.at_r, load)
    points = [Point(scenario, arm) for arm in plan.EVERY]
    points.sort(key=lambda p: f.estimate(p, "ttft_s.p90").value)
    rows = []
    for point in points:
        c = Cells(f, point)
        rows.append(
            (
                point.arm.policy,
                c("ttft_s.p50"),
                c.ranged("ttft_s.p90"),
                c("ttft_s.p99"),
                *(c(f"tpot_s.{q}", _ms) for q in ("p50", "p90", "p99")),
                c("e2e_s.p90"),
                c("apc", percent),
                c("hotspot.ttft_p90_max_s"),
                c("wall_clock_factor"),
                c("stretch.p50"),
            )
        )
    any_, intra = (f.estimate(points[0], f"apc_ceiling.{kind}").value for kind in ("any", "intra_session"))
    floor = f.estimate(points[0], "floor_ttft_s.p90").value
    header = (
        "policy",
        "TTFT p50 s",
        "p90 [95 %]",
        "p99",
        "TPOT p50 ms",
        "p90",
        "p99",
        "E2E p90 s",
        "APC",
        "worst endpoint s",
        "wall-clock factor",
        "stretch p50",
    )
    return Table(
        f"End to end at {load} = {as_number(scenario.rate)} sessions/s",
        header,
        rows,
        f"Lowest TTFT p90 first. Ceiling of APC: {percent(any_)} with any session's blocks, {percent(intra)}"
        f" with the session's own. Floor of TTFT p90: {as_seconds(floor)}. *Worst endpoint* is the highest"
        " TTFT p90 of any endpoint.",
    )


def _ms(value_s: float) -> str:
    return as_number(value_s * 1e3)


def setup(f: Findings, trace: Stats) -> Table:
    scenario = plan.scenario(f.at_r)
    point = Point(scenario, OURS)
    requests = f.pooled(point).requests / len(f.results(point))
    window_s, warmup_s = as_number(scenario.window_s), as_number(scenario.warmup_s)
    rows = [
        ("endpoints", f"{scenario.endpoints} modelled H20 GPUs, KV pool {H20.kv_pool_tokens:,} tokens each"),
        ("model", "30B mixture of experts with 3B active parameters"),
        ("KV between endpoints", "any endpoint can pull KV from any other (`pullable`)"),
        ("R", f"{as_number(f.r)} sessions/s"),
        ("duration", f"{window_s} s of traffic, of which the first {warmup_s} s are not measured"),
        ("requests", f"{as_number(requests)} measured per simulation at R"),
        ("sessions", f"{scenario.rate * scenario.window_s:,.0f} begin per simulation at R, on average"),
        ("seeds", f"{f.size.seeds[0]}–{f.size.seeds[-1]}; side studies use {len(f.size.side_seeds)} of them"),
        ("prompt tokens per request", _spread(trace.input_tokens)),
        ("output tokens per request", _spread(trace.output_tokens)),
        ("input : output", as_number(trace.input_per_output)),
        ("turns per session", _spread(trace.turns_per_session)),
        ("prompt tokens per session", _spread(trace.tokens_per_session)),
        ("prompt tokens of the top 1 % of sessions", percent(trace.top_1_percent_share)),
    ]
    if trace.gap_s:
        rows.append(("gaps between turns, s", _spread(trace.gap_s)))
    if trace.reuse:
        shares = (trace.reuse.intra_session, trace.reuse.cross_session, trace.reuse.shared_prefix)
        rows.append(("reuse intra / cross / shared", " / ".join(map(percent, shares))))
    rates = (trace.hit_rate.any, trace.hit_rate.intra_session)
    rows.append(("best possible hit rate any / intra", " / ".join(map(percent, rates))))
    return Table(
        "Setup",
        ("", ""),
        rows,
        f"The trace's figures come from {trace.sessions:,} generated sessions of one seed, played to their"
        f" end. A window of {window_s} s cuts sessions off, so a simulation's own figures are lower.",
    )


def _spread(s: Spread) -> str:
    named = {"mean": s.mean, "p50": s.p50, "p90": s.p90, "p99": s.p99, "max": s.max}
    return ", ".join(f"{name} {as_number(value)}" for name, value in named.items())


# -- parts -------------------------------------------------------------------------------------------------


def migrations(f: Findings) -> Table:
    rows = []
    for load in BAR_LOADS:
        for arm in (OURS, plan.BOTH, Arm("mooncake"), Arm("conductor")):
            point = Point(plan.scenario(f.at_r, load), arm)
            c = Cells(f, point)
            rows.append(
                (
                    load,
                    arm.policy,
                    c.ranged("migrations.per_request", percent),
                    c("migrations.per_minute"),
                    c("migrations.transfer_s.mean", as_seconds),
                    c("migrations.transfer_s.p90", as_seconds),
                    c("extra.moved_tokens.p50"),
                    c.ranged("migrations.accuracy", percent),
                    c("migrations.thrash_rate", percent),
                    c("extra.turns_left.mean"),
                    c("extra.turns_left.p50"),
                )
            )
    return Table(
        "Migrations",
        (
            "load",
            "policy",
            "turns that moved",
            "per minute",
            "transfer mean",
            "transfer p90",
            "tokens p50",
            "accuracy, next 3 turns",
            "thrash",
            "turns left mean",
            "p50",
        ),
        rows,
        "Transfers are all pulls of KV, including copies of prefixes (mooncake and conductor copy prefixes"
        " and do not move sessions). The transfer time includes waiting for the sender.",
    )


def conductor(f: Findings) -> Table:
    """The Conductor experiment: three arms, and the targets that it is operated by."""
    f = f.side
    rows = []
    for name, arm in plan.CONDUCTOR.items():
        point = Point(plan.scenario(f.at_r), arm)
        results = f.results(point).values()
        cpu_ms = 1e3 * sum(r.wall_s for r in results) / sum(r.run.requests for r in results)
        copies = f.estimate(point, "extra.transfers_per_minute").value
        figures = (
            (100 * f.estimate(point, "apc").value, 80.0, False),
            (cpu_ms, 1.0, True),
            (f.estimate(point, "node_load_variance").value, 10.0, True),
            (copies, 50.0, True),
        )
        c = Cells(f, point)
        rows.append(
            (
                name,
                c("ttft_s.mean", as_seconds),
                c.ranged("ttft_s.p90", as_seconds),
                *(_target(*figure) for figure in figures),
            )
        )
    return Table(
        "Conductor's three arms, at R",
        (
            "arm",
            "TTFT mean",
            "TTFT p90",
            "hit rate % (> 80)",
            "scheduling ms (< 1)",
            "node-load variance (< 10)",
            "copies per minute (< 50)",
        ),
        rows,
        "*Scheduling* is the CPU time of a whole simulated request including its decision, so it is an upper"
        " bound. Published on other hardware and another load: mean prefill latency 150 / 95 / 88 ms, hit"
        " rate 0 / 82 / 87 %, variance 18.5 / 12.3 / 7.8.",
    )


def _target(value: float, limit: float, at_most: bool) -> str:
    met = value < limit if at_most else value > limit
    return f"{as_number(value)}, {'met' if met else 'missed'}"


def decode_pools(f: Findings) -> Table:
    rows = []
    for load in LOADS:
        for policy in ("static_pd", "perilune"):
            c = Cells(f, Point(plan.scenario(f.at_r, load), Arm(policy)))
            rows.append(
                (
                    load,
                    policy,
                    *(c(f"extra.request_kv.{q}", percent) for q in ("p50", "p90", "p99")),
                    *(c(f"extra.decode_kv.{q}", percent) for q in ("p50", "p90", "p99")),
                    c("ttft_s.p50", as_seconds),
                    c("success_rate", percent),
                )
            )
    return Table(
        "Decode pools: static 4P4D beside perilune",
        (
            "load",
            "policy",
            "one request's KV / pool p50",
            "p90",
            "p99",
            "decoding KV / pool p50",
            "p90",
            "p99",
            "TTFT p50",
            "answered",
        ),
        rows,
        "Published for 4P4D: one request fills 69 % of a decode pool at p90 and 138 % at p99, and 52–68 % of"
        " requests succeed. That implies a pool of about 85,000 tokens; here a pool has"
        f" {H20.kv_pool_tokens:,} and no client gives up, so requests wait instead of failing. Decoding KV"
        " counts a prefix once for every request that uses it.",
    )


def chatbot(f: Findings) -> Table:
    f = f.side
    rows = []
    for load, gap_s in product(plan.GAP_LOADS, plan.GAPS_S):
        for arm in plan.COUPLED:
            c = Cells(f, Point(plan.gap_scenario(f.at_r, load, gap_s), arm))
            rows.append(
                (
                    load,
                    "as recorded" if gap_s is None else f"{gap_s:g} s",
                    arm.policy,
                    c("turn_s.mean", as_seconds),
                    c("extra.in_flight"),
                    c.ranged("wall_clock_factor"),
                    c.ranged("stretch.p50"),
                    c.ranged("stretch.p90"),
                )
            )
    return Table(
        "Chatbot control: the same turns with other gaps",
        (
            "load",
            "gap",
            "policy",
            "mean W_turn",
            "requests in flight",
            "wall-clock factor",
            "stretch p50",
            "stretch p90",
        ),
        rows,
    )
