"""One simulation of the evaluation: a deployment, a load, a policy and a seed, played by `perilune simulate`.

A cell's key is its fields and a fingerprint of the code that plays it: the simulator with the gateway's own
code, and this one policy. So a changed policy is played again, and no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import takewhile
from math import inf, isfinite
from pathlib import Path
from time import process_time

import msgspec

from perilune_api.pool import MoveTrigger, Routing, SessionAdmission
from perilune_gateway.policy import POLICIES
from perilune_lab.quantiles import quantile
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.clients import Clients
from perilune_lab.simulate.deployment import STORE_BYTES_PER_S, Arm, Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20, LINKS, with_store
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.loop import BEGIN_S
from perilune_lab.simulate.outcome import PlayedRequest, SimulatedOutcome
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import Workload, prepare
from perilune_lab.terminal.policy_arguments import changed
from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.model import Mode, Style, Trace
from perilune_lab.traces.source import AGENTIC
from perilune_research.evaluation.traffic import QUIET, hard_to_guess, tenants, varied
from perilune_research.evaluation.twice import DecidesTwice, Twice
from perilune_research.sources import REGISTRY, fingerprint, is_module

COMPUTES = (__name__,)
_BATCH = 4
"""Most cells of a batch, so that an interruption loses little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One simulation."""

    policy: str
    rate: float
    """Sessions per second; for a recorded trace, a factor on the recorded speed."""
    seed: int
    arm: Arm = Arm.NONE
    split: bool = False
    """Whether half of the endpoints only prefill for the others."""
    overlap: bool = False
    """Whether transfers overlap with prefills."""
    triggers: tuple[MoveTrigger, ...] = ()
    """Situations in which the gateway plans moves. Empty: those by default."""
    admission: float | None = None
    """Seconds for which the gateway holds new sessions while active contexts fill the KV pools; with 0 it
    refuses them. None: they begin at once."""
    faults: Faults = Faults()
    link: str = "idle"
    slower: float = 1.0
    """Factor on all compute times of all engines, of which the gateway is not told."""
    tokens_per_prompt: int | None = None
    """The most tokens of an engine's step that one prompt gets. None: all."""
    gateways: int = 1
    endpoints: int = 8
    patience_s: float = 0.0
    """Seconds without a first token after which clients close a request. 0: they wait."""
    retries: int = 2
    """How many times clients send a refused or closed request again."""
    begin_within_s: float = 0.0
    """TTFT that the first request of each session asks for. 0: none."""
    window_s: float = 1800.0
    warmup_s: float = 600.0
    traffic: tuple[tuple[str, float], ...] = ()
    """Parameters of generated traffic that differ from their defaults, as factors."""
    tenants: tuple[str, ...] = ()
    """The tenants that send (`traffic.tenants`). Empty: sessions name none."""
    twice: bool = False
    """Whether bodies are hard to guess, and each turn of a known session is decided twice (`twice.py`)."""
    trace: str = AGENTIC
    mode: Mode = Mode.THINKTIME
    limit: int | None = None
    """How many requests of a trace are played, from its beginning. None plays all of them."""
    params: tuple[tuple[str, str], ...] = ()
    """Parameters of policies that differ from their defaults, as BLOCK.NAME and value."""

    @property
    def key(self) -> str:
        """JSON of everything that the result depends on. A trace counts by its file's name."""
        fields = {**asdict(self), "trace": Path(self.trace).name, "code": code(self.policy)}
        return msgspec.json.encode(fields, order="sorted").decode()

    @property
    def offered(self) -> tuple[object, ...]:
        """What the workload depends on."""
        return (
            *(self.trace, self.mode, self.limit, self.rate, self.seed, self.window_s, self.warmup_s),
            *(self.traffic, self.tenants, self.twice, self.patience_s, self.retries),
            self.begin_within_s,
        )

    @property
    def deployment(self) -> Deployment:
        hardware = replace(H20, link=LINKS[self.link], engine=H20.engine.scaled(self.slower))
        hardware = replace(hardware, tokens_per_prompt=self.tokens_per_prompt)
        deployment = Deployment(
            arm=self.arm,
            endpoints=self.endpoints,
            prefill_endpoints=self.endpoints // 2 if self.split else 0,
            overlap=self.overlap,
            gateways=self.gateways,
            hardware=hardware,
        )
        if not deployment.stores:
            return deployment
        return replace(deployment, hardware=with_store(hardware, STORE_BYTES_PER_S))

    @property
    def routing(self) -> Routing:
        routing = changed(Routing(), dict(self.params), "--param")
        if self.admission is not None:
            waits = SessionAdmission(enabled=True, max_wait_seconds=self.admission)
            routing = msgspec.structs.replace(routing, session_admission=waits)
        if not self.triggers:
            return routing
        planned = msgspec.structs.replace(routing.migration, triggers=self.triggers)
        return msgspec.structs.replace(routing, migration=planned)

    def workload(self) -> Workload:
        """Make the traffic. Raises SpecError if the file is no trace."""
        clients = Clients(
            patience_s=self.patience_s or inf, retries=self.retries, begin_within_s=self.begin_within_s
        )
        if self.tenants or self.twice:
            trace = self._special()
            return prepare(
                trace,
                H20.engine,
                self.mode,
                window_s=self.window_s,
                warmup_s=self.warmup_s,
                clients=clients,
            )
        recorded = self.trace != AGENTIC
        load = OfferedLoad(
            trace=self.trace,
            mode=self.mode,
            limit=self.limit,
            window_s=inf if recorded else self.window_s,
            warmup_s=0.0 if recorded else self.warmup_s,
            parameters=varied(Agentic(), self.traffic),
            clients=clients,
        )
        return load.workload(self.rate, self.seed, H20.engine)

    def _special(self) -> Trace:
        """Return traffic that `perilune simulate` does not offer."""
        if self.tenants:
            return tenants(self.tenants, self.rate, self.seed, self.window_s)
        plain = agentic.sessions(Agentic(sessions_per_s=self.rate), self.seed)
        within = takewhile(lambda session: session.start_s < self.window_s, plain)
        return Trace("hard to guess", Style.CHAT, tuple(hard_to_guess(within, self.seed)))


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """What waited at one endpoint."""

    pending_tokens: float
    """Uncached tokens of prompts that wait or are computed, averaged over time."""
    hot_share: float
    """Share of the time with more of them than T_hot."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one cell. Those of turns are of the turns after the warm-up, where nothing else is
    said."""

    run: Run
    turns: int
    """Number of turns that were played, including those of the warm-up."""
    read: int
    """Number of these whose body the gateway had to read."""
    transfers: Mapping[str, int]
    """Number of transfers of KV that have ended, by reason and outcome."""
    hot_share: float
    """Share of the decisions that found the session's host hot (T_hot), whatever followed."""
    answered: float
    """Share of all turns that the sessions have, of which those of a lost session never come."""
    in_flight: float
    """Turns in flight, averaged over time."""
    heat: tuple[Heat, ...]
    """One entry for each endpoint, from the hottest to the coolest."""
    refused: int
    """Number of refusals, of which a request may have several."""
    session_p90_s: float | None
    """Seconds from a session's first request to its last token, of all sessions. None if a tenth of them
    never ended."""
    session_p99_s: float | None
    """The same of all but a hundredth."""
    quiet_ttft_p90_s: float | None
    """TTFT p90 in seconds of the tenant that sends no more than its share. None if there is no such tenant,
    or if more than a tenth of its turns got no token."""
    twice: Twice | None
    """How the decisions by headers and by bodies differ; None if turns were decided once."""
    simulated_s: float
    cpu_s: float


@cache
def code(policy: str) -> str:
    """Return a fingerprint of the code that plays this policy."""
    modules = {f"{REGISTRY}{room}.{name}": name for name in POLICIES for room in ("", ".others")}
    mine = [module for module, name in modules.items() if name == policy and is_module(module)]
    return fingerprint((*COMPUTES, *mine), modules.keys() - set(mine))


def batches(cells: Sequence[Cell]) -> list[tuple[Cell, ...]]:
    """Group cells that play the same workload into batches."""
    found: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.offered].append(cell)
    return [tuple(group[at : at + _BATCH]) for group in found.values() for at in range(0, len(group), _BATCH)]


def compute(batch: Sequence[Cell]) -> list[tuple[Cell, Result]]:
    """Simulate the cells of a batch, which share one workload."""
    workload = batch[0].workload()
    return [(cell, _result(cell, workload)) for cell in batch]


def _result(cell: Cell, workload: Workload) -> Result:
    routing, twice = cell.routing, None
    how = (workload, cell.deployment, cell.policy, routing, cell.faults, cell.seed)
    if cell.twice:
        began, simulation = process_time(), DecidesTwice(*how)
        outcome, twice = simulation.run(), simulation.twice
        outcome.cpu_s = process_time() - began
    else:
        outcome = simulate(*how)
    ear = routing.policy.ear
    run = measure.run(outcome, workload, ear.cooldown_seconds)
    done = [r for r in outcome.requests if r.task.ideal_at_s >= workload.warmup_s]
    ended = sessions_s(outcome.requests, workload.warmup_s)
    return Result(
        run=msgspec.structs.replace(run, per_endpoint=msgspec.UNSET),
        turns=len(outcome.requests),
        read=outcome.read,
        transfers=outcome.transfers,
        hot_share=sum(r.hot for r in done) / max(1, len(done)),
        answered=run.succeeded / max(1, len(workload.measured)),
        in_flight=_in_flight(done),
        heat=heat(outcome, BEGIN_S + workload.warmup_s, ear.hot_pending_tokens),
        refused=sum(r.refusals for r in outcome.requests),
        session_p90_s=_finite(ended, 0.9),
        session_p99_s=_finite(ended, 0.99),
        quiet_ttft_p90_s=_quiet_ttft_p90_s(done, workload),
        twice=twice,
        simulated_s=outcome.simulated_s,
        cpu_s=outcome.cpu_s,
    )


def sessions_s(requests: Sequence[PlayedRequest], warmup_s: float) -> list[float]:
    """Return for each session that came after the warm-up how many seconds it took from its first request to
    its last token, in ascending order; infinity if it lost a request."""
    turns: dict[int, list[PlayedRequest]] = defaultdict(list)
    for r in requests:
        turns[r.task.session].append(r)
    found = []
    for played in turns.values():
        played.sort(key=lambda r: r.task.number)
        if played[0].task.ideal_at_s >= warmup_s:
            whole = all(r.succeeded for r in played)
            found.append(played[-1].finished_s - played[0].submitted_s if whole else inf)
    return sorted(found)


def _finite(ordered: Sequence[float], q: float) -> float | None:
    """Return the value at this rank, without interpolation; None if it is infinite, or there is none."""
    found = ordered[round(q * (len(ordered) - 1))] if ordered else inf
    return found if isfinite(found) else None


def _in_flight(done: Sequence[PlayedRequest]) -> float:
    span_s = max(r.finished_s for r in done) - min(r.submitted_s for r in done) if done else 0.0
    return sum(r.e2e_s for r in done) / span_s if span_s else 0.0


def heat(outcome: SimulatedOutcome, from_s: float, hot_tokens: float) -> tuple[Heat, ...]:
    """Return what waited at each endpoint from then on, the hottest first. A turn waits from its submission
    to its first token."""
    changes: dict[int, list[tuple[float, int]]] = {n: [] for n in range(len(outcome.addresses))}
    for r in outcome.requests:
        if r.endpoint >= 0 and from_s < r.first_token_s < inf:
            tokens = r.prompt_tokens - r.cached_tokens
            changes[r.endpoint] += [(max(from_s, r.submitted_s), tokens), (r.first_token_s, -tokens)]
    span_s = max((at_s for each in changes.values() for at_s, _ in each), default=from_s) - from_s
    found = [_heat(each, from_s, hot_tokens, span_s) for each in changes.values()]
    return tuple(sorted(found, key=lambda each: -each.pending_tokens))


def _heat(changes: Sequence[tuple[float, int]], from_s: float, hot_tokens: float, span_s: float) -> Heat:
    pending, sum_s, hot_s, since_s = 0, 0.0, 0.0, from_s
    for at_s, change in sorted(changes):
        sum_s += pending * (at_s - since_s)
        hot_s += (at_s - since_s) * (pending > hot_tokens)
        pending, since_s = pending + change, at_s
    return Heat(pending_tokens=sum_s / span_s if span_s else 0.0, hot_share=hot_s / span_s if span_s else 0.0)


def _quiet_ttft_p90_s(done: Sequence[PlayedRequest], workload: Workload) -> float | None:
    """Return it, counting a turn that was given up as never answered."""
    quiet = [r for r in done if workload.jobs[r.task.session].tenant == QUIET]
    p90_s = quantile(sorted(r.ttft_s if r.succeeded else inf for r in quiet), 0.9) if quiet else inf
    return p90_s if isfinite(p90_s) else None
