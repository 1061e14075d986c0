"""Runs side by side as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType
from rich.table import Table

from perilune_lab.report.document import Report, Run
from perilune_lab.terminal.formats import as_percent, as_seconds


def table(report: Report, title: str = "") -> Table:
    """Return runs side by side: a row per metric, a column per policy; three policies fit into 80 columns.
    Leave out metrics that no run knows."""
    title = title or f"{report.trace.get('name', 'trace')} · {report.mode}"
    if report.simulated:
        title += f" · simulated, engine seconds (time scale {report.time_scale:g})"
    grid = Table(title=title, title_justify="left", min_width=len(title))
    grid.add_column("")
    for each in report.runs:
        grid.add_column(each.policy, justify="right")
    for name, cells in _rows(report.runs):
        if any(cells):
            grid.add_row(name, *cells)
    return grid


def _rows(runs: Sequence[Run]) -> Iterable[tuple[str, list[str]]]:
    yield "requests", [str(r.requests) for r in runs]
    yield "succeeded", [as_percent(r.success_rate) for r in runs]
    yield "rejected (429)", [str(r.rejected) if r.rejected else "" for r in runs]
    for name in ("prompt", "cached", "completion"):
        yield f"{name} tokens", [cell(getattr(r.tokens, name, UNSET), "{:,}") for r in runs]
    yield "APC", ["" if isinstance(r.apc, UnsetType) else as_percent(r.apc) for r in runs]
    yield (
        "ceiling any / intra",
        [
            " / ".join(map(as_percent, (r.apc_ceiling.any, r.apc_ceiling.intra_session)))
            if r.apc_ceiling
            else ""
            for r in runs
        ],
    )
    for name in ("ttft_s", "tpot_s", "e2e_s", "turn_s"):
        for q in ("p50", "p90", "p99"):
            label = f"{name.removesuffix('_s').upper() if name != 'turn_s' else 'turn'} {q}"
            yield label, [_time(getattr(getattr(r, name), q, UNSET)) for r in runs]
    yield "output tokens/s", [cell(r.output_tokens_per_s, "{:.0f}") for r in runs]
    yield (
        "hotspot median / max",
        [
            f"{_time(r.hotspot.ttft_p90_median_s)} / {_time(r.hotspot.ttft_p90_max_s)}" if r.hotspot else ""
            for r in runs
        ],
    )
    yield "node-load variance", [cell(r.node_load_variance, "{:.1f}") for r in runs]
    yield "interference", [cell(r.interference, "{:.2f}") for r in runs]
    yield "wall-clock factor", [cell(r.wall_clock_factor, "{:.2f}") for r in runs]
    yield (
        "stretch p50 / p90",
        [f"{r.stretch.p50:.2f} / {r.stretch.p90:.2f}" if r.stretch else "" for r in runs],
    )
    yield "migrations", [str(r.migrations.total) if r.migrations else "" for r in runs]
    yield (
        "scheduling p50 / p99",
        [
            f"{r.scheduling_ms.p50:.2f} / {r.scheduling_ms.p99:.2f} ms" if r.scheduling_ms else ""
            for r in runs
        ],
    )


def cell(value: float | UnsetType, form: str) -> str:
    """Return a cell's text; empty if the value is unknown."""
    return "" if isinstance(value, UnsetType) else form.format(value)


def _time(seconds: float | UnsetType) -> str:
    return "" if isinstance(seconds, UnsetType) else as_seconds(seconds)
