"""`python -m perilune_research simulate`: policies side by side on modelled engines, the same seeds for all.

Steps: find R where a rate is given in it → play every (rate, seed) with every policy → JSON and a figure if
requested, then a table per rate with 95 % intervals over seeds. Nothing printed is a measurement of hardware.

Exit status: 0; 2 for a wrong call or trace, or a file that cannot be written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from perilune_api.pool import SpecError
from perilune_lab import report
from perilune_lab.console import Console
from perilune_lab.exits import wrong_call
from perilune_lab.traces.source import AGENTIC
from perilune_research.simulator import large_fleet, output
from perilune_research.simulator.harness import Comparison, NoRateError, play, pooled, r_of
from perilune_research.simulator.options import Options, parse, times_r

_SEEDS_FOR_R = 8
_MOST_SESSIONS = 1_000_000
"""Upper limit; more would take days."""


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        out = Console(width=None if sys.stdout.isatty() else 200)
        return run(options, out, Console(stderr=True, soft_wrap=True))
    except SpecError as error:
        return wrong_call("python -m perilune_research simulate", error)


def run(options: Options, out: Console, err: Console) -> int:
    """Simulates, writes the files and prints the tables. Raises SpecError."""
    comparison, began = options.comparison, time.perf_counter()
    mode = comparison.load.mode
    rates = _rates(options, err)
    pieces = len(rates) * len(options.seeds)
    err.print(
        f"simulating {_some(len(comparison.policies), 'policy', 'policies')} × {_some(len(rates), 'rate')} ×"
        f" {_some(len(options.seeds), 'seed')} on {comparison.fleet.endpoints} modelled H20, mode {mode},"
        f" {_some(options.jobs, 'process', 'processes')}",
        highlight=False,
    )
    rows = []
    for i, piece in enumerate(play(comparison, rates, options.seeds, options.jobs), 1):
        rows += piece
        simulated_s, wall_s = sum(p.simulated_s for p in piece), sum(p.wall_s for p in piece)
        err.print(
            f"{i}/{pieces}: rate {piece[0].rate:.4g}, seed {piece[0].seed}, {piece[0].run.requests} requests,"
            f" {simulated_s / max(wall_s, 1e-9):,.0f} × real time per core",
            highlight=False,
        )
    if not any(row.run.requests for row in rows):
        raise SpecError("no request falls into what is measured - at `--rates`, `--window`")
    runs = pooled(comparison, rows)
    took_s = time.perf_counter() - began
    try:
        _write(options, runs, err)
    finally:  # the tables come all the same
        for grid in output.tables(runs, _unit(comparison)):
            out.print(grid)
        simulated_s, wall_s = sum(p.simulated_s for p in rows), sum(p.wall_s for p in rows)
        requests = sum(p.run.requests for p in rows)
        out.print(
            f"simulated; mode {mode}; {simulated_s / max(wall_s, 1e-9):,.0f} × real time per core,"
            f" {requests / max(wall_s, 1e-9):,.0f} requests per second, {took_s:.1f} s in all",
            highlight=False,
        )
        for line in large_fleet.lines(rows):
            out.print(line, highlight=False)
    return 0


def _write(options: Options, runs: Sequence[report.Run], err: Console) -> None:
    """Writes report and figure, if requested. Raises SpecError."""
    comparison = options.comparison
    document = report.Report(
        simulated=True,
        mode=comparison.load.mode,
        endpoints=comparison.fleet.endpoints,
        time_scale=1.0,
        trace=describe(options),
        runs=tuple(runs),
    )
    title = f"{document.trace['name']}, mode {document.mode}, {document.endpoints} endpoints"
    try:
        if options.json:
            options.json.write_bytes(report.encode(document))
            err.print(f"report: {options.json}", highlight=False)
        if options.png:
            output.draw(runs, options.png, _unit(comparison), title)
            err.print(f"figure: {options.png}", highlight=False)
    except OSError as error:
        raise SpecError(f"not written: {error} - at `--json`, `--png`") from None


def _some(n: int, one: str, more: str = "") -> str:
    return f"{n} {one if n == 1 else more or one + 's'}"


def describe(options: Options) -> dict[str, object]:
    """The workload and everything that was assumed."""
    comparison = options.comparison
    load, fleet = comparison.load, comparison.fleet
    generated = {
        "window_s": load.window_s,
        "warmup_s": load.warmup_s,
        "zipf_alpha": load.parameters.zipf_alpha,
        "context_tokens": load.parameters.context_tokens,
    }
    return {
        "name": load.trace,
        "rate_unit": _unit(comparison),
        **(generated if load.trace == AGENTIC else {}),
        "store_bytes_per_s": fleet.hardware.engine.store_bytes_per_s if fleet.store else 0,
        "kv_tokens": fleet.hardware.kv_pool_tokens,
        "host_tokens": fleet.host_tokens,
        "pullable": comparison.pullable,
        "transfers": "overlapped" if fleet.overlapped else "serial",
        "link": msgspec.to_builtins(fleet.hardware.link),
        "faults": msgspec.to_builtins(comparison.faults),
        "routing": msgspec.to_builtins(comparison.routing),
    }


def _unit(comparison: Comparison) -> str:
    return "sessions/s" if comparison.load.trace == AGENTIC else "× recorded speed"


def _rates(options: Options, err: Console) -> list[float]:
    """The rates as numbers, with `R` resolved."""
    found_r = 0.0
    rates = []
    for text in options.rates:
        if (times := times_r(text)) is None:
            rates.append(float(text))
            continue
        if not found_r:
            seeds = options.seeds[:_SEEDS_FOR_R]
            try:
                found_r = r_of(options.comparison, seeds, options.reference, options.jobs)
            except NoRateError as error:
                raise SpecError(f"{options.reference}: {error} - at `--rates`") from None
            err.print(f"R = {found_r:.4g} {_unit(options.comparison)} ({options.reference})", highlight=False)
        rates.append(found_r * times)
    load = options.comparison.load
    if load.trace == AGENTIC and (sessions := max(rates) * load.window_s) > _MOST_SESSIONS:
        raise SpecError(f"{sessions:,.0f} sessions: at most {_MOST_SESSIONS:,} - at `--rates`, `--window`")
    return list(dict.fromkeys(rates))
