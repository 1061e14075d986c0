"""Parses the command line of `python -m perilune_research simulate` into checked `Options`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perilune_api.pool import Routing, SessionAdmission, SpecError
from perilune_lab.simulate import faults as faults_of
from perilune_lab.simulate.h20 import H20, LINKS, Hardware, with_store
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.options import (
    bytes_per_s,
    check_generated,
    check_recorded,
    checked_faults,
    checked_rates,
)
from perilune_lab.terminal.arguments import (
    assignments,
    count,
    figure,
    not_negative,
    one_of,
    output,
    positive,
)
from perilune_lab.terminal.policy_arguments import changed, listed
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.model import Mode
from perilune_lab.traces.source import AGENTIC
from perilune_research.simulator.deployment import STORE_BYTES_PER_S, Deployment
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.harness import Comparison
from perilune_research.simulator.policies import POLICIES
from perilune_research.simulator.setting import PLANNER

_MOST_ENDPOINTS = 10_000
"""Upper limit of endpoints, because of memory."""
_DEFAULT = OfferedLoad()

_POLICIES = f"all, or some of: {', '.join(POLICIES)}; NAME{PLANNER}: together with the migration planner"
_EPILOG = f"""\
examples (after `python -m perilune_research`):
  simulate --trace agentic --policies all --rates R/2,R,1.25R --seeds 16 --json r.json --png r.png
  simulate --trace mooncake_conversation.jsonl.gz --mode timestamps --policies ear,dynamo --rates 1,2
  simulate --policies ear,perilune --rates 1 --faults slow-links=10,outliers=0.05
  simulate --policies lmetric_plus_one --endpoints 1000 --rates 100 --seeds 1 --window 60 --warmup 0

arms, by how KV gets from one engine to another:
  {Deployment.NONE}: not at all, as in a pool with defaults
  {Deployment.HANDOFF}: engines hand KV over, in planned moves and for requests (within pull.maxSeconds)
  {Deployment.STORE}: all engines share one store
  {Deployment.BOTH}: hand-off and store
  {Deployment.OFFLOAD}: engines keep KV in host memory and read each other's for requests
  {Deployment.PULL}: any engine pulls any prefix for a request, without limits, which no pool can do
rates: sessions per second for generated traffic; for a file, a factor on the recorded speed. R is the rate at
  which TTFT p90 of lmetric (or --reference) is 5 × the floor, which is TTFT p90 if every turn ran alone with
  its session's prefix cached.
faults: NAME=VALUE,… (dead=ENDPOINT@SECONDS), of
  {", ".join(faults_of.NAMES)}
modes: {Mode.THINKTIME}: a turn follows the previous one after the recorded gap (closed loop);
  {Mode.TIMESTAMPS}: at its timestamp (open loop); {Mode.MAX}: when the previous one has ended, but not before
  its timestamp
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    comparison: Comparison
    rates: tuple[str, ...]
    """Rates as given: numbers and multiples of R."""
    reference: str
    """The policy that defines R."""
    seeds: tuple[int, ...]
    jobs: int
    """Number of parallel processes."""
    json: Path | None
    png: Path | None


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raise SystemExit(2) for a wrong call, SpecError for a wrong value."""
    args = _parser().parse_args(argv)
    if args.endpoints > _MOST_ENDPOINTS:
        raise SpecError(f"{args.endpoints:,} endpoints: at most {_MOST_ENDPOINTS:,} - at `--endpoints`")
    hardware = _hardware(args)
    load = _load(args, hardware)
    return Options(
        comparison=Comparison(
            load=load,
            faults=checked_faults(args.faults, args.endpoints),
            fleet=SimulatedFleet(
                endpoints=args.endpoints,
                hardware=hardware,
                overlapped=args.overlapped,
                host_tokens=args.host_tokens,
            ),
            policies=_policies(args.policies, "--policies"),
            routing=changed(
                Routing(session_admission=SessionAdmission(enabled=args.admission)),
                assignments(args.param, "--param"),
                "--param",
            ),
            deployment=args.arm,
        ),
        rates=checked_rates(args.rates),
        reference=_reference(args.reference),
        seeds=tuple(range(args.seeds_from, args.seeds_from + args.seeds)),
        jobs=args.jobs,
        json=args.json,
        png=args.png,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perilune_research simulate",
        description="Compare the gateway's policies: play a trace through each of them on modelled engines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--trace",
        default=AGENTIC,
        metavar="FILE|agentic",
        help="a trace (Mooncake's, Qwen-Bailian's or our schema), or generated traffic [%(default)s]",
    )
    add("--policies", default="all", metavar="A,B", help=_POLICIES)
    add(
        "--rates",
        default="R/2,R,1.25R",
        metavar="X,Y",
        help="loads, as numbers or multiples of R [%(default)s]",
    )
    add("--reference", default="lmetric", metavar="POLICY", help="policy that defines R [%(default)s]")
    add("--endpoints", type=count, default=8, metavar="N", help="number of engines [%(default)s]")
    add(
        "--seeds",
        type=count,
        default=16,
        metavar="N",
        help="number of seeds, which are the same for all policies [%(default)s]",
    )
    add("--seeds-from", type=count, default=1, metavar="N", help="first seed [%(default)s]")
    add(
        "--mode",
        type=one_of(Mode),
        choices=list(Mode),
        default=Mode.THINKTIME,
        help="when turns are submitted; see below [%(default)s]",
    )
    add(
        "--window",
        type=positive,
        default=_DEFAULT.window_s,
        metavar="S",
        help="length of generated traffic, in seconds [%(default)s]",
    )
    add(
        "--warmup",
        type=not_negative,
        default=_DEFAULT.warmup_s,
        metavar="S",
        help="first seconds of the window, which are not measured [%(default)s]",
    )
    add("--limit", type=count, metavar="N", help="play only the first N requests of a file")
    add(
        "--zipf", type=not_negative, default=0.0, metavar="A", help="skew of generated sessions [%(default)s]"
    )
    add(
        "--arm",
        type=one_of(Deployment),
        choices=list(Deployment),
        default=Deployment.NONE,
        help="how KV gets from one engine to another; see below [%(default)s]",
    )
    add("--store", metavar="3GBps", help="speed at which one engine reads the shared store [3GBps]")
    add(
        "--host-tokens",
        type=count,
        default=0,
        metavar="N",
        help=f"tokens that each engine keeps in its host memory [none; 64 GiB in arm {Deployment.OFFLOAD}]",
    )
    add("--link", choices=sorted(LINKS), default="idle", help="speed of KV transfers [%(default)s]")
    add("--kv-tokens", type=count, metavar="N", help="tokens in each engine's KV pool [281600]")
    add(
        "--context-tokens",
        type=count,
        metavar="N",
        help="tokens of the longest generated request with its answer [131072]",
    )
    add("--overlapped", action="store_true", help="transfer KV during the prefill, not before it")
    add(
        "--admission",
        action="store_true",
        help="let new sessions wait while active contexts fill the KV pools; refused ones come back twice",
    )
    add("--faults", default="", metavar="NAME=V,…", help="faults of fleet and gateway; see below [none]")
    add(
        "--param",
        "--params",
        action="append",
        default=[],
        metavar="BLOCK.NAME=V",
        help="a parameter of a policy (e.g. ear.cooldownSeconds=10), or of migration, enginePriority or pull",
    )
    add(
        "--jobs",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of parallel processes [%(default)s]",
    )
    add("--json", type=output, metavar="FILE", help="write the report (docs/report.md)")
    add("--png", type=figure, metavar="FILE", help="draw the report, as .png, .svg or .pdf")
    return parser


def _hardware(args: argparse.Namespace) -> Hardware:
    hardware = replace(H20, link=LINKS[args.link])
    if args.kv_tokens:
        hardware = replace(hardware, engine=replace(hardware.engine, kv_pool_tokens=args.kv_tokens))
    if not args.arm.reach.stores:
        if args.store:
            raise SpecError(f"arm {args.arm} has no store, so it has no speed - at `--store`")
        return hardware
    return with_store(hardware, bytes_per_s(args.store, "--store") if args.store else STORE_BYTES_PER_S)


def _load(args: argparse.Namespace, hardware: Hardware) -> OfferedLoad:
    generated = Agentic(zipf_alpha=args.zipf)
    if args.context_tokens:
        generated = replace(generated, context_tokens=args.context_tokens)
    load = OfferedLoad(
        trace=args.trace,
        mode=args.mode,
        window_s=args.window,
        warmup_s=args.warmup,
        limit=args.limit,
        parameters=generated,
    )
    if load.trace == AGENTIC:
        check_generated(load, hardware)
    else:
        given = {
            "--zipf": args.zipf,
            "--context-tokens": args.context_tokens,
            "--window": load.window_s != _DEFAULT.window_s,
            "--warmup": load.warmup_s != _DEFAULT.warmup_s,
        }
        check_recorded(load, given)
    return load


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
