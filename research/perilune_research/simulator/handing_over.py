"""Planned hand-offs of KV: the gateway's own `Handoffs` table decides, and legs are requests to the engines.

As in the gateway, the give leg is a request of one token that waits in the host's queue like any other. When
its prefill has ended, the fabric sends the KV that the target lacks. The take leg is a request of one token
to the target, which finds the KV that arrived. The session switches when the target holds enough, and the
host keeps its copy until it evicts it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from perilune_gateway.model import Move, Subject
from perilune_gateway.model.handoff import Content, GivenUp, HandoffOutcome
from perilune_gateway.moves.handoff import Copy, Handoff, Handoffs, Over, Stage, Standing, Switch
from perilune_lab.simulate.workload import Task
from perilune_research.simulator.request import Leg

if TYPE_CHECKING:
    from perilune_research.simulator.simulation import Simulation

_BITS = 20
"""The name of a block consists of its run and, in this many bits, the depth of its end in tokens."""


def block_of(run: int, tokens: int) -> int:
    """Return the name of the block that ends at depth `tokens` of a run."""
    return run << _BITS | tokens


class MoveLeg(Leg):
    """One leg of one copy in a hand-off."""

    __slots__ = ("handing_over", "handoff", "missing_tokens")

    handing_over: SimulatedHandingOver
    handoff: Handoff
    missing_tokens: int
    """Tokens that the target does not hold."""

    def prefilled(self) -> None:
        self.handing_over.first_token(self)

    def finished(self) -> None:
        self.handing_over.finished(self)

    def lost(self) -> None:
        self.handing_over.lost(self)


class SimulatedHandingOver:
    """Carries out the hand-offs that the `Handoffs` table decides, and is the `World` that the table asks."""

    def __init__(self, simulation: Simulation, handoffs: Handoffs) -> None:
        self._sim = simulation
        self._handoffs = handoffs
        self._tickets: dict[Handoff, int] = {}
        self._takes: dict[Handoff, MoveLeg] = {}
        self.outcomes: Counter[HandoffOutcome] = Counter()
        self.given_up: Counter[GivenUp] = Counter()

    @property
    def _now(self) -> float:
        return self._sim.now

    # -- what happens ------------------------------------------------------------------------------

    def planned(self) -> None:
        """Offers the planner's new plan to the table."""
        self._handoffs.offer(self._sim.gateway.moves.planner.ahead, self._now)
        self.step()

    def turn_ended(self) -> None:
        """Step the open hand-offs, since a turn has ended for which one of them may wait."""
        if self._handoffs.open:
            self.step()

    def first_token(self, leg: MoveLeg) -> None:
        """Send the KV and the take leg when a give leg has ended its prefill; ignores take legs."""
        if leg.endpoint != self._number(leg.handoff.move.source):
            return
        sim, move = self._sim, leg.handoff.move
        if leg.handoff.is_over:
            return
        target = self._number(move.target)
        arrives_s = self._now
        if leg.missing_tokens:
            arrives_s = sim.fabric.send(leg.endpoint, target, leg.missing_tokens, self._now)
        take = self._leg(leg.handoff, target, leg.missing_tokens)
        take.fetched_tokens = leg.prompt_tokens
        take.ready_s = arrives_s
        take.transfer_s = arrives_s - self._now
        self._takes[leg.handoff] = take
        self._begin(take, 0)

    def finished(self, leg: MoveLeg) -> None:
        """Take the load of a leg that has ended off its endpoint. A take leg also tells how many tokens its
        target had cached."""
        self._release(leg)
        if self._takes.get(leg.handoff) is not leg:
            return
        del self._takes[leg.handoff]
        if leg.handoff.is_over:
            return
        move, know = leg.handoff.move, self._sim.beliefs.calibration
        if leg.missing_tokens and leg.transfer_s and leg.cached_tokens + self._block >= leg.prompt_tokens:
            target = self._number(move.target)
            link = self._sim.beliefs.link(self._number(move.source), target)
            predicted_s = self._sim.beliefs.uncorrected.transfer_s(leg.missing_tokens, link)
            know.transfer(move.source, move.target, leg.transfer_s, predicted_s, self._now)
        self._handoffs.took(leg.handoff, leg.cached_tokens, self._now)
        self.step()

    def lost(self, leg: MoveLeg) -> None:
        """Give a hand-off up: the engine of one of its legs has died."""
        self._release(leg)
        self._takes.pop(leg.handoff, None)
        self._handoffs.failed(leg.handoff, GivenUp.UNREACHABLE)
        self.step()

    # -- what follows ------------------------------------------------------------------------------

    def step(self) -> None:
        """Carries out what the present state of the hand-offs asks for."""
        for effect in self._handoffs.step(self, self._now):
            match effect:
                case Copy(handoff, missing_tokens):
                    self._copy(handoff, missing_tokens)
                case Switch(handoff):
                    self._switch(handoff.move)
                case Over(handoff):
                    self._over(handoff)

    def _copy(self, handoff: Handoff, missing_tokens: int) -> None:
        planner, move = self._sim.gateway.moves.planner, handoff.move
        if handoff not in self._tickets:
            begun = replace(move, transfer_bytes=handoff.transfer_bytes)
            self._tickets[handoff] = planner.started(begun, self._now)
        give = self._leg(handoff, self._number(move.source), missing_tokens)
        self._begin(give, self._block)

    def _switch(self, move: Move) -> None:
        beliefs, now = self._sim.beliefs, self._now
        source, target = self._number(move.source), self._number(move.target)
        assert isinstance(move.subject, int)
        self._sim.gateway.moves.rebind(move.subject, target, now)
        beliefs.moved(source, target, now)

    def _over(self, handoff: Handoff) -> None:
        self.outcomes[handoff.outcome] += 1
        if handoff.cause:
            self.given_up[handoff.cause] += 1
        arrived = handoff.stage is not Stage.GIVEN_UP
        planner = self._sim.gateway.moves.planner
        planner.finished(self._tickets.pop(handoff), self._now, arrived=arrived)

    # -- legs --------------------------------------------------------------------------------------

    @property
    def _block(self) -> int:
        return self._sim.fleet.hardware.block_tokens

    def _number(self, address: str) -> int:
        return self._sim.beliefs.number[address]

    def _leg(self, handoff: Handoff, endpoint: int, missing_tokens: int) -> MoveLeg:
        assert handoff.content is not None
        run = handoff.content.blocks[-1] >> _BITS
        task = Task(
            session=-1,
            number=-1,
            run=run,
            prompt_tokens=handoff.content.tokens,
            answer_run=run,
            output_tokens=1,
            gap_s=0.0,
            timestamp_s=0.0,
        )
        leg = MoveLeg(task, self._sim.next_number(), self._now, self._now)
        leg.handing_over = self
        leg.handoff, leg.missing_tokens, leg.endpoint = handoff, missing_tokens, endpoint
        return leg

    def _begin(self, leg: MoveLeg, uncached_tokens: int) -> None:
        """Send a leg to its endpoint and counts it as load there."""
        beliefs, e = self._sim.beliefs, leg.endpoint
        leg.uncached_tokens = uncached_tokens
        if uncached_tokens:
            leg.predicted_s = beliefs.models[e].prefill_s(uncached_tokens, leg.prompt_tokens)
        beliefs.start(e, leg.prompt_tokens)
        beliefs.prefill_starts(e, uncached_tokens, leg.predicted_s)
        if self._sim.engines[e].alive:
            self._sim.engines[e].add(leg, self._now)
        else:
            self.lost(leg)

    def _release(self, leg: MoveLeg) -> None:
        beliefs, e = self._sim.beliefs, leg.endpoint
        beliefs.prefill_done(e, leg.uncached_tokens, leg.predicted_s)
        beliefs.finish(e, leg.prompt_tokens, 0.0)

    # -- the world ---------------------------------------------------------------------------------

    def standing(self, subject: Subject) -> Standing | None:
        return self._sim.gateway.moves.standing(subject, self._now)

    def content(self, subject: Subject) -> Content | None:
        found = self._sim.gateway.moves.content(subject)
        if found is None:
            return None
        run, tokens = found
        return Content(array("i", bytes(4 * tokens)), (block_of(run, tokens),))

    def missing_tokens(self, target: str, content: Content, now: float) -> int:
        return content.tokens - self._held(target, content.blocks[-1], now)

    def confirmed(self, target: str, block: int) -> bool:
        return self._held(target, block, self._now) >= block & (1 << _BITS) - 1

    def can_copy(self, source: str, target: str) -> bool:
        ready = self._sim.beliefs.ready
        return ready[self._number(source)] and ready[self._number(target)]

    def may_choose(self, target: str) -> bool:
        return self._sim.beliefs.ready[self._number(target)]

    def kv_bytes(self, tokens: int) -> int:
        return self._sim.beliefs.uncorrected.kv_bytes(tokens)

    def keeps_room(self, source: str, tokens: int) -> bool:
        return True

    def affords(self, move: Move, transfer_bytes: int, now: float) -> bool:
        return self._sim.gateway.moves.planner.affords(move, transfer_bytes, now)

    def _held(self, address: str, block: int, now: float) -> int:
        """Return how many tokens of the prompt that ends with `block` the endpoint has announced, in whole
        blocks."""
        run, tokens = block >> _BITS, block & (1 << _BITS) - 1
        size = self._block
        held = self._sim.index.announced(self._number(address), run, tokens)
        return held if held == tokens else held // size * size
