"""Draws a report: TTFT distribution, APC next to TTFT p90, and every endpoint, one colour per policy.

Runs without a display. The import takes half a second, so import it only to draw a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from msgspec import UnsetType

from perilune_lab.report import Report, Run

_SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def draw(report: Report, path: Path, ttft_s: Mapping[str, Sequence[float]] | None = None) -> None:
    """Write a PNG (or what the suffix says). `ttft_s`: engine seconds per policy, for the whole
    distribution; without, its quantiles are drawn. Raises OSError."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    distribution, bars, endpoints = figure.subplots(1, 3)
    _distribution(distribution, report.runs, ttft_s or {})
    _bars(bars, report.runs)
    _endpoints(endpoints, report.runs)
    figure.suptitle(_title(report))
    figure.savefig(path, dpi=120)


def _title(report: Report) -> str:
    name = f"{report.trace.get('name', 'trace')}, mode {report.mode}"
    if isinstance(report.endpoints, int):
        name += f", {report.endpoints} endpoints"
    return name + (" — SIMULATED engines, engine seconds" if report.simulated else "")


def _distribution(axes: Axes, runs: Sequence[Run], ttft_s: Mapping[str, Sequence[float]]) -> None:
    for i, run in enumerate(runs):
        samples = sorted(ttft_s.get(run.policy, ()))
        if samples:
            shares = [(k + 1) / len(samples) for k in range(len(samples))]
            axes.step(samples, shares, where="post", label=run.policy, color=f"C{i}")
        elif not isinstance(run.ttft_s, UnsetType):
            points = [getattr(run.ttft_s, name) for name in _SHARES]
            axes.plot(points, list(_SHARES.values()), marker="o", label=run.policy, color=f"C{i}")
    axes.set(title="TTFT", xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _bars(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw APC on the left axis and TTFT p90 on the right one."""
    right = axes.twinx()
    for i, run in enumerate(runs):
        if not isinstance(run.apc, UnsetType):
            axes.bar(i - 0.2, run.apc, 0.38, color=f"C{i}")
        if not isinstance(run.ttft_s, UnsetType):
            right.bar(i + 0.2, run.ttft_s.p90, 0.38, color=f"C{i}", alpha=0.45, hatch="//")
    axes.set(title="APC (solid), TTFT p90 (hatched)", ylabel="share of prompt tokens", ylim=(0, 1))
    right.set_ylabel("seconds")
    _name(axes, range(len(runs)), [run.policy for run in runs])


def _endpoints(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw TTFT p90 of every endpoint, grouped by policy, slowest first."""
    at = 0
    ticks, names = [], []
    for i, run in enumerate(runs):
        rows = () if isinstance(run.per_endpoint, UnsetType) else run.per_endpoint
        heights = sorted(
            (row.ttft_s.p90 for row in rows if not isinstance(row.ttft_s, UnsetType)), reverse=True
        )
        axes.bar(range(at, at + len(heights)), heights, color=f"C{i}")
        if heights:
            ticks.append(at + (len(heights) - 1) / 2)
            names.append(run.policy)
        at += len(heights) + 1
    axes.set(title="TTFT p90 per endpoint", ylabel="seconds")
    _name(axes, ticks, names)


def _name(axes: Axes, ticks: Sequence[float], names: Sequence[str]) -> None:
    """Write the policies below their bars, slanted so that long names do not run into each other."""
    axes.set_xticks(ticks, names, rotation=20, ha="right", rotation_mode="anchor")
