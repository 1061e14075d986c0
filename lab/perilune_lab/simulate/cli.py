"""`perilune simulate`: compares policies on modelled engines, with the same seeds for all.

1. Find R, if a rate is given as a multiple of it.
2. Play every rate and seed with every policy, through the gateway's own code.
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
from dataclasses import asdict
from math import inf

import msgspec

from perilune_api.pool import SpecError
from perilune_lab import report
from perilune_lab.simulate import tables
from perilune_lab.simulate.harness import Comparison, Played, play, pooled, r_of
from perilune_lab.simulate.loads import NoRateError
from perilune_lab.simulate.options import Options, parse, times_r
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.traces.source import AGENTIC

_SEEDS_FOR_R = 8
_MOST_SESSIONS = 1_000_000
"""Upper limit of sessions in one simulation; more would take days."""
_WIDTH = 200
_POOL_NOTICE = (
    "{} gives routing, store, room for KV, and the numbers of engines and gateways; model, GPUs and engine"
    " flags are not taken: every engine is simulated as one H20 with a mixture of experts of 30B parameters"
)


def main(argv: Sequence[str]) -> int:
    """Return the exit status. Raises SystemExit for `--help` and unknown options, KeyboardInterrupt after
    Ctrl-C."""
    try:
        options = parse(argv)
        out = Console(width=None if sys.stdout.isatty() else _WIDTH)
        return run(options, out, Console(stderr=True, soft_wrap=True))
    except SpecError as error:
        return wrong_call("perilune simulate", error)


def run(options: Options, out: Console, err: Console) -> int:
    """Simulate, write the files and print the tables; return 0. Raises SpecError for a wrong trace or option,
    and where a file cannot be written."""
    comparison, began = options.comparison, time.perf_counter()
    if options.pool:
        err.print(_POOL_NOTICE.format(options.pool), highlight=False)
    rates = _rates(options, err)
    pieces = len(rates) * len(options.seeds)
    rows: list[Played] = []
    try:
        err.print(_plan(options, rates), highlight=False)
        for i, piece in enumerate(play(comparison, rates, options.seeds, options.jobs), 1):
            rows += piece
            one = piece[0]
            err.print(
                f"{i}/{pieces}: rate {one.rate:.4g}, seed {one.seed}, {_some(one.turns, 'turn')},"
                f" {_cost(piece)}",
                highlight=False,
            )
    except KeyboardInterrupt:
        _show(comparison, pooled(comparison.policies, rows), out)
        done = len({(row.rate, row.seed) for row in rows})
        raise KeyboardInterrupt(
            f"{done} of {pieces} rates and seeds were simulated; no file was written"
        ) from None
    if not any(row.run.requests for row in rows):
        raise SpecError("no request arrives in the measured time - at `--rates`, `--window`")
    runs = pooled(comparison.policies, rows)
    took_s = time.perf_counter() - began
    try:
        _write(options, runs, err)
    finally:  # print the tables even if a file cannot be written
        _show(comparison, runs, out)
        for line in (
            *_happened(rows),
            f"simulated; {comparison.deployment.name};"
            f" mode {comparison.load.mode}; {_cost(rows)}; {took_s:.1f} s in all",
        ):
            out.print(line, highlight=False)
    return 0


def _plan(options: Options, rates: Sequence[float]) -> str:
    c = options.comparison
    return (
        f"simulating {_some(len(c.policies), 'policy', 'policies')} × {_some(len(rates), 'rate')}"
        f" × {_some(len(options.seeds), 'seed')}: {c.deployment.name}, mode {c.load.mode},"
        f" {_some(options.jobs, 'process', 'processes')}"
    )


def _cost(rows: Sequence[Played]) -> str:
    turns, cpu_s = sum(row.turns for row in rows), sum(row.cpu_s for row in rows)
    simulated_s = sum(row.simulated_s for row in rows)
    return (
        f"{1000 * cpu_s / max(turns, 1):.2f} ms of CPU per turn,"
        f" {simulated_s / max(cpu_s, 1e-9):,.0f} × real time per core"
    )


def _show(comparison: Comparison, runs: Sequence[report.Run], out: Console) -> None:
    for grid in tables.tables(runs, _unit(comparison), comparison.deployment.name, out.width):
        out.print(grid)


def _happened(rows: Sequence[Played]) -> Iterable[str]:
    """Yield a line per policy: failures, bodies that were read, transfers."""
    for policy in dict.fromkeys(row.run.policy for row in rows):
        mine = [row for row in rows if row.run.policy == policy]
        turns = sum(row.turns for row in mine)
        lost = sum(row.run.requests - row.run.succeeded for row in mine)
        done: Counter[str] = Counter()
        for row in mine:
            done.update(row.transfers)
        parts = [f"{sum(row.read for row in mine) / max(turns, 1):.0%} of the bodies read"]
        parts.append(f"{lost:,} turns failed" if lost else "no turn failed")
        if abandoned := sum(row.run.abandoned or 0 for row in mine):
            parts.append(f"clients closed {abandoned:,} requests")
        if ended := sum(row.run.sessions.lost for row in mine if row.run.sessions):
            parts.append(f"{ended:,} sessions lost")
        parts += [f"{name}: {count:,}" for name, count in sorted(done.items())]
        yield f"{policy}: {', '.join(parts)}"
        faults: Counter[str] = Counter()
        for row in mine:
            faults.update(row.policy_faults)
        for what, count in faults.most_common(3):
            yield f"{policy} is not what these figures show: it failed {count:,} times, {what}"


def _write(options: Options, runs: Sequence[report.Run], err: Console) -> None:
    """Write report and figure, if requested. Raises SpecError if it cannot write them."""
    comparison = options.comparison
    document = report.Report(
        simulated=True,
        mode=comparison.load.mode,
        endpoints=comparison.deployment.endpoints,
        time_scale=1.0,
        trace=describe(options),
        runs=tuple(runs),
    )
    title = f"{document.trace['name']}, {comparison.deployment.name}, mode {document.mode}"
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
    """Return the workload and the pool document, for the report."""
    c = options.comparison
    load, deployment = c.load, c.deployment
    generated = {
        "window_s": load.window_s,
        "warmup_s": load.warmup_s,
        "zipf_alpha": load.parameters.zipf_alpha,
        "context_tokens": load.parameters.context_tokens,
    }
    return {
        "name": load.trace,
        "rate_unit": _unit(c),
        **(generated if load.trace == AGENTIC else {}),
        "arm": deployment.arm,
        "deployment": deployment.name,
        "store_bytes_per_s": deployment.hardware.engine.store_bytes_per_s if deployment.stores else 0,
        "store_tokens": deployment.store_blocks * deployment.block_tokens if deployment.stores else 0,
        **({"stores_answers": deployment.stores_answers} if deployment.stores else {}),
        "kv_tokens": deployment.hardware.kv_pool_tokens,
        "block_tokens": deployment.block_tokens,
        "link": msgspec.to_builtins(deployment.hardware.link),
        "faults": msgspec.to_builtins(c.faults),
        "overlap": deployment.overlap,
        **{name: value for name, value in asdict(load.clients).items() if 0 < value < inf},
        "pool": msgspec.to_builtins(deployment.pool(c.policies[0], c.routing, c.faults)),
    }


def _unit(comparison: Comparison) -> str:
    return "sessions/s" if comparison.load.trace == AGENTIC else "× recorded speed"


def _rates(options: Options, err: Console) -> list[float]:
    """Return the rates as numbers. If some are multiples of R, find R first."""
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
