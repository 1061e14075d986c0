"""`python -m perilune_research fastpath`: compares decisions from headers with decisions from whole bodies.

    traffic ─▶ rig ─▶ pairs of verdicts ─▶ compare ─▶ table

The gateway's own code decides every turn of a known session twice on the same state. Engines and time are
simulated.

Exit status: 0; 1 if a policy is below the bar; 2 for a wrong call; 130 after Ctrl-C, which still prints the
table of the policies that were done.
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
from perilune_lab.quantiles import quantile
from perilune_lab.terminal.arguments import count, not_negative, positive
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import live_policies
from perilune_lab.terminal.processes import ctrl_c_noticed
from perilune_lab.traces.agentic import Agentic
from perilune_research.fastpath.compare import Tally
from perilune_research.fastpath.rig import Rig, Setting
from perilune_research.fastpath.traffic import Conversation, Habits, conversations

BELOW = 1
"""Exit status if a policy is below the bar."""
BAR = 0.999
"""Smallest share of equal decisions that passes."""
USUAL = ("ear", "sticky", "perilune")
TURNS_PER_S = 120
"""Turns that one core decides twice in a second, roughly."""
LENGTHS = 0.3
"""Factor on the measured lengths of agents' texts, on T_hot and on the KV pools. It reduces the work to a
tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked command line."""

    policies: tuple[str, ...] = USUAL
    turns: int = 5000
    """Number of turns to decide twice, per policy."""
    seed: int = 0
    endpoints: int = 8
    sessions_per_s: float = 1.0
    restart_every_s: float = 120.0
    """Mean seconds between two engine restarts in the fleet."""
    bar: float = BAR


def traffic(options: Options) -> Iterable[Conversation]:
    """Return agents' sessions with LENGTHS of their measured lengths. Contexts have at most 20,000 tokens, so
    that many are compacted."""
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
    """Play the traffic with one policy. `progress` is called now and then with the number of turns that were
    decided."""
    tally = Tally(policy=policy)
    setting = Setting(
        policy=PolicyChoice(
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
  body read    share of the turns whose headers did not suffice, so that the gateway reads the body
  equal        share of the turns decided by headers that the body would have sent to the same endpoint
  same         share of all turns with the same decision, including those whose body is read; --bar limits it
  tokens, held errors of the estimated length of the prompt, and of the estimated tokens of it that the
               session's host holds, relative to the prompt's length: median and 99 % quantile
  restarts     engine restarts
  failed       requests that failed and were sent again
"""


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m perilune_research fastpath",
        description="Decide every turn of a known session twice on the same state, by its headers alone and"
        " by its body, and count how often and why the decisions differ. The traffic is agentic, with hot"
        " hosts, rewritten prompts, engine restarts, evictions, sub-agents and reused ids. Engines and time"
        " are simulated; the gateway's own code decides.",
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
        "--turns",
        type=count,
        default=default.turns,
        help="number of turns to decide twice, per policy (default %(default)s)",
    )
    parser.add_argument(
        "--endpoints", type=count, default=default.endpoints, help="number of engines (default %(default)s)"
    )
    parser.add_argument(
        "--sessions-per-s",
        type=positive,
        default=default.sessions_per_s,
        metavar="RATE",
        help="sessions that begin per second; 1 is a good load for 8 endpoints, 3 too much"
        " (default %(default)s)",
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
    return Options(
        policies=policies,
        turns=args.turns,
        seed=args.seed,
        endpoints=args.endpoints,
        sessions_per_s=args.sessions_per_s,
        bar=args.bar,
    )


def render(tallies: Sequence[tuple[Tally, Rig]]) -> str:
    """Return the table, then the differences by cause, with a few examples."""
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
    number = len(options.policies)
    print(
        f"{number} {'policy' if number == 1 else 'policies'}, {options.turns:,} turns each, decided twice;"
        f" about {options.turns / TURNS_PER_S * number:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    done: list[tuple[Tally, Rig]] = []
    try:
        with ctrl_c_noticed() as check:
            for policy in options.policies:
                done.append(_measured(options, policy, check))
    except KeyboardInterrupt:
        if done:
            _print(options, done)
        raise KeyboardInterrupt(f"{len(done)} of {number} policies were done") from None
    _print(options, done)
    short = [tally.policy for tally, _ in done if tally.same_share < options.bar]
    if short:
        print(f"below {options.bar:.1%}: {', '.join(short)}")
    return BELOW if short else 0


def _measured(options: Options, policy: str, check: Callable[[], None]) -> tuple[Tally, Rig]:
    """Measure one policy and show progress. Call `check` now and then, which raises KeyboardInterrupt after
    Ctrl-C."""
    started = time.monotonic()
    line = Line(f"{policy}: turns decided:", options.turns)

    def show(turns: int) -> None:
        check()
        line.show(turns)

    found = measure(options, policy, show)
    line.end(f"{policy}: {time.monotonic() - started:.0f} s")
    return found


def _print(options: Options, done: Sequence[tuple[Tally, Rig]]) -> None:
    print(
        f"simulated, seed {options.seed}, {options.endpoints} endpoints, {options.sessions_per_s} sessions/s"
    )
    print(render(done))


class Line:
    """Shows progress on standard error: in one line on a terminal; elsewhere, only its end."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._on = sys.stderr.isatty()

    def show(self, n: int) -> None:
        if self._on:
            print(f"\r{self._what} {n} of {self._total} ", end="", file=sys.stderr, flush=True)

    def end(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._on else text, file=sys.stderr, flush=True)
