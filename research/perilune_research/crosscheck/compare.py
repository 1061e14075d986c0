"""Compares the live and simulated figures of each policy, and gives three verdicts over all policies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import inf, sqrt

import msgspec
from rich.table import Table

from perilune_lab.report import Run
from perilune_lab.terminal.formats import as_percent

TTFT_WITHIN = 0.20
"""Share by which simulated TTFT p90 may differ from the live one."""
APC_WITHIN = 0.02
"""Difference allowed between simulated and live hit rate (0–1), chance aside."""
CHANCE = 2.0
"""Standard deviations by which the hit rate of a live play, or the mean of several, may differ from the
simulated mean by chance."""
TIE = 0.10
"""Policies whose TTFT p90 differ by a smaller share count as equal."""
WAITED = 0.25
"""Time that all processes waited for a CPU, per request, as a share of TTFT p50. Above this, live times
depend too much on this machine."""


class Simulated(msgspec.Struct, frozen=True):
    """Means over simulated plays; a spread is their standard deviation."""

    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p90_spread_s: float
    apc: float
    apc_spread: float


class Pair(msgspec.Struct, frozen=True):
    """One policy, live and simulated."""

    live: Run
    simulated: Simulated
    waited_s: float
    """Seconds that all processes waited for a CPU, per live request."""
    plays: int = 1
    """Number of live plays, whose results are pooled."""

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self.live.policy

    @property
    def ttft_off(self) -> float:
        """Simulated / live TTFT p90, minus 1."""
        return self.simulated.ttft_p90_s / p90_s(self.live) - 1.0

    @property
    def apc_off(self) -> float:
        """Simulated minus live hit rate, 0–1."""
        return self.simulated.apc - (self.live.apc or 0.0)

    @property
    def apc_beyond_chance(self) -> float:
        """The part of `apc_off` that chance in the live plays does not explain, ≥ 0."""
        return max(0.0, abs(self.apc_off) - CHANCE * self.simulated.apc_spread / sqrt(self.plays))

    @property
    def agrees(self) -> bool:
        """Whether live and simulated figures agree."""
        return abs(self.ttft_off) <= TTFT_WITHIN and self.apc_beyond_chance <= APC_WITHIN

    @property
    def disturbed(self) -> bool:
        """Whether the machine was too busy to judge by the live times."""
        return self.waited_s > WAITED * (self.live.ttft_s.p50 if self.live.ttft_s else 0.0)


def p90_s(run: Run) -> float:
    """Return TTFT p90 in seconds; inf if nothing was measured."""
    return run.ttft_s.p90 if run.ttft_s else inf


def swapped(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Return the pairs of policies whose order is clear both live and simulated, and not the same."""
    found = []
    for a, b in combinations(pairs, 2):
        live = p90_s(a.live) / p90_s(b.live)
        simulated = a.simulated.ttft_p90_s / b.simulated.ttft_p90_s
        clear = all(not 1 - TIE < ratio < 1 / (1 - TIE) for ratio in (live, simulated))
        if clear and (live < 1) != (simulated < 1):
            found.append((a.policy, b.policy))
    return found


def table(pairs: Sequence[Pair]) -> Table:
    """Return a table with a row per policy, lowest live TTFT p90 first."""
    grid = Table(title="live: real Envoy and gateway, simulated engines in real time · simulated: everything")
    grid.add_column("policy", no_wrap=True)
    for name in (
        "TTFT p50 live",
        "simulated",
        "p90 live",
        "simulated",
        "off",
        "APC live",
        "simulated",
        "off",
    ):
        grid.add_column(name, justify="right", no_wrap=True)
    for pair in sorted(pairs, key=lambda pair: p90_s(pair.live)):
        live, simulated = pair.live, pair.simulated
        grid.add_row(
            pair.policy + ("" if pair.agrees else " (!)"),
            f"{live.ttft_s.p50 * 1e3:,.0f} ms" if live.ttft_s else "–",
            f"{simulated.ttft_p50_s * 1e3:,.0f} ms",
            f"{p90_s(live) * 1e3:,.0f} ms",
            f"{simulated.ttft_p90_s * 1e3:,.0f} ± {simulated.ttft_p90_spread_s * 1e3:,.0f} ms",
            f"{pair.ttft_off:+.0%}",
            as_percent(live.apc or 0),
            f"{as_percent(simulated.apc)} ± {simulated.apc_spread * 100:.1f}",
            f"{pair.apc_off * 100:+.1f}",
        )
    return grid


def verdicts(pairs: Sequence[Pair]) -> list[tuple[bool, str]]:
    """Return the three verdicts: (whether it holds, a sentence about it)."""
    ttft = max(pairs, key=lambda pair: abs(pair.ttft_off))
    apc = max(pairs, key=lambda pair: (pair.apc_beyond_chance, abs(pair.apc_off)))
    wrong = swapped(pairs)
    order = ", ".join(f"{a} and {b}" for a, b in wrong) or "none"
    return [
        (
            abs(ttft.ttft_off) <= TTFT_WITHIN,
            f"TTFT p90 within {TTFT_WITHIN:.0%}: largest difference {ttft.ttft_off:+.0%} ({ttft.policy})",
        ),
        (
            apc.apc_beyond_chance <= APC_WITHIN,
            f"hit rate within {APC_WITHIN * 100:.0f} points beyond {CHANCE:.0f} standard deviations:"
            f" largest difference {apc.apc_off * 100:+.1f} ± {apc.simulated.apc_spread * 100:.1f}"
            f" ({apc.policy})",
        ),
        (not wrong, f"same order of policies: swapped: {order} (less than {TIE:.0%} apart counts as equal)"),
    ]
