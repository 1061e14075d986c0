"""Plays a tenant at its share of a pool alone, and beside one that sends ten times its share.

    quiet alone ─────────┐
    both, in turn ───────┼─▶ the quiet one's TTFT p90, and the output tokens of both
    both, fair shares ───┘

The gateway is real, engines and time are modelled (`perilune simulate`). With fair shares new sessions wait
by tenant (`routing.sessionAdmission`), and engines rank requests by what their tenants have queued
(`routing.enginePriority.fairShare`), both across all gateways; *in turn* is the same pool without either.
Seconds count from a session's first arrival, refusals included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import merge
from itertools import takewhile
from math import inf

from perilune_api.pool import EnginePriority, Routing, SessionAdmission
from perilune_lab.quantiles import mean, quantile
from perilune_lab.simulate.deployment import Deployment
from perilune_lab.simulate.outcome import SimulatedOutcome
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import Workload, prepare
from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.model import Mode, Session, Style, Trace

QUIET, GREEDY = "quiet", "greedy"
TIMES = 10.0
"""How many times its share the greedy tenant sends."""
MOST_TTFT, LEAST_THROUGHPUT = 1.3, 0.98
"""Bars: the quiet tenant's TTFT p90 against alone, and the output tokens per second against a pool that
serves in turn."""
IN_TURN = Routing(session_admission=SessionAdmission(enabled=False))
FAIR = Routing(
    session_admission=SessionAdmission(enabled=True, max_wait_seconds=60.0),
    engine_priority=EnginePriority(fair_share=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The traffic of one comparison."""

    share: float
    """Sessions per second of a tenant's share of the pool."""
    endpoints: int = 8
    window_s: float = 900.0
    warmup_s: float = 300.0
    traffic: Agentic = Agentic()

    def workload(self, seed: int, *, greedy: bool) -> Workload:
        """Make the traffic of the quiet tenant, and of the greedy one if it is there, too. The quiet one's is
        the same in both."""
        parts = [self._sessions(QUIET, self.share, seed)]
        if greedy:
            parts.append(self._sessions(GREEDY, TIMES * self.share, seed + 1_000))
        sessions = tuple(merge(*parts, key=lambda session: session.start_s))
        trace = Trace("tenants", Style.CHAT, sessions)
        engine = Deployment().hardware.engine
        return prepare(trace, engine, Mode.THINKTIME, window_s=self.window_s, warmup_s=self.warmup_s)

    def _sessions(self, tenant: str, rate: float, seed: int) -> list[Session]:
        made = agentic.sessions(replace(self.traffic, sessions_per_s=rate), seed)
        return [replace(s, tenant=tenant) for s in takewhile(lambda s: s.start_s < self.window_s, made)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one simulation says."""

    ttft_p90_s: float
    """Of the quiet tenant; inf if more than a tenth of its turns were given up."""
    refused: int
    """Turns of the quiet tenant whose clients gave up."""
    lost: int
    """The same of the greedy one."""
    output_tokens_per_s: float
    """Of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """One comparison, with means over its seeds."""

    gateways: int
    alone: Figures
    in_turn: Figures
    fair: Figures

    @property
    def ttft_ratio(self) -> float:
        """The quiet tenant's TTFT p90 beside the greedy one against alone."""
        return self.fair.ttft_p90_s / self.alone.ttft_p90_s

    @property
    def throughput_ratio(self) -> float:
        """Output tokens per second against a pool that serves in turn."""
        return self.fair.output_tokens_per_s / self.in_turn.output_tokens_per_s

    @property
    def met(self) -> bool:
        return self.ttft_ratio <= MOST_TTFT and self.throughput_ratio >= LEAST_THROUGHPUT


def compare(setting: Setting, gateways: int, seeds: range, fair: Routing = FAIR) -> Shares:
    """Play one comparison."""
    deployment = Deployment(endpoints=setting.endpoints, gateways=gateways)

    def played(routing: Routing, *, greedy: bool) -> Figures:
        return _mean([_play(setting, deployment, routing, seed, greedy=greedy) for seed in seeds])

    return Shares(
        gateways=gateways,
        alone=played(fair, greedy=False),
        in_turn=played(IN_TURN, greedy=True),
        fair=played(fair, greedy=True),
    )


def _play(setting: Setting, deployment: Deployment, routing: Routing, seed: int, *, greedy: bool) -> Figures:
    workload = setting.workload(seed, greedy=greedy)
    return figures(simulate(workload, deployment, "perilune", routing, seed=seed), workload, setting)


def figures(outcome: SimulatedOutcome, workload: Workload, setting: Setting) -> Figures:
    """Return the figures of one simulation: of the turns after the warm-up, and the output tokens that the
    whole pool made within the window."""
    jobs = workload.jobs
    done = [r for r in outcome.requests if r.task.ideal_at_s >= workload.warmup_s]
    quiet = [r for r in done if jobs[r.task.session].tenant == QUIET]
    lost = sum(not r.succeeded for r in done) - sum(not r.succeeded for r in quiet)
    good = [r for r in done if r.succeeded]
    span_s = max(r.finished_s for r in good) - min(r.submitted_s for r in good)
    return Figures(
        ttft_p90_s=quantile(sorted(r.ttft_s if r.succeeded else inf for r in quiet), 0.9),
        refused=sum(not r.succeeded for r in quiet),
        lost=lost,
        output_tokens_per_s=sum(r.output_tokens for r in good) / span_s,
    )


def _mean(each: list[Figures]) -> Figures:
    return Figures(
        ttft_p90_s=mean(f.ttft_p90_s for f in each),
        refused=sum(f.refused for f in each),
        lost=sum(f.lost for f in each),
        output_tokens_per_s=mean(f.output_tokens_per_s for f in each),
    )
