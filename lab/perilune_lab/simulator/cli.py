"""`perilune simulate`: policies side by side on modelled engines, the same seeds for all.

Steps: find R where a rate is given in it → play every (rate, seed) with every policy → JSON and a figure if
asked for, then a table per rate with 95 % intervals over seeds. Nothing printed is a measurement of hardware.

Exit status: 0; 2 for a wrong call or trace, or a file that cannot be written.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from perilune_api.pool import PolicyParams, SpecError
from perilune_gateway.policy import POLICIES
from perilune_lab import report
from perilune_lab.arguments import assignments, count, figure, is_positive, not_negative, positive
from perilune_lab.arguments import output as output_file
from perilune_lab.console import Console
from perilune_lab.policy_arguments import changed, listed
from perilune_lab.simulator import faults as faults_of
from perilune_lab.simulator import large_fleet, output
from perilune_lab.simulator.fleet import SimulatedFleet
from perilune_lab.simulator.h20 import H20, LINKS, with_store
from perilune_lab.simulator.harness import Comparison, NoRateError, OfferedLoad, play, pooled, r_of
from perilune_lab.simulator.routing import PLANNER
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.model import Mode
from perilune_lab.traces.source import AGENTIC

WRONG_CALL = 2
_SEEDS_FOR_R = 8
_MOST_ENDPOINTS, _MOST_SESSIONS = 10_000, 1_000_000
"""More would take all memory, or days."""
_RATE = re.compile(r"(?P<times>\d*\.?\d*)R(?:/(?P<by>\d+\.?\d*))?")

_POLICIES = f"all, or some of: {', '.join(POLICIES)}; NAME{PLANNER}: with the migration planner beside it"
_EPILOG = f"""\
examples:
  perilune simulate --trace agentic --policies all --rates R/2,R,1.25R --seeds 16 --json r.json --png r.png
  perilune simulate --trace mooncake_conversation.jsonl.gz --mode timestamps --policies ear,dynamo --rates 1,2
  perilune simulate --policies ear,perilune --rates 1 --faults slow-links=10,outliers=0.05
  perilune simulate --policies lmetric_plus_one --endpoints 1000 --rates 100 --seeds 1 --window 60 --warmup 0

rates: sessions per second of generated traffic, times as fast as recorded for a file. R is the rate at which
  lmetric (or --reference) has TTFT p90 = 5 × the floor: every turn alone, its session's prefix cached.
faults: name=value,… of {", ".join(faults_of.NAMES)} (dead=ENDPOINT@SECONDS)
modes: {Mode.THINKTIME} closed loop, recorded gaps; {Mode.TIMESTAMPS} open loop; {Mode.MAX} the later of both
"""


@dataclass(frozen=True, slots=True)
class Options:
    comparison: Comparison
    rates: tuple[str, ...]
    reference: str
    seeds: tuple[int, ...]
    jobs: int
    json: Path | None
    png: Path | None


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        out = Console(width=None if sys.stdout.isatty() else 200)
        return run(options, out, Console(stderr=True, soft_wrap=True))
    except SpecError as error:
        print(f"perilune simulate: {error}", file=sys.stderr)
        return WRONG_CALL


def run(options: Options, out: Console, err: Console) -> int:
    """Plays, writes, prints. Raises SpecError."""
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
    """Report and figure, where asked for. Raises SpecError."""
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
        "params": msgspec.to_builtins(comparison.params),
    }


def _unit(comparison: Comparison) -> str:
    return "sessions/s" if comparison.load.trace == AGENTIC else "× recorded speed"


def _rates(options: Options, err: Console) -> list[float]:
    """Numbers, `R` resolved."""
    found_r = 0.0
    rates = []
    for text in options.rates:
        if (times := _times_r(text)) is None:
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


def _times_r(text: str) -> float | None:
    """`R`, `R/2`, `1.25R`; None: it is no multiple of R."""
    match = _RATE.fullmatch(text)
    if match is None or not all(map(is_positive, found := (match["times"] or "1", match["by"] or "1"))):
        return None
    return float(found[0]) / float(found[1])


def parse(argv: Sequence[str]) -> Options:
    """Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    parser = argparse.ArgumentParser(
        prog="perilune simulate",
        description="Play a trace through the gateway's policies on modelled engines, and compare.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--trace",
        default=AGENTIC,
        metavar="FILE|agentic",
        help="Mooncake's, Qwen-Bailian's or our schema [%(default)s]",
    )
    add("--policies", default="all", metavar="A,B", help=_POLICIES)
    add("--rates", default="R/2,R,1.25R", metavar="X,Y", help="numbers or multiples of R [%(default)s]")
    add("--reference", default="lmetric", metavar="POLICY", help="what R is found with [%(default)s]")
    add("--endpoints", type=count, default=8, metavar="N", help="[%(default)s]")
    add("--seeds", type=count, default=16, metavar="N", help="paired over policies [%(default)s]")
    add("--seeds-from", type=count, default=1, metavar="N", help="first seed [%(default)s]")
    add("--mode", type=Mode, choices=list(Mode), default=Mode.THINKTIME, help="[%(default)s]")
    default = OfferedLoad()
    add(
        "--window",
        type=positive,
        default=default.window_s,
        metavar="S",
        help="of generated traffic [%(default)s]",
    )
    add(
        "--warmup",
        type=not_negative,
        default=default.warmup_s,
        metavar="S",
        help="of it, not measured [%(default)s]",
    )
    add("--limit", type=count, metavar="N", help="of a file, the first N requests")
    add(
        "--zipf", type=not_negative, default=0.0, metavar="A", help="skew of generated sessions [%(default)s]"
    )
    add("--store", metavar="3GBps", help="a shared KV store, as one engine reads it")
    add("--host-tokens", type=count, default=0, metavar="N", help="DRAM tier of one endpoint [none]")
    add("--link", choices=sorted(LINKS), default="idle", help="KV transfer [%(default)s]")
    add("--kv-tokens", type=count, metavar="N", help="KV pool of one endpoint [281600]")
    add(
        "--context-tokens",
        type=count,
        metavar="N",
        help="longest generated request, with its answer [131072]",
    )
    add("--no-pull", action="store_true", help="engines cannot pull KV from each other")
    add("--overlapped", action="store_true", help="transfers run beside the prefill, not before it")
    add("--faults", default="", metavar="NAME=V,…", help="see below")
    add(
        "--param",
        "--params",
        action="append",
        default=[],
        metavar="NAME=V",
        help="of policies, e.g. cooldown_seconds=10",
    )
    add("--jobs", type=count, default=os.cpu_count() or 1, metavar="N", help="processes [%(default)s]")
    add("--json", type=output_file, metavar="FILE", help="write the report (docs/report.md)")
    add("--png", type=figure, metavar="FILE", help="draw it, as .png, .svg or .pdf")
    args = parser.parse_args(argv)
    if args.endpoints > _MOST_ENDPOINTS:
        raise SpecError(f"{args.endpoints:,} endpoints: at most {_MOST_ENDPOINTS:,} - at `--endpoints`")
    hardware = replace(H20, link=LINKS[args.link])
    if args.kv_tokens:
        hardware = replace(hardware, engine=replace(hardware.engine, kv_pool_tokens=args.kv_tokens))
    if args.store:
        hardware = with_store(hardware, _bytes_per_s(args.store))
    generated = Agentic(zipf_alpha=args.zipf)
    if args.context_tokens:
        generated = replace(generated, context_tokens=args.context_tokens)
    load = OfferedLoad(args.trace, args.mode, args.window, args.warmup, args.limit, generated)
    if load.trace != AGENTIC and not Path(load.trace).is_file():
        what = "no regular file" if Path(load.trace).exists() else "no such file"
        raise SpecError(f"{load.trace}: {what} - at `--trace`")
    if load.trace == AGENTIC and load.mode is not Mode.THINKTIME:
        raise SpecError(f"generated traffic has no timestamps, which mode {load.mode} needs - at `--mode`")
    for option, given in (
        ("--zipf", args.zipf),
        ("--context-tokens", args.context_tokens),
        ("--window", load.window_s != default.window_s),
        ("--warmup", load.warmup_s != default.warmup_s),
    ):
        if given and load.trace != AGENTIC:
            raise SpecError(f"{load.trace} is played as it was recorded - at `{option}`")
    if load.trace == AGENTIC and load.limit:
        raise SpecError("generated traffic has no end but that of `--window` - at `--limit`")
    if load.trace == AGENTIC and generated.context_tokens > hardware.kv_pool_tokens:
        raise SpecError(
            f"generated requests have up to {generated.context_tokens:,} tokens, which a KV pool of"
            f" {hardware.kv_pool_tokens:,} does not hold: give as many, or shorten the requests with"
            f" `--context-tokens {hardware.kv_pool_tokens}` - at `--kv-tokens`"
        )
    if load.trace == AGENTIC and load.warmup_s >= load.window_s:
        raise SpecError("nothing is measured: the warm-up is as long as the window - at `--warmup`")
    faults = faults_of.parse(args.faults)
    if faults.dead_endpoint >= args.endpoints:
        raise SpecError(
            f"dead={faults.dead_endpoint}: the last endpoint is {args.endpoints - 1} - at `--faults`"
        )
    rates = tuple(args.rates.split(","))
    for rate in rates:
        if _times_r(rate) is None and not is_positive(rate):
            raise SpecError(f"{rate!r} is neither a number above 0 nor a multiple of R - at `--rates`")
    return Options(
        comparison=Comparison(
            policies=_policies(args.policies, "--policies"),
            load=load,
            fleet=SimulatedFleet(
                args.endpoints,
                hardware,
                bool(args.store),
                overlapped=args.overlapped,
                host_tokens=args.host_tokens,
            ),
            faults=faults,
            params=changed(PolicyParams(), assignments(args.param, "--param"), "--param"),
            pullable=not args.no_pull,
        ),
        rates=rates,
        reference=_reference(args.reference),
        seeds=tuple(range(args.seeds_from, args.seeds_from + args.seeds)),
        jobs=args.jobs,
        json=args.json,
        png=args.png,
    )


def _reference(text: str) -> str:
    names = _policies(text, "--reference")
    if len(names) != 1:
        raise SpecError(f"{text}: must be one policy - at `--reference`")
    return names[0]


def _policies(text: str, option: str) -> tuple[str, ...]:
    names = listed(text, POLICIES)
    for name in names:
        if name.removesuffix(PLANNER) not in POLICIES:
            raise SpecError(f"Unknown policy {name!r}, known are {', '.join(POLICIES)} - at `{option}`")
    return names


def _bytes_per_s(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*)\s*GBps", text)
    if match is None or not float(match[1]):
        raise SpecError(f"{text!r}: bytes per second like 3GBps - at `--store`")
    return float(match[1]) * 1e9
