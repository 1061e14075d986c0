"""What the gateway has sent to engines: turns, and the legs by which KV goes before them or with them.

Each hears from the engines what a client or a feed of the gateway hears, and tells the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from perilune_gateway.feeds.handoff_legs import TAKE_S
from perilune_gateway.model import Outcome, Routed
from perilune_gateway.model.handoff import GivenUp, KvPull, Leg, RemotePrefill
from perilune_gateway.routing.handing_over import Legs
from perilune_lab.engine.request import Give, Request, Take
from perilune_lab.engine.request import Leg as EngineLeg
from perilune_lab.simulate.legs import ANSWER, BothLegs
from perilune_lab.simulate.outcome import PlayedRequest

if TYPE_CHECKING:
    from perilune_lab.simulate.gateway import SimulatedGateway
    from perilune_lab.simulate.simulation import Simulation


class Sent:
    """A routed turn, as the engine answers it."""

    def __init__(
        self, simulation: Simulation, gateway: SimulatedGateway, turn: PlayedRequest, routed: Routed
    ) -> None:
        self.simulation = simulation
        self.router = gateway.router
        self.gateway = gateway
        self.turn = turn
        self.routed = routed
        self.close: Callable[[], object] = lambda: None
        """Ends what the gateway or the proxy has open at engines for the turn."""

    def leave(self) -> None:
        """End the request, which its client has closed, as proxy and gateway do."""
        self.close()
        self.router.finished(self.routed.ticket, Outcome.CANCELLED)

    def request(self, output: Sequence[int], leg: EngineLeg | None = None) -> Request:
        """Return the turn as an engine's request."""
        table = self.simulation.texts.open(self.turn.task)
        priority = self.routed.fields.priority or 0
        return Request(self.routed.request_id, table, output, priority=priority, leg=leg)

    def send(self, leg: EngineLeg | None = None) -> None:
        """Send the turn to its endpoint; if that is dead, to the next that the gateway named."""
        s = self.simulation
        engine = next((e for a in self.routed.destinations if (e := s.engines[a]).alive), None)
        if engine is None:
            return self._failed()
        self.turn.endpoint = engine.number
        self.router.on_response(self.routed.ticket, 200, engine.address, True)
        request = self.request(s.texts.answer(self.turn.task), leg)
        self.close = partial(engine.abort, request)
        engine.add(request, self)
        return None

    def first_token(self, request: Request) -> None:
        self.turn.first_token_s = self.simulation.loop.now
        self.turn.cached_tokens = request.cached_tokens

    def finished(self, request: Request) -> None:
        self.turn.preemptions = request.preemptions
        self.router.finished(self.routed.ticket, Outcome.COMPLETED)
        self.simulation.ended(self.turn)

    def lost(self, request: Request) -> None:
        self._failed()

    def _failed(self) -> None:
        self.turn.failed = True
        self.router.finished(self.routed.ticket, Outcome.FAILED)
        self.simulation.ended(self.turn)


class Pulled:
    """The KV that an endpoint fetches before it gets a turn, as `feeds/pull_legs.py` has it fetched."""

    def __init__(self, sent: Sent, pull: KvPull) -> None:
        self._sent = sent
        self._pull = pull
        self._router = sent.router

    def begin(self) -> None:
        s, pull = self._sent.simulation, self._pull
        ends = self._sent.gateway.ends(pull.source, pull.target)
        both = BothLegs(pull.transfer_id, pull.content, ends, pull.within_s, s.loop, self)
        self._sent.close = both.cancel
        both.begin()

    def ended(self, leg: Leg) -> None:
        pass

    def took(self, cached_tokens: int, seconds: float) -> None:
        ticket = self._sent.routed.ticket
        self._router.moves.pulling.took(ticket, self._pull, cached_tokens, seconds)
        self._router.fetched(ticket)
        self._sent.send()

    def failed(self, leg: Leg, cause: GivenUp) -> None:
        ticket = self._sent.routed.ticket
        self._router.moves.pulling.failed(ticket, self._pull, leg, cause)
        self._router.prefills_itself(ticket)
        self._sent.send()


class PrefilledElsewhere:
    """The give leg of a turn that another endpoint prefills, as `feeds/prefill_legs.py` sends it."""

    def __init__(self, sent: Sent, remote: RemotePrefill) -> None:
        self._sent = sent
        self._remote = remote
        self._request = sent.request(ANSWER, Give(remote.transfer_id))

    def begin(self) -> None:
        s, remote, ticket = self._sent.simulation, self._remote, self._sent.routed.ticket
        source, prefills = s.engines[remote.source], self._sent.router.moves.remote_prefills
        if not source.alive:
            prefills.failed(ticket, remote, GivenUp.UNREACHABLE)
            self._sent.router.prefills_itself(ticket)
            return self._sent.send()
        prefills.giving(ticket, remote, lambda: source.abort(self._request))
        source.add(self._request, self)
        s.loop.at(s.loop.now + remote.give_s, self._late)
        return self._sent.send(Take(remote.transfer_id, "", ""))

    def first_token(self, request: Request) -> None:
        self._sent.turn.leg_cached_tokens = request.cached_tokens

    def finished(self, request: Request) -> None:
        prefills = self._sent.router.moves.remote_prefills
        prefills.given(self._sent.routed.ticket, self._remote)

    def lost(self, request: Request) -> None:
        self._failed(GivenUp.BROKE_OFF)

    def _late(self) -> None:
        if self._request.finish is None:
            self._sent.simulation.engines[self._remote.source].abort(self._request)
            self._failed(GivenUp.NOT_TAKEN)

    def _failed(self, cause: GivenUp) -> None:
        prefills = self._sent.router.moves.remote_prefills
        prefills.failed(self._sent.routed.ticket, self._remote, cause)


class Round:
    """The legs of one round of a hand-off, as `feeds/handoff_legs.py` sends them."""

    def __init__(self, gateway: SimulatedGateway, legs: Legs) -> None:
        self._handing_over = gateway.router.moves.handing_over
        self._legs = legs
        self._rounds = gateway.rounds
        ends = gateway.ends(legs.source, legs.target)
        self._both = BothLegs(legs.transfer_id, legs.content, ends, TAKE_S, gateway.loop, self)

    def begin(self) -> None:
        self._rounds[self._both] = self._legs
        self._handing_over.giving(self._legs)
        self._both.begin(accepted=lambda: self._handing_over.taking(self._legs))

    def ended(self, leg: Leg) -> None:
        self._handing_over.ended(self._legs, leg)

    def took(self, cached_tokens: int, seconds: float) -> None:
        self._rounds.pop(self._both, None)
        self._handing_over.took(self._legs, cached_tokens, seconds)

    def failed(self, leg: Leg, cause: GivenUp) -> None:
        self._rounds.pop(self._both, None)
        self._handing_over.failed(self._legs, cause)
