"""The evaluation's tables. One function makes each of them from the findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import isfinite
from pathlib import Path

from perilune_lab.quantiles import quantile
from perilune_lab.simulate.h20 import H20
from perilune_lab.terminal.formats import as_number, as_seconds
from perilune_lab.traces.source import AGENTIC
from perilune_lab.traces.stats import Spread, Stats
from perilune_research.evaluate import plan
from perilune_research.evaluate.bars import Bar, rivals
from perilune_research.evaluate.cells import Profile
from perilune_research.evaluate.extra import LONG_TOKENS, Kind
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import BAR_LOADS, LOADS, OURS, Point
from perilune_research.evaluate.table import Cells
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.new_sessions import LARGEST
from perilune_research.table import Table, percent, ranged

# -- bars --------------------------------------------------------------------------------------------------


def bars(judged: Sequence[Bar], subject: str) -> Table:
    rows = []
    for bar in judged:
        verdict = f"**{bar.verdict}**" + ("" if bar.clear else " (within the interval)")
        for i, check in enumerate(bar.checks):
            limit = f"{'≤' if check.at_most else '≥'} {as_number(check.limit)} {check.unit}".strip()
            known = isfinite(check.value)
            found = ranged(Estimate(check.value, check.low, check.high)) if known else "never"
            what = check.what + (f" ({check.detail})" if check.detail else "")
            mark = "met" if check.met else "missed"
            rows.append(
                (f"**{bar.name}**" if not i else "", verdict if not i else "", what, found, limit, mark)
            )
    return Table(
        f"Bars — {subject}",
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
        f"perilune against the best of all others, {load}{_arm(f)}",
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
        f"SLO capacity{_arm(f)}",
        ("", f"{_unit(f)}", "perilune / this"),
        rows,
        "The largest session rate with TTFT p90 ≤ 5 s and a median stretch ≤ 1.25, found by bisection per"
        " seed.",
    )


# -- end to end --------------------------------------------------------------------------------------------


def end_to_end(f: Findings, load: str) -> Table:
    scenario = plan.scenario(f.at_r, load)
    points = [Point(scenario, profile) for profile in plan.every(f.at_r)]
    points.sort(key=lambda p: f.estimate(p, "ttft_s.p90").value)
    rows = []
    for point in points:
        c = Cells(f, point)
        rows.append(
            (
                point.profile.policy,
                c("ttft_s.p50"),
                c.ranged("ttft_s.p90"),
                c("ttft_s.p99"),
                *(c(f"tpot_s.{q}", _ms) for q in ("p90", "p99")),
                c.ranged("e2e_s.p90"),
                c.ranged("apc", percent),
                c.ranged("output_tokens_per_s"),
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
        "TTFT p90 s [95 %]",
        "TTFT p99 s",
        "TPOT p90 ms",
        "TPOT p99 ms",
        "E2E p90 s [95 %]",
        "APC [95 %]",
        "output tokens/s [95 %]",
        "worst endpoint s",
        "wall-clock factor",
        "stretch p50",
    )
    return Table(
        f"End to end at {load} = {as_number(scenario.rate)} {_unit(f)}{_arm(f)}",
        header,
        rows,
        f"Lowest TTFT p90 first; {_seeds(f, points[0])}. Ceiling of APC: {percent(any_)} with any session's"
        f" blocks, {percent(intra)} with the session's own. Floor of TTFT p90: {as_seconds(floor)}. *Worst"
        " endpoint* is the highest TTFT p90 of any endpoint.",
    )


MEANS = {
    Deployment.NONE: "engines share no KV, so what an engine does not hold, it computes; this is a pool with"
    " defaults",
    Deployment.HANDOFF: "planned moves copy a session's KV before it switches, and endpoints fetch KV for"
    " requests within `routing.pull` (`mooncake.transfer: handoff`)",
    Deployment.STORE: "all engines read and write one store, at 3 GB/s for each engine (`mooncake.store`)",
    Deployment.BOTH: "planned moves copy a session's KV before it switches, endpoints fetch KV for requests"
    " within `routing.pull`, and all engines share one store of 3 GB/s for each engine",
    Deployment.OFFLOAD: "engines keep KV in 64 GiB of host memory each, and read each other's when a request"
    " needs it (`mooncake.transfer: offload`)",
    Deployment.PULL: "hypothetical: any engine pulls any prefix from any other when a request needs it,"
    " without limits",
}
"""What each arm means, in words."""


def traffic_name(f: Findings) -> str:
    """Return the kind of traffic, with the name of a recorded trace."""
    trace = f.at_r.trace
    return "generated traffic" if trace == AGENTIC else f"recorded traffic {Path(trace).name}"


def subject(f: Findings) -> str:
    """Return arm and traffic, which every title names."""
    return f"arm {f.deployment}, {traffic_name(f)}"


def _arm(f: Findings) -> str:
    """Return the end of a title."""
    return f" — {subject(f)}"


def _unit(f: Findings) -> str:
    return "sessions/s" if f.at_r.trace == AGENTIC else "× recorded speed"


def _seeds(f: Findings, point: Point) -> str:
    seeds = list(f.results(point))
    return f"seeds {seeds[0]}–{seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"


def _ms(value_s: float) -> str:
    return as_number(value_s * 1e3)


def setup(f: Findings) -> Table:
    scenario = plan.scenario(f.at_r)
    rows = [
        ("arm", f"{f.deployment}: {MEANS[f.deployment]}"),
        ("traffic", traffic_name(f)),
        ("endpoints", f"{scenario.endpoints} modelled H20 GPUs, KV pool {H20.kv_pool_tokens:,} tokens each"),
        ("model", "30B mixture of experts with 3B active parameters"),
        ("R", f"{as_number(f.r)} {_unit(f)}"),
        ("loads", ", ".join(f"{name} = {as_number(f.r * times)}" for name, times in LOADS.items())),
    ]
    if scenario.trace == AGENTIC:
        window_s, warmup_s = as_number(scenario.window_s), as_number(scenario.warmup_s)
        rows.append(("duration", f"{window_s} s of traffic, the first {warmup_s} s are not measured"))
    return Table(f"Setup{_arm(f)}", ("", ""), rows)


def traffic(trace: Stats) -> Table:
    """Describe the generated traffic, apart from any arm."""
    rows = [
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
        "Generated traffic",
        ("", ""),
        rows,
        f"{trace.sessions:,} generated sessions of one seed, played to their end. A window cuts sessions off,"
        " so a simulation's own figures are lower.",
    )


def _spread(s: Spread) -> str:
    named = {"mean": s.mean, "p50": s.p50, "p90": s.p90, "p99": s.p99, "max": s.max}
    return ", ".join(f"{name} {as_number(value)}" for name, value in named.items())


# -- parts -------------------------------------------------------------------------------------------------


def migrations(f: Findings) -> Table:
    rows = []
    for load in BAR_LOADS:
        planned = [profile for profile in plan.every(f.at_r) if profile in plan.PLANNED]
        for profile in (OURS, plan.BOTH, Profile("mooncake"), Profile("conductor"), *planned):
            if profile not in plan.every(f.at_r):
                continue
            point = Point(plan.scenario(f.at_r, load), profile)
            c = Cells(f, point)
            rows.append(
                (
                    load,
                    profile.policy,
                    c.ranged("migrations.per_request", percent),
                    c("migrations.per_minute"),
                    c("extra.switched_per_minute"),
                    c("extra.given_up_per_minute"),
                    c("migrations.transfer_s.mean"),
                    c("migrations.transfer_s.p90"),
                    c("extra.moved_tokens.p50"),
                    c.ranged("migrations.accuracy", percent),
                    c("migrations.thrash_rate", percent),
                    c("extra.hot_share", percent),
                    c("extra.turns_left.mean"),
                    c("extra.turns_left.p50"),
                )
            )
    return Table(
        f"Migrations{_arm(f)}",
        (
            "load",
            "policy",
            "turns that moved",
            "per minute",
            "switched after a hand-off, per minute",
            "hand-offs given up, per minute",
            "transfer mean s",
            "transfer p90 s",
            "tokens p50",
            "accuracy, next 3 turns",
            "thrash",
            "turns with a hot host",
            "turns left mean",
            "p50",
        ),
        rows,
        "Turns that *moved* are those that a policy moved, and those that carried a planned move out."
        " Transfers are all transfers of KV between engines, including copies of prefixes (in arm pull,"
        " mooncake and conductor copy prefixes and do not move sessions). Their time includes waiting for the"
        " sender. A host is hot from the T_hot of ear on, 16,384 pending prefill tokens.",
    )


def conductor(f: Findings) -> Table:
    """Show Conductor's experiment: its three variants, and its operational targets."""
    f = f.side
    rows = []
    for name, (deployment, _) in plan.CONDUCTOR.items():
        point = plan.conductor_point(f.at_r, name)
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
                deployment,
                c("ttft_s.mean"),
                c.ranged("ttft_s.p90"),
                *(_target(*figure) for figure in figures),
            )
        )
    return Table(
        "Conductor's experiment, at R",
        (
            "",
            "deployment arm",
            "TTFT mean s",
            "TTFT p90 s",
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
            c = Cells(f, Point(plan.scenario(f.at_r, load), Profile(policy)))
            rows.append(
                (
                    load,
                    policy,
                    *(c(f"extra.request_kv.{q}", percent) for q in ("p50", "p90", "p99")),
                    *(c(f"extra.decode_kv.{q}", percent) for q in ("p50", "p90", "p99")),
                    c("ttft_s.p50"),
                    c("success_rate", percent),
                )
            )
    return Table(
        f"Decode pools: static 4P4D beside perilune{_arm(f)}",
        (
            "load",
            "policy",
            "one request's KV / pool p50",
            "p90",
            "p99",
            "decoding KV / pool p50",
            "p90",
            "p99",
            "TTFT p50 s",
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
        for profile in plan.COUPLED:
            c = Cells(f, Point(plan.gap_scenario(f.at_r, load, gap_s), profile))
            rows.append(
                (
                    load,
                    "as recorded" if gap_s is None else f"{gap_s:g} s",
                    profile.policy,
                    c("turn_s.mean"),
                    c("extra.in_flight"),
                    c.ranged("wall_clock_factor"),
                    c.ranged("stretch.p50"),
                    c.ranged("stretch.p90"),
                )
            )
    return Table(
        f"Chatbot control: the same turns with other gaps{_arm(f)}",
        (
            "load",
            "gap",
            "policy",
            "mean W_turn s",
            "requests in flight",
            "wall-clock factor",
            "stretch p50",
            "stretch p90",
        ),
        rows,
    )


def admission(f: Findings) -> Table:
    rows = []
    for load, on in product(LOADS, (False, True)):
        point = Point(plan.admission_scenario(f.at_r, load, on), OURS)
        c, results = Cells(f, point), f.results(point).values()
        lost = sum(int(r.run.sessions.lost) for r in results if r.run.sessions)
        rows.append(
            (
                load,
                "on" if on else "off",
                c.ranged("output_tokens_per_s"),
                c("goodput_per_s"),
                c("sessions.completion_s.p50"),
                c.ranged("sessions.completion_s.p90"),
                c.ranged("sessions.completion_s.p99"),
                _or_never(f, point, "extra.completion_p90_s"),
                _or_never(f, point, "extra.completion_p99_s"),
                f"{lost:,} of {sum(r.extra.sessions for r in results):,}",
                c.ranged("ttft_s.p90"),
                c.ranged("sessions.later_ttft_s.p90"),
                c("apc", percent),
            )
        )
    return Table(
        f"Session admission, perilune{_arm(f)}",
        (
            "load",
            "admission",
            "output tokens/s [95 %]",
            "goodput /s",
            "completion p50 s",
            "p90 s [95 %]",
            "p99 s [95 %]",
            "p90 s, lost counted",
            "p99 s, lost counted",
            "lost sessions",
            "TTFT p90 s [95 %]",
            "of later turns",
            "APC",
        ),
        rows,
        f"Means over {_seeds(f, point)}. Seconds count from a session's arrival, including its waiting and"
        " its refusals. *Completion* has the sessions that came to their end. In the columns with *lost"
        " counted*, a session whose client gave up (after two refusals) never ends, and *never* means that"
        " the value is infinite with some seed.",
    )


def queues(f: Findings) -> Table:
    f = f.side
    rows = []
    for load, (gateways, tenants) in product(plan.QUEUE_LOADS, plan.QUEUES):
        point = Point(plan.queue_scenario(f.at_r, load, gateways, tenants), OURS)
        found = [one for r in f.results(point).values() for one in r.extra.beginnings]
        kinds: list[tuple[str, Callable[[Kind], bool]]] = [
            ("short", lambda kind: not kind.long),
            ("long", lambda kind: kind.long),
        ]
        if tenants > 1:
            kinds += [
                ("of the largest tenant", lambda kind: kind.largest),
                ("of the others", lambda kind: not kind.largest),
            ]
        for name, is_of in kinds:
            mine = [one for one in found if is_of(one.kind)]
            waited_s = sorted(s for one in mine for s in one.waited_s)
            lost, sessions = sum(one.lost for one in mine), sum(one.lost + len(one.waited_s) for one in mine)
            if not sessions:
                continue
            at_once = sum(s == 0.0 for s in waited_s)
            shown = (
                [as_number(quantile(waited_s, q)) for q in (0.5, 0.9, 0.99, 1.0)] if waited_s else 4 * ["–"]
            )
            rows.append(
                (
                    load,
                    str(gateways),
                    str(tenants),
                    name,
                    f"{sessions:,}",
                    percent(at_once / sessions),
                    *shown,
                    f"{lost:,} ({percent(lost / sessions)})",
                )
            )
    return Table(
        f"Who waits to begin, session admission, perilune{_arm(f)}",
        (
            "load",
            "gateways",
            "tenants",
            "sessions",
            "number",
            "begun at once",
            "begun after p50 s",
            "p90 s",
            "p99 s",
            "longest s",
            "lost",
        ),
        rows,
        f"All sessions of {_seeds(f, point)} together. Seconds count from a session's arrival, including its"
        f" refusals, of sessions that began. *Long* sessions begin with more than {LONG_TOKENS:,} tokens. Of"
        f" four tenants the largest one begins {percent(LARGEST)} of all sessions. Gateways hear one another"
        " at once.",
    )


def _or_never(f: Findings, point: Point, metric: str) -> str:
    """Return the mean of a metric, or "never" if a seed lacks it because it is infinite there."""
    known = f.values(point, metric) if f.has(point, metric) else {}
    return Cells(f, point)(metric) if len(known) == len(f.results(point)) else "never"


def beliefs(f: Findings) -> Table:
    f = f.side
    rows = []
    named = [("as modelled, told 1.3 ×", lambda load: plan.scenario(f.at_r, load))]
    named += [(name, partial(plan.belief, f.at_r, name=name)) for name in plan.BELIEFS]
    for (name, scenario), load in product(named, plan.BELIEF_LOADS):
        points = [Point(scenario(load), profile) for profile in plan.BELIEVERS]
        ours, *others = points
        best = min(others, key=lambda p: f.estimate(p, "ttft_s.p90").value)
        ratio = f"{ranged(f.ratio(ours, best, 'ttft_s.p90'))} × {best.profile}"
        rows.append((name, load, *(ranged(f.estimate(p, "ttft_s.p90")) for p in points), ratio))
    return Table(
        f"TTFT p90 in seconds where engines differ from what the pool says{_arm(f)}",
        ("engines", "load", *(str(profile) for profile in plan.BELIEVERS), "perilune / best other"),
        rows,
        f"{_seeds(f, points[0]).capitalize()}. *Told 2 ×*: the pool says that prefill takes twice as long as"
        " it does. *Unequal 2*: engines' compute times differ by up to a factor of 2 in both directions, and"
        " the pool says that they are equal. All rows but those of the first kind have noise on each prefill"
        " step (standard deviation of its logarithm 0.2, in the last 0.3). The gateway does not know how long"
        " answers will be.",
    )


def ablation(f: Findings) -> Table:
    rows = [
        (
            name,
            *(
                Cells(f, Point(plan.scenario(f.at_r, load), profile)).ranged("ttft_s.p90")
                for load in BAR_LOADS
            ),
        )
        for name, profile in plan.ABLATION.items()
    ]
    return Table(f"Ablation, TTFT p90 in seconds{_arm(f)}", ("", *BAR_LOADS), rows)
