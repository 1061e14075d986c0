"""`python -m perilune_research simulate`: compares policies on modelled engines, with the same seeds for all.

1. Find R, if a rate is given as a multiple of it.
2. Play every rate and seed with every policy.
3. Write JSON and a figure if requested, and print a table per rate with 95 % intervals over seeds. Nothing
   that it prints is a measurement of hardware.

Exit status: 0; 2 for a wrong call or trace, or a file that cannot be written; 130 after Ctrl-C, which still
prints the tables of what was simulated until then.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from perilune_api.pool import SpecError
from perilune_lab import report
from perilune_lab.simulate import tables
from perilune_lab.simulate.loads import NoRateError
from perilune_lab.simulate.options import times_r
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.traces.source import AGENTIC
from perilune_research.simulator import large_fleet
from perilune_research.simulator.harness import Comparison, Played, play, pooled, r_of
from perilune_research.simulator.options import Options, parse

_SEEDS_FOR_R = 8
_MOST_SESSIONS = 1_000_000
"""Upper limit of sessions in one simulation; more would take days."""


def main(argv: Sequence[str]) -> int:
    """Return the exit status. Raise SystemExit for `--help` and unknown options, KeyboardInterrupt after
    Ctrl-C."""
    try:
        options = parse(argv)
        out = Console(width=None if sys.stdout.isatty() else 200)
        return run(options, out, Console(stderr=True, soft_wrap=True))
    except SpecError as error:
        return wrong_call("python -m perilune_research simulate", error)


def run(options: Options, out: Console, err: Console) -> int:
    """Simulate, write the files and print the tables; return 0. Raise SpecError for a wrong trace or
    option, and where a file cannot be written."""
    comparison, began = options.comparison, time.perf_counter()
    mode = comparison.load.mode
    rates = _rates(options, err)
    pieces = len(rates) * len(options.seeds)
    rows: list[Played] = []
    try:
        err.print(
            f"simulating {_some(len(comparison.policies), 'policy', 'policies')} ×"
            f" {_some(len(rates), 'rate')} × {_some(len(options.seeds), 'seed')}"
            f" on {comparison.fleet.endpoints} modelled H20, mode {mode},"
            f" {_some(options.jobs, 'process', 'processes')}",
            highlight=False,
        )
        for i, piece in enumerate(play(comparison, rates, options.seeds, options.jobs), 1):
            rows += piece
            simulated_s, wall_s = sum(p.simulated_s for p in piece), sum(p.wall_s for p in piece)
            err.print(
                f"{i}/{pieces}: rate {piece[0].rate:.4g}, seed {piece[0].seed}, {piece[0].run.requests}"
                f" requests, {simulated_s / max(wall_s, 1e-9):,.0f} × real time per core",
                highlight=False,
            )
    except KeyboardInterrupt:
        for grid in tables.tables(pooled(comparison, rows), _unit(comparison)):
            out.print(grid)
        done = len({(row.rate, row.seed) for row in rows})
        raise KeyboardInterrupt(
            f"{done} of {pieces} rates and seeds were simulated; no file was written"
        ) from None
    if not any(row.run.requests for row in rows):
        raise SpecError("no request arrives in the measured time - at `--rates`, `--window`")
    runs = pooled(comparison, rows)
    took_s = time.perf_counter() - began
    try:
        _write(options, runs, err)
    finally:  # print the tables even if a file cannot be written
        for grid in tables.tables(runs, _unit(comparison)):
            out.print(grid)
        simulated_s, wall_s = sum(p.simulated_s for p in rows), sum(p.wall_s for p in rows)
        requests = sum(p.run.requests for p in rows)
        out.print(
            f"simulated; mode {mode}; {simulated_s / max(wall_s, 1e-9):,.0f} × real time per core,"
            f" {requests / max(wall_s, 1e-9):,.0f} requests per second, {took_s:.1f} s in all",
            highlight=False,
        )
        for line in (*pulls(rows), *large_fleet.lines(rows)):
            out.print(line, highlight=False)
    return 0


def pulls(rows: Sequence[Played]) -> Iterable[str]:
    """Yield a line per policy that could have KV fetched for requests: how often it did, and how often it
    did not for which reason."""
    for policy in dict.fromkeys(row.run.policy for row in rows):
        done: Counter[str] = Counter()
        for row in rows:
            if row.run.policy == policy:
                done.update(row.seen.pulls)
                done.update(row.seen.unpulled)
        if done:
            counts = ", ".join(f"{name} {count:,}" for name, count in done.most_common())
            yield f"{policy}: requests whose prefix another endpoint cached, by what happened to it: {counts}"


def _write(options: Options, runs: Sequence[report.Run], err: Console) -> None:
    """Write report and figure, if requested. Raise SpecError if it cannot write them."""
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
            tables.draw(runs, options.png, _unit(comparison), title)
            err.print(f"figure: {options.png}", highlight=False)
    except OSError as error:
        raise SpecError(f"the report or the figure was not written: {error} - at `--json`, `--png`") from None


def _some(n: int, one: str, more: str = "") -> str:
    return f"{n} {one if n == 1 else more or one + 's'}"


def describe(options: Options) -> dict[str, object]:
    """Return the workload and everything that the simulation assumes, for the report."""
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
        "store_bytes_per_s": fleet.hardware.engine.store_bytes_per_s
        if comparison.deployment.reach.stores
        else 0,
        "kv_tokens": fleet.hardware.kv_pool_tokens,
        "host_tokens": fleet.host_tokens
        or comparison.deployment.host_tokens(fleet.hardware.engine.kv_bytes_per_token),
        "arm": comparison.deployment,
        "transfers": "overlapped" if fleet.overlapped else "serial",
        "link": msgspec.to_builtins(fleet.hardware.link),
        "faults": msgspec.to_builtins(comparison.faults),
        "routing": msgspec.to_builtins(comparison.routing),
    }


def _unit(comparison: Comparison) -> str:
    return "sessions/s" if comparison.load.trace == AGENTIC else "× recorded speed"


def _rates(options: Options, err: Console) -> list[float]:
    """Return the rates as numbers. If some are multiples of R, finds R first."""
    found_r = 0.0
    rates = []
    for text in options.rates:
        if (times := times_r(text)) is None:
            rates.append(float(text))
            continue
        if not found_r:
            seeds = options.seeds[:_SEEDS_FOR_R]
            err.print(
                f"searching R, the rate at which TTFT p90 of {options.reference} is 5 × the floor:"
                f" several simulations with {_some(len(seeds), 'seed')} each",
                highlight=False,
            )
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
