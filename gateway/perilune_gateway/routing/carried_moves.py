"""Tells the planner how the planned moves end that requests carry out.

Such a move is over with the first of: its prefill's end, the head of a whole answer, another endpoint that
serves, the request's end.
"""

from __future__ import annotations

from perilune_gateway.moves.planner import Planner
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.request_facts import Answered, Decided, Ended, Prefilled, Rerouted, Withdrawn


class CarriedMoves:
    """The planned moves of one pool's requests."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def on_decided(self, fact: Decided) -> None:
        if move := fact.decision.move:
            fact.request.move = self._planner.started(move, fact.now)

    def on_prefilled(self, fact: Prefilled) -> None:
        self._end(fact.request, fact.now, arrived=True)

    def on_answered(self, fact: Answered) -> None:
        if not fact.request.streamed:
            self._end(fact.request, fact.now, arrived=not fact.refused)

    def on_rerouted(self, fact: Rerouted) -> None:
        self._end(fact.request, fact.now, arrived=False)

    def on_ended(self, fact: Ended) -> None:
        self._end(fact.request, fact.now, arrived=fact.answered)

    def on_withdrawn(self, fact: Withdrawn) -> None:
        self._end(fact.request, fact.now, arrived=False)

    def _end(self, request: InFlight, now: float, *, arrived: bool) -> None:
        """`arrived`: the target has the KV."""
        if request.move >= 0:
            self._planner.finished(request.move, now, arrived=arrived)
            request.move = -1
