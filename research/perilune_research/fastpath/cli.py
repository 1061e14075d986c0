"""`python -m perilune_research fastpath`: compares decisions from headers with decisions from whole bodies.

    traffic ─▶ rig ─▶ pairs of verdicts ─▶ compare ─▶ table

Every turn of a known session is decided twice on the same state, by the gateway's own code. Engines and time
are simulated. Exit status: 0; 1 below the bar; 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from perilune_api.policies import EarParams, PolicyChoice, PolicyName
from perilune_api.pool import SpecError
from perilune_gateway.policy import POLICIES
from perilune_lab.arguments import count, not_negative, positive
from perilune_lab.exits import wrong_call
from perilune_lab.policy_arguments import live_policies
from perilune_lab.quantiles import quantile
from perilune_lab.traces.agentic import Agentic
from perilune_research.fastpath.compare import Tally
from perilune_research.fastpath.rig import Rig, Setting
from perilune_research.fastpath.traffic import Conversation, Habits, conversations

BELOW = 1
BAR = 0.999
USUAL = ("ear", "sticky", "perilune")
LENGTHS = 0.3
"""Factor on the agent's measured lengths, on T_hot and on the KV pools, which makes a tenth of the work."""


@dataclass(frozen=True, slots=True)
class Options:
    policies: tuple[str, ...] = USUAL
    turns: int = 5000
    seed: int = 0
    endpoints: int = 8
    sessions_per_s: float = 1.0
    restart_every_s: float = 120.0
    bar: float = BAR


def traffic(options: Options) -> Iterable[Conversation]:
    """The sessions that are sent: agents' at LENGTHS of their length, with contexts of at most 20,000 tokens,
    so that many are compacted."""
    parameters = Agentic(
        sessions_per_s=options.sessions_per_s,
        turns_alpha=1.2,
        turns_min=3,
        context_tokens=65_536,
        answer_max_tokens=2048,
        length_scale=LENGTHS,
        gap_scale=0.3,
    )
    return conversations(parameters, Habits(), options.seed)


def measure(
    options: Options, policy: str, progress: Callable[[int], None] | None = None
) -> tuple[Tally, Rig]:
    """Runs one policy over the traffic."""
    tally = Tally(policy)
    setting = Setting(
        PolicyChoice(
            name=PolicyName(policy),
            ear=EarParams(hot_pending_tokens=int(EarParams().hot_pending_tokens * LENGTHS)),
        ),
        endpoints=options.endpoints,
        restart_every_s=options.restart_every_s,
        seed=options.seed,
    )
    rig = Rig(setting, traffic(options), tally.add)
    rig.run(options.turns, progress)
    return tally, rig


_EPILOG = """\
examples (after `python -m perilune_research`):
  fastpath
  fastpath --policies perilune --turns 500 --sessions-per-s 3

columns:
  turns        turns of sessions that the gateway knew
  body read    turns whose headers did not suffice, so that the body decides in any case
  equal        share of the turns decided by headers that the body would have sent to the same endpoint
  same         share of all turns with the same decision, turns whose body is read included; --bar limits it
  tokens, held error of the estimated length of the prompt, and of what the host holds of it, relative to the
               prompt: median and 99 % quantile
"""


def parse(argv: Sequence[str]) -> Options:
    """Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m perilune_research fastpath",
        description="Decides every turn of a known session twice on the same state, by its headers alone and"
        " by its body, over agentic traffic with hot hosts, rewritten prompts, engine restarts, evictions,"
        " sub-agents and reused ids; counts how often and why the decisions differ. Engines and time are"
        " simulated, the decisions are the gateway's.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--policies",
        default=",".join(USUAL),
        metavar="NAMES",
        help=f"all, or some of: {', '.join(POLICIES)} (default %(default)s)",
    )
    parser.add_argument(
        "--turns", type=count, default=default.turns, help="turns to decide twice (default %(default)s)"
    )
    parser.add_argument(
        "--endpoints", type=count, default=default.endpoints, help="number of engines (default %(default)s)"
    )
    parser.add_argument(
        "--sessions-per-s",
        type=positive,
        default=default.sessions_per_s,
        metavar="RATE",
        help="sessions that begin per second; 1 loads 8 endpoints well, 3 too much (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=default.seed, help="seed of traffic and decisions (default %(default)s)"
    )
    parser.add_argument(
        "--bar",
        type=not_negative,
        default=default.bar,
        help="smallest share of equal decisions that passes (default %(default)s)",
    )
    args = parser.parse_args(argv)
    policies = live_policies(args.policies, "--policies")
    return Options(policies, args.turns, args.seed, args.endpoints, args.sessions_per_s, bar=args.bar)


def render(tallies: Sequence[tuple[Tally, Rig]]) -> str:
    """Prints the table, then the differences by cause, with a few examples."""
    lines = [
        f"{'':10} turns  body read     equal      same   tokens p50  p99    held p50  p99   restarts failed"
    ]
    for tally, rig in tallies:
        tokens, held = sorted(tally.token_errors), sorted(tally.held_errors)
        errors = [quantile(e, q) if e else 0.0 for e in (tokens, held) for q in (0.5, 0.99)]
        lines.append(
            f"{tally.policy:10} {tally.turns:5} {tally.read / max(1, tally.turns):10.1%}"
            f" {tally.equal_share:9.2%} {tally.same_share:9.2%}"
            f" {errors[0]:12.1%} {errors[1]:4.0%} {errors[2]:10.1%} {errors[3]:5.0%}"
            f" {rig.restarts:9} {rig.resent:6}"
        )
    for tally, _ in tallies:
        for (cause, reasons), times in tally.different.most_common():
            lines.append(f"{tally.policy}: {times} × {cause}: {reasons}")
        lines += [f"    {example}" for example in tally.examples]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
    except SpecError as error:
        return wrong_call("python -m perilune_research fastpath", error)
    done = []
    for policy in options.policies:
        started = time.monotonic()
        line = Line(f"{policy}: turns weighed", options.turns)
        done.append(measure(options, policy, line.show))
        line.end(f"{policy}: {time.monotonic() - started:.0f} s")
    print(
        f"simulated, seed {options.seed}, {options.endpoints} endpoints, {options.sessions_per_s} sessions/s"
    )
    print(render(done))
    short = [tally.policy for tally, _ in done if tally.same_share < options.bar]
    if short:
        print(f"below {options.bar:.1%}: {', '.join(short)}")
    return BELOW if short else 0


class Line:
    """Progress on standard error, rewritten in place on a terminal, silent elsewhere."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._on = sys.stderr.isatty()

    def show(self, n: int) -> None:
        if self._on:
            print(f"\r{self._what} {n} of {self._total} ", end="", file=sys.stderr, flush=True)

    def end(self, text: str) -> None:
        if self._on:
            print(f"\r\033[K{text}", file=sys.stderr)
