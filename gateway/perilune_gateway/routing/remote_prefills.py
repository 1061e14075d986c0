"""Follows the prompts that are prefilled on another endpoint than the one that decodes.

    decision with `prefill` ─▶ begin ─▶ feeds/prefill_legs.py ─┬─▶ accepted ─▶ the request goes on
                                                               └─▶ failed: the target prefills the prompt
    give leg's end ─▶ given or failed        request's end ─▶ ended

A remote prefill is load on the prefill endpoint from `begin` until its KV events or its leg's end say that
the prompt is computed. One that fails before it is accepted becomes load on the target, which then prefills
the prompt; one that fails later costs the same there, after the connector's own bounds. Each ends with its
request, and leaves a `HandoffRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import uuid4

from msgspec import Struct

from perilune_api.pool import Disaggregation
from perilune_gateway.model import Candidate, Decision, Move, MoveReason, Subject
from perilune_gateway.model.handoff import GivenUp, RemotePrefill
from perilune_gateway.routing.observer import HandoffObserver
from perilune_gateway.routing.request_transfers import EndedTransfers, TransferStats
from perilune_gateway.state.pool_state import PoolState


class _Open(Struct, gc=False):
    """A remote prefill whose request has not ended."""

    remote: RemotePrefill
    move: Move
    tokens: int
    leg: int
    """Ticket of its load on the source."""
    began_at: float
    join: int
    """Number of the source's joining the pool."""
    claimed: Sequence[int]
    """The prompt's blocks that count as cached on the source until it announces them."""
    cause: GivenUp | None = None
    cancel: Callable[[], object] = lambda: None
    """Ends its give leg, which may have ended already."""


class RemotePrefills:
    """The remote prefills of one pool's requests, by the requests' tickets."""

    def __init__(
        self,
        state: PoolState,
        observer: HandoffObserver,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._clock = clock
        self._past = EndedTransfers(observer, clock, wall_clock)
        self._open: dict[int, _Open] = {}

    def configure(self, pool: Disaggregation) -> None:
        """Take over a (changed) pool document."""
        self._pool = pool

    def stats(self) -> TransferStats:
        return self._past.stats(len(self._open))

    def begin(
        self,
        ticket: int,
        subject: Subject,
        decision: Decision,
        candidates: Sequence[Candidate],
        blocks: Sequence[int],
        tokens: int,
        *,
        tenant: str = "",
    ) -> RemotePrefill:
        """A request of the tenant begins whose prompt another endpoint prefills: its load begins there."""
        in_flight, now = self._state.in_flight, self._clock()
        by_address = {c.address: c for c in candidates}
        giver, taker = by_address[decision.prefill], by_address[decision.target]
        missing = tokens - taker.overlap.device_tokens
        uncached = tokens - giver.overlap.device_tokens
        remote = RemotePrefill(
            f"perilune-{uuid4().hex}",
            giver.address,
            taker.address,
            giver.endpoint.bootstrap,
            self._pool.accept_seconds,
            2 * self._pool.max_seconds,
        )
        move = Move(
            subject,
            MoveReason.PREFILL,
            giver.address,
            taker.address,
            taker.engine.kv_bytes(missing),
            decision.estimated_ttft_s,
        )
        leg, whole = in_flight.leg_ticket(), self._state.fleet.whole_blocks(giver.address, len(blocks))
        claimed = self._state.index.speculate(giver.address, blocks, now)
        self._open[ticket] = _Open(
            remote, move, tokens, leg, now, self._state.fleet.join(giver.address), claimed
        )
        in_flight.start(
            leg,
            giver.address,
            uncached_tokens=uncached,
            prefill_s=giver.prefill_s,
            context_tokens=tokens,
            last_block=blocks[whole - 1] if whole and giver.endpoint.events else 0,
            tenant=tenant,
        )
        return remote

    def giving(self, ticket: int, remote: RemotePrefill, cancel: Callable[[], object]) -> None:
        """The give leg is sent. `cancel` is called at the end of the request, after which the leg is of no
        use; at once if it has ended."""
        if one := self._of(ticket, remote):
            one.cancel = cancel
        else:
            cancel()

    def given(self, ticket: int, remote: RemotePrefill) -> None:
        """The give leg has ended well: the source has computed the prompt, and keeps it until it is
        fetched."""
        if one := self._of(ticket, remote):
            one.claimed = ()  # they stay
            self._end_leg(one)

    def failed(self, ticket: int, remote: RemotePrefill, cause: GivenUp) -> None:
        """The give leg has failed, or the target will not fetch. Ignores requests that have ended."""
        if one := self._of(ticket, remote):
            one.cause = one.cause or cause
            self._unclaim(one)
            self._end_leg(one)
            if cause is GivenUp.UNREACHABLE and self._is_there(one):
                self._state.fleet.suspect(remote.source, self._clock())

    def served_elsewhere(self, ticket: int) -> None:
        """The proxy sent the request to another endpoint than the target."""
        if one := self._open.get(ticket):
            self.failed(ticket, one.remote, GivenUp.ELSEWHERE)

    def ended(self, ticket: int, *, answered: bool) -> None:
        """The request has ended. Ignores requests without a remote prefill."""
        one = self._open.pop(ticket, None)
        if one is None:
            return
        self._end_leg(one)
        if not answered:
            one.cause = one.cause or GivenUp.LEFT
            self._unclaim(one)
        self._past.add(one.move, one.tokens, 0 if one.cause else one.tokens, one.cause, one.began_at)
        one.cancel()

    def _of(self, ticket: int, remote: RemotePrefill) -> _Open | None:
        one = self._open.get(ticket)
        return one if one and one.remote is remote else None

    def _unclaim(self, one: _Open) -> None:
        """The source does not compute the prompt to its end. What it has computed it announces."""
        if self._is_there(one):
            self._state.index.unclaim(one.remote.source, one.claimed)
        one.claimed = ()

    def _is_there(self, one: _Open) -> bool:
        """Whether the source is still in the pool."""
        return one.join == self._state.fleet.join(one.remote.source)

    def _end_leg(self, one: _Open) -> None:
        if self._state.in_flight.runs(one.leg):
            self._state.in_flight.finish(one.leg)
