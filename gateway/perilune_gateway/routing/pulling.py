"""Follows the KV that endpoints fetch for requests before they get them.

    decision with `replicate_from` ─▶ refuses ─▶ begin ─▶ feeds/pull_legs.py ─┬─▶ took ──▶ the request goes on
                                                                              └─▶ failed: as it would without
    request's end ─▶ ended

The give leg is load on the source: one block to compute, and the blocks that stay until they are fetched. On
the target the request itself is the load. The bytes count against the link's budget together with those of
planned moves, and so do the copies of both endpoints. What the take leg needed teaches the calibration how
fast the link is. After a leg has failed, its endpoint gives nothing (or takes nothing) for PAUSE_S seconds,
so that an engine that hangs holds few requests. Each pull leaves a `HandoffRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import uuid4

from msgspec import Struct

from perilune_api.pool import Pool
from perilune_gateway.model import Candidate, Decision, Move, Subject, Unpulled
from perilune_gateway.model.handoff import Content, GivenUp, KvPull, Leg
from perilune_gateway.policy.cost import target_of
from perilune_gateway.routing.observer import HandoffObserver
from perilune_gateway.routing.pull import move_of
from perilune_gateway.routing.pull_limits import PullLimits
from perilune_gateway.routing.request_transfers import EndedTransfers, TransferStats
from perilune_gateway.state.pool_state import PoolState


class _Open(Struct, gc=False):
    """A pull that has not ended."""

    pull: KvPull
    move: Move
    predicted_s: float
    """Seconds of the transfer alone, as the engine's model says, without calibration."""
    leg: int
    """Ticket of its load on the source."""
    limits_ticket: int
    began_at: float


class Pulling:
    """The pulls of one pool's requests, by the requests' tickets."""

    def __init__(
        self,
        state: PoolState,
        limits: PullLimits,
        observer: HandoffObserver,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._limits = limits
        self._clock = clock
        self._past = EndedTransfers(observer, clock, wall_clock)
        self._open: dict[int, _Open] = {}

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        self._rules = pool.spec.routing.pull
        self._model = pool.spec.model.name
        self._first = pool.spec.routing.engine_priority.used

    def stats(self) -> TransferStats:
        return self._past.stats(len(self._open))

    # -- before ------------------------------------------------------------------------------------

    def content(self, blocks: Sequence[int], tokens: int) -> Content | None:
        """Return the prefix of `tokens` that can be fetched; None if its token ids are not known."""
        found = self._state.block_tokens.prompt(blocks[tokens // self._state.block_size - 1])
        return found if isinstance(found, Content) else None

    def refuses(self, decision: Decision, candidates: Sequence[Candidate], now: float) -> Unpulled | None:
        """Return why the decision's KV may not be fetched now; None if it may."""
        move = move_of("", decision, target_of(decision, candidates))
        return self._limits.refuses(move.source, move.target, move.transfer_bytes, now)

    # -- what happens ------------------------------------------------------------------------------

    def begin(
        self,
        ticket: int,
        subject: Subject,
        decision: Decision,
        candidates: Sequence[Candidate],
        content: Content,
    ) -> KvPull:
        """A request waits until its endpoint has fetched the content: the source's load begins."""
        state, now = self._state, self._clock()
        source, target = decision.replicate_from, target_of(decision, candidates)
        giver, link = state.fleet.get(source), target.links[source]
        missing = content.tokens - target.overlap.device_tokens
        move = move_of(subject, decision, target)
        pull = KvPull(
            f"perilune-{uuid4().hex}",
            content.lora or self._model,
            content,
            source,
            decision.target,
            giver.bootstrap if giver else "",
            self._rules.max_seconds,
            self._first,
        )
        leg, block = state.in_flight.leg_ticket(), state.block_size
        engine = state.calibration.speed(source, now).engine
        state.in_flight.start(
            leg,
            source,
            uncached_tokens=block,
            prefill_s=engine.prefill_s(block, content.tokens),
            context_tokens=content.tokens,
        )
        predicted_s = state.calibration.engine.transfer_s(missing, link.bandwidth_bytes_per_s)
        self._open[ticket] = _Open(pull, move, predicted_s, leg, self._limits.began(move), now)
        return pull

    def took(self, ticket: int, pull: KvPull, cached_tokens: int, seconds: float) -> None:
        """The target has the KV: its take leg answered after `seconds`, and computed all but
        `cached_tokens`."""
        one = self._of(ticket, pull)
        if one is None:
            return
        tokens, state = pull.content.tokens, self._state
        if cached_tokens < tokens:
            self._limits.failed(Leg.GIVE, pull.source, self._clock())
            return self._end(ticket, one, GivenUp.RECOMPUTED, cached_tokens)
        took_s = max(0.001, seconds - state.calibration.engine.leg_overhead_s(tokens))
        state.calibration.transfer(pull.source, pull.target, took_s, one.predicted_s, self._clock())
        self._limits.worked(pull.source, pull.target)
        return self._end(ticket, one, None, cached_tokens)

    def failed(self, ticket: int, pull: KvPull, leg: Leg, cause: GivenUp) -> None:
        """The target has not got the KV in time, or will not, because of this leg. Ignores pulls that have
        ended."""
        if one := self._of(ticket, pull):
            at, now = pull.source if leg is Leg.GIVE else pull.target, self._clock()
            self._limits.failed(leg, at, now)
            self._end(ticket, one, cause)
            if cause is GivenUp.UNREACHABLE:
                self._state.fleet.suspect(at, now)

    def ended(self, ticket: int) -> None:
        """The request has ended; it may have been held still. Ignores requests without a pull."""
        if one := self._open.get(ticket):
            self._end(ticket, one, GivenUp.LEFT)

    def forget(self, address: str) -> None:
        """The endpoint left the pool."""
        self._limits.forget(address)

    # -- inside ------------------------------------------------------------------------------------

    def _of(self, ticket: int, pull: KvPull) -> _Open | None:
        one = self._open.get(ticket)
        return one if one and one.pull is pull else None

    def _end(self, ticket: int, one: _Open, cause: GivenUp | None, cached_tokens: int = 0) -> None:
        del self._open[ticket]
        self._state.in_flight.finish(one.leg)
        self._limits.ended(one.limits_ticket)
        self._past.add(one.move, one.pull.content.tokens, cached_tokens, cause, one.began_at)
