"""Parses the command line of `perilune demo` into checked `Options`."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TypeVar

from perilune_gateway.policy import POLICIES
from perilune_lab.demo.load import OVERLOAD, usual_time_scale
from perilune_lab.terminal.arguments import figure, output

Number = TypeVar("Number", int, float)

MOST_ENDPOINTS = 256
MOST_TIME_SCALE = 2.5
"""Largest time scale. Faster engines answer in milliseconds, which a busy machine cannot measure."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the runs that are compared."""

    name: str
    policy: str
    admission: bool = False
    """Whether new sessions wait while active ones fill the KV pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line."""

    endpoints: int
    policy: str
    compare: tuple[str, ...]
    """Policies to compare with, other than `policy`."""
    overload: bool
    """Compare `policy` without and with session admission, under more load than the engines can serve."""
    seconds: float
    """Wall seconds per policy."""
    time_scale: float
    """Engine seconds per wall second."""
    seed: int
    keep: bool
    live: bool
    json: Path | None
    png: Path | None

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The runs in the order in which they are compared."""
        if self.overload:
            return Arm(self.policy, self.policy), Arm(f"{self.policy} + admission", self.policy, True)
        return tuple(Arm(policy, policy) for policy in (self.policy, *self.compare))

    @property
    def order(self) -> tuple[Arm, ...]:
        """The runs in their order; the one that stays up with --keep is last."""
        first, *others = self.arms
        return (*others, first) if self.keep and not self.overload else self.arms


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) with a message for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="perilune demo",
        description="Real Envoy, the gateway and simulated engines under agentic load: watch requests go"
        " where their KV cache is, then see what that gains.",
        epilog="example: perilune demo --endpoints 4 --seconds 20 --compare round_robin,sticky --json FILE",
    )
    parser.add_argument(
        "--endpoints", type=_at_least(1, int, MOST_ENDPOINTS), default=8, metavar="N", help="default 8"
    )
    known = ", ".join(sorted(POLICIES))
    parser.add_argument(
        "--policy", type=_policy, default="perilune", metavar="P", help=f"default perilune; {known}"
    )
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument(
        "--compare",
        type=_policies,
        default=("round_robin",),
        metavar="P,P",
        help="further policies, each with fresh engines; default round_robin, '' for none",
    )
    compared.add_argument(
        "--overload",
        action="store_true",
        help=f"{OVERLOAD:g} times the load, without and with session admission (docs/concepts.md); refused"
        " clients come back as OpenAI's SDKs do",
    )
    parser.add_argument("--seconds", type=_at_least(1.0, float), default=60.0, help="per run; default 60")
    parser.add_argument(
        "--time-scale", type=_at_least(0.01, float), metavar="X",
        help=f"engine seconds per wall second; default at most {MOST_TIME_SCALE:g}, less for many endpoints",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="of the load; equal seeds, equal sessions; default 0"
    )
    parser.add_argument("--keep", action="store_true", help="stay up afterwards, until Ctrl-C")
    parser.add_argument("--json", type=output, metavar="FILE", help="write the report (docs/report.md)")
    parser.add_argument("--png", type=figure, metavar="FILE", help="draw the comparison")
    parser.add_argument("--no-live", dest="live", action="store_false", help="lines instead of the live view")
    args = parser.parse_args(argv)
    compare = tuple(policy for policy in args.compare if policy != args.policy)
    scale = args.time_scale or min(MOST_TIME_SCALE, usual_time_scale(args.endpoints))
    return Options(**{**vars(args), "compare": compare, "time_scale": scale})


def _at_least(least: Number, kind: Callable[[str], Number], most: float = inf) -> Callable[[str], Number]:
    def convert(text: str) -> Number:
        value = kind(text)
        if most < value < inf:
            raise argparse.ArgumentTypeError(f"must be at most {most}")
        if not least <= value < inf:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    convert.__name__ = kind.__name__
    return convert


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(POLICIES.why_not(text))
    return text


def _policies(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_policy(word.strip()) for word in text.split(",") if word.strip()))
