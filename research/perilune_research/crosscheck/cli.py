"""`python -m perilune_research crosscheck`: plays one workload live and simulated, and compares the two.

Live means a real Envoy, a real gateway and simulated engines in real time.

    workload ─▶ play: live, a policy at a time ─┐
                play: simulated ────────────────┴─▶ compare: a table, three verdicts

The verdicts say whether TTFT p90 agrees within 20 %, the hit rate within 2 points, and the order of policies.
A few milliseconds decide which endpoint a turn goes to, so no two live plays are equal. Simulated figures are
therefore means over plays whose think times are up to 10 ms longer, with their standard deviation. Live
figures are those of one play, or pooled over `--plays` of them. In the hit rate, two standard deviations of
the live mean count as chance.

Live times are wall times, which a busy machine makes longer. The command measures how long its processes
waited for a CPU (Linux's schedstat) and prints it. If the machine was too busy, disagreement proves nothing.

Exit status: 0 if everything agrees; 1 if it does not, or the stack failed; 2 for a wrong call; 3 if it does
not agree but the machine was too busy to judge; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from perilune_api.pool import SpecError
from perilune_lab.processes.stack import StackError
from perilune_lab.terminal.arguments import count, output, positive
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import live_policies
from perilune_research.crosscheck.compare import Pair, table, verdicts
from perilune_research.crosscheck.play import Crosscheck
from perilune_research.crosscheck.workload import POLICIES, Options

FAILED, TOO_BUSY = 1, 3
_MOST_ENGINES, _MOST_SESSIONS, _LEAST_TURNS = 64, 10_000, 50
"""Limits of a crosscheck. Each engine is a process on this machine, and sessions are played in real time.
With fewer turns, a single one would weigh more than the two points within which hit rates have to agree."""

_EPILOG = """\
examples (after `python -m perilune_research`):
  crosscheck
  crosscheck --policies ear,round_robin --seconds 20 --json crosscheck.json
  crosscheck --policies dynamo --plays 4
"""


def conclude(options: Options, pairs: Sequence[Pair], out: Console) -> int:
    """Write the JSON file, print table and verdicts, and return the exit status. Raises OSError if it cannot
    write the file, but prints all the same."""
    try:
        if options.json:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(pairs), indent=2) + b"\n")
    finally:  # print the table even if the file cannot be written
        status = _print(pairs, out)
    return status


def _print(pairs: Sequence[Pair], out: Console) -> int:
    out.print(table(pairs))
    found = verdicts(pairs)
    for holds, text in found:
        out.print(f"{'met' if holds else 'MISSED'}: {text}", highlight=False)
    busiest = max(pairs, key=lambda pair: pair.waited_s)
    if busiest.disturbed:
        out.print(
            f"This machine was too busy: a request waited {busiest.waited_s * 1e3:.0f} ms for a CPU"
            f" ({busiest.policy}). Live times are too long, so do not judge by this run.",
            highlight=False,
        )
    if all(holds for holds, _ in found):
        return 0
    return TOO_BUSY if busiest.disturbed else FAILED


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        crosscheck = Crosscheck(options, Console(stderr=True))
        if (turns := crosscheck.trace.requests) < _LEAST_TURNS:
            raise SpecError(
                f"{turns} turns are too few: at least {_LEAST_TURNS} are needed - at `--seconds`, `--rate`"
            )
        out = Console(width=None if sys.stdout.isatty() else 140)
        try:
            pairs = uvloop.run(crosscheck.run())
        except KeyboardInterrupt:
            if crosscheck.pairs:
                out.print(table(crosscheck.pairs))
            done = f"{len(crosscheck.pairs)} of {len(options.policies)} policies were compared"
            raise KeyboardInterrupt(f"{done}; there is no verdict") from None
    except SpecError as error:
        return wrong_call("python -m perilune_research crosscheck", error)
    except StackError as error:
        print(f"python -m perilune_research crosscheck: {error}", file=sys.stderr)
        return FAILED
    return conclude(options, pairs, out)


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m perilune_research crosscheck",
        description="Play one workload live (Envoy, gateway, simulated engines in real time) and in the"
        " simulator, and compare the two.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--policies",
        default=",".join(POLICIES),
        metavar="A,B",
        help="policies to play [%(default)s]",
    )
    add(
        "--endpoints",
        type=count,
        default=default.endpoints,
        metavar="N",
        help="number of engines [%(default)s]",
    )
    add(
        "--seconds",
        type=positive,
        default=default.seconds,
        metavar="S",
        help="length of the traffic, in seconds [%(default)s]",
    )
    add(
        "--rate",
        type=positive,
        default=default.rate,
        metavar="X",
        help="sessions that begin per second and endpoint [%(default)s]",
    )
    add("--seed", type=int, default=default.seed, metavar="N", help="seed of the traffic [%(default)s]")
    add(
        "--plays",
        type=count,
        default=default.plays,
        metavar="N",
        help="live plays of each policy, whose results are pooled since single plays differ [%(default)s]",
    )
    add("--json", type=output, metavar="FILE", help="write the live and simulated figures")
    args = parser.parse_args(argv)
    policies = live_policies(args.policies, "--policies")
    if args.endpoints > _MOST_ENGINES:
        raise SpecError(f"{args.endpoints:,} engines: at most {_MOST_ENGINES} - at `--endpoints`")
    if (sessions := args.rate * args.endpoints * args.seconds) > _MOST_SESSIONS:
        raise SpecError(f"{sessions:,.0f} sessions: at most {_MOST_SESSIONS:,} - at `--rate`, `--seconds`")
    return Options(
        policies=policies,
        endpoints=args.endpoints,
        seconds=args.seconds,
        rate=args.rate,
        seed=args.seed,
        plays=args.plays,
        json=args.json,
    )
