"""Routed requests until they end, and what is learned from them.

    started ─▶ on_response (0 or 1 times) ─▶ finished (exactly once)
                    └─ on_applied, whenever their engines announce blocks

1. *started*: a request was routed; its blocks count as cached there from now on (`speculate`).
2. *on_applied*: a KV event that covers its last block ends its prefill: load is released, speeds learned; one
   that continues a session's chain moves the session's tail on.
3. *on_response*: who really serves it; a fallback takes over load and session.
4. *finished*: the load is given back. Parity then looks, a moment later, whether its blocks were announced.

A planned move that a request carries out is over with the first of 2, the head of a whole answer, and 4.

Costs a few µs each. Does not: decide, or know bodies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from perilune_gateway.model import Endpoint, Move, Outcome, Tier
from perilune_gateway.moves.planner import Planner
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.engine_blocks import Applied
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.sessions import Session, Sessions

EVENTS_LATE_S = 1.0
"""KV events of an ended prompt may come this late before parity counts them as missing."""
APPROXIMATE_TTL_S = 600.0
"""How long a prompt counts as cached on an endpoint that publishes no events."""
TELLING_PREFILL_S = 0.25
"""A prefill predicted to be shorter says more of overheads and events on their way than of the engine."""
UNREACHABLE = (0, 502, 503, 504)
"""Statuses with which Envoy says that an endpoint could not be reached; 0: no answer."""


class Parity(Protocol):
    """parity.ParityCheck, as far as requests concern it."""

    def request_blocks_seen(self, endpoint: str, seen: bool) -> None: ...


class Running(Struct, gc=False):
    """A routed request until it ends."""

    request_id: str
    target: str
    started_at: float
    session: Session | None
    final: bool
    blocks: Sequence[int]
    awaited: int
    """The block whose store ends its prefill; 0: none is known."""
    prefill_s: float = 0.0
    """Of its prefill alone, predicted without correction."""
    fetch_s: float = 0.0
    """Of pulling or loading KV before it, predicted without correction; 0: nothing is fetched."""
    peer: str = ""
    """Whom it pulls from; empty: it loads from the shared store, if anything."""
    overhead_s: float = 0.0
    """Beside prefill and decode, predicted; known where something is fetched."""
    ttft_s: float = 0.0
    """Queue and prefill, predicted."""
    prefilled_at: float = 0.0
    record: int = -1
    """Its number in the ring of decisions."""
    served: str = ""
    status: int = 0
    move: int = -1
    """The planner's ticket of the move that it carries out, until the target has the KV; -1: none."""


class InFlight:
    """One pool's requests in flight."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        index: PrefixIndex,
        calibration: Calibration,
        planner: Planner,
        decisions: Decisions,
        metrics: Metrics,
        parity: Parity | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._index = index
        self._calibration = calibration
        self._planner = planner
        self._decisions = decisions
        self._metrics = metrics
        self.parity = parity
        self._clock = clock
        self._running: dict[int, Running] = {}
        self._unseen: deque[tuple[float, str, int]] = deque()
        """(when to look, endpoint, last block of a prompt that ended there)."""
        self._prefilled_at: dict[str, float] = {}
        """By address: when its last prefill ended."""

    def configure(self, block_size: int) -> None:
        self._block_size = block_size

    def forget(self, address: str) -> None:
        """It left the pool. Its requests in flight go on."""
        self._prefilled_at.pop(address, None)

    def started(self, ticket: int, running: Running, move: Move | None = None) -> None:
        """`move`: that it carries out."""
        self._running[ticket] = running
        if move:
            running.move = self._planner.started(move, running.started_at)

    def speculate(self, endpoint: Endpoint, prompt_blocks: Sequence[int], now: float) -> None:
        """What was just sent there counts as cached there: equal prompts that follow at once meet it."""
        if not prompt_blocks:
            return
        if endpoint.events:
            self._index.speculate(endpoint.address, prompt_blocks, now)
        else:
            self._index.speculate(endpoint.address, prompt_blocks, now, ttl_s=APPROXIMATE_TTL_S)

    # -- what Envoy says ---------------------------------------------------------------------------

    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None:
        """The answer's head. `served`: who really answers, empty if unknown."""
        running, now = self._running[ticket], self._clock()
        running.status, running.served = status, served
        if served and served != running.target and self._fleet.get(served):
            self._served_elsewhere(ticket, running, served, now)
        if not streamed:
            self._fleet.prefill_done(ticket)
            self._moved(running, now, arrived=status < 400)

    def _served_elsewhere(self, ticket: int, running: Running, served: str, now: float) -> None:
        self._fleet.suspect(running.target, now)
        self._moved(running, now, arrived=False)
        self._fleet.served_by(ticket, served)
        if running.session and running.session.ticket == ticket:
            self._sessions.bind(running.session, served, now)
        if endpoint := self._fleet.get(served):
            self.speculate(endpoint, running.blocks, now)
        running.target = served

    def finished(self, ticket: int, outcome: Outcome) -> None:
        """The request ended. Raises KeyError when it already had."""
        running, now = self._running.pop(ticket), self._clock()
        self._fleet.finish(ticket)
        self._moved(running, now, arrived=outcome is Outcome.COMPLETED and running.status < 400)
        if outcome is Outcome.FAILED and running.status in UNREACHABLE:
            self._fleet.suspect(running.target, now)
        if running.prefilled_at and outcome is Outcome.COMPLETED and self._fleet.get(running.target):
            self._calibration.decoded(running.target, now - running.prefilled_at)
        if self.parity and running.awaited and outcome is Outcome.COMPLETED and running.status < 400:
            self._unseen.append((now + EVENTS_LATE_S, running.target, running.awaited))
        if self._unseen:
            self._look_for_blocks(now)
        if (
            running.final
            and (session := running.session)
            and (session.ticket == ticket or not session.inferred)
        ):
            self._sessions.free(session.key)
        self._decisions.finish(
            running.record, outcome, now - running.started_at, running.served, running.status
        )
        self._metrics.ended(running.target, outcome)

    def _moved(self, running: Running, now: float, *, arrived: bool) -> None:
        """If it carries out a move: the target has the KV now, or never will."""
        if running.move >= 0:
            self._planner.finished(running.move, now, arrived=arrived)
            running.move = -1

    def _look_for_blocks(self, now: float) -> None:
        """Did the prompts that ended a moment ago show up in their engines' stores? Else hashes or templates
        differ."""
        while self.parity and self._unseen and self._unseen[0][0] <= now:
            _, target, block = self._unseen.popleft()
            self.parity.request_blocks_seen(target, self._index.announced(target, block))

    # -- what engines announce ---------------------------------------------------------------------

    def on_applied(self, applied: Applied) -> None:
        """A KV event went into the index: release the load that it ends, move sessions' tails on."""
        if applied.cleared:
            self._sessions.forget_host(applied.endpoint)
        if not applied.stored or applied.tier is not Tier.DEVICE:
            return
        for ticket in self._fleet.blocks_stored(applied.endpoint, applied.stored):
            self._prefilled(self._running[ticket], self._clock())
            self._moved(self._running[ticket], self._clock(), arrived=True)
        grown = self._sessions.blocks_stored(
            applied.endpoint, applied.parent, applied.stored, self._block_size
        )
        if grown:
            session, tokens = grown
            self._fleet.progress(session.ticket, tokens)

    def _prefilled(self, running: Running, now: float) -> None:
        """Its prefill has just ended: learn from how long that took. Engines prefill one after the other, so
        it ran from the end of the one before, or from its own start."""
        before = self._prefilled_at.get(running.target, 0.0)
        running.prefilled_at = self._prefilled_at[running.target] = now
        if running.fetch_s:
            if before < running.started_at:  # else it may have fetched while others were prefilled
                self._fetched(running, now)
        elif running.prefill_s >= TELLING_PREFILL_S:
            alone_s = now - max(running.started_at, before)
            self._calibration.prefill(running.target, alone_s, running.prefill_s, now)
            self._calibration.ttft(running.target, now - running.started_at, running.ttft_s, now)

    def _fetched(self, running: Running, now: float) -> None:
        """What its prefill does not explain of the time until its blocks were there, fetching took."""
        target, know = running.target, self._calibration
        rest_s = running.prefill_s * know.prefill_ratio(target, now) + running.overhead_s
        took_s = max(0.001, now - running.started_at - rest_s)
        if running.peer:
            know.transfer(running.peer, target, took_s, running.fetch_s, now)
        else:
            know.store(target, took_s, running.fetch_s, now)
