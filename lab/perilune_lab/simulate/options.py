"""Parses the command line of `perilune simulate` into checked `Options`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import msgspec

from perilune_api.pool import Routing, SpecError
from perilune_gateway.policy import POLICIES
from perilune_lab.simulate import faults as faults_of
from perilune_lab.simulate import pool_file
from perilune_lab.simulate.clients import Clients
from perilune_lab.simulate.deployment import (
    BLOCK_TOKENS,
    STORE_BYTES_PER_GPU,
    STORE_BYTES_PER_S,
    Arm,
    Deployment,
)
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20, LINKS, Hardware, with_store
from perilune_lab.simulate.harness import Comparison
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.pool_file import PoolDefaults
from perilune_lab.terminal.arguments import (
    assignments,
    count,
    figure,
    is_positive,
    not_negative,
    one_of,
    output,
    positive,
    whole,
)
from perilune_lab.terminal.policy_arguments import changed, live_policies
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.files import read_lines
from perilune_lab.traces.model import Mode
from perilune_lab.traces.source import AGENTIC

_MOST_ENDPOINTS = 1_000
_WINDOW_S, _WARMUP_S = 900.0, 300.0
_LEAST_RATE = 0.001
"""Lowest rate; with a lower one traffic of a day would take years of virtual time."""
_POLICIES = "perilune,lmetric_plus_one,ear,round_robin"
_RATE = re.compile(r"(?P<times>\d*\.?\d*)R(?:/(?P<by>\d+\.?\d*))?")

_EPILOG = f"""\
examples:
  perilune simulate
      four policies on 8 modelled H20, generated coding agents: about a minute
  perilune simulate --policies perilune,ear --arm handoff --rates 0.8,1.2 --seeds 8 --json r.json --png r.png
  perilune simulate --trace mooncake_conversation.jsonl.gz --mode timestamps --policies perilune --rates 1,2
  perilune simulate --pool pool.yaml --rates 0.5,1 --param pull.maxSeconds=1
      your InferencePool, with one parameter changed
  perilune simulate --policies perilune --prefill 4 --faults slow-links=10,outliers=0.05
  perilune simulate --policies perilune,round_robin --rates 1,1.25 --patience 60
      clients close a request that has no token after a minute, and try twice more

arms, by how KV gets from one engine to another (what `spec.mooncake` of a pool says):
  {Arm.NONE}     not at all, as in a pool with defaults
  {Arm.HANDOFF}  engines hand KV over: in planned moves (migration.triggers), for requests (pull.maxSeconds)
  {Arm.STORE}    all engines share one store
  {Arm.BOTH}     hand-off and store
rates: new sessions per second for generated traffic; for a file, a factor on the recorded speed. R is the
  rate at which TTFT p90 of --reference is 5 × the floor: that of turns that run alone with the prefix of
  their session cached. R/2 and 1.25R are multiples of it; to find it takes some eight simulations of each
  seed.
faults: NAME=VALUE,… (dead and drain: ENDPOINT@SECONDS), of
  {", ".join(faults_of.NAMES)}
modes: {Mode.THINKTIME}: a turn follows the previous one after the recorded gap (closed loop);
  {Mode.TIMESTAMPS}: at its timestamp (open loop); {Mode.MAX}: when the previous one has ended, but not before
  its timestamp
clients that leave: a client closes a request without a first token after --patience seconds, as if it closed
  its connection, and sends it again half a second later. By default it tries three times in all (--retries),
  with those that were refused, and then gives up the session. In TTFT p90 of all such turns count as never
  answered.
refusals: --param limits.ttftSloSeconds=S refuses any request that no endpoint is predicted to answer within S
  seconds (tpotSloSeconds: time per token once it decodes; maxPendingSeconds: queued prefill), --begin-within
  only the first of each session

columns: TTFT, TPOT (time per output token) and E2E of turns that were answered; APC: share of prompt tokens
  from prefix caches; worst endpoint: its TTFT p90; interference: TPOT over TPOT alone, mean; wall clock: time
  of the whole replay over that with each turn alone; stretch: the same of a session, median; regret: TTFT p90
  over the floor; moves: turns that changed their endpoint; ok: share of turns that were answered.

The gateway is real, engines and time are modelled: no figure is a measurement of an H20. Intervals are of
95 % over seeds, which are the same for all policies. docs/simulator.md says what is modelled, and how far it
can be trusted.
"""


_PLAIN = PoolDefaults(
    arm=Arm.NONE,
    endpoints=8,
    prefill=0,
    gateways=1,
    store_bytes=STORE_BYTES_PER_GPU,
    stores_answers=True,
    kv_tokens=H20.kv_pool_tokens,
    routing=Routing(),
)
"""Without `--pool`."""
_HANDING_OVER = {Arm.NONE: Arm.HANDOFF, Arm.STORE: Arm.BOTH}
"""Separate prefill needs hand-offs."""


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
    pool: Path | None
    """The file that gave the defaults of the comparison."""
    json: Path | None
    png: Path | None


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    args = _parser().parse_args(argv)
    routing = _with_defaults(args)
    if args.admission:
        admission = msgspec.structs.replace(routing.session_admission, enabled=True)
        routing = msgspec.structs.replace(routing, session_admission=admission)
    deployment = _deployment(args)
    return Options(
        comparison=Comparison(
            policies=live_policies(args.policies, "--policies"),
            load=_load(args, deployment.hardware),
            deployment=deployment,
            routing=changed(routing, assignments(args.param, "--param"), "--param"),
            faults=_checked_faults(args.faults, args.endpoints),
        ),
        rates=_checked_rates(args.rates),
        reference=_reference(args.reference),
        seeds=tuple(range(args.seeds_from, args.seeds_from + args.seeds)),
        jobs=args.jobs,
        pool=args.pool,
        json=args.json,
        png=args.png,
    )


def times_r(text: str) -> float | None:
    """Return the factor in a text such as `R`, `R/2` or `1.25R`; None if it is not a multiple of R."""
    match = _RATE.fullmatch(text)
    if match is None or not all(map(is_positive, found := (match["times"] or "1", match["by"] or "1"))):
        return None
    return float(found[0]) / float(found[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perilune simulate",
        description="Compare policies on your traffic without engines: play a trace through the gateway's own"
        "\ncode in front of modelled engines, in virtual time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--trace",
        default=AGENTIC,
        metavar="FILE|agentic",
        help="a trace (Mooncake's, Qwen-Bailian's or our schema), or generated coding agents [%(default)s]",
    )
    add(
        "--policies",
        "--policy",
        metavar="A,B",
        help=f"all, or some of: {', '.join(POLICIES)} [{_POLICIES}, and that of the pool before them]",
    )
    add(
        "--rates",
        "--rate",
        default="1",
        metavar="X,Y",
        help="loads, as numbers or multiples of R; see below [%(default)s]",
    )
    add("--reference", default="lmetric", metavar="POLICY", help="policy that defines R [%(default)s]")
    add(
        "--pool",
        type=Path,
        metavar="FILE",
        help="an InferencePool, or a gateway's pool document, as YAML: its routing, and the defaults of"
        " --arm, --endpoints, --prefill, --gateways, --store-tokens and --kv-tokens; its engines are"
        " simulated as H20s",
    )
    add(
        "--arm",
        type=one_of(Arm),
        choices=list(Arm),
        help=f"how KV gets from one engine to another; see below [{_PLAIN.arm}]",
    )
    add("--endpoints", type=count, metavar="N", help=f"number of engines [{_PLAIN.endpoints}]")
    add(
        "--prefill",
        type=whole,
        metavar="N",
        help="so many of them only prefill for the others, and hand KV over, so that the arm is"
        f" {Arm.HANDOFF} or {Arm.BOTH} [all do both]",
    )
    add(
        "--gateways",
        type=count,
        metavar="N",
        help=f"number of gateways, which share their state; each costs time [{_PLAIN.gateways}]",
    )
    add_runs(parser, 4)
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
        metavar="S",
        help=f"length of generated traffic, in seconds [{_WINDOW_S:g}]",
    )
    add(
        "--warmup",
        type=not_negative,
        metavar="S",
        help=f"first seconds of the window, which fill the caches and are not measured [{_WARMUP_S:g}]",
    )
    add("--limit", type=count, metavar="N", help="play only the first N requests of a file")
    add(
        "--zipf", type=not_negative, default=0.0, metavar="A", help="skew of generated sessions [%(default)g]"
    )
    add("--kv-tokens", type=count, metavar="N", help=f"tokens in each engine's KV pool [{_PLAIN.kv_tokens}]")
    add(
        "--block-size",
        type=count,
        default=BLOCK_TOKENS,
        metavar="TOKENS",
        help="tokens of a block; smaller ones cost more time [%(default)s]",
    )
    add(
        "--context-tokens",
        type=count,
        metavar="N",
        help="tokens of the longest generated request with its answer [131072]",
    )
    add(
        "--overlap",
        action="store_true",
        help="engines send KV layer by layer while they prefill: a model of engines that can do so, which"
        " vLLM 0.32 with its MooncakeConnector is not, since it sends after the prefill",
    )
    add("--link", choices=sorted(LINKS), default="idle", help="speed of KV transfers [%(default)s]")
    add("--store", metavar="3GBps", help="speed at which one engine reads the shared store [3GBps]")
    add(
        "--store-tokens",
        type=count,
        metavar="N",
        help="tokens in the shared store [what 80 GiB of each GPU's engine hold, the default of"
        " `mooncake.store.segmentSize`: 7 M with 8 endpoints]",
    )
    add(
        "--store-prompts-only",
        action=argparse.BooleanOptionalAction,
        help="the store gets the KV of prompts, and not that of answers"
        " (`mooncake.store.saveDecodeCache: false`)",
    )
    add(
        "--admission",
        action="store_true",
        help="let new sessions wait while active contexts fill the KV pools; see --retries",
    )
    add(
        "--patience",
        type=positive,
        default=inf,
        metavar="S",
        help="clients close a request that has no token after S seconds; see below [they wait]",
    )
    add(
        "--retries",
        type=whole,
        default=Clients().retries,
        metavar="N",
        help="how often clients send a refused or closed request again [%(default)s, as OpenAI's SDKs do]",
    )
    add(
        "--begin-within",
        type=positive,
        default=0.0,
        metavar="S",
        help="the first request of each session has `x-slo-ttft-ms`, and is refused if no endpoint is"
        " predicted to answer within S seconds; see below",
    )
    add("--faults", default="", metavar="NAME=V,…", help="faults of fleet and gateway; see below [none]")
    add(
        "--param",
        "--params",
        action="append",
        default=[],
        metavar="BLOCK.NAME=V",
        help="a parameter of a policy (e.g. ear.cooldownSeconds=10), or of migration, enginePriority, pull or"
        " limits",
    )
    add("--png", type=figure, metavar="FILE", help="draw the report, as .png, .svg or .pdf")
    return parser


def add_runs(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Add the options of all that simulates: how often, in how many processes, and where results go."""
    parser.add_argument(
        "--seeds", type=count, default=seeds, metavar="N", help="number of seeds [%(default)s]"
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of parallel processes [%(default)s]",
    )
    parser.add_argument("--json", type=output, metavar="FILE", help="write the report as JSON")


def _with_defaults(args: argparse.Namespace) -> Routing:
    """Give the options in `args` that the command line leaves out: as the pool's file says, or else their
    usual values. Return the routing. Raises SpecError for a file that is wrong, or that contradicts them."""
    given = pool_file.read(args.pool) if args.pool else _PLAIN
    if given.prefill and args.prefill is None and args.arm in _HANDING_OVER:
        raise SpecError(
            f"arm {args.arm} hands no KV over, which the {given.prefill} endpoints need that only prefill:"
            " leave them out with `--prefill 0` - at `--arm`"
        )
    args.policies = args.policies or f"{given.routing.policy.name},{_POLICIES}"
    for option in ("arm", "endpoints", "prefill", "gateways", "kv_tokens"):
        if getattr(args, option) is None:
            setattr(args, option, getattr(given, option))
    if args.pool and args.arm in (Arm.STORE, Arm.BOTH):
        store_bytes = given.store_bytes * args.endpoints * H20.gpus
        args.store_tokens = args.store_tokens or int(store_bytes // H20.engine.kv_bytes(1))
        if args.store_prompts_only is None:
            args.store_prompts_only = not given.stores_answers
    return given.routing


def _deployment(args: argparse.Namespace) -> Deployment:
    if args.endpoints > _MOST_ENDPOINTS:
        raise SpecError(f"{args.endpoints:,} endpoints: at most {_MOST_ENDPOINTS:,} - at `--endpoints`")
    if args.prefill >= args.endpoints:
        raise SpecError(
            f"{args.prefill} of {args.endpoints} endpoints only prefill: none decodes - at `--prefill`"
        )
    arm = _HANDING_OVER.get(args.arm, args.arm) if args.prefill else args.arm
    hardware = replace(H20, link=LINKS[args.link], block_tokens=args.block_size)
    hardware = replace(hardware, engine=replace(hardware.engine, kv_pool_tokens=args.kv_tokens))
    deployment = Deployment(
        arm=arm,
        endpoints=args.endpoints,
        prefill_endpoints=args.prefill,
        overlap=args.overlap,
        gateways=args.gateways,
        hardware=hardware,
        block_tokens=args.block_size,
    )
    if hardware.kv_pool_tokens < 2 * args.block_size:
        raise SpecError(
            f"a KV pool of {hardware.kv_pool_tokens:,} tokens has no two blocks of {args.block_size:,}"
            " - at `--kv-tokens`, `--block-size`"
        )
    if deployment.overlap and not deployment.hands_over:
        raise SpecError(f"arm {arm} hands no KV over, unless with `--prefill` - at `--overlap`")
    if not deployment.stores:
        if args.store:
            raise SpecError(f"arm {arm} has no store, so it has no speed - at `--store`")
        if args.store_tokens:
            raise SpecError(f"arm {arm} has no store - at `--store-tokens`")
        if args.store_prompts_only:
            raise SpecError(f"arm {arm} has no store - at `--store-prompts-only`")
        return deployment
    speed = _bytes_per_s(args.store, "--store") if args.store else STORE_BYTES_PER_S
    if args.store_tokens and args.store_tokens < args.block_size:
        raise SpecError(
            f"a store of {args.store_tokens:,} tokens has no block of {args.block_size:,}"
            " - at `--store-tokens`"
        )
    return replace(
        deployment,
        hardware=with_store(hardware, speed),
        store_tokens=args.store_tokens,
        stores_answers=not args.store_prompts_only,
    )


def _load(args: argparse.Namespace, hardware: Hardware) -> OfferedLoad:
    generated = Agentic(zipf_alpha=args.zipf)
    if args.context_tokens:
        generated = replace(generated, context_tokens=args.context_tokens)
    load = OfferedLoad(
        trace=args.trace,
        mode=args.mode,
        window_s=_WINDOW_S if args.window is None else args.window,
        warmup_s=_WARMUP_S if args.warmup is None else args.warmup,
        limit=args.limit,
        parameters=generated,
        clients=Clients(patience_s=args.patience, retries=args.retries, begin_within_s=args.begin_within),
    )
    if load.trace == AGENTIC:
        _check_generated(load, hardware)
    else:
        given = {
            "--zipf": args.zipf,
            "--context-tokens": args.context_tokens,
            "--window": args.window is not None,
            "--warmup": args.warmup is not None,
        }
        _check_recorded(load, given)
        load = replace(load, window_s=float("inf"), warmup_s=0.0)
    return load


def _check_generated(load: OfferedLoad, hardware: Hardware) -> None:
    """Check generated traffic. Raises SpecError."""
    longest, room = load.parameters.context_tokens, hardware.kv_pool_tokens
    if load.mode is not Mode.THINKTIME:
        raise SpecError(f"generated traffic has no timestamps, which mode {load.mode} needs - at `--mode`")
    if load.limit:
        raise SpecError("only a file can be limited; generated traffic ends with `--window` - at `--limit`")
    if longest > room:
        raise SpecError(
            f"generated requests have up to {longest:,} tokens, which a KV pool of {room:,} does not hold:"
            f" enlarge it with `--kv-tokens`, or shorten the requests with `--context-tokens {room}`"
        )
    if load.warmup_s >= load.window_s:
        raise SpecError("nothing is measured: the warm-up is as long as the window - at `--warmup`")


def _check_recorded(load: OfferedLoad, given: Mapping[str, object]) -> None:
    """Check a recorded trace. `given`: options that only generated traffic has, with a true value if they
    were given. Raises SpecError."""
    if not Path(load.trace).is_file():
        what = "no regular file" if Path(load.trace).exists() else "no such file"
        raise SpecError(f"{load.trace}: {what} - at `--trace`")
    try:
        next(read_lines(Path(load.trace), dict[str, msgspec.Raw]), None)
    except SpecError as error:
        if str(error).startswith(f"{load.trace}: "):
            raise  # the file cannot be read; else the error names a line
        raise SpecError(
            f"{error}: a trace has one JSON object a line, in the schema of Mooncake, Qwen-Bailian or"
            " Perilune - at `--trace`"
        ) from None
    for option, value in given.items():
        if value:
            raise SpecError(f"{load.trace} is played as it was recorded - at `{option}`")


def _checked_faults(text: str, endpoints: int) -> Faults:
    """Return the faults. Raises SpecError."""
    faults = faults_of.parse(text)
    for name, number in (("dead", faults.dead_endpoint), ("drain", faults.drain_endpoint)):
        if number >= endpoints:
            raise SpecError(f"{name}={number}: the last endpoint is {endpoints - 1} - at `--faults`")
    return faults


def _checked_rates(text: str) -> tuple[str, ...]:
    """Return the rates as given: numbers and multiples of R. Raises SpecError."""
    rates = tuple(text.split(","))
    for rate in rates:
        if times_r(rate) is not None:
            continue
        if not is_positive(rate):
            raise SpecError(f"{rate!r} is neither a number above 0 nor a multiple of R - at `--rates`")
        if float(rate) < _LEAST_RATE:
            raise SpecError(f"{rate}: at least {_LEAST_RATE:g} - at `--rates`")
    return rates


def _bytes_per_s(text: str, option: str) -> float:
    """Return a speed such as 3GBps in bytes per second. Raises SpecError."""
    match = re.fullmatch(r"(\d+\.?\d*)\s*GBps", text)
    if match is None or not float(match[1]):
        raise SpecError(f"{text!r}: must be a speed such as 3GBps - at `{option}`")
    return float(match[1]) * 1e9


def _reference(text: str) -> str:
    names = live_policies(text, "--reference")
    if len(names) != 1:
        raise SpecError(f"{text}: must be one policy - at `--reference`")
    return names[0]
