"""`perilune trace stats FILE|agentic`: a table, and with --json the same numbers for machines."""

import argparse
import sys
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from rich.box import SIMPLE_HEAD
from rich.table import Table

from perilune_api.pool import SpecError
from perilune_lab.terminal.arguments import count, not_negative, output
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.formats import as_percent
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.source import AGENTIC, open_trace
from perilune_lab.traces.stats import Spread, Stats, stats

_EPILOG = """\
examples:
  perilune trace stats mooncake_conversation.jsonl.gz
  perilune trace stats agentic --seed 1 --sessions 2000 --json moments.json

The hit rate is that of an infinite cache, token-weighted: `any` counts prefixes of every session,
`intra-session` only those of the session itself. Files: Mooncake's schema (timestamp, input_length,
output_length, hash_ids), Qwen-Bailian's (chat_id, parent_chat_id and the same) or Perilune's (see
perilune_lab/traces/jsonl.py), plain or gzip. Mooncake's traces name no sessions: they are derived from the
chains of hash ids.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0, or 2 for a file that cannot be read; then line and field are printed to
    stderr."""
    parser = argparse.ArgumentParser(
        prog="perilune trace",
        description="What a trace is made of: lengths, sessions, reuse, best possible hit rate.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="stats")
    command = commands.add_parser(
        "stats",
        help="measure a trace",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("trace", metavar="FILE|agentic", help="a trace file, or generated agentic traffic")
    command.add_argument("--limit", type=count, metavar="N", help="read only the first N requests")
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="agentic: seed of the traffic (default 0)"
    )
    command.add_argument(
        "--sessions", type=count, default=1000, metavar="N", help="agentic: number of sessions (default 1000)"
    )
    command.add_argument(
        "--zipf", type=not_negative, default=0.0, metavar="A", help="agentic: skew of the sessions' weights"
    )
    command.add_argument("--json", type=output, metavar="FILE", help="also write the numbers as JSON")
    args = parser.parse_args(argv)
    print(f"{args.trace}: measuring it; about a second for 20,000 requests", file=sys.stderr, flush=True)
    try:
        trace = open_trace(args.trace, args.limit, args.seed, args.sessions, Agentic(zipf_alpha=args.zipf))
    except SpecError as error:
        return wrong_call("perilune trace", error)
    found = stats(trace)
    if args.json:
        try:
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        except OSError as error:
            return wrong_call("perilune trace", f"{args.json}: {error.strerror}")
    console = Console()
    for grid in tables(found):
        console.print(grid)
    return 0


def tables(found: Stats) -> tuple[Table, Table]:
    """Return tables of distributions and of single numbers."""
    title = found.name if found.name != AGENTIC else f"{found.name}, generated"
    spreads = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    spreads.add_column("", no_wrap=True)
    for name in ("mean", "p25", "p50", "p75", "p90", "p99", "max"):
        spreads.add_column(name, justify="right", no_wrap=True)
    for name, spread in _spreads(found):
        if isinstance(spread, Spread):
            spreads.add_row(name, *(as_short_number(value) for value in msgspec.structs.astuple(spread)))
    shares = Table(show_header=False, box=SIMPLE_HEAD)
    shares.add_column("", no_wrap=True)
    shares.add_column("", justify="right", no_wrap=True)
    for name, value in _shares(found):
        shares.add_row(name, value)
    return spreads, shares


def _spreads(found: Stats) -> Iterator[tuple[str, Spread | UnsetType]]:
    yield "prompt tokens", found.input_tokens
    yield "output tokens", found.output_tokens
    yield "turns per session", found.turns_per_session
    yield "tokens per session", found.tokens_per_session
    yield "gap (s)", found.gap_s


def _shares(found: Stats) -> Iterator[tuple[str, str]]:
    yield "requests", f"{found.requests:,}"
    yield "sessions", f"{found.sessions:,}"
    if found.span_s is not UNSET:
        yield "span (s)", f"{found.span_s:,.0f}"
    yield "prompt : output tokens", f"{found.input_per_output:.1f}"
    yield "top 1 % of sessions, of tokens", as_percent(found.top_1_percent_share)
    yield "hit rate, infinite cache: any", as_percent(found.hit_rate.any)
    yield "hit rate: intra-session only", as_percent(found.hit_rate.intra_session)
    if found.reuse:
        yield "of the reuse: intra-session", as_percent(found.reuse.intra_session)
        yield "of the reuse: cross-session", as_percent(found.reuse.cross_session)
        yield "of the reuse: shared prefix", as_percent(found.reuse.shared_prefix)
    yield "prefill, of compute: no cache", as_percent(found.prefill_compute.no_cache)
    yield "prefill, of compute: infinite cache", as_percent(found.prefill_compute.infinite_cache)


def as_short_number(value: float) -> str:
    """Return at most six characters, so that a row fits 80 columns."""
    for least, unit, letter in ((999_500, 1e6, "M"), (9_999.5, 1e3, "k")):
        if value >= least:
            return f"{value / unit:#.3g}".rstrip(".") + letter
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
