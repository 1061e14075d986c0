"""`perilune bench-stream`: many streamed requests at once, timed by the client and by the engine.

    prompts ─▶ burst: what client and engines saw (histograms) ─▶ text: a table, JSON

With `--target`, its own /metrics is the engine side where one engine answers there, else those of `--engine`.
With `--simulated` it starts a simulated engine twice, once with serial and once with batched misses, and
prints both side by side with the ratio: what prefilling a burst's misses in one forward is worth.

Exit status: 0; 1 when the target cannot be reached or nothing succeeded; 2 for a wrong call;
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from uuid import uuid4

import msgspec
from msgspec import UNSET

from perilune_lab.bench_stream.burst import Burst, Measured, NoEngine, measure
from perilune_lab.bench_stream.text import table
from perilune_lab.load.client import TargetError
from perilune_lab.processes.stack import EngineOptions, Stack, StackError
from perilune_lab.terminal.arguments import count, output, positive, url
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.loop import run

DOWN = 1
SCHEMA = "perilune.burst/v1"
TOKENS_PER_STEP = 2048
"""Tokens per step of the simulated engine, so that a burst is admitted in several steps. In one step, TPOT
would depend on how many requests arrived in time for it."""
_ERRORS_SHOWN = 5

_EPILOG = """\
examples:
  perilune bench-stream --target http://127.0.0.1:8000 --num-requests 32 --unique-prompts --max-new-tokens 8
  perilune bench-stream --target http://127.0.0.1:10000 --engine http://10.0.0.1:8000 --same-prompt
  perilune bench-stream --simulated --num-requests 32            serial against batched misses, on one engine

The target's own /metrics is the engine side where it has vLLM's; behind a gateway name the engines with
--engine. Other traffic on them is counted there too.
"""


async def on_target(args: argparse.Namespace, burst: Burst) -> tuple[list[Measured], Counter[str]]:
    found, errors = await measure(
        "", args.target, args.engine, burst, model=args.model, time_scale=args.time_scale
    )
    return [found], errors


async def on_simulated(burst: Burst, time_scale: float) -> tuple[list[Measured], Counter[str]]:
    """Measure a simulated engine at H20 speed, with serial and then with batched misses."""
    found, errors = [], Counter[str]()
    step = ("--tokens-per-step", str(TOKENS_PER_STEP))
    for name, arguments in (("serial", (*step, "--serial-misses")), ("batched", step)):
        options = EngineOptions(time_scale=time_scale, kv_tokens=281_600, arguments=arguments)
        async with Stack(engines=1, options=options, with_gateway=False, with_envoy=False) as stack:
            target = f"http://{stack.endpoints[0]}"
            measured, wrong = await measure(name, target, (), burst, time_scale=time_scale)
        found.append(measured)
        errors.update(wrong)
    return found, errors


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    name = uuid4().hex[:8]  # prompts that no cache has seen
    burst = Burst(args.num_requests, args.same_prompt, args.prompt_tokens, args.max_new_tokens, name)
    what = "equal" if burst.same else "different"
    title = (
        f"{burst.requests} {what} prompts of {burst.prompt_tokens} tokens at once,"
        f" {burst.output_tokens} new each"
    )
    where = "a simulated engine, twice" if args.simulated else args.target
    expected_s = burst.expected_s() / args.time_scale * (2 if args.simulated else 1)
    print(f"{title}, to {where}; about {expected_s:.1f} s on one H20", file=sys.stderr, flush=True)
    try:
        work = on_simulated(burst, args.time_scale) if args.simulated else on_target(args, burst)
        found, errors = run(work)
    except (TargetError, StackError) as error:
        print(f"perilune bench-stream: {error}", file=sys.stderr)
        return DOWN
    if args.simulated:
        title += " · simulated engine (H20 model)"
    if args.json:
        document = {"schema": SCHEMA, "simulated": args.simulated, "same_prompt": burst.same, "bursts": found}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
        print(f"report: {args.json}", file=sys.stderr)
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(
        table(found, title, published=not burst.same)
    )
    for one in found:
        if one.succeeded and one.no_engine is not UNSET:
            print(f"no engine side: {why(one.no_engine, args, one.name)}", file=sys.stderr)
    for wrong, times in errors.most_common(_ERRORS_SHOWN):
        print(f"{times} × {wrong}", file=sys.stderr)
    return 0 if all(burst.succeeded for burst in found) else DOWN


def why(no_engine: NoEngine, args: argparse.Namespace, name: str) -> str:
    """Explain in one line why there is no engine side, and what to do. `name`: the name of the burst on a
    simulated engine."""
    where = ", ".join(args.engine or [args.target or name])
    if no_engine is NoEngine.NO_HISTOGRAMS:
        return f"{where} has no histograms of vLLM on /metrics"
    what = "has counts that fell" if no_engine is NoEngine.FALLEN else "counted fewer requests than succeeded"
    if args.engine or args.simulated:
        return f"/metrics of {where} {what}: an engine was restarted meanwhile, or several answer there"
    return f"/metrics of {where} {what}: several engines seem to answer there, name each with --engine"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="perilune bench-stream",
        description="Submit a burst of streamed requests and time it, at the client and at the engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--target", type=url, metavar="URL", help="http://host:port, without /v1")
    where.add_argument("--simulated", action="store_true", help="start a simulated engine, once in each mode")
    add(
        "--engine",
        action="append",
        default=[],
        type=url,
        metavar="URL",
        help="engine whose /metrics is read; once for each engine [the target]",
    )
    add("--num-requests", type=count, default=32, metavar="N", help="size of the burst [%(default)s]")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--unique-prompts", action="store_true", help="prompts all differ (default)")
    prompts.add_argument("--same-prompt", action="store_true", help="prompts are all equal")
    add("--prompt-tokens", type=count, default=384, metavar="N", help="length of each prompt [%(default)s]")
    add("--max-new-tokens", type=count, default=8, metavar="N", help="length of each answer [%(default)s]")
    add(
        "--model",
        default="",
        metavar="NAME",
        help="model that requests name [the first one that the target serves]",
    )
    add(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="engine seconds per second of simulated engines [%(default)s]",
    )
    add("--json", type=output, metavar="FILE", help="write everything as JSON")
    args = parser.parse_args(argv)
    for option, value in (("--engine", args.engine), ("--model", args.model)):
        if args.simulated and value:
            parser.error(f"{option} has no meaning with --simulated: leave it out, or name a --target")
    return args
