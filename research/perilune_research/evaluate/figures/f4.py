"""f4: three baselines, of which each fails in another dimension: locality, balance, capacity."""

from __future__ import annotations

from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Profile
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas, colour, horizontal, row
from perilune_research.evaluate.findings import Estimate
from perilune_research.evaluate.plan import OURS, Point

_BASELINES = (Profile("lmetric"), Profile("sticky"), Profile("static_pd"), OURS)
_METRICS = {
    "apc": "apc",
    "ceiling": "apc_ceiling.intra_session",
    "worst_endpoint_ttft_p90_s": "hotspot.ttft_p90_max_s",
    "ttft_p50_s": "ttft_s.p50",
}


def _draw(context: Context) -> Drawn:
    f = context.findings
    scenario = plan.scenario(f.at_r)
    points = [Point(scenario, profile) for profile in _BASELINES]
    names = [p.profile.policy for p in points]
    colours = [colour(name) for name in names]
    figure = canvas(10.5, 2.9)
    locality, balance, capacity = figure.subplots(1, 3, sharey=True)
    lost = [_lost(f.ratio(p, p, "apc", _METRICS["ceiling"])) for p in points]
    horizontal(locality, names, lost, colours, "{:.0%}")
    locality.set(
        title="locality: possible hits that were lost",
        xlabel="1 − APC / intra-session ceiling",
        xlim=(0, 1.1),
    )
    worst = [f.estimate(p, _METRICS["worst_endpoint_ttft_p90_s"]) for p in points]
    horizontal(balance, names, worst, colours, "{:.3g} s")
    balance.set(title="balance: the worst endpoint", xlabel="TTFT p90 there, s (log)", xscale="log")
    median = [f.estimate(p, _METRICS["ttft_p50_s"]) for p in points]
    horizontal(capacity, names, median, colours, "{:.3g} s")
    capacity.set(title="capacity: the median request waits", xlabel="TTFT p50, s (log)", xscale="log")
    for axes in (balance, capacity):
        low, high = axes.get_xlim()
        axes.set_xlim(low / 1.5, high * 3)
    return Drawn(figure, {"rows": [row(f, p, _METRICS, policy=p.profile.policy) for p in points]})


def _lost(kept: Estimate) -> Estimate:
    return Estimate(1 - kept.value, 1 - kept.high, 1 - kept.low)


F4 = Figure(
    "Three baselines, three ways to fail (at R)",
    "lmetric balances load and loses cache hits. sticky binds sessions to hosts, and a crowded host evicts KV"
    " that its sessions need again. The prefill endpoints of static 4P4D limit the whole system. perilune is"
    " shown for comparison.",
    _draw,
)
