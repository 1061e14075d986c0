"""Follows the KV events that one engine publishes over ZMQ, for one data-parallel rank.

`run` is a task for each `Publisher`:

1. Subscribe. Once connected, request a replay of everything from message 0 on, to catch up with earlier
   messages. Messages that are published meanwhile wait in the socket, and then in the engine's.
2. Each message is the next one, old, or shows a gap or a restart (kv_sequence.py). The next one is applied,
   an old one skipped. After a restart the engine's cache is empty, so its blocks are reset.
3. For a gap, request a replay of the missing messages (kv_replay.py). When that fails (no replay address, no
   answer, or the engine keeps fewer messages), the rank's blocks are reset and later messages applied.
4. After each reconnection request the same replay, so that an engine that restarted and then idles is not
   credited with the blocks of its old process.
5. A message that cannot be read may have removed any block, so the rank's blocks are reset. One that is too
   long ends the feed, see zmq_sockets.py; pool_events.py starts it again.

The task sleeps while messages come one after the other: they are taken by a piece of work that naps until
the next one arrives (turns.py). An engine publishes events with its next scheduler step, so those of an idle
engine arrive late. kv_rank.py applies messages, and state/engine_blocks.py decides what a block means for
routing.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from perilune_gateway.feeds import zmq_sockets
from perilune_gateway.feeds.kv_events import decode, live_frames
from perilune_gateway.feeds.kv_rank import Counters, Publisher, Rank, Shared, Sink
from perilune_gateway.feeds.kv_replay import Replays
from perilune_gateway.feeds.kv_sequence import Order
from perilune_gateway.feeds.turns import Nap, Work
from perilune_gateway.feeds.zmq_sockets import Socket, take
from perilune_gateway.model import ProtocolError

log = logging.getLogger(__name__)

RECEIVE_QUEUE = 1_000
"""Number of live messages that ZMQ queues here. More wait in the engine, which drops some after 100,000."""
GONE_S = 1.0
"""Seconds within which ZMQ says that it tries again to connect; usually at once."""


async def run(publisher: Publisher, sink: Sink, shared: Shared, counters: Counters) -> None:
    """Feed `sink` until cancelled. Raises SpecError for an invalid address, zmq.ZMQError when no more sockets
    can be opened, and ProtocolError when the engine sends a message that is too long."""
    socket = zmq_sockets.new_socket(shared.context, zmq.SUB, RECEIVE_QUEUE)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 5_000)
    # The kernel finds dead engines. ZMQ's heartbeats would wait behind messages that this gateway is too busy
    # to read, and end the connection with all that waits in the engine.
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 4)
    socket.subscribe(b"")
    monitor = None
    try:
        monitor = socket.get_monitor_socket(_WATCHED)
        zmq_sockets.connect(socket, publisher.events)
        await _Feed(publisher, sink, shared, counters).follow(socket, monitor)
    finally:
        if monitor is not None:
            socket.disable_monitor()
            monitor.close(linger=0)
        socket.close(linger=0)


_WATCHED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class _Held(NamedTuple):
    """The message before which others are missing."""

    seq: int
    frames: list[bytes]
    received_s: float


class _Feed:
    """The feed of one rank, by the steps of the module's header."""

    def __init__(self, publisher: Publisher, sink: Sink, shared: Shared, counters: Counters) -> None:
        self._rank = Rank(publisher, sink, shared, counters)
        self._replays = Replays(self._rank, shared)
        self._shared = shared
        self._counters = counters
        self._arrival = Nap()
        self._said = asyncio.Event()
        """Whether ZMQ may have said something of the connection."""
        self._least_lag_s = inf
        self._behind = True
        """Whether messages may be missing that a replay would bring."""
        self._gone = False
        """Whether the connection has ended and ZMQ has not said yet that it tries again."""

    async def follow(self, socket: Socket, monitor: Socket) -> None:
        """Apply live messages until cancelled. Raises ProtocolError when the connection ended for good."""
        arrivals, turns = self._shared.arrivals, self._shared.turns
        arrivals.watch(socket, self._arrival.wake)
        arrivals.watch(monitor, self._speaks)
        try:
            while True:
                self._said.clear()
                while frames := take(monitor):
                    self._connection(parse_monitor_message(frames)["event"])
                if self._behind and self._counters.connected:
                    self._behind = False
                    await self._replays.catch_up()
                    self._counters.caught_up = True
                held = await turns.run(self._arriving(socket))
                if held:
                    await self._gap(held.seq)
                    await turns.run(self._live(held.frames, held.received_s, asked=True))
                elif self._gone:
                    await self._try_again()
        finally:
            arrivals.unwatch(socket)
            arrivals.unwatch(monitor)

    def _speaks(self) -> None:
        self._said.set()
        self._arrival.wake()

    def _connection(self, event: int) -> None:
        self._counters.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._counters.connected:
            self._counters.failure = ""
        if event == zmq.EVENT_DISCONNECTED:
            self._behind = self._gone = True
            self._counters.behind_s = 0.0
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._gone = False

    async def _try_again(self) -> None:
        """Wait until ZMQ says that it tries again to connect."""
        try:
            # Not wait_for: that of Python 3.11 may lose a cancellation.
            async with asyncio.timeout(GONE_S):
                await self._said.wait()
        except TimeoutError:
            self._counters.malformed += 1
            raise ProtocolError(
                f"a message of more than {zmq_sockets.MAX_MESSAGE_BYTES} bytes, or none of ZMQ"
            ) from None

    # -- live messages -----------------------------------------------------------------------------

    def _arriving(self, socket: Socket) -> Work[_Held | None]:
        """Apply messages as they arrive, until one shows a gap, or ZMQ says something of the connection."""
        clock, said = self._shared.clock, self._said.is_set
        while not said():
            frames = take(socket)
            if frames:
                received_s = clock()
                if gap := (yield from self._live(frames, received_s)):
                    return _Held(gap, frames, received_s)
                yield None
                continue
            self._counters.behind_s = 0.0
            if self._gone:
                break
            yield self._arrival
        return None

    def _live(self, frames: list[bytes], received_s: float, *, asked: bool = False) -> Work[int]:
        """Apply one message. If messages before it are missing and were not asked for yet, apply nothing and
        return its number; else return 0."""
        seq = None
        try:
            seq, payload = live_frames(frames)
            batch = decode(payload)
        except ProtocolError as error:
            self._rank.unreadable(seq, error)
            return 0
        order = self._rank.tracker.order(seq, batch.published_s)
        if order is Order.RESTART:
            self._rank.restarted()
            order = self._rank.tracker.order(seq, batch.published_s)
        if order is Order.GAP and not asked:
            return seq
        lag_s = received_s - batch.published_s
        self._least_lag_s = min(self._least_lag_s, lag_s)
        self._counters.lag_s, self._counters.behind_s = lag_s, lag_s - self._least_lag_s
        if order is Order.OLD:
            self._counters.old += 1
            return 0
        self._counters.heard_at = received_s
        yield from self._rank.apply(seq, batch, lag_s)
        return 0

    async def _gap(self, seq: int) -> None:
        """Request the messages missing before `seq`. When they are lost the rank is reset, unless nothing was
        applied yet."""
        first, fresh = self._rank.tracker.expected, self._rank.tracker.fresh
        if not fresh:
            self._counters.gaps += 1
            log.info(
                "KV events are missing endpoint=%s rank=%d first=%d count=%d",
                *self._rank.publisher[:2],
                first,
                seq - first,
            )
        lost = await self._replays.catch_up()
        if lost and not fresh:
            self._rank.rebuild(lost)
