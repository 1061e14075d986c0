"""Follows the prompts that are prefilled on another endpoint than the one that decodes.

    decision with `prefill` ─▶ begins ─▶ feeds/prefill_legs.py ─┬─▶ accepted ─▶ the request goes on
                                                                └─▶ failed: the target prefills the prompt
    give leg's end ─▶ given or failed         request's end ─▶ ends

A remote prefill is load on the prefill endpoint until its KV events or its leg's end say that the prompt is
computed. One that fails before it is accepted becomes load on the target, which then prefills the prompt; one
that fails later costs the same there, after the connector's own bounds. Each ends with its request, and
leaves a `HandoffRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import uuid4

from perilune_api.pool import Disaggregation
from perilune_gateway.model import Move, MoveReason
from perilune_gateway.model.handoff import GivenUp, RemotePrefill
from perilune_gateway.routing.disaggregation import prefill_work
from perilune_gateway.routing.request_transfers import RequestTransfers, TransferStats
from perilune_gateway.state.facts import Unreached
from perilune_gateway.state.in_flight import InFlight, Load, Transfer
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import Broken, Decided, Ended, Rerouted, Withdrawn


class Prefilling(Transfer, gc=False, kw_only=True, eq=False):
    """A remote prefill whose request has not ended."""

    remote: RemotePrefill
    leg: Load | None
    """What it is as load on the source. None once the source has computed the prompt, or will not."""
    join: int
    """Number of the source's joining the pool."""
    claimed: Sequence[int]
    """The prompt's blocks that count as cached on the source until it announces them."""
    cancel: Callable[[], object] = lambda: None
    """Ends its give leg, which may have ended already."""


class RemotePrefills:
    """The remote prefills of one pool's requests."""

    def __init__(self, state: PoolState, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock
        self._transfers = RequestTransfers(state.facts.tell, clock, wall_clock)

    def configure(self, pool: Disaggregation) -> None:
        """Take over a (changed) pool document."""
        self._pool = pool

    def stats(self) -> TransferStats:
        return self._transfers.stats()

    # -- what happens to requests ------------------------------------------------------------------

    def on_decided(self, fact: Decided) -> None:
        decision, request = fact.decision, fact.request
        if not decision.prefill:
            return
        state, tokens, blocks = self._state, request.prompt_tokens, request.blocks
        by_address = {c.address: c for c in fact.candidates}
        giver, taker = by_address[decision.prefill], by_address[decision.target]
        move = Move(
            subject=request.session.key if request.session else fact.view.request_id,
            reason=MoveReason.PREFILL,
            source=giver.address,
            target=taker.address,
            transfer_bytes=taker.engine.kv_bytes(tokens - taker.overlap.device_tokens),
            cost_s=decision.estimated_ttft_s,
        )
        work = prefill_work(decision, giver, fact.view)
        whole = state.fleet.whole_blocks(giver.address, len(blocks))
        request.transfer = Prefilling(
            move=move,
            began_at=fact.now,
            tokens=tokens,
            remote=RemotePrefill(
                transfer_id=f"perilune-{uuid4().hex}",
                source=giver.address,
                target=taker.address,
                bootstrap=giver.endpoint.bootstrap,
                accept_s=self._pool.accept_seconds,
                give_s=2 * self._pool.max_seconds,
            ),
            leg=state.loads.start(
                giver.address,
                uncached_tokens=work.uncached_tokens,
                prefill_s=work.engine_s,
                context_tokens=tokens,
                last_block=blocks[whole - 1] if whole and giver.endpoint.events else 0,
                tenant=request.tenant,
            ),
            join=state.fleet.join(giver.address),
            claimed=state.index.speculate(giver.address, blocks, fact.now),
        )
        self._transfers.under_way += 1

    def on_rerouted(self, fact: Rerouted) -> None:
        if isinstance(one := fact.request.transfer, Prefilling):
            self._fail(one, GivenUp.ELSEWHERE)

    def on_ended(self, fact: Ended) -> None:
        self._end(fact.request, answered=fact.answered)

    def on_withdrawn(self, fact: Withdrawn) -> None:
        self._end(fact.request, answered=False)

    # -- what happens to legs ----------------------------------------------------------------------

    def giving(self, ticket: int, remote: RemotePrefill, cancel: Callable[[], object]) -> None:
        """Record that the give leg is sent. `cancel` is called at the end of the request, after which the leg
        is of no use; at once if it has ended."""
        if one := self._of(ticket, remote):
            one.cancel = cancel
        else:
            cancel()

    def given(self, ticket: int, remote: RemotePrefill) -> None:
        """Record that the give leg has ended well: the source has computed the prompt, and keeps it until it
        is fetched."""
        if one := self._of(ticket, remote):
            one.claimed = ()  # they stay
            self._end_leg(one)

    def failed(self, ticket: int, remote: RemotePrefill, cause: GivenUp) -> None:
        """Record that the give leg has failed, or the target will not fetch. Ignore requests that have
        ended."""
        if one := self._of(ticket, remote):
            self._fail(one, cause)
            if cause is GivenUp.BROKE_OFF:  # the prompt may be one at which engines end
                self._state.facts.tell(Broken(self._state.requests[ticket], self._clock(), 1))

    # -- inside ------------------------------------------------------------------------------------

    def _of(self, ticket: int, remote: RemotePrefill) -> Prefilling | None:
        request = self._state.requests.get(ticket)
        one = request.transfer if request else None
        return one if isinstance(one, Prefilling) and one.remote is remote else None

    def _fail(self, one: Prefilling, cause: GivenUp) -> None:
        one.cause = one.cause or cause
        self._unclaim(one)
        self._end_leg(one)
        if cause in (GivenUp.UNREACHABLE, GivenUp.BROKE_OFF) and self._is_there(one):
            self._state.facts.tell(Unreached(one.remote.source, self._clock()))

    def _end(self, request: InFlight, *, answered: bool) -> None:
        one = request.transfer
        if not isinstance(one, Prefilling):
            return
        request.transfer = None
        self._transfers.under_way -= 1
        self._end_leg(one)
        if not answered:
            one.cause = one.cause or GivenUp.LEFT
            self._unclaim(one)
        self._transfers.ended(one, 0 if one.cause else one.tokens)
        one.cancel()

    def _unclaim(self, one: Prefilling) -> None:
        """Record that the source does not compute the prompt to its end. What it has computed it
        announces."""
        if self._is_there(one):
            self._state.index.unclaim(one.remote.source, one.claimed)
        one.claimed = ()

    def _is_there(self, one: Prefilling) -> bool:
        """Return whether the source is still in the pool."""
        return one.join == self._state.fleet.join(one.remote.source)

    def _end_leg(self, one: Prefilling) -> None:
        if one.leg:
            self._state.loads.finish(one.leg)
            one.leg = None
