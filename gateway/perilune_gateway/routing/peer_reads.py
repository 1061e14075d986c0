"""Follows the KV that endpoints read from each other's host memory while they serve a request.

    decision with `replicate_from` ─▶ refuses ─▶ begin ─▶ the request goes on with `remote_kv_source`
    target: asks the source, fetches what it has, computes the rest ─▶ prefilled or answered
    request's end ─▶ ended

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
from uuid import uuid4

import msgspec
from msgspec import Struct

from perilune_api import names
from perilune_gateway.model import Candidate, Decision, Move, Subject, Unpulled, server_of
from perilune_gateway.model.handoff import Attachment, GivenUp, Leg
from perilune_gateway.policy.cost import target_of
from perilune_gateway.routing.observer import HandoffObserver
from perilune_gateway.routing.pull import move_of
from perilune_gateway.routing.pull_limits import PullLimits
from perilune_gateway.routing.request_transfers import EndedTransfers, TransferStats
from perilune_gateway.state.fleet import Fleet

LATE_S = 1.0
HANGS_S = 30.0
"""Seconds after which an engine takes a source for gone that does not answer its handshake, and computes."""


class _Open(Struct, gc=False):
    """A read whose request has not ended."""

    move: Move
    tokens: int
    began_at: float
    late_at: float
    limits_ticket: int | None
    """None: the prompt is computed, so the transfer is over."""
    cause: GivenUp | None = None


class PeerReads:
    """The reads of one pool's requests, by the requests' tickets."""

    def __init__(
        self,
        fleet: Fleet,
        limits: PullLimits,
        observer: HandoffObserver,
        secret: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`secret`: the pool's, by which engines obey transfer parameters; empty: they need none."""
        self._fleet = fleet
        self._limits = limits
        self._secret = secret
        self._clock = clock
        self._past = EndedTransfers(observer, clock, wall_clock)
        self._open: dict[int, _Open] = {}

    def stats(self) -> TransferStats:
        return self._past.stats(sum(one.limits_ticket is not None for one in self._open.values()))

    def refuses(self, decision: Decision, candidates: Sequence[Candidate], now: float) -> Unpulled | None:
        """Return why the decision's KV may not be read now; None if it may."""
        move = _move("", decision, candidates)
        under_way = (one for one in self._open.values() if one.limits_ticket is not None)
        if any(one.move.source == move.source and one.late_at <= now for one in under_way):
            return Unpulled.FAILED
        return self._limits.refuses(move.source, move.target, move.transfer_bytes, now)

    def begin(
        self,
        ticket: int,
        subject: Subject,
        decision: Decision,
        candidates: Sequence[Candidate],
        alone_s: float,
    ) -> Attachment:
        """A request begins whose endpoint reads from another one. Returns what to attach to it. `alone_s`:
        predicted seconds of queue and prefill without that; inf if no KV event will end the prefill, so that
        it cannot be told how long it took."""
        move, now = _move(subject, decision, candidates), self._clock()
        ticket_of_limits = self._limits.began(move)
        self._open[ticket] = _Open(
            move, decision.cached_tokens, now, now + alone_s + LATE_S, ticket_of_limits
        )
        source = self._fleet.get(move.source)
        host, _, port = (source.peer if source else "").rpartition(":")
        known = {"kv_request_id": str(uuid4()), "remote_host": host, "remote_port": int(port or 0)}
        headers: tuple[tuple[str, str], ...] = ((names.TRANSFER_TARGET_HEADER, server_of(move.target)),)
        if self._secret:
            headers += ((names.ENGINE_SECRET_HEADER, self._secret),)
        return Attachment(msgspec.json.encode({"remote_kv_source": known}), headers)

    def prefilled(self, ticket: int) -> None:
        """A KV event has ended the prefill. Ignores requests without a read."""
        one = self._open.get(ticket)
        if one and one.limits_ticket is not None and self._clock() >= one.late_at:
            self._fail(one, GivenUp.NOT_TAKEN)
        self.answered(ticket)

    def answered(self, ticket: int) -> None:
        """The request has its answer's head: nothing is fetched any more. Ignores requests without a read."""
        one = self._open.get(ticket)
        if one and one.limits_ticket is not None:
            self._limits.ended(one.limits_ticket)
            one.limits_ticket = None

    def served_elsewhere(self, ticket: int) -> None:
        """The proxy sent the request to another endpoint than the target, which reads nothing."""
        if one := self._open.get(ticket):
            one.cause = GivenUp.ELSEWHERE

    def ended(self, ticket: int, *, answered: bool, cached_tokens: int | None) -> None:
        """The request has ended. `cached_tokens`: of the prompt, as the engine reported; None: it is not
        known. Ignores requests without a read."""
        one = self._open.get(ticket)
        if one is None:
            return
        self.answered(ticket)
        del self._open[ticket]
        if not answered:
            one.cause = one.cause or GivenUp.LEFT
        elif one.cause is None and cached_tokens is not None:
            if cached_tokens < one.tokens:
                self._fail(one, GivenUp.RECOMPUTED)
            else:
                self._limits.worked(one.move.source, one.move.target)
        seen = cached_tokens is not None
        self._past.add(one.move, one.tokens, cached_tokens or 0, one.cause, one.began_at, seen=seen)

    def _fail(self, one: _Open, cause: GivenUp) -> None:
        if one.cause is None:
            one.cause = cause
            self._limits.failed(Leg.GIVE, one.move.source, self._clock())


def _move(subject: Subject, decision: Decision, candidates: Sequence[Candidate]) -> Move:
    return move_of(subject, decision, target_of(decision, candidates), from_host=True)
