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

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from uuid import uuid4

from msgspec import Struct

from perilune_api.pool import Disaggregation
from perilune_gateway.model import Candidate, Decision, Move, MoveReason, Subject
from perilune_gateway.model.handoff import EXPIRED, GivenUp, HandoffOutcome, HandoffRecord, RemotePrefill
from perilune_gateway.state.pool_state import PoolState

RECENT = 50
"""Number of ended remote prefills that are remembered."""


class Observer(Protocol):
    """Is told of every remote prefill that has ended."""

    def handed_over(self, record: HandoffRecord) -> None: ...


class _Open(Struct, gc=False):
    """A remote prefill whose request has not ended."""

    remote: RemotePrefill
    move: Move
    tokens: int
    leg: int
    """Ticket of its load on the source."""
    began_at: float
    cause: GivenUp | None = None


class RemotePrefillStats(Struct, frozen=True):
    """Statistics of a pool's remote prefills."""

    open: int
    outcomes: Mapping[HandoffOutcome, int]
    given_up: Mapping[GivenUp, int]
    transfer_bytes: int
    recent: Sequence[HandoffRecord]


class RemotePrefills:
    """The remote prefills of one pool's requests, by the requests' tickets."""

    def __init__(
        self,
        state: PoolState,
        observer: Observer,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._observer = observer
        self._clock = clock
        self._wall_clock = wall_clock
        self.on_ended: Callable[[RemotePrefill], None] = lambda remote: None
        """Called at the end of a request; its give leg may still run, and is of no use any more."""
        self._open: dict[int, _Open] = {}
        self._outcomes: Counter[HandoffOutcome] = Counter()
        self._given_up: Counter[GivenUp] = Counter()
        self._bytes = 0
        self._recent: deque[HandoffRecord] = deque(maxlen=RECENT)

    def configure(self, pool: Disaggregation) -> None:
        """Take over a (changed) pool document."""
        self._pool = pool

    def stats(self) -> RemotePrefillStats:
        return RemotePrefillStats(
            len(self._open), dict(self._outcomes), dict(self._given_up), self._bytes, tuple(self._recent)
        )

    def begin(
        self,
        ticket: int,
        subject: Subject,
        decision: Decision,
        candidates: Sequence[Candidate],
        blocks: Sequence[int],
        tokens: int,
    ) -> RemotePrefill:
        """A request begins whose prompt another endpoint prefills: its load begins there."""
        fleet, now = self._state.fleet, self._clock()
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
        leg = fleet.leg_ticket()
        self._open[ticket] = _Open(remote, move, tokens, leg, now)
        fleet.start(
            leg,
            giver.address,
            uncached_tokens=uncached,
            prefill_s=giver.prefill_s,
            context_tokens=tokens,
            last_block=blocks[-1] if blocks and giver.endpoint.events else 0,
        )
        self._state.index.speculate(giver.address, blocks, now)
        return remote

    def given(self, ticket: int, remote: RemotePrefill) -> None:
        """The give leg has ended well: the source has computed the prompt, and keeps it until it is
        fetched."""
        if one := self._of(ticket, remote):
            self._end_leg(one)

    def failed(self, ticket: int, remote: RemotePrefill, cause: GivenUp) -> None:
        """The give leg has failed, or the target will not fetch. Ignores requests that have ended."""
        if one := self._of(ticket, remote):
            one.cause = one.cause or cause
            self._end_leg(one)
            if cause is GivenUp.UNREACHABLE:
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
        outcome = HandoffOutcome.COPIED
        if one.cause:
            outcome = HandoffOutcome.EXPIRED if one.cause in EXPIRED else HandoffOutcome.FAILED
            self._given_up[one.cause] += 1
        self._outcomes[outcome] += 1
        self._bytes += one.move.transfer_bytes
        record = HandoffRecord(
            one.move,
            outcome,
            one.cause,
            one.tokens,
            0 if one.cause else one.tokens,
            one.move.transfer_bytes,
            1,
            self._clock() - one.began_at,
            self._wall_clock(),
        )
        self._recent.append(record)
        self._observer.handed_over(record)
        self.on_ended(one.remote)

    def _of(self, ticket: int, remote: RemotePrefill) -> _Open | None:
        one = self._open.get(ticket)
        return one if one and one.remote is remote else None

    def _end_leg(self, one: _Open) -> None:
        if self._state.fleet.runs(one.leg):
            self._state.fleet.finish(one.leg)
