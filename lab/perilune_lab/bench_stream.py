"""`perilune bench-stream`: many streamed requests at once, timed by the client and by the engine.

1. `--num-requests` prompts, all different or all equal, are submitted together, every answer is streamed.
2. *Client side*: submit latency (submit → head of the response), TTFT, TPOT, ITL and latency of each request;
   TPOT = (last − first token) / (tokens − 1), ITL = gaps, pooled.
3. *Engine side*: what the engines' own histograms (/metrics, vLLM's names) grew by meanwhile. Their means are
   exact, their quantiles interpolated within buckets, as Prometheus does.

With `--simulated` it starts a simulated engine twice, once with serial and once with batched misses, and
prints both side by side with the ratio: what prefilling a burst's misses in one forward is worth.

Exit status: 0; 1 when the target cannot be reached or nothing succeeded; 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from perilune_lab.burst_histograms import Scrape, scrape
from perilune_lab.client import Load, Result, TargetError, models, run_load
from perilune_lab.quantiles import mean, quantile
from perilune_lab.stack import EngineOptions, Stack, StackError
from perilune_lab.text import Vocabulary
from perilune_lab.traces.model import Segment, Session, Style, Turn

DOWN = 1
SCHEMA = "perilune.burst/v1"
_ERRORS_SHOWN = 5

_EPILOG = """\
examples:
  perilune bench-stream --target http://127.0.0.1:8000 --num-requests 32 --unique-prompts --max-new-tokens 8
  perilune bench-stream --target http://127.0.0.1:10000 --engine http://10.0.0.1:8000 --same-prompt
  perilune bench-stream --simulated --num-requests 32            serial against batched misses, on one engine

The target's own /metrics is the engine side where it has vLLM's; behind a gateway name the engines with
--engine. Other traffic on them is counted there too.
"""


@dataclass(frozen=True, slots=True)
class Burst:
    """What is sent."""

    requests: int = 32
    same: bool = False
    """All prompts are equal, else all differ from the first token on."""
    prompt_tokens: int = 384
    output_tokens: int = 8
    name: str = ""
    """Prompts follow from it: another name, other prompts."""

    def sessions(self) -> list[Session]:
        return [self._session(i) for i in range(self.requests)]

    def _session(self, i: int) -> Session:
        session = f"burst-{self.name}-{i}"
        prompt = f"burst-{self.name}" if self.same else session
        turn = Turn(session, 0, (Segment(prompt, self.prompt_tokens),), self.output_tokens)
        return Session(session, 0.0, (turn,))


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


class Side(msgspec.Struct, frozen=True):
    """What one side saw; None: it did not say, or no stream had two tokens."""

    ttft_s: Quantiles | None
    tpot_s: Quantiles | None
    itl_s: Quantiles | None
    latency_s: Quantiles | None
    """Submit → last token."""


class Measured(msgspec.Struct, frozen=True):
    """One burst. Engine seconds: wall seconds × the time scale."""

    name: str
    requests: int
    succeeded: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    """First submit → last token."""
    submit_s: Quantiles | None
    client: Side
    engine: Side

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


async def measure(
    name: str, target: str, engines: Sequence[str], burst: Burst, *, model: str = "", time_scale: float = 1.0
) -> tuple[Measured, Counter[str]]:
    """A burst and the errors in it. Raises TargetError when nobody answers."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10.0)) as http:
        before = await scrape(http, engines)
        load = Load(
            target=target,
            model=model or (await models(target) or [""])[0],
            style=Style.TEXT,
            concurrency=burst.requests,
            time_scale=time_scale,
        )
        results = await run_load(burst.sessions(), load, Vocabulary().words_for)
        grown = (await scrape(http, engines)).since(before)
    errors = Counter(result.error for result in results if not result.succeeded)
    return summarize(name, results, grown, time_scale), errors


def summarize(name: str, results: Sequence[Result], grown: Scrape, time_scale: float) -> Measured:
    """`grown`: what the engines' histograms grew by."""
    good = [r for r in results if r.succeeded]
    end = max((r.submitted_at_s + r.e2e_s for r in good if r.e2e_s is not None), default=0.0)

    def scaled(values: Sequence[float | None]) -> Quantiles | None:
        return _quantiles([value * time_scale for value in values if value is not None])

    return Measured(
        name,
        len(results),
        len(good),
        sum(r.prompt_tokens for r in good),
        sum(r.cached_tokens or 0 for r in good),
        sum(r.output_tokens for r in good),
        (end - min((r.submitted_at_s for r in results), default=0.0)) * time_scale if good else 0.0,
        scaled([r.accepted_s for r in good]),
        Side(
            scaled([r.ttft_s for r in good]),
            scaled([r.tpot_s for r in good]),
            scaled([gap for r in good for gap in r.itl_s]),
            scaled([r.e2e_s for r in good]),
        ),
        Side(*(_of_histogram(grown, names) for names in ENGINE_NAMES)),
    )


ENGINE_NAMES = (
    ("vllm:time_to_first_token_seconds",),
    ("vllm:request_time_per_output_token_seconds",),
    ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ("vllm:e2e_request_latency_seconds",),
)
"""Histograms in the order of Side's fields; older engines' names after the newer ones'."""


def _quantiles(values: Sequence[float]) -> Quantiles | None:
    if not values:
        return None
    ordered = sorted(values)
    return Quantiles(mean(ordered), *(quantile(ordered, q) for q in (0.5, 0.95, 0.99)))


def _of_histogram(grown: Scrape, names: Sequence[str]) -> Quantiles | None:
    found = next((grown.histograms[name] for name in names if name in grown.histograms), None)
    if found is None or not found.count:
        return None
    return Quantiles(found.sum / found.count, *(found.quantile(q) for q in (0.5, 0.95, 0.99)))


# -- telling ---------------------------------------------------------------------------------------------


def table(bursts: Sequence[Measured], title: str, published: bool) -> Table:
    """A row per quantity, two columns per burst; the ratio of the first to the second where there are two,
    and where asked for as published."""
    grid = Table(title=title, title_justify="left")
    grid.add_column("")
    for burst in bursts:
        for side in ("client", "engine"):
            grid.add_column(f"{burst.name} {side}".strip(), justify="right")
    if len(bursts) == 2:
        for side in ("client", "engine", *(["published"] if published else [])):
            grid.add_column(f"ratio {side}", justify="right")
    for label, cells in rows(bursts, published):
        grid.add_row(label, *cells)
    return grid


def rows(bursts: Sequence[Measured], published: bool) -> list[tuple[str, list[str]]]:
    found = []
    for field in ("submit", "ttft", "tpot", "itl", "latency"):
        for q in ("p50", "p95", "p99", "mean"):
            values = [_value(burst, side, field, q) for burst in bursts for side in ("client", "engine")]
            cells = ["" if value is None else f"{value * 1e3:,.1f} ms" for value in values]
            name = f"{field.upper() if field in ('ttft', 'tpot', 'itl') else field} {q}"
            found.append((name, cells + _ratios(values, name if published else "")))
    rates: list[float | None] = [rate for burst in bursts for rate in (burst.tokens_per_s, None)]
    found.append(
        (
            "tokens/s",
            ["" if r is None else f"{r:,.0f}" for r in rates]
            + _ratios(rates, "tokens/s" if published else ""),
        )
    )
    counts = [cell for b in bursts for cell in (f"{b.succeeded} of {b.requests}", "")]
    found.append(("succeeded", counts))
    cached = [cell for b in bursts for cell in (f"{b.cached_tokens:,} of {b.prompt_tokens:,}", "")]
    found.append(("cached tokens", cached))
    return [row for row in found if any(row[1])]


def _value(burst: Measured, side: str, field: str, q: str) -> float | None:
    if field == "submit":
        quantiles = burst.submit_s if side == "client" else None
    else:
        quantiles = getattr(getattr(burst, side), f"{field}_s")
    return None if quantiles is None else getattr(quantiles, q)


PUBLISHED = {
    "TTFT p50": 418 / 143,
    "TTFT p95": 799 / 260,
    "TPOT p50": 141 / 100,
    "ITL p99": 401 / 150,
    "latency p50": 1416 / 862,
    "tokens/s": 164 / 254,
}
"""Serial / batched, of 32 unique prompts at once on another engine, GPU and model; how long its prompts were
is not known."""


def _ratios(values: Sequence[float | None], name: str) -> list[str]:
    """First burst / second, for each side; then what was published under that name, if it has one."""
    if len(values) != 4:
        return []
    pairs = zip(values[:2], values[2:], strict=True)
    ratios = [f"{a / b:.2f}" if a is not None and b else "" for a, b in pairs]
    if not name:
        return ratios
    return [*ratios, f"{PUBLISHED[name]:.2f}" if name in PUBLISHED else ""]


# -- the command -----------------------------------------------------------------------------------------


async def on_target(args: argparse.Namespace, burst: Burst) -> tuple[list[Measured], Counter[str]]:
    engines = args.engine or [args.target]
    found, errors = await measure(
        "", args.target, engines, burst, model=args.model, time_scale=args.time_scale
    )
    return [found], errors


async def on_simulated(burst: Burst) -> tuple[list[Measured], Counter[str]]:
    """A simulated engine in either mode, one after the other, at H20 speed."""
    found, errors = [], Counter[str]()
    for name, arguments in (("serial", ("--serial-misses",)), ("batched", ())):
        options = EngineOptions(time_scale=1.0, kv_tokens=281_600, arguments=arguments)
        async with Stack(engines=1, options=options, with_gateway=False, with_envoy=False) as stack:
            target = f"http://{stack.endpoints[0]}"
            measured, wrong = await measure(name, target, [target], burst)
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
    try:
        found, errors = uvloop.run(on_simulated(burst) if args.simulated else on_target(args, burst))
    except (TargetError, StackError) as error:
        print(f"perilune bench-stream: {error}", file=sys.stderr)
        return DOWN
    if args.simulated:
        title += " · simulated engine (H20 model)"
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(
        table(found, title, published=not burst.same)
    )
    for wrong, count in errors.most_common(_ERRORS_SHOWN):
        print(f"{count} × {wrong}", file=sys.stderr)
    if args.json:
        document = {"schema": SCHEMA, "simulated": args.simulated, "same_prompt": burst.same, "bursts": found}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
        print(f"report: {args.json}", file=sys.stderr)
    return 0 if all(burst.succeeded for burst in found) else DOWN


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="perilune bench-stream",
        description="Submit a burst of streamed requests and time it, at the client and at the engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--target", type=_url, metavar="URL", help="http://host:port, without /v1")
    where.add_argument("--simulated", action="store_true", help="a simulated engine, in both modes")
    add(
        "--engine",
        action="append",
        type=_url,
        metavar="URL",
        help="whose /metrics is the engine side [target]",
    )
    add("--num-requests", type=_count, default=32, metavar="N", help="[%(default)s]")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--unique-prompts", action="store_true", help="all different; so by default")
    prompts.add_argument("--same-prompt", action="store_true", help="all equal")
    add("--prompt-tokens", type=_count, default=384, metavar="N", help="of each prompt [%(default)s]")
    add("--max-new-tokens", type=_count, default=8, metavar="N", help="of each answer [%(default)s]")
    add("--model", default="", metavar="NAME", help="what requests ask for [the target's first]")
    add("--time-scale", type=float, default=1.0, metavar="X", help="of a simulated target [%(default)s]")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    return parser.parse_args(argv)


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must begin with http:// or https://, got {text}")
    return text.rstrip("/").removesuffix("/v1")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return int(text)
