"""Tables and figures of simulations. All of them say that they are simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType
from rich.box import SIMPLE_HEAD
from rich.table import Table

from perilune_lab.report import Run
from perilune_lab.report.columns import cell
from perilune_lab.terminal.formats import as_number, as_percent, as_seconds

_COLUMNS = (
    "policy",
    "TTFT p50",
    "p90 [95 %]",
    "p99",
    "TPOT p90",
    "E2E p90",
    "APC",
    "worst endpoint",
    "interference",
    "wall clock",
    "stretch",
    "regret",
    "moves",
    "ok",
    "TTFT p90 of all",
)
"""The last two are for tables with a turn that was not answered."""
_FIRST_TO_GO = (
    *("regret", "stretch", "wall clock", "interference", "worst endpoint", "p99", "TPOT p90"),
    *("moves", "TTFT p50", "APC"),
)
"""The columns that a narrow terminal does not show, in the order in which they go."""
_GAP = 3
"""Characters between two columns; both edges together have one more."""


def tables(runs: Sequence[Run], unit: str, deployment: str, width: int) -> Iterable[Table]:
    """Yield one table per rate, with a row per policy, lowest TTFT p90 first, with as many columns as fit
    into `width` characters. `unit`: that of the rate. `deployment`: what it is called."""
    for rate in dict.fromkeys(run.rate for run in runs):
        mine = [run for run in runs if run.rate == rate]
        seeds = mine[0].seeds or ()
        ceiling = mine[0].apc_ceiling
        title = "SIMULATED · " + (f"{deployment} · " if deployment else "")
        title += f"{rate:.4g} {unit} · {len(seeds)} seed{'s' * (len(seeds) != 1)}"
        if ceiling:
            title += f" · APC ceiling {as_percent(ceiling.any)} any,"
            title += f" {as_percent(ceiling.intra_session)} intra-session"
        if floor := mine[0].floor_ttft_s:
            title += f" · floor of TTFT p90 {as_seconds(floor.p90)}"
        mine.sort(key=lambda run: run.ttft_s.p90 if run.ttft_s else float("inf"))
        all_answered = all(run.success_rate == 1 for run in mine)
        columns = {
            name: cells
            for name, *cells in zip(_COLUMNS, *map(_cells, mine), strict=True)
            if not all_answered or name not in _COLUMNS[-2:]
        }
        left_out = _narrowed(columns, width)
        grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, caption_justify="left")
        if left_out:
            grid.caption = f"too narrow for {', '.join(left_out)}; --json has all figures"
        for name in columns:
            grid.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
        for row in zip(*columns.values(), strict=True):
            grid.add_row(*row)
        yield grid


def _narrowed(columns: dict[str, list[str]], width: int) -> list[str]:
    """Remove columns until the others fit into so many characters; return the names of the removed ones."""
    left_out = []
    for name in _FIRST_TO_GO:
        needed = sum(max(map(len, (title, *cells))) + _GAP for title, cells in columns.items())
        if needed + 1 <= width:
            break
        del columns[name]
        left_out.append(name)
    return left_out


def _cells(run: Run) -> list[str]:
    ttft, tpot, e2e = run.ttft_s or None, run.tpot_s or None, run.e2e_s or None
    return [
        run.policy,
        as_seconds(ttft.p50) if ttft else "",
        _with_interval(ttft.p90, run) if ttft else "",
        as_seconds(ttft.p99) if ttft else "",
        as_seconds(tpot.p90) if tpot else "",
        as_seconds(e2e.p90) if e2e else "",
        "" if isinstance(run.apc, UnsetType) else as_percent(run.apc),
        as_seconds(run.hotspot.ttft_p90_max_s) if run.hotspot else "",
        cell(run.interference, "{:.2f}"),
        cell(run.wall_clock_factor, "{:.2f}"),
        cell(run.stretch.p50 if run.stretch else UNSET, "{:.2f}"),
        cell(run.regret, "{:.2f}"),
        str(run.migrations.total) if run.migrations else "",
        as_percent(run.success_rate) if run.success_rate < 1 else "",
        as_seconds(run.all_ttft_s.p90) if run.all_ttft_s and run.all_ttft_s.p90 else "never",
    ]


def _with_interval(p90_s: float, run: Run) -> str:
    """Return TTFT p90 and its interval, in the same unit."""
    text = as_seconds(p90_s)
    if not run.intervals or "ttft_s.p90" not in run.intervals:
        return text
    scale = 1e3 if text.endswith("ms") else 1.0
    low, high = (as_number(scale * bound) for bound in run.intervals["ttft_s.p90"])
    return f"{text} [{low}–{high}]"


_FIGURES = (
    ("TTFT p90 (s)", "ttft_s.p90", True),
    ("APC", "apc", False),
    ("worst endpoint, TTFT p90 (s)", "hotspot.ttft_p90_max_s", True),
    ("wall-clock factor", "wall_clock_factor", False),
)


def draw(runs: Sequence[Run], path: Path, unit: str, title: str) -> None:
    """Draw four panels with lines over the rate and their 95 % intervals as bands; for a single rate, bars.
    Raises OSError if it cannot write the file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(run.policy for run in runs))
    rates = sorted({float(run.rate) for run in runs if run.rate})
    figure = Figure(figsize=(13, 8), layout="constrained")
    for axes, (label, name, logarithmic) in zip(figure.subplots(2, 2).flat, _FIGURES, strict=True):
        for i, policy in enumerate(policies):
            points = [p for run in runs if run.policy == policy for p in [_point(run, name)] if p]
            style = {"color": f"C{i % 10}", "label": policy}
            if len(rates) == 1:
                for _, y, low, high in points:
                    axes.bar(i, y, yerr=[[max(0.0, y - low)], [max(0.0, high - y)]], **style)
            else:
                xs, ys, lows, highs = zip(*sorted(points), strict=True) if points else ((), (), (), ())
                axes.plot(xs, ys, marker="o", linestyle="-" if i < 10 else "--", **style)
                axes.fill_between(xs, lows, highs, alpha=0.15, color=f"C{i % 10}")
        axes.set_title(label)
        axes.grid(alpha=0.3)
        if logarithmic:
            axes.set_yscale("log")
        if len(rates) == 1:
            axes.set_xticks(range(len(policies)), policies, rotation=60, ha="right")
        else:
            axes.set_xlabel(unit)
    if len(rates) > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(f"SIMULATED — {title}")
    figure.savefig(path, dpi=110)


def _point(run: Run, name: str) -> tuple[float, float, float, float] | None:
    """Return (rate, value, low, high) of a figure such as `ttft_s.p90`; None if the run does not have it."""
    value: object = run
    for part in name.split("."):
        value = getattr(value, part, UNSET)
    if not isinstance(value, float) or not run.rate:
        return None
    low, high = run.intervals.get(name, (value, value)) if run.intervals else (value, value)
    return float(run.rate), value, low, high
