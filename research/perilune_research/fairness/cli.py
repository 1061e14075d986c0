"""`python -m perilune_research fairness`: what a tenant that sends ten times its share costs another one.

Plays a tenant alone and beside the greedy one, through the gateway's own code in virtual time, with one
gateway and with several (`play`), and prints a table and whether both bars are met.

Exit status: 0; 1 if a bar is missed; 2 for a wrong call; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from perilune_lab.terminal.arguments import count, positive
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.formats import as_number
from perilune_research.fairness.play import LEAST_THROUGHPUT, MOST_TTFT, TIMES, Setting, Shares, compare

MISSED = 1
_EPILOG = """\
examples (after `python -m perilune_research`):
  fairness                                       one gateway and four, two seeds: half an hour
  fairness --gateways 1 --seeds 1 --endpoints 4  minutes
"""
_HEADER = (
    "gateways",
    "alone s",
    "in turn s",
    "fair shares s",
    "ratio",
    "tokens/s in turn",
    "fair shares",
    "ratio",
    "given up: quiet",
    "greedy",
)


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. Raises SystemExit for `--help` and wrong calls."""
    args = _parser().parse_args(argv)
    out = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    setting = Setting(
        share=args.share, endpoints=args.endpoints, window_s=args.window, warmup_s=args.window / 3
    )
    seeds = range(args.seeds_from, args.seeds_from + args.seeds)
    found = [compare(setting, gateways, seeds) for gateways in args.gateways]
    out.print(table(found))
    for shares in found:
        out.print(verdict(shares))
    return 0 if all(shares.met for shares in found) else MISSED


def table(found: Sequence[Shares]) -> Table:
    """Return a row for each number of gateways."""
    grid = Table(
        title=f"SIMULATED · TTFT p90 of a tenant at its share, beside one at {TIMES:.0f} times its share",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for name in _HEADER:
        grid.add_column(name, justify="right")
    for s in found:
        seconds = (s.alone.ttft_p90_s, s.in_turn.ttft_p90_s, s.fair.ttft_p90_s, s.ttft_ratio)
        tokens = (s.in_turn.output_tokens_per_s, s.fair.output_tokens_per_s, s.throughput_ratio)
        cells = [as_number(value) for value in (*seconds, *tokens)]
        grid.add_row(str(s.gateways), *cells, str(s.fair.refused), str(s.fair.lost))
    return grid


def verdict(shares: Shares) -> str:
    """Return a sentence on both bars."""
    return (
        f"{'met' if shares.met else 'MISSED'}: with {shares.gateways} gateways TTFT p90 is"
        f" {as_number(shares.ttft_ratio)} times that alone (at most {MOST_TTFT:g}), and output"
        f" {as_number(shares.throughput_ratio)} times that in turn (at least {LEAST_THROUGHPUT:g})"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perilune_research fairness",
        description="What a tenant that sends ten times its share costs another one, with fair shares.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--share", type=positive, default=0.1, metavar="RATE", help="sessions per second [%(default)s]")
    add("--endpoints", type=count, default=8, metavar="N", help="simulated H20s [%(default)s]")
    add("--gateways", type=count, nargs="+", default=[1, 4], metavar="N", help="numbers to play [1 4]")
    add("--window", type=positive, default=900.0, metavar="S", help="seconds of traffic [%(default)s]")
    add("--seeds", type=count, default=2, metavar="N", help="number of seeds [%(default)s]")
    add("--seeds-from", type=count, default=1, metavar="N", help="first seed [%(default)s]")
    return parser
