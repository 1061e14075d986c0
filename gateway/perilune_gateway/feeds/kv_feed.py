"""Follows the KV events that one engine publishes over ZMQ, for one data-parallel rank.

`run` is a task for each `Publisher`:

1. Subscribe, then request a replay of everything from message 0 on, to catch up with earlier messages.
2. Each message is the next one, old, or shows a gap or a restart (kv_sequence.py). The next one is applied,
   an old one skipped. After a restart the engine's cache is empty, so its blocks are reset.
3. For a gap, request a replay of the missing messages and apply them. When that fails (no replay address, no
   answer, or the engine keeps fewer messages), the rank's blocks are reset and later messages applied.
4. After each reconnection request the same replay, so that an engine that restarted and then idles is not
   credited with the blocks of its old process.
5. A message that cannot be read may have removed any block, so the rank's blocks are reset.

Costs about 3 µs per event, within a budget for each turn of the event loop (turn_budget.py). A replay is kept
in memory until it is known to continue what was applied. The length of a message is not limited, because ZMQ
disconnects a peer for good that sends a longer one. An engine publishes events with its next scheduler step,
so those of an idle engine arrive late. state/engine_blocks.py decides what a block means for routing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import nan
from typing import NamedTuple, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from perilune_api.pool import SpecError
from perilune_gateway.feeds.kv_events import decode, live_frames, replay_frames
from perilune_gateway.feeds.kv_sequence import Order, Replayed, SequenceTracker, judge
from perilune_gateway.feeds.turn_budget import TurnBudget
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.kv_events import Batch

log = logging.getLogger(__name__)

RECEIVE_HWM = 100_000
"""Number of messages that ZMQ queues; it drops further ones, which shows as a gap."""
REPLAY_TIMEOUT_S = 2.0
"""Seconds to wait for each message of a replay. Publishers answer within 0.1 s."""
REPLAYED_MESSAGES = 100_000
"""Maximum number of messages in one replay; vLLM keeps 10,000 by default."""
_YIELD_EVERY = 32
"""Number of replayed messages that are applied before other tasks may run."""


class Publisher(NamedTuple):
    """The addresses at which one rank of an engine publishes its KV events."""

    endpoint: str
    rank: int
    events: str
    """ZMQ address of the live events."""
    replay: str = ""
    """ZMQ address of the replay socket; empty when there is none."""


class ResetCause(StrEnum):
    """Why an endpoint's blocks must be forgotten."""

    RESTARTED = "restarted"
    LOST = "lost"
    """Messages are missing and could not be replayed."""
    MALFORMED = "malformed"
    """A message could not be read."""
    UNFOLLOWED = "unfollowed"
    """The feed has ended, because the pool no longer lists the publisher or because the feed failed."""


class Sink(Protocol):
    """Receives what a feed reads."""

    def batch(self, endpoint: str, rank: int, batch: Batch, lag_s: float) -> None:
        """Applies a batch. `lag_s` is the seconds from its publication to its receipt; NaN for a replayed
        one."""

    def reset(self, endpoint: str, rank: int, cause: ResetCause) -> None:
        """Forgets all blocks of this rank."""


@dataclass(slots=True)
class Counters:
    """Counts of one feed, for metrics."""

    connected: bool = False
    """Whether the ZMQ connection to the publisher is up."""
    lag_s: float = nan
    """Seconds from publication to receipt of the last live batch."""
    batches: int = 0
    gaps: int = 0
    replayed: int = 0
    rebuilds: int = 0
    """Number of gaps that could not be filled."""
    restarts: int = 0
    old: int = 0
    malformed: int = 0
    unknown: int = 0
    """Number of events of unknown types."""


async def run(
    publisher: Publisher,
    sink: Sink,
    clock: Callable[[], float],
    context: zmq.asyncio.Context,
    counters: Counters | None = None,
    replay_timeout_s: float = REPLAY_TIMEOUT_S,
    budget: TurnBudget | None = None,
) -> None:
    """Feeds `sink` until cancelled. `clock` is wall-clock time, for the lag. Raises SpecError for an invalid
    address."""
    feed = _Feed(publisher, sink, clock, context, counters or Counters(), replay_timeout_s)
    socket = _socket(context, zmq.SUB)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 5_000)
    socket.set(zmq.HEARTBEAT_IVL, 10_000)
    socket.set(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.subscribe(b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        _connect(socket, publisher.events, publisher.endpoint)
        answered = await feed.catch_up()
        await feed.follow(socket, monitor, budget or TurnBudget(), behind=not answered)
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, RECEIVE_HWM)
    return socket


def _connect(socket: zmq.asyncio.Socket, url: str, endpoint: str) -> None:
    """Raises SpecError."""
    try:
        socket.connect(url)
    except zmq.ZMQError as error:
        raise SpecError(f"{url!r} of {endpoint} is not a ZMQ address: {error}") from None


class _Feed:
    """The feed of one rank, by the steps of the module's header."""

    def __init__(
        self,
        publisher: Publisher,
        sink: Sink,
        clock: Callable[[], float],
        context: zmq.asyncio.Context,
        counters: Counters,
        replay_timeout_s: float,
    ) -> None:
        self._publisher = publisher
        self._endpoint, self._rank = publisher.endpoint, publisher.rank
        self._sink = sink
        self._clock = clock
        self._context = context
        self._counters = counters
        self._replay_timeout_s = replay_timeout_s
        self._tracker = SequenceTracker()
        self._has_blocks = False
        """Whether a batch was applied since the last reset."""
        self._logged_unreadable = False
        """Whether the log already says that messages cannot be read. Cleared by the next readable one."""

    async def follow(
        self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, budget: TurnBudget, *, behind: bool
    ) -> None:
        """Applies live messages until cancelled. `behind`: catch up when the publisher connects."""
        poller = zmq.asyncio.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        while True:
            for ready, _ in await poller.poll():
                if ready is monitor:
                    event = parse_monitor_message(await monitor.recv_multipart())["event"]
                    self._counters.connected = event != zmq.EVENT_DISCONNECTED
                    if not self._counters.connected:
                        behind = True
                    elif behind:
                        behind = False
                        await self.catch_up()
                else:
                    frames = await socket.recv_multipart()
                    await budget.begin()
                    await self._live(frames)
                    budget.end()
            await asyncio.sleep(0)

    async def catch_up(self) -> bool:
        """Requests a replay of what was missed and applies it. Returns False when there is no answer."""
        if not self._publisher.replay:
            return False
        replayed = await self._replay(max(self._tracker.expected - 1, 0))
        if replayed is None:
            return False
        verdict = judge(self._tracker, [(seq, batch.published_s) for seq, batch in replayed])
        if verdict is Replayed.RESTARTED:
            self._restarted()
            replayed = await self._replay(0) or []
        elif verdict is Replayed.LOST:
            self._rebuild()
        for count, (seq, batch) in enumerate(replayed):
            if seq >= self._tracker.expected:
                self._counters.replayed += 1
                self._apply(seq, batch, nan)
            if count % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
        return True

    async def _live(self, frames: list[bytes]) -> None:
        received_s = self._clock()
        seq = None
        try:
            seq, payload = live_frames(frames)
            batch = decode(payload)
        except ProtocolError as error:
            self._unreadable(seq, error)
            return
        order = self._tracker.order(seq, batch.published_s)
        if order is Order.RESTART:
            self._restarted()
            order = self._tracker.order(seq, batch.published_s)
        if order is Order.GAP:
            await self._gap(seq)
            order = self._tracker.order(seq, batch.published_s)
        if order is Order.OLD:
            self._counters.old += 1
            return
        self._counters.lag_s = received_s - batch.published_s
        self._apply(seq, batch, self._counters.lag_s)

    async def _gap(self, seq: int) -> None:
        """Requests the messages missing before `seq`. When they are lost the rank is reset, unless nothing
        was applied yet."""
        first, fresh = self._tracker.expected, self._tracker.fresh
        if not fresh:
            self._counters.gaps += 1
            log.info(
                "KV events are missing endpoint=%s rank=%d first=%d count=%d",
                self._endpoint,
                self._rank,
                first,
                seq - first,
            )
        answered = await self.catch_up()
        if not answered and not fresh:
            self._rebuild()

    async def _replay(self, first: int) -> list[tuple[int, Batch]] | None:
        """Everything from `first` on that the publisher still has; None when it does not answer."""
        socket = _socket(self._context, zmq.DEALER)
        replayed: list[tuple[int, Batch]] = []
        try:
            _connect(socket, self._publisher.replay, self._endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                # Not wait_for: that of Python 3.11 may lose a cancellation.
                async with asyncio.timeout(self._replay_timeout_s):
                    frames = await socket.recv_multipart()
                seq, payload = replay_frames(frames)
                if payload is None:
                    return replayed
                if len(replayed) == REPLAYED_MESSAGES or (replayed and seq <= replayed[-1][0]):
                    raise ProtocolError(f"a replay that does not end, at message {seq}")
                replayed.append((seq, decode(payload)))
        except TimeoutError:
            log.warning("KV event replay not answered endpoint=%s rank=%d", self._endpoint, self._rank)
            return None
        except ProtocolError as error:
            self._counters.malformed += 1
            log.warning(
                "KV event replay cannot be read endpoint=%s rank=%d error=%s",
                self._endpoint,
                self._rank,
                error,
            )
            return None
        finally:
            socket.close(linger=0)

    def _apply(self, seq: int, batch: Batch, lag_s: float) -> None:
        self._has_blocks, self._logged_unreadable = True, False
        self._counters.batches += 1
        self._counters.unknown += batch.unknown
        self._tracker.applied(seq, batch.published_s)
        self._sink.batch(self._endpoint, self._rank, batch, lag_s)

    def _restarted(self) -> None:
        self._counters.restarts += 1
        self._reset(ResetCause.RESTARTED)

    def _rebuild(self) -> None:
        self._counters.rebuilds += 1
        self._reset(ResetCause.LOST)

    def _unreadable(self, seq: int | None, error: ProtocolError) -> None:
        """Resets the rank, because the events of an unreadable message are lost; a replay would bring the
        same bytes. Logs only the first of several in a row. When `seq` is None, the next message shows a
        gap."""
        self._counters.malformed += 1
        if not self._logged_unreadable:
            log.warning(
                "KV events cannot be read endpoint=%s rank=%d error=%s", self._endpoint, self._rank, error
            )
        self._logged_unreadable = True
        if seq is None:
            return
        published_s = self._tracker.published_s
        if self._has_blocks:
            self._reset(ResetCause.MALFORMED)
        self._tracker.applied(seq, published_s)

    def _reset(self, cause: ResetCause) -> None:
        self._has_blocks = False
        self._tracker.forget()
        self._sink.reset(self._endpoint, self._rank, cause)
