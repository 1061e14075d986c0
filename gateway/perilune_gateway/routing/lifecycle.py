"""Follows every routed request to its end.

    begun ──▶ on_response ──▶ on_usage (each 0 or 1 times) ──▶ finished (exactly once)
                └─ on_applied, whenever an engine announces blocks

1. `begun`: the load begins. Within its block verdicts.py applies the rest of the verdict.
2. `on_applied`: a KV event that covers the prompt's last block ends its prefill. The load is released, and
   speed_learning.py learns how long the prefill took. An event that continues a session's blocks moves the
   session's known context forward.
3. `on_response`: the answer's head says which endpoint really serves. A fallback takes over load and session.
4. `on_usage`: the answer said how much of the prompt was cached; the record's ending keeps it.
5. `finished`: the load is given back. A moment later the parity check is told whether the prompt's blocks
   were announced.

The time to the first token is told once for each prompt, from the request's arrival, so session admission,
the decision and fetching KV are part of it. It ends with the KV event that ends the prefill. Of a turn that
was decided from its headers that is the event that continues the session by all but NEARLY of the expected
tokens, or by a single block, since engines announce those of an answer one by one. Where no event will come
(engines without them, estimated tokens) it ends with the head of a streamed answer, which engines may send
before the first token; an answer as a whole tells nothing of its first token then, and does not count.
Clients that leave before the first token, and those that session admission refuses after a wait, count with
the time that they waited. Other refusals and errors do not count.

A planned move that a request carries out is over with the first of: its prefill's end, the head of a whole
answer, its end. Does not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perilune_gateway.model import Ending, Endpoint, Move, Outcome, Tier, rank_of, server_of
from perilune_gateway.moves.planner import Planner
from perilune_gateway.routing.announcement_check import AnnouncementCheck
from perilune_gateway.routing.handing_over import HandingOver
from perilune_gateway.routing.observer import Observer
from perilune_gateway.routing.peer_reads import PeerReads
from perilune_gateway.routing.prefill_forecast import PrefillForecast
from perilune_gateway.routing.pulling import Pulling
from perilune_gateway.routing.remote_prefills import RemotePrefills
from perilune_gateway.routing.running import Running
from perilune_gateway.routing.session_turns import SessionTurns
from perilune_gateway.routing.speed_learning import SpeedLearning
from perilune_gateway.state.engine_blocks import Applied
from perilune_gateway.state.pool_state import PoolState

NEARLY = 0.25
"""A share of a prefill by which the estimate of an unread body's tokens may be wrong."""
NOT_FOUND = 404
FAILED = 500
REFUSED = 400
"""Least status of an answer without a prefill."""
UNREACHABLE = (0, 502, 503, 504)
"""Statuses by which Envoy reports an endpoint that it could not reach; 0: no answer came."""


class Lifecycle:
    """The routed requests of one pool that have not ended, by their tickets."""

    def __init__(
        self,
        state: PoolState,
        planner: Planner,
        handing_over: HandingOver,
        remote_prefills: RemotePrefills,
        pulling: Pulling,
        peer_reads: PeerReads,
        turns: SessionTurns,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._planner = planner
        self._handing_over = handing_over
        self._remote_prefills = remote_prefills
        self._pulling = pulling
        self._peer_reads = peer_reads
        self._turns = turns
        self._observer = observer
        self._clock = clock
        self._learning = SpeedLearning(state.calibration)
        self._announcements = AnnouncementCheck(state.index, state.parity)
        self._running: dict[int, Running] = {}

    def forget(self, address: str) -> None:
        """The endpoint left the pool. Its requests go on."""
        self._learning.forget(address)

    # -- the beginning -----------------------------------------------------------------------------

    @contextmanager
    def begun(
        self,
        ticket: int,
        running: Running,
        move: Move | None = None,
        *,
        context_tokens: int = 0,
        tenant: str = "",
    ) -> Iterator[None]:
        """A request begins, and with it its load and the planned `move` that it carries out. If the block
        raises, the request is taken back, and leaves no load behind."""
        self._running[ticket] = running
        if move:
            running.move = self._planner.started(move, running.started_at)
        self._state.in_flight.start(
            ticket,
            running.target,
            uncached_tokens=running.forecast.uncached_tokens,
            prefill_s=running.forecast.calibrated_s,
            context_tokens=context_tokens,
            last_block=running.awaited,
            tenant=tenant,
        )
        try:
            self._expect_prefilled(ticket, running)
            yield
        except BaseException:
            now = self._clock()
            del self._running[ticket]
            self._state.in_flight.finish(ticket)
            self._state.ejection.ended(ticket, now, well=False)
            self._end_move(running, now, arrived=False)
            self._remote_prefills.ended(ticket, answered=False)
            self._pulling.ended(ticket)
            self._peer_reads.ended(ticket, answered=False, cached_tokens=None)
            raise

    def prefills_itself(self, ticket: int) -> None:
        """The KV does not come from another endpoint after all: the prompt is load on the target, to which it
        is sent now. What a leg that failed has left there is unknown, so nothing is learned from this
        prefill."""
        running, now = self._running[ticket], self._clock()
        alone = running.alone
        assert alone, "nothing was to come"
        running.sent_at, running.forecast, running.learns = now, alone, False
        self._state.in_flight.begin_again(
            ticket,
            running.target,
            uncached_tokens=alone.uncached_tokens,
            prefill_s=alone.calibrated_s,
            last_block=running.awaited,
        )
        self._state.ejection.sent_now(ticket, now, alone_s=alone.alone_s)
        self._expect_prefilled(ticket, running)

    def fetched(self, ticket: int) -> None:
        """The request was held until its KV was fetched, and is sent now."""
        running, now = self._running[ticket], self._clock()
        running.sent_at, running.forecast = now, running.forecast.fetched()
        self._state.ejection.sent_now(ticket, now, alone_s=running.forecast.alone_s)
        self._expect_prefilled(ticket, running)

    def _expect_prefilled(self, ticket: int, running: Running) -> None:
        """If no KV event ends the prefill, it ends as predicted."""
        if running.expects_ratio:
            at = running.sent_at + running.expects_ratio * running.forecast.ttft_s
            self._state.in_flight.expect_prefilled(ticket, at)

    # -- what Envoy says ---------------------------------------------------------------------------

    def on_reset(self, ticket: int, served: str) -> None:
        """The endpoint that had the request last, `served`, broke off before it answered. If that is not the
        target, the target did, too, or could not be reached."""
        running = self._running[ticket]
        times = 2 if served and served != server_of(running.target) else 1
        self._state.resets.reset(running.name, self._clock(), times)

    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None:
        """The answer's head has come. `served`: the endpoint that answers, empty if unknown. One that refuses
        a request caches nothing of it."""
        running, now, state = self._running[ticket], self._clock(), self._state
        rank = rank_of(running.target)
        if served and rank is not None:
            served = f"{served}#{rank}"
        running.status, running.served, running.answered_at = status, served, now
        here = self._is_there(running)
        if served != running.target and (endpoint := state.fleet.get(served)):
            self._served_elsewhere(ticket, running, endpoint, now, well=status < FAILED)
        if status >= REFUSED and here:
            state.index.unclaim(running.target, running.claimed)
        if status == NOT_FOUND and running.session:
            running.session.unserved = True
        if status < FAILED:
            state.resets.answered(running.name)
        state.ejection.head(ticket, status, now)
        running.streamed = streamed and status < REFUSED
        if running.streamed and not running.told:
            self._first_token(running, now)
        if not (streamed and running.awaited):
            self._peer_reads.answered(ticket)
        if not streamed:
            state.in_flight.prefill_done(ticket)
            self._end_move(running, now, arrived=status < REFUSED)

    def _served_elsewhere(
        self, ticket: int, running: Running, endpoint: Endpoint, now: float, *, well: bool
    ) -> None:
        """The proxy sent the request to another endpoint, which computes whatever it lacks of the prompt: no
        KV comes to it from elsewhere. If the answer is no failure (`well`), the first one is not well; else
        the request may be to blame."""
        state, served = self._state, endpoint.address
        self._remote_prefills.served_elsewhere(ticket)
        self._peer_reads.served_elsewhere(ticket)
        if self._is_there(running):
            if well:
                state.fleet.suspect(running.target, now)
            state.index.unclaim(running.target, running.claimed)
        self._end_move(running, now, arrived=False)
        if running.awaited and not endpoint.events:
            running.awaited, running.told, running.expects_ratio = 0, False, 1.0
        held = state.index.leading(served, running.blocks, now) if running.blocks else 0
        work = self._forecast(served, running.prompt_tokens, held * state.block_size, now)
        state.in_flight.begin_again(
            ticket,
            served,
            uncached_tokens=work.uncached_tokens,
            prefill_s=work.calibrated_s,
            last_block=running.awaited if work.uncached_tokens else 0,
        )
        state.ejection.served_by(ticket, served, now)
        if running.session and running.session.ticket == ticket:
            state.sessions.bind(running.session, served, now)
        state.claim(served, running.blocks, now, running.claim_s)
        running.join = state.fleet.join(served)
        running.target, running.sent_at, running.forecast, running.learns = served, now, work, False
        running.claimed, running.announced_tokens = running.blocks[held:], 0
        self._expect_prefilled(ticket, running)

    def _forecast(self, address: str, prompt_tokens: int, held_tokens: int, now: float) -> PrefillForecast:
        """What a prompt is at an endpoint that holds `held_tokens` of it and gets no KV from elsewhere."""
        calibration = self._state.calibration
        uncached, believed = max(0, prompt_tokens - held_tokens), calibration.engine
        calibrated_s = calibration.speed(address, now).engine.prefill_s(uncached, held_tokens)
        return PrefillForecast(
            held_tokens,
            uncached,
            calibrated_s,
            believed.prefill_s(uncached, held_tokens),
            overhead_s=believed.request_overhead_s(prompt_tokens),
            ttft_s=self._state.in_flight.at(address).pending_s + calibrated_s,
        )

    def on_usage(self, ticket: int, cached_tokens: int) -> None:
        """The engine served so many of the prompt's tokens from its prefix cache."""
        self._running[ticket].cached_tokens = cached_tokens

    def finished(self, ticket: int, outcome: Outcome) -> None:
        """The request has ended. Raises KeyError if it had ended before."""
        running, now, state = self._running.pop(ticket), self._clock(), self._state
        completed = outcome is Outcome.COMPLETED
        answered = completed and running.status < REFUSED
        if outcome is Outcome.CANCELLED:
            self._first_token(running, now)
        elif completed and running.streamed:  # no KV event has told of it
            self._first_token(running, running.answered_at)
        state.in_flight.finish(ticket)
        wrong = state.ejection.ended(ticket, now, well=answered)
        self._end_move(running, now, arrived=answered)
        self._remote_prefills.ended(ticket, answered=answered)
        self._pulling.ended(ticket)
        self._peer_reads.ended(ticket, answered=answered, cached_tokens=running.cached_tokens)
        here = self._is_there(running)
        if here and outcome is Outcome.FAILED and running.status in UNREACHABLE:
            state.fleet.suspect(running.target, now)
            state.index.unclaim(running.target, running.claimed)
        if completed and here:
            self._learning.completed(running, now)
        if answered and here:
            self._compare(running)
        if answered and here and running.awaited:
            self._announcements.answered(running.target, running.awaited, running.started_at, now)
        self._announcements.check(now)
        self._turns.ended(ticket, running, now, wrong if here else None, answered=answered)
        since = running.started_at
        ending = Ending(
            outcome,
            now - since,
            running.served,
            running.status,
            running.cached_tokens,
            running.answered_at - since if running.answered_at else None,
            running.prefilled_at - since if running.prefilled_at else None,
        )
        self._observer.ended(running.record, running.target, ending)
        self._handing_over.turn_ended()

    def _is_there(self, running: Running) -> bool:
        """Whether the endpoint to which the request was sent is still in the pool."""
        return running.join == self._state.fleet.join(running.target) != 0

    def _compare(self, running: Running) -> None:
        """Compare the cached tokens that the engine reports with what its KV events had told."""
        told, found = running.announced_tokens, running.cached_tokens
        if told and found is not None and running.forecast.held_tokens == told:
            state, target = self._state, running.target
            state.computed_again.reported(
                target, found, told, state.fleet.engine_blocks(target) * state.block_size
            )

    # -- what engines announce ---------------------------------------------------------------------

    def on_applied(self, applied: Applied) -> None:
        """A KV event has changed the index: release the load that it ends, and extend sessions' contexts."""
        state = self._state
        if applied.cleared:
            state.sessions.forget_host(applied.endpoint)
        self._handing_over.on_applied(applied)
        if not applied.stored or applied.tier is not Tier.DEVICE:
            return
        now = self._clock()
        state.ejection.heard(applied.endpoint)
        state.fleet.announced(applied.endpoint, applied.stride)
        for ticket in state.in_flight.blocks_stored(applied.endpoint, applied.stored):
            if running := self._running.get(ticket):  # else a prompt that is prefilled for another endpoint
                self._prefilled(ticket, running, now)
        grown = state.sessions.blocks_stored(
            applied.endpoint, applied.parent, applied.stored, state.block_size, applied.stride
        )
        if grown:
            session, tokens = grown
            left = state.in_flight.progress(session.ticket, tokens)
            running = self._running.get(session.ticket)
            one_block = len(applied.stored) == applied.stride
            if running and not running.awaited and (left <= NEARLY or one_block):
                self._first_token(running, now)

    def _prefilled(self, ticket: int, running: Running, now: float) -> None:
        running.prefilled_at = now
        self._state.ejection.prefilled(ticket, now)
        self._first_token(running, now)
        if self._is_there(running):
            self._learning.prefilled(running, now)
        self._peer_reads.prefilled(ticket)
        self._end_move(running, now, arrived=True)

    def _first_token(self, running: Running, now: float) -> None:
        """Tell of the request's first token, unless that was done."""
        if running.arrived_at is not None:
            self._observer.first_token(now - running.arrived_at)
            running.arrived_at = None

    def _end_move(self, running: Running, now: float, *, arrived: bool) -> None:
        """If the request carries out a move, the move is over. `arrived`: the target has the KV."""
        if running.move >= 0:
            self._planner.finished(running.move, now, arrived=arrived)
            running.move = -1
