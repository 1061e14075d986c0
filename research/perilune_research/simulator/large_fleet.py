"""Reports what decisions cost in a large fleet, and how often a shortlist gives the same choice as all
endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from perilune_lab.quantiles import quantile
from perilune_lab.terminal.formats import as_percent
from perilune_research.simulator.harness import Played

DECISION_P99_S = 0.002
"""Highest p99 of the CPU seconds of a decision."""
AGREED = 0.995
"""Lowest share of audited choices that must equal the choice from all endpoints."""


def lines(played: Sequence[Played]) -> Iterator[str]:
    """Yield a line per policy and a line about memory for a large fleet; nothing for a small one."""
    for policy in dict.fromkeys(row.run.policy for row in played):
        seen = [row.seen for row in played if row.run.policy == policy]
        took_s = sorted(chain.from_iterable(each.decision_s for each in seen))
        if not took_s:
            continue
        p99_s = quantile(took_s, 0.99)
        line = f"{policy}: a decision takes {quantile(took_s, 0.5) * 1e3:.2f} ms of CPU (p50),"
        line += (
            f" {p99_s * 1e3:.2f} ms (p99, bar {DECISION_P99_S * 1e3:g} ms: {_met(p99_s <= DECISION_P99_S)})"
        )
        if audited := sum(each.audited for each in seen):
            agreed = sum(each.agreed for each in seen) / audited
            line += f"; {as_percent(agreed, 2)} of {audited} audited choices are the same from all endpoints"
            line += f" (bar {AGREED:.1%}: {_met(agreed >= AGREED)})"
        yield line
    if any(row.seen.decision_s for row in played):
        yield f"largest process: {max(row.peak_bytes for row in played) / 2**20:,.0f} MiB of memory"


def _met(holds: bool) -> str:
    return "met" if holds else "MISSED"
