"""The findings in words. Every sentence is built from the figures, so it changes or turns round with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perilune_lab.formats import as_number, as_seconds
from perilune_research.evaluate import plan
from perilune_research.evaluate.bars import Bar, Verdict, rivals
from perilune_research.evaluate.cells import Arm
from perilune_research.evaluate.figures.f8 import amplification, measured_amplification
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import ABLATION, BAR_LOADS, LOADS, OURS, STRONGEST, Point
from perilune_research.evaluate.table import Table, percent, ranged
from perilune_research.evaluate.thresholds import choices

_P90 = "ttft_s.p90"


def found(f: Findings, judged: Sequence[Bar]) -> str:
    lines = [
        "## What was found\n",
        *_bullets(_ours(f, judged)),
        "",
        _against(f).markdown(),
        "### Where the results differ from published ones\n",
    ]
    return "\n".join([*lines, *_bullets(_departures(f))]) + "\n"


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def compared(ratio: Estimate, lower: str = "lower", higher: str = "higher") -> str:
    """A phrase such as `12 % lower`, or that these seeds do not distinguish the two."""
    if ratio.low <= 1.0 <= ratio.high:
        return f"not distinguishable with these seeds (ratio {as_number(ratio.value)})"
    if ratio.value < 1:
        return f"{percent(1 - ratio.value)} {lower}"
    if ratio.value >= 2:
        return f"{as_number(ratio.value)} times {higher}"
    return f"{percent(ratio.value - 1)} {higher}"


# -- ours --------------------------------------------------------------------------------------------------


def _ours(f: Findings, judged: Sequence[Bar]) -> Iterable[str]:
    met = [bar.name for bar in judged if bar.verdict is Verdict.MET]
    missed = [bar.name for bar in judged if bar.verdict is Verdict.MISSED]
    yield f"Bars met: {', '.join(met) or 'none'}. Missed: {', '.join(missed) or 'none'}."
    point = Point(plan.scenario(f.at_r), OURS)
    share = f.ratio(point, point, "apc", "apc_ceiling.intra_session").value
    regret = f.estimate(point, "regret").value
    yield (
        f"At R, the TTFT p90 of perilune is {as_seconds(f.estimate(point, _P90).value)}, which is"
        f" {as_number(regret)} times the floor. Its APC is {percent(share)} of the intra-session ceiling."
    )
    for load in BAR_LOADS:
        yield _behind(f, load)
    yield _overload(f)
    yield _behind(f, plan.OVERLOAD)
    yield _stores(f)
    if len(f.capacities) > 1:
        yield _capacity(f)


def _against(f: Findings) -> Table:
    """Sentences about TTFT p90 of our policy against that of others, by load."""
    rows = []
    for name in ("ear", "mooncake", "lmetric_plus_one", "lmetric", "sticky"):
        scenarios = [plan.scenario(f.at_r, load) for load in BAR_LOADS]
        ratios = [f.ratio(Point(s, OURS), Point(s, Arm(name)), _P90) for s in scenarios]
        rows.append((name, *map(compared, ratios)))
    return Table("TTFT p90 of perilune against other policies", ("policy", *BAR_LOADS), rows)


def _behind(f: Findings, load: str) -> str:
    """Metrics in which another policy has the better mean, even if the seeds do not distinguish the two."""
    named = [
        f"{row.metric.name} ({row.best}, {percent(row.worse.value)}"
        + (")" if row.worse.low > 0 else ", within the interval)")
        for row in rivals(f, load)
        if row.worse.value > 0
    ]
    if not named:
        return f"At {load}, no policy is better in any of the ten metrics."
    return f"At {load}, other policies are better in {', '.join(named)}."


def _stores(f: Findings) -> str:
    ours, *others = plan.stores(f.at_r)
    versus = [f"against {point.arm} {compared(f.ratio(ours, point, _P90))}" for point in others]
    return (
        f"At R with a shared store of {plan.STORE_BYTES_PER_S / 1e9:g} GB/s, the TTFT p90 of perilune is"
        f" {as_seconds(f.estimate(ours, _P90).value)}; compared with other policies that also have one:"
        f" {'; '.join(versus)}."
    )


def _overload(f: Findings) -> str:
    scenario = plan.scenario(f.at_r, plan.OVERLOAD)
    points = sorted((Point(scenario, arm) for arm in plan.EVERY), key=lambda p: f.estimate(p, _P90).value)
    best, place = points[0], [p.arm for p in points].index(OURS) + 1
    ours = f"; perilune is number {place} with {as_seconds(f.estimate(points[place - 1], _P90).value)}"
    return (
        f"Past saturation ({plan.OVERLOAD}) all queues grow; {best.arm.policy} has the lowest TTFT p90"
        f" ({as_seconds(f.estimate(best, _P90).value)}){ours if place > 1 else ''}."
    )


def _capacity(f: Findings) -> str:
    by_rate = sorted(f.capacities.items(), key=lambda row: -row[1].value)
    named = "; ".join(
        f"{name.replace(', store', ' with a store')} {ranged(found)}" for name, found in by_rate
    )
    return f"Sessions per second within the SLO, highest first: {named}."


# -- departures --------------------------------------------------------------------------------------------


def _departures(f: Findings) -> Iterable[str]:
    scenario = plan.scenario(f.at_r)
    plus, raw, ear = (Point(scenario, arm) for arm in (STRONGEST, Arm("lmetric"), Arm("ear")))
    calm = plan.scenario(f.at_r, "R/2")
    at_half = compared(f.ratio(Point(calm, STRONGEST), Point(calm, raw.arm), _P90))
    yield (
        "LMetric as published multiplies by the batch size, which is 0 on an idle endpoint. With batch size"
        f" + 1 (`lmetric_plus_one`) its TTFT p90 is {at_half} at R/2, and at R"
        f" {compared(f.ratio(plus, raw, _P90))}. At R, the TTFT p90 of ear against that stronger form is"
        f" {compared(f.ratio(ear, plus, _P90))}."
    )
    yield _legacy(f)
    yield _ablation(f)
    for choice in choices(f):
        yield f"{choice.name}: {as_number(choice.chosen)}, {choice.reason}."
    yield _conductor(f)
    yield _decode_pool(f)
    yield _think_time(f)
    yield _theory(f)


def _legacy(f: Findings) -> str:
    points = [Point(plan.scenario(f.at_r), arm) for arm in plan.EVERY]
    best = min(points, key=lambda p: f.estimate(p, "hotspot.legacy_index").value)
    worst_s = sorted(f.estimate(p, "hotspot.ttft_p90_max_s").value for p in points)
    if best.arm == min(points, key=lambda p: f.estimate(p, "hotspot.ttft_p90_max_s").value).arm:
        return f"The hotspot index max / median agrees with TTFT here: {best.arm.policy} is the best at R."
    mine_s = f.estimate(best, "hotspot.ttft_p90_max_s").value
    index = as_number(f.estimate(best, "hotspot.legacy_index").value)
    return (
        f"The hotspot index max / median misleads: it ranks {best.arm.policy} first at R ({index}), although"
        f" the worst endpoint of {best.arm.policy} has a TTFT p90 of {as_seconds(mine_s)}, number"
        f" {worst_s.index(mine_s) + 1} of {len(points)}."
    )


def _ablation(f: Findings) -> str:
    scenario = plan.scenario(f.at_r)
    values = [
        f"{name} {as_seconds(f.estimate(Point(scenario, arm), _P90).value)}" for name, arm in ABLATION.items()
    ]
    return f"Ablation, TTFT p90 at R: {', '.join(values)}."


def _conductor(f: Findings) -> str:
    g, scenario = f.side, plan.scenario(f.at_r)
    none, aware, hot = (Point(scenario, arm) for arm in plan.CONDUCTOR.values())
    return (
        "Conductor published a mean prefill latency 37 % lower with cache awareness, and 7 % lower again with"
        " hot migration. Here the mean TTFT at R with cache awareness is"
        f" {compared(g.ratio(aware, none, 'ttft_s.mean'))}; hot migration on top of it makes it"
        f" {compared(g.ratio(hot, aware, 'ttft_s.mean'))}."
    )


def _decode_pool(f: Findings) -> str:
    point = Point(plan.scenario(f.at_r), Arm("static_pd"))
    p90, p99 = (f.estimate(point, f"extra.request_kv.{q}").value for q in ("p90", "p99"))
    return (
        "Static 4P4D fails here because four endpoints do all the prefill (TTFT p50"
        f" {as_seconds(f.estimate(point, 'ttft_s.p50').value)} at R), not because decode pools overflow: one"
        f" request fills {percent(p90)} of a pool at p90 and {percent(p99)} at p99, where 69 and 138 % were"
        " published."
    )


def _think_time(f: Findings) -> str:
    g = f.side
    parts, why = [], ""
    for load in plan.GAP_LOADS:
        at_once, pause = (Point(plan.gap_scenario(f.at_r, load, gap_s), STRONGEST) for gap_s in (0.0, 30.0))
        turn = compared(g.ratio(pause, at_once, "turn_s.mean"), "faster", "slower")
        if g.ratio(pause, at_once, "turn_s.mean").low > 1:
            why = (
                " A pausing session keeps its KV, so think time shortens the queues but enlarges the working"
                " set of the caches."
            )
        wall = f"{as_number(g.estimate(pause, 'wall_clock_factor').value)} against"
        parts.append(
            f"at {load} turns are {turn} and the wall-clock factor is {wall}"
            f" {as_number(g.estimate(at_once, 'wall_clock_factor').value)}"
        )
    return (
        "Think time is published as what breaks the feedback loop. With 30 s between the same turns instead"
        f" of none (lmetric_plus_one): {'; '.join(parts)}.{why}"
    )


def _theory(f: Findings) -> str:
    g = f.side
    parts = []
    for load in BAR_LOADS:
        i = list(LOADS).index(load)
        theory = amplification(g, [Point(plan.scenario(f.at_r, name), OURS) for name in LOADS])[i]
        parts.append(f"{load} {as_number(measured_amplification(g, load, OURS))} ({_finite(theory)})")
    return (
        "Dispatch coupling: relative growth of turns in flight per relative slowdown of the engines, for"
        f" perilune, measured (and predicted by 1 / (1 − ΛN W′)): {', '.join(parts)}."
    )


def _finite(value: float) -> str:
    return as_number(value) if value < 1e6 else "diverges"
