"""Follows every routed request to its end: turns what Envoy and the engines say into facts.

    begin ──▶ on_response ──▶ on_usage, on_output (each 0 or 1 times) ──▶ finished (exactly once)
                └─ on_applied, whenever an engine announces blocks

1. `begin`: the record of the request begins, and verdicts.py completes the verdict; or `withdraw`, if that
   raises.
2. `on_applied`: a KV event that covers the prompt's last block ends its prefill. An event that continues a
   session's blocks moves the session's known context forward.
3. `on_response`: the answer's head says which endpoint really serves; the record follows.
4. `on_usage`: the answer said how much of the prompt was cached; the record's ending keeps it. `on_output`:
   it said how many tokens it has.
5. `finished`: the request is over.

The time to the first token is told once for each prompt, from the request's arrival, so session admission,
the decision and fetching KV are part of it. It ends with the KV event that ends the prefill. Of a turn that
was decided from its headers that is the event that continues the session by all but NEARLY of the expected
tokens, or by a single block, since engines announce those of an answer one by one. Where no event will come
(engines without them, estimated tokens) it ends with the head of a streamed answer, which engines may send
before the first token; an answer as a whole tells nothing of its first token then, and does not count.
Clients that leave before the first token, and those that session admission refuses after a wait, count with
the time that they waited. Other refusals and errors do not count.

Writes the requests' records, and changes no other state: the listeners do (new_router.py lists them). Does
not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perilune_gateway.model import (
    Candidate,
    Decision,
    Ending,
    Endpoint,
    Outcome,
    RequestView,
    Tier,
    rank_of,
    server_of,
)
from perilune_gateway.model.applied import Applied
from perilune_gateway.model.forecast import PrefillForecast
from perilune_gateway.routing.claiming import UNREACHABLE
from perilune_gateway.state.facts import BlocksChanged, Unreached
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import (
    Answered,
    Broken,
    Decided,
    Ended,
    FirstToken,
    Prefilled,
    Progressed,
    Rerouted,
    Sent,
    TurnOver,
    Withdrawn,
)

NEARLY = 0.25
"""A share of a prefill by which the estimate of an unread body's tokens may be wrong."""
FAILED = 500
REFUSED = 400
"""Least status of an answer without a prefill."""


class Lifecycle:
    """The way of one pool's requests, from their decision to their end."""

    def __init__(self, state: PoolState, clock: Callable[[], float]) -> None:
        self._state = state
        self._tell = state.facts.tell
        self._clock = clock

    # -- the beginning -----------------------------------------------------------------------------

    def begin(
        self,
        request: InFlight,
        view: RequestView,
        decision: Decision,
        candidates: Sequence[Candidate] = (),
    ) -> None:
        """Begin a request. If this or the rest of its verdict raises, call `withdraw`."""
        self._state.requests.add(request)
        self._tell(Decided(request, view, decision, candidates, request.started_at))

    def withdraw(self, request: InFlight) -> None:
        """Take a request back that has begun and is not sent. It leaves nothing behind."""
        self._state.requests.pop(request.ticket)
        self._tell(Withdrawn(request, self._clock()))

    def prefills_itself(self, ticket: int) -> None:
        """Record that the KV does not come from another endpoint after all: the target, to which the request
        is sent now, computes the prompt. What a leg that failed has left there is unknown, so nothing is
        learned from this prefill."""
        request, now = self._state.requests[ticket], self._clock()
        assert request.alone, "nothing was to come"
        request.sent_at, request.forecast, request.learns = now, request.alone, False
        self._tell(Sent(request, now, True))

    def fetched(self, ticket: int) -> None:
        """Record that the request was held until its KV was fetched, and is sent now."""
        request, now = self._state.requests[ticket], self._clock()
        request.sent_at, request.forecast = now, request.forecast.fetched()
        self._tell(Sent(request, now, False))

    # -- what Envoy says ---------------------------------------------------------------------------

    def on_reset(self, ticket: int, served: str) -> None:
        """Record that the endpoint that had the request last, `served`, broke off before it answered. If that
        is not the target, the target did, too, or could not be reached."""
        request = self._state.requests[ticket]
        times = 2 if served and served != server_of(request.target) else 1
        self._tell(Broken(request, self._clock(), times))

    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None:
        """Record that the answer's head has come. `served`: the endpoint that answers, empty if unknown."""
        request, now = self._state.requests[ticket], self._clock()
        rank = rank_of(request.target)
        if served and rank is not None:
            served = f"{served}#{rank}"
        request.status, request.served, request.answered_at = status, served, now
        if served != request.target and (endpoint := self._state.fleet.get(served)):
            self._reroute(request, endpoint, now)
        request.streamed = streamed and status < REFUSED
        if request.streamed and not request.told:
            self._first_token(request, now)
        self._tell(Answered(request, now, self._is_there(request), status >= REFUSED))

    def _reroute(self, request: InFlight, endpoint: Endpoint, now: float) -> None:
        """Record that the proxy sent the request to another endpoint, which computes whatever it lacks of the
        prompt: no KV comes to it from elsewhere."""
        state, served, before = self._state, endpoint.address, request.target
        was_there, well = self._is_there(request), request.status < FAILED
        if request.awaited and not endpoint.events:
            request.awaited, request.told, request.expects_ratio = 0, False, 1.0
        held = state.index.leading(served, request.blocks, now) if request.blocks else 0
        request.forecast = self._forecast(served, request.prompt_tokens, held * state.block_size, now)
        request.target, request.join = served, state.fleet.join(served)
        request.sent_at, request.learns = now, False
        request.announced_tokens = 0
        if was_there and well:
            self._tell(Unreached(before, now))
        self._tell(Rerouted(request, now, before, was_there))

    def _forecast(self, address: str, prompt_tokens: int, held_tokens: int, now: float) -> PrefillForecast:
        """Return what a prompt is at an endpoint that holds `held_tokens` of it and gets no KV from
        elsewhere."""
        calibration = self._state.calibration
        uncached, believed = max(0, prompt_tokens - held_tokens), calibration.engine
        calibrated_s = calibration.speed(address, now).engine.prefill_s(uncached, held_tokens)
        return PrefillForecast(
            held_tokens=held_tokens,
            uncached_tokens=uncached,
            calibrated_s=calibrated_s,
            prefill_s=believed.prefill_s(uncached, held_tokens),
            overhead_s=believed.request_overhead_s(prompt_tokens),
            ttft_s=self._state.loads.at(address).pending_s + calibrated_s,
        )

    def on_usage(self, ticket: int, cached_tokens: int) -> None:
        """Record that the engine served so many of the prompt's tokens from its prefix cache."""
        self._state.requests[ticket].cached_tokens = cached_tokens

    def on_output(self, ticket: int, tokens: int) -> None:
        """Record that the engine has reported how many tokens its answer has."""
        self._state.requests[ticket].output_tokens = tokens

    def finished(self, ticket: int, outcome: Outcome) -> None:
        """Record that the request has ended. Raise KeyError if it had ended before."""
        request, now = self._state.requests.pop(ticket), self._clock()
        completed = outcome is Outcome.COMPLETED
        answered = completed and request.status < REFUSED
        if outcome is Outcome.CANCELLED:
            self._first_token(request, now)
        elif completed and request.streamed:  # no KV event has told of it
            self._first_token(request, request.answered_at)
        is_there = self._is_there(request)
        wrong = self._state.ejection.verdict(request, now, answered=answered) if is_there else None
        if is_there and outcome is Outcome.FAILED and request.status in UNREACHABLE:
            self._tell(Unreached(request.target, now))
        since = request.started_at
        ending = Ending(
            outcome=outcome,
            duration_s=now - since,
            served=request.served,
            status=request.status,
            cached_tokens=request.cached_tokens,
            output_tokens=request.output_tokens,
            answered_s=request.answered_at - since if request.answered_at else None,
            prefilled_s=request.prefilled_at - since if request.prefilled_at else None,
        )
        self._tell(
            Ended(request=request, now=now, ending=ending, answered=answered, is_there=is_there, wrong=wrong)
        )
        self._tell(TurnOver())

    def _is_there(self, request: InFlight) -> bool:
        """Return whether the endpoint that has the request is still in the pool."""
        return request.join == self._state.fleet.join(request.target) != 0

    # -- what engines announce ---------------------------------------------------------------------

    def on_applied(self, applied: Applied) -> None:
        """Record that a KV event has changed the index: it may end prefills, and extend sessions' contexts.
        Removals alone change neither, and no listener hears of them."""
        if not (applied.stored or applied.cleared):
            return
        state, now, requests = self._state, self._clock(), self._state.requests
        if not applied.stored or applied.tier is not Tier.DEVICE:
            self._tell(BlocksChanged(applied, now))
            return
        done = state.loads.awaiting(applied.endpoint, applied.stored)
        self._tell(BlocksChanged(applied, now))
        for ticket in done:
            self._prefilled(requests[ticket], now)
        grown = state.sessions.blocks_stored(
            applied.endpoint, applied.parent, applied.stored, state.block_size, applied.stride
        )
        if grown:
            session, tokens = grown
            if request := requests.get(session.ticket):
                self._progressed(request, tokens, now, one_block=len(applied.stored) == applied.stride)

    def _prefilled(self, request: InFlight, now: float) -> None:
        request.prefilled_at = now
        self._first_token(request, now)
        self._tell(Prefilled(request, now, self._is_there(request)))

    def _progressed(self, request: InFlight, tokens: int, now: float, *, one_block: bool) -> None:
        self._tell(Progressed(request, tokens))
        load = request.load
        left = load.tokens / load.total_tokens if load and load.tokens else 0.0
        if not request.awaited and (left <= NEARLY or one_block):
            self._first_token(request, now)

    def _first_token(self, request: InFlight, now: float) -> None:
        """Tell of the request's first token, unless that was done."""
        if request.arrived_at is not None:
            request.first_token_at = now
            self._tell(FirstToken(now - request.arrived_at, request))
            request.arrived_at = None
