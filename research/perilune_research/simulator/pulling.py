"""Pulls: endpoints fetch KV before they get a request, where engines hand KV over (`routing.pull`).

    decision with `replicate_from` ─▶ give leg on the giver ─▶ fabric ─▶ take leg on the target ─▶ the request

As in the gateway (`routing/pulling.py`, `feeds/pull_legs.py`), both legs are requests of one token that wait
in their engine's queue like any other. The give leg counts as load of the giver until the pull ends; the
target has the request itself as load. The gateway holds the request for at most `pull.max_seconds`. If the KV
has not arrived by then, the gateway cancels the legs that still wait, and the target computes the prompt. The
gateway's own functions say who gives and limit the pulls (`routing/pull.py`, `routing/pull_limits.py`).

Not modelled: blocks that the giver keeps until they are fetched, and a giver that dies while it sends. Unlike
in vLLM, which schedules the take leg first and fetches then, the take leg waits in the target's queue after
the transfer, as in planned moves (`handing_over`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from perilune_gateway.model import Candidate, Decision, Move
from perilune_gateway.model.handoff import EXPIRED, GivenUp, HandoffOutcome
from perilune_gateway.model.handoff import Leg as LegKind
from perilune_gateway.routing.pull import move_of
from perilune_lab.simulate.workload import Task
from perilune_research.simulator.request import Leg, SimulatedRequest

if TYPE_CHECKING:
    from perilune_research.simulator.simulation import Simulation


class Fetch(NamedTuple):
    """What the target, the endpoint of a request, fetches or reads from the giver for it."""

    move: Move
    tokens: int
    """Leading tokens of the prompt that the giver holds."""
    missing_tokens: int
    """How many of `tokens` the target lacks."""
    alone_tokens: int
    """Tokens that the target computes if nothing arrives."""
    alone_s: float
    """Predicted seconds to compute `alone_tokens`."""


def fetch_of(decision: Decision, target: Candidate, prompt_tokens: int, *, from_host: bool = False) -> Fetch:
    """Return what `target` fetches by a decision that names a giver (`replicate_from`). `from_host`: the
    target reads the giver's host memory."""
    device, host, _ = target.overlap
    here, alone = host if from_host else device, max(target.overlap)
    return Fetch(
        move_of("", decision, target, from_host=from_host),
        decision.cached_tokens,
        decision.cached_tokens - here,
        prompt_tokens - alone,
        target.engine.prefill_s(prompt_tokens - alone, alone),
    )


@dataclass(slots=True, eq=False, kw_only=True)
class _Pull:
    """The pull of one request."""

    request: SimulatedRequest
    fetch: Fetch
    source: int
    target: int
    ticket: int
    give_s: float
    """Predicted seconds of the give leg's prefill."""
    began_s: float
    legs: list[PullLeg] = field(default_factory=list)
    over: bool = False
    """Whether the pull has ended."""


class PullLeg(Leg):
    """One of the two legs of a pull."""

    __slots__ = ("kind", "pull", "pulling")

    pull: _Pull
    kind: LegKind
    pulling: SimulatedPulling

    def prefilled(self) -> None:
        if self.kind is LegKind.GIVE and not self.pull.over:
            self.pulling.given(self.pull)

    def finished(self) -> None:
        if self.kind is LegKind.TAKE and not self.pull.over:
            self.pulling.took(self.pull)

    def lost(self) -> None:
        if not self.pull.over:
            self.pulling.failed(self.pull, self.kind, GivenUp.UNREACHABLE)


class SimulatedPulling:
    """The pulls of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        routing = simulation.setting.routing
        self._max_s = routing.pull.max_seconds
        self._limits = simulation.gateway.moves.limits

    def begin(self, request: SimulatedRequest, fetch: Fetch) -> None:
        """Send the give leg of a request that waits until its endpoint has fetched KV."""
        sim, beliefs, now = self._sim, self._sim.beliefs, self._sim.now
        source, block = beliefs.number[fetch.move.source], sim.fleet.hardware.block_tokens
        give_s = beliefs.models[source].prefill_s(block, fetch.tokens)
        ticket = self._limits.began(fetch.move, now)
        pull = _Pull(
            request=request,
            fetch=fetch,
            source=source,
            target=request.endpoint,
            ticket=ticket,
            give_s=give_s,
            began_s=now,
        )
        beliefs.start(source, fetch.tokens)
        beliefs.prefill_starts(source, block, give_s)
        sim.at(now + self._max_s, partial(self._late, pull))
        self._send(pull, LegKind.GIVE, source, self._leg(pull, LegKind.GIVE, source))

    def given(self, pull: _Pull) -> None:
        """Send what the target lacks, and the take leg: the giver has ended the prefill of its leg."""
        sim, now = self._sim, self._sim.now
        leg = self._leg(pull, LegKind.TAKE, pull.target)
        held = sim.engines[pull.target].cache.match(leg.run, leg.prompt_tokens)
        leg.ready_s = now
        if missing := leg.prompt_tokens - held:
            leg.ready_s = sim.fabric.send(pull.source, pull.target, missing, now)
        leg.fetched_tokens = leg.prompt_tokens
        self._send(pull, LegKind.TAKE, pull.target, leg)

    def took(self, pull: _Pull) -> None:
        """End the pull: the target has the KV. The gateway learns the link's speed from the time that the
        legs took."""
        sim, now, move = self._sim, self._sim.now, pull.fetch.move
        overhead_s = sim.beliefs.uncorrected.leg_overhead_s(pull.fetch.tokens)
        took_s = max(0.001, now - pull.began_s - overhead_s)
        sim.beliefs.observe_transfer(pull.source, pull.target, pull.fetch.missing_tokens, took_s, now)
        self._limits.worked(move.source, move.target)
        pull.request.source, pull.request.moved_tokens = pull.source, pull.fetch.missing_tokens
        self._end(pull, None)

    def failed(self, pull: _Pull, kind: LegKind, cause: GivenUp) -> None:
        """Give the pull up because of one leg: the target computes the prompt."""
        move, request, beliefs = pull.fetch.move, pull.request, self._sim.beliefs
        self._limits.failed(kind, move.source if kind is LegKind.GIVE else move.target, self._sim.now)
        if cause is GivenUp.UNREACHABLE:
            self._sim.unreachable(pull.source if kind is LegKind.GIVE else pull.target)
        for leg in pull.legs:
            self._sim.engines[leg.endpoint].cancel(leg)
        beliefs.prefill_done(pull.target, request.uncached_tokens, request.predicted_s)
        request.uncached_tokens, request.predicted_s = pull.fetch.alone_tokens, pull.fetch.alone_s
        beliefs.prefill_starts(pull.target, request.uncached_tokens, request.predicted_s)
        self._end(pull, cause)

    # -- inside ------------------------------------------------------------------------------------

    def _leg(self, pull: _Pull, kind: LegKind, endpoint: int) -> PullLeg:
        sim, tokens = self._sim, pull.fetch.tokens
        runs = sim.workload.runs
        run = next(r for r in runs.chain[pull.request.run] if tokens <= runs.end[r])
        leg = PullLeg(
            Task(
                session=-1,
                number=-1,
                run=run,
                prompt_tokens=tokens,
                answer_run=run,
                output_tokens=1,
                gap_s=0.0,
                timestamp_s=0.0,
            ),
            sim.next_number(),
            sim.now,
            sim.now,
        )
        leg.pull, leg.kind, leg.pulling, leg.endpoint = pull, kind, self, endpoint
        pull.legs.append(leg)
        return leg

    def _send(self, pull: _Pull, kind: LegKind, endpoint: int, leg: PullLeg) -> None:
        engine = self._sim.engines[endpoint]
        if engine.alive:
            engine.add(leg, self._sim.now)
        else:
            self.failed(pull, kind, GivenUp.UNREACHABLE)

    def _late(self, pull: _Pull) -> None:
        """Give the pull up if it has not ended: the request was held for as long as it may be."""
        if not pull.over:
            self.failed(pull, LegKind.GIVE, GivenUp.NOT_TAKEN)

    def _end(self, pull: _Pull, cause: GivenUp | None) -> None:
        """Count the pull and sends the request on, behind the requests that its endpoint got meanwhile."""
        pull.over = True
        sim, now, request = self._sim, self._sim.now, pull.request
        sim.beliefs.prefill_done(pull.source, sim.fleet.hardware.block_tokens, pull.give_s)
        sim.beliefs.finish(pull.source, pull.fetch.tokens, 0.0)
        self._limits.ended(pull.ticket)
        outcome = HandoffOutcome.COPIED
        if cause:
            outcome = HandoffOutcome.EXPIRED if cause in EXPIRED else HandoffOutcome.FAILED
        sim.gateway.seen.pulls[outcome] += 1
        request.held_s += now - pull.began_s
        request.routed_s = now
        request.number = sim.next_number()
        sim.at(now, partial(self._go, request))

    def _go(self, request: SimulatedRequest) -> None:
        self._sim.send(request, request.endpoint, self._sim.now)
