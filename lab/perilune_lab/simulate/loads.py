"""The traffic that is offered to a simulated pool, and R, the rate that loads it fully."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import inf, sqrt

from perilune_gateway.model import EngineModel
from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_lab.simulate.bisection import last_that
from perilune_lab.simulate.clients import Clients
from perilune_lab.simulate.workload import Workload, prepare
from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.model import Mode, Style, Trace
from perilune_lab.traces.source import AGENTIC, open_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """The traffic that is played."""

    trace: str = AGENTIC
    """`agentic`, or a file's path."""
    mode: Mode = Mode.THINKTIME
    window_s: float = 1800.0
    """Generated traffic leaves out turns that an unloaded system would see at this time or later."""
    warmup_s: float = 600.0
    """Turns of generated traffic that an unloaded system would see before this time are not measured."""
    limit: int | None = None
    """Number of a file's requests to play, from the first; None: all."""
    parameters: Agentic = field(default_factory=Agentic)
    """Parameters of generated traffic."""
    clients: Clients = Clients()

    def workload(self, rate: float, seed: int, engine: EngineModel) -> Workload:
        """Make the workload. `rate` is in sessions per second for generated traffic, and for a file a factor
        on the recorded speed. The seed has no effect on a file. Raises SpecError if the file is no trace, or
        lacks the timestamps that the mode needs."""
        if self.trace != AGENTIC:
            recorded = open_trace(self.trace, self.limit)
            return prepare(recorded, engine, self.mode, rate, clients=self.clients)
        p = replace(self.parameters, sessions_per_s=rate)
        started = takewhile(lambda s: s.start_s < self.window_s, agentic.sessions(p, seed))
        trace = Trace(AGENTIC, Style.CHAT, tuple(started), {"seed": seed, **agentic.describe(p)})
        return prepare(
            trace,
            engine,
            self.mode,
            window_s=self.window_s,
            warmup_s=self.warmup_s,
            clients=self.clients,
        )


REGRET_AT_R = 5.0
"""At R, the reference's TTFT p90 is this multiple of the floor."""
_TOLERANCE_OF_R = 0.03


class NoRateError(Exception):
    """No rate is R; the message says why."""


def find_r(runs_at: Callable[[float], Sequence[Run]], guess: float) -> float:
    """Find R, to 3 %: the rate at which a policy's TTFT p90 is 5 times the unloaded floor, where both are
    means over the seeds.

    `runs_at` returns the policy's runs at a rate, one per seed. Raises NoRateError if R is not between 1/64
    and 64 times the guess.
    """

    def below(rate: float) -> bool:
        runs = runs_at(rate)
        floor_s = mean(run.floor_ttft_s.p90 if run.floor_ttft_s else 0.0 for run in runs)
        return mean(run.ttft_s.p90 if run.ttft_s else inf for run in runs) < REGRET_AT_R * floor_s

    low, high = last_that(below, guess, _TOLERANCE_OF_R)
    if not low:
        raise NoRateError(
            f"TTFT p90 is {REGRET_AT_R:g} × the floor or above at any load, or no request is measured"
        )
    if high == inf:
        raise NoRateError(f"TTFT p90 stays below {REGRET_AT_R:g} × the floor at any load")
    return sqrt(low * high)
