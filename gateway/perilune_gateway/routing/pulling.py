"""Follows the KV that endpoints fetch for requests before they get them.

    decision with `replicate_from` ─▶ refuses ─▶ begins ▶ feeds/pull_legs.py ─┬─▶ took ──▶ the request goes on
                                                                              └─▶ failed: as it would without
    request's end ─▶ ends

The give leg is load on the source: one block to compute, and the blocks that stay until they are fetched. On
the target the request itself is the load. The bytes count against the link's budget together with those of
planned moves, and so do the copies of both endpoints. What the take leg needed teaches the calibration how
fast the link is. After a leg has failed, its endpoint gives nothing (or takes nothing) for PAUSE_S seconds,
so that an engine that hangs holds few requests. Each pull leaves a `HandoffRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import uuid4

from perilune_api.pool import Pool
from perilune_gateway.model import Candidate, Decision, Unpulled
from perilune_gateway.model.handoff import Content, GivenUp, KvPull, Leg
from perilune_gateway.policy.cost import target_of
from perilune_gateway.routing.pull import move_of
from perilune_gateway.routing.pull_limits import PullLimits
from perilune_gateway.routing.request_transfers import RequestTransfers, TransferStats
from perilune_gateway.state.facts import Unreached
from perilune_gateway.state.in_flight import InFlight, Load, Transfer
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import Decided, Ended, Withdrawn


class Pull(Transfer, gc=False, kw_only=True, eq=False):
    """A pull that has not ended."""

    pull: KvPull
    predicted_s: float
    """Seconds of the transfer alone, as the engine's model says, without calibration."""
    leg: Load
    """What it is as load on the source."""
    limits_ticket: int


class Pulling:
    """The pulls of one pool's requests."""

    def __init__(
        self,
        state: PoolState,
        limits: PullLimits,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._limits = limits
        self._clock = clock
        self._transfers = RequestTransfers(state.facts.tell, clock, wall_clock)

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        self._rules = pool.spec.routing.pull
        self._model = pool.spec.model.name
        self._first = pool.spec.routing.engine_priority.used

    def stats(self) -> TransferStats:
        return self._transfers.stats()

    # -- before ------------------------------------------------------------------------------------

    def content(self, blocks: Sequence[int], tokens: int) -> Content | None:
        """Return the prefix of `tokens` that can be fetched; None if its token ids are not known."""
        found = self._state.block_tokens.prompt(blocks[tokens // self._state.block_size - 1])
        return found if isinstance(found, Content) else None

    def refuses(self, decision: Decision, candidates: Sequence[Candidate], now: float) -> Unpulled | None:
        """Return why the decision's KV may not be fetched now; None if it may."""
        move = move_of("", decision, target_of(decision, candidates))
        return self._limits.refuses(move.source, move.target, move.transfer_bytes, now)

    # -- what happens to requests ------------------------------------------------------------------

    def on_decided(self, fact: Decided) -> None:
        decision, request, content = fact.decision, fact.request, fact.request.content
        if not content or not decision.replicate_from:
            return
        state, now, block = self._state, fact.now, self._state.block_size
        source, target = decision.replicate_from, target_of(decision, fact.candidates)
        giver, link = state.fleet.get(source), target.links[source]
        missing = content.tokens - target.overlap.device_tokens
        subject = request.session.key if request.session else fact.view.request_id
        move = move_of(subject, decision, target)
        request.transfer = Pull(
            move=move,
            began_at=now,
            tokens=content.tokens,
            pull=KvPull(
                transfer_id=f"perilune-{uuid4().hex}",
                model=content.lora or self._model,
                content=content,
                source=source,
                target=decision.target,
                bootstrap=giver.bootstrap if giver else "",
                within_s=self._rules.max_seconds,
                first=self._first,
            ),
            predicted_s=state.calibration.engine.transfer_s(missing, link.bandwidth_bytes_per_s),
            leg=state.loads.start(
                source,
                uncached_tokens=block,
                prefill_s=state.calibration.speed(source, now).engine.prefill_s(block, content.tokens),
                context_tokens=content.tokens,
            ),
            limits_ticket=self._limits.began(move, now),
        )
        self._transfers.under_way += 1

    def on_ended(self, fact: Ended) -> None:
        self._leave(fact.request)

    def on_withdrawn(self, fact: Withdrawn) -> None:
        self._leave(fact.request)

    def _leave(self, request: InFlight) -> None:
        """Record that the request has ended; it may have been held still."""
        if isinstance(one := request.transfer, Pull):
            self._end(request, one, GivenUp.LEFT)

    # -- what happens to legs ----------------------------------------------------------------------

    def took(self, ticket: int, pull: KvPull, cached_tokens: int, seconds: float) -> None:
        """Record that the target has the KV: its take leg answered after `seconds`, and computed all but
        `cached_tokens`."""
        found = self._of(ticket, pull)
        if found is None:
            return
        request, one = found
        tokens, state = one.tokens, self._state
        if cached_tokens < tokens:
            self._limits.failed(Leg.GIVE, pull.source, self._clock())
            return self._end(request, one, GivenUp.RECOMPUTED, cached_tokens)
        took_s = max(0.001, seconds - state.calibration.engine.leg_overhead_s(tokens))
        state.calibration.transfer(pull.source, pull.target, took_s, one.predicted_s, self._clock())
        self._limits.worked(pull.source, pull.target)
        return self._end(request, one, None, cached_tokens)

    def failed(self, ticket: int, pull: KvPull, leg: Leg, cause: GivenUp) -> None:
        """Record that the target has not got the KV in time, or will not, because of this leg. Ignore pulls
        that have ended."""
        if found := self._of(ticket, pull):
            at, now = pull.source if leg is Leg.GIVE else pull.target, self._clock()
            self._limits.failed(leg, at, now)
            self._end(*found, cause)
            if cause is GivenUp.UNREACHABLE:
                self._state.facts.tell(Unreached(at, now))

    # -- inside ------------------------------------------------------------------------------------

    def _of(self, ticket: int, pull: KvPull) -> tuple[InFlight, Pull] | None:
        request = self._state.requests.get(ticket)
        one = request.transfer if request else None
        return (request, one) if request and isinstance(one, Pull) and one.pull is pull else None

    def _end(self, request: InFlight, one: Pull, cause: GivenUp | None, cached_tokens: int = 0) -> None:
        request.transfer, one.cause = None, cause
        self._transfers.under_way -= 1
        self._state.loads.finish(one.leg)
        self._limits.ended(one.limits_ticket)
        self._transfers.ended(one, cached_tokens)
