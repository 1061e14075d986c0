"""`perilune profile`: measures how fast an engine is, and writes it as the pool's cost model.

    prompts of several lengths, new, half cached, cached ─▶ Measured ─▶ fit (profile_fit.py) ─▶ a table,
    YAML (profile_yaml.py), and what was left out, with the reason

1. Each prompt is sent alone, with one token of output, some times over; the time to the end of that answer is
   its time to the first token. How many of its tokens there are, and how many were cached, the engine itself
   says (`usage`).
2. With lengths enough, the cost model's seconds per request, token and pair of attention are fitted to them.
   With few, only `prefillScale` is: the median of measured / predicted seconds, where the prediction is that
   of one H20. The error that is left at each prompt is shown.
3. One longer answer shows the seconds of a decode step, and `--streams` of them side by side, whose long
   prompt is cached, how fast the engine reads weights and KV.
4. With `--peer`, KV is handed over from another engine (`profile_transfer.py`): fixed seconds and speed, and
   the speed of network cards (`nicGbits`) by which the pool's cost model predicts the same.

Not done: load by others during the measurement, which makes the engine look slower.

Exit status: 0; 1 when the target cannot be reached or answers without counts, or when the peer hands nothing
over (then all else is written); 2 for a wrong call; 130 after Ctrl-C, with the lines of what was measured
until then.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from urllib.parse import urlsplit
from uuid import uuid4

from rich.table import Table

from perilune_gateway.model import H20_30B
from perilune_lab import profile_transfer
from perilune_lab.load.client import Load, TargetError, models, run_load
from perilune_lab.load.result import Result
from perilune_lab.profile_fit import SHORTEST, Decoded, Measured, Profile
from perilune_lab.profile_transfer import Peer, Transfer
from perilune_lab.profile_yaml import as_yaml, left_out
from perilune_lab.terminal.arguments import count, output, positive, url
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.loop import run
from perilune_lab.traces.model import Segment, Session, Style, Turn
from perilune_lab.vocabulary import Vocabulary

DOWN = 1
DECODED = 64
"""Tokens of an answer that shows the speed of decode."""
STREAMS = 8
"""Answers that are generated side by side."""

_EPILOG = """\
examples:
  perilune profile --target http://10.0.0.1:8000
  perilune profile --target http://10.0.0.1:8000 --max-tokens 65536 --repeat 5 --yaml cost.yaml
  perilune profile --target http://10.0.0.1:8000 --peer http://10.0.0.2:8000 --bootstrap 10.0.0.2:8998

Name one engine itself, not a gateway, and send it no other traffic meanwhile. The engine has to report cached
tokens (vLLM: --enable-prompt-tokens-details). Put the lines that it writes under spec.engine of the pool.
With --peer, PERILUNE_ENGINE_SECRET has the pool's secret, where the operator's door guards the engines.
"""


def lengths(max_tokens: int) -> list[int]:
    """Return the prompt lengths in tokens: SHORTEST, then each four times the one before, and `max_tokens`
    last."""
    found = [max_tokens]
    while found[0] // 4 >= SHORTEST:
        found.insert(0, found[0] // 4)
    return found


def expected_s(max_tokens: int, repeat: int) -> float:
    """Return the seconds that one H20 takes for all prompts."""
    rows = [
        Measured(tokens, cached, 0.0)
        for length in lengths(max_tokens)
        for tokens, cached in ((length // 2, 0), (length, length // 2), (length, length))
    ]
    return repeat * sum(row.predicted_s for row in rows)


async def measure(
    target: str,
    *,
    model: str = "",
    max_tokens: int = 16_384,
    repeat: int = 3,
    streams: int = STREAMS,
    time_scale: float = 1.0,
    measured: Callable[[Measured], None] = lambda row: None,
) -> Profile:
    """Call `measured` with every kind of prompt as soon as it is measured. Raises TargetError if the target
    cannot be reached, refuses a prompt, or reports no counts."""
    model = model or (await models(target) or [""])[0]
    load = Load(
        target=target, model=model, style=Style.TEXT, concurrency=1, time_scale=time_scale, send_session=False
    )
    words = Vocabulary().words_for

    async def played(*turns: Turn) -> list[Result]:
        results = await run_load([Session(turns[0].session, 0.0, turns)], load, words)
        for result in results:
            if not result.succeeded:
                raise TargetError(f"a prompt of {turns[-1].prompt_tokens} words was refused: {result.error}")
            if not result.counted or result.cached_tokens is None:
                raise TargetError("its answers do not report tokens (--enable-prompt-tokens-details of vLLM)")
        return results

    tokens_per_word = 1.0

    def words_of(tokens: int) -> int:
        return max(2, round(tokens / tokens_per_word))

    async def turns_of(length: int) -> list[Result]:
        """Return the turns of a new prompt: half the length first, then the whole length, which begins with
        it, then the same again."""
        name, words_in_all = uuid4().hex, words_of(length)  # no cache has seen it
        half = Segment(f"{name}-1", words_in_all // 2)
        rest = Segment(f"{name}-2", words_in_all - half.tokens)
        return await played(
            Turn(session=name, number=0, prompt=(half,), output_tokens=1),
            Turn(session=name, number=1, prompt=(half, rest), output_tokens=1),
            Turn(session=name, number=2, prompt=(half, rest), output_tokens=1),
        )

    async def side_by_side() -> list[Result]:
        """Return answers to one cached prompt, which begin together."""
        prompt = (Segment(uuid4().hex, words_of(max_tokens)),)
        await played(Turn(session="w", number=0, prompt=prompt, output_tokens=1))
        sessions = [
            Session(str(i), 0.0, (Turn(session=str(i), number=0, prompt=prompt, output_tokens=DECODED),))
            for i in range(streams)
        ]
        return await run_load(sessions, replace(load, concurrency=streams), words)

    (_, _, last) = await turns_of(SHORTEST)  # the first request of an engine is slower
    tokens_per_word = (last.prompt_tokens or SHORTEST) / SHORTEST
    prompts: list[Measured] = []
    for length in lengths(max_tokens):
        repeated = [await turns_of(length) for _ in range(repeat)]
        for results in zip(*repeated, strict=True):
            tokens, cached = results[0].prompt_tokens, min(r.cached_tokens or 0 for r in results)
            ttft_s = median(r.finished_at_s - r.submitted_at_s for r in results) * time_scale
            prompts.append(Measured(tokens, cached, ttft_s))
            measured(prompts[-1])
    (alone,) = await played(
        Turn(session="d", number=0, prompt=(Segment(uuid4().hex, SHORTEST),), output_tokens=DECODED)
    )
    return with_decode(prompts, alone, await side_by_side(), time_scale)


def with_decode(
    prompts: Sequence[Measured], alone: Result, beside: Sequence[Result], time_scale: float = 1.0
) -> Profile:
    """Return the profile with the speed of decode, as one answer alone and answers side by side tell it."""
    if failed := [result.error for result in beside if not result.succeeded]:
        said = f"{len(failed)} of {len(beside)} answers side by side failed ({failed[0]})"
        return Profile(prompts, undecoded=f"{said}; a smaller --max-tokens or fewer --streams may do")
    alone_s = (alone.tpot_s or 0.0) * time_scale
    beside_s = median(result.tpot_s or 0.0 for result in beside) * time_scale
    if not alone_s or not beside_s:
        said = "an answer came in one piece, without time between its tokens"
        return Profile(prompts, undecoded=f"{said}; engines have to send each (vLLM: --stream-interval=1)")
    context = sum(result.prompt_tokens + DECODED // 2 for result in beside)
    return Profile(prompts, Decoded(alone_s, beside_s, len(beside), context))


def table(profile: Profile, title: str) -> Table:
    grid = Table(title=title, title_justify="left")
    for name in ("prompt tokens", "cached", "TTFT", "by the model", "error"):
        grid.add_column(name, justify="right")
    for row in profile.prompts:
        times = (row.ttft_s, row.by(profile.engine))
        grid.add_row(
            f"{row.tokens:,}",
            f"{row.cached:,}",
            *(f"{seconds * 1e3:,.1f} ms" for seconds in times),
            f"{profile.error(row):+.0%}",
        )
    return grid


def transfer_table(transfer: Transfer, title: str) -> Table:
    fixed_s, tokens_per_s = transfer.fit()
    grid = Table(title=title, title_justify="left")
    for name in ("tokens", "transfer", "by the fit"):
        grid.add_column(name, justify="right")
    for row in transfer.rows:
        times = row.seconds, fixed_s + row.tokens / tokens_per_s
        grid.add_row(f"{row.tokens:,}", *(f"{seconds * 1e3:,.1f} ms" for seconds in times))
    return grid


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    all_lengths = ", ".join(f"{length:,}" for length in lengths(args.max_tokens))
    expected = expected_s(args.max_tokens, args.repeat) / args.time_scale
    print(
        f"prompts of up to {all_lengths} tokens, {args.repeat} of each, one at a time, to {args.target};"
        f" about {expected:.0f} s on one H20, longer on a slower engine",
        file=sys.stderr,
        flush=True,
    )
    try:
        profile, transfer = run(_measure(args))
    except TargetError as error:
        print(f"perilune profile: {error}", file=sys.stderr)
        return DOWN
    console = Console(highlight=False)
    console.print(table(profile, f"{args.target}: {profile.scale:.3g} × the time of one H20"))
    if profile.decoded:
        alone, beside = profile.decoded.alone_s * 1e3, profile.decoded.beside_s * 1e3
        streams = f"{profile.decoded.streams} long contexts"
        console.print(f"{alone:,.1f} ms per output token, alone; {beside:,.1f} ms in {streams}")
    if transfer:
        fixed_s, tokens_per_s = transfer.fit()
        speed = f", and {tokens_per_s:,.0f} tokens per second" if isfinite(tokens_per_s) else ""
        console.print(transfer_table(transfer, f"KV from {args.peer}"))
        console.print(f"{fixed_s * 1e3:,.1f} ms for each transfer{speed}")
    for said in left_out(profile, transfer):
        print(f"perilune profile: {said}", file=sys.stderr)
    text = as_yaml(profile, transfer)
    if args.yaml:
        args.yaml.write_text(text, encoding="utf-8")
        print(f"cost model: {args.yaml}", file=sys.stderr)
    else:
        print(text, end="")
    return DOWN if profile.unmoved else 0


def _tell(row: Measured) -> None:
    print(
        f"{row.tokens:,} tokens, {row.cached:,} of them cached: TTFT {row.ttft_s * 1e3:,.1f} ms",
        file=sys.stderr,
        flush=True,
    )


async def _measure(args: argparse.Namespace) -> tuple[Profile, Transfer | None]:
    model = args.model or (await models(args.target) or [""])[0]
    profile = await measure(
        args.target,
        model=model,
        max_tokens=args.max_tokens,
        repeat=args.repeat,
        streams=args.streams,
        time_scale=args.time_scale,
        measured=_tell,
    )
    profile = replace(profile, kv_bytes_per_token=args.kv_bytes_per_token)
    if not args.peer:
        return profile, None
    peer = Peer(args.peer, args.bootstrap, os.environ.get("PERILUNE_ENGINE_SECRET", ""))
    found = lengths(args.max_tokens)
    try:
        return profile, await profile_transfer.measure(
            args.target, peer, model, found, args.repeat, args.time_scale
        )
    except TargetError as error:
        return replace(profile, unmoved=str(error)), None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises SystemExit(2) with a message for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="perilune profile",
        description="Measure an engine's prefill by length and cached part, its decode, and with --peer"
        " its transfers; write the pool's cost model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", required=True, type=url, metavar="URL", help="an engine: http://host:port, without /v1")
    add("--model", default="", metavar="NAME", help="what requests ask for [the target's first]")
    add("--max-tokens", type=_length, default=16_384, metavar="N", help="of the longest prompt [%(default)s]")
    add("--repeat", type=count, default=3, metavar="N", help="times that each prompt is sent [%(default)s]")
    add("--streams", type=count, default=STREAMS, metavar="N", help="side by side, for decode [%(default)s]")
    add("--time-scale", type=positive, default=1.0, metavar="X", help="of a simulated engine [%(default)s]")
    add("--yaml", type=output, metavar="FILE", help="where the cost model goes [standard output]")
    add("--peer", type=url, metavar="URL", help="another engine, from which KV is handed over")
    add("--bootstrap", default="", metavar="IP:PORT", help="the peer's bootstrap page [its host, port 8998]")
    add(
        "--kv-bytes-per-token",
        type=count,
        default=H20_30B.kv_bytes_per_token,
        metavar="N",
        help="spec.model.kvBytesPerToken [%(default)s]",
    )
    args = parser.parse_args(argv)
    if args.peer and not args.bootstrap:
        args.bootstrap = f"{urlsplit(args.peer).hostname}:8998"
    if args.bootstrap and not args.peer:
        parser.error("--bootstrap is the peer's: name it with --peer")
    return args


def _length(text: str) -> int:
    if (tokens := count(text)) < SHORTEST:
        raise argparse.ArgumentTypeError(f"must be at least {SHORTEST}, got {text}")
    return tokens
