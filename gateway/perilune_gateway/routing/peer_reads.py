"""Follows the KV that endpoints read from each other's host memory while they serve a request.

    decision with `replicate_from` ─▶ refuses ─▶ begins ─▶ the request goes on with `remote_kv_source`
    target: asks the source, fetches what it has, computes the rest ─▶ prefilled or answered
    request's end ─▶ ends

This is the tier `p2p` of vLLM's OffloadingConnector, from 0.27.0 on (`v1/kv_offload/tiering/p2p` in 0.32.0
and 0.33.0). The source needs no request and computes nothing, and the gateway holds nothing.

If a read fails, the target computes the prompt. But it takes long to notice: a source that hangs costs 10 s
(ZeroMQ's heartbeat), one that hangs or refuses in the handshake 30 s, and a transfer that hangs 40 s. The
request waits meanwhile. So a source is named in no other request once it has delayed one by LATE_S, compared
with what the target would have needed alone; and for `pull_limits.PAUSE_S` after a failure.

Only the target obeys the parameters. The target's address and the pool's secret go with them, and every other
engine drops them. So it does no harm if a proxy sends the request again to another engine.

Only the engine's report of cached tokens tells whether the target found the KV. The gateway sees the report
in answers as a whole, and in full duplex also in streams that contain it. Each read leaves a `HandoffRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from uuid import uuid4

import msgspec

from perilune_api import names
from perilune_gateway.model import Candidate, Decision, Endpoint, Unpulled, server_of
from perilune_gateway.model.handoff import Attachment, GivenUp, Leg
from perilune_gateway.policy.cost import target_of
from perilune_gateway.routing.pull import move_of
from perilune_gateway.routing.pull_limits import PullLimits
from perilune_gateway.routing.request_transfers import RequestTransfers, TransferStats
from perilune_gateway.state.in_flight import InFlight, Transfer
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.request_facts import (
    Answered,
    Decided,
    Ended,
    Prefilled,
    Rerouted,
    Withdrawn,
)

LATE_S = 1.0
HANGS_S = 30.0
"""Seconds after which an engine takes a source for gone that does not answer its handshake, and computes."""


class PeerRead(Transfer, gc=False, kw_only=True, eq=False):
    """A read whose request has not ended."""

    attachment: Attachment
    """What the request carries for it."""
    late_at: float
    limits_ticket: int | None
    """None once the prompt is computed, so that the transfer is over."""


class PeerReads:
    """The reads of one pool's requests."""

    def __init__(
        self,
        state: PoolState,
        limits: PullLimits,
        secret: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`secret`: the pool's, by which engines obey transfer parameters. Empty if they need none."""
        self._state = state
        self._limits = limits
        self._secret = secret
        self._clock = clock
        self._transfers = RequestTransfers(state.facts.tell, clock, wall_clock)
        self._from: dict[str, set[PeerRead]] = {}
        """Source → the reads from it that are under way."""

    def stats(self) -> TransferStats:
        return self._transfers.stats()

    def refuses(self, decision: Decision, candidates: Sequence[Candidate], now: float) -> Unpulled | None:
        """Return why the decision's KV may not be read now; None if it may."""
        move = move_of("", decision, target_of(decision, candidates), from_host=True)
        if any(one.late_at <= now for one in self._from.get(move.source, ())):
            return Unpulled.FAILED
        return self._limits.refuses(move.source, move.target, move.transfer_bytes, now)

    # -- what happens to requests ------------------------------------------------------------------

    def on_decided(self, fact: Decided) -> None:
        decision, request = fact.decision, fact.request
        if not (fact.view.prefix.from_host and decision.replicate_from):
            return
        assert request.alone, "the KV comes from another endpoint"
        # Without a KV event that ends the prefill nobody can tell how long it took.
        alone_s = request.alone.ttft_s if request.awaited else inf
        subject = request.session.key if request.session else fact.view.request_id
        move = move_of(subject, decision, target_of(decision, fact.candidates), from_host=True)
        one = request.transfer = PeerRead(
            move=move,
            began_at=fact.now,
            tokens=decision.cached_tokens,
            attachment=self._attachment(self._state.fleet.get(move.source), move.target),
            late_at=fact.now + alone_s + LATE_S,
            limits_ticket=self._limits.began(move, fact.now),
        )
        self._transfers.under_way += 1
        self._from.setdefault(move.source, set()).add(one)

    def on_prefilled(self, fact: Prefilled) -> None:
        if one := _under_way(fact.request):
            if fact.now >= one.late_at:
                self._fail(one, GivenUp.NOT_TAKEN)
            self._over(one)

    def on_answered(self, fact: Answered) -> None:
        """End the read: after a head nothing is fetched any more, unless it is the early one of a stream."""
        request = fact.request
        if (one := _under_way(request)) and not (request.streamed and request.awaited):
            self._over(one)

    def on_rerouted(self, fact: Rerouted) -> None:
        """Record that the endpoint that serves reads nothing."""
        if isinstance(one := fact.request.transfer, PeerRead):
            one.cause = GivenUp.ELSEWHERE

    def on_ended(self, fact: Ended) -> None:
        self._end(fact.request, answered=fact.answered)

    def on_withdrawn(self, fact: Withdrawn) -> None:
        self._end(fact.request, answered=False)

    # -- inside ------------------------------------------------------------------------------------

    def _attachment(self, source: Endpoint | None, target: str) -> Attachment:
        host, _, port = (source.peer if source else "").rpartition(":")
        known = {"kv_request_id": str(uuid4()), "remote_host": host, "remote_port": int(port or 0)}
        headers: tuple[tuple[str, str], ...] = ((names.TRANSFER_TARGET_HEADER, server_of(target)),)
        if self._secret:
            headers += ((names.ENGINE_SECRET_HEADER, self._secret),)
        return Attachment(msgspec.json.encode({"remote_kv_source": known}), headers)

    def _end(self, request: InFlight, *, answered: bool) -> None:
        one = request.transfer
        if not isinstance(one, PeerRead):
            return
        request.transfer, cached_tokens = None, request.cached_tokens
        if one.limits_ticket is not None:
            self._over(one)
        if not answered:
            one.cause = one.cause or GivenUp.LEFT
        elif one.cause is None and cached_tokens is not None:
            if cached_tokens < one.tokens:
                self._fail(one, GivenUp.RECOMPUTED)
            else:
                self._limits.worked(one.move.source, one.move.target)
        self._transfers.ended(one, cached_tokens or 0, seen=cached_tokens is not None)

    def _over(self, one: PeerRead) -> None:
        """Record that nothing is fetched any more."""
        assert one.limits_ticket is not None, "it is under way"
        self._limits.ended(one.limits_ticket)
        one.limits_ticket = None
        self._transfers.under_way -= 1
        reads = self._from[one.move.source]
        reads.remove(one)
        if not reads:
            del self._from[one.move.source]

    def _fail(self, one: PeerRead, cause: GivenUp) -> None:
        if one.cause is None:
            one.cause = cause
            self._limits.failed(Leg.GIVE, one.move.source, self._clock())


def _under_way(request: InFlight) -> PeerRead | None:
    one = request.transfer
    return one if isinstance(one, PeerRead) and one.limits_ticket is not None else None
