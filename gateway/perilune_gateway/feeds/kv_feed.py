"""Follows the KV events that one engine publishes over ZMQ, for one data-parallel rank.

`run` is a task for each `Publisher`:

1. Subscribe. Once connected, request a replay of everything from message 0 on, to catch up with earlier
   messages. Messages that are published meanwhile wait in the socket, and then in the engine's.
2. Each message is the next one, old, or shows a gap or a restart (kv_sequence.py). The next one is applied,
   an old one skipped. After a restart the engine's cache is empty, so its blocks are reset.
3. For a gap, request a replay of the missing messages. When that fails (no replay address, no answer, or the
   engine keeps fewer messages), the rank's blocks are reset and later messages applied.
4. After each reconnection request the same replay, so that an engine that restarted and then idles is not
   credited with the blocks of its old process.
5. A message that cannot be read may have removed any block, so the rank's blocks are reset. One that is too
   long ends the feed, see zmq_sockets.py; pool_events.py starts it again.

A replay is applied message by message while it is read; REPLAY_BYTES of it may wait, and what the engine
sends faster than that waits in TCP's buffers. vLLM drops the rest without a word, also the end of the replay,
so a hole or a missing end is asked for again from the next number. A request names the first message only,
and vLLM's publisher sends all later ones before it publishes again. So requests are few: at most MOST_REPLAYS
at once in one gateway, at random moments, and with growing pauses where nothing new comes.

Costs about 9 µs per message and 7 µs per block, in slices (turns.py). An engine publishes events with its
next scheduler step, so those of an idle engine arrive late. state/engine_blocks.py decides what a block means
for routing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from math import inf, nan
from random import Random
from typing import NamedTuple, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from perilune_gateway.feeds import zmq_sockets
from perilune_gateway.feeds.kv_events import decode, live_frames, pieces, replay_frames
from perilune_gateway.feeds.kv_sequence import Order, Replayed, SequenceTracker, judge
from perilune_gateway.feeds.turns import Turns, Work
from perilune_gateway.feeds.zmq_sockets import Socket, readable, take
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.kv_events import AllBlocksCleared, Batch, Lost

log = logging.getLogger(__name__)

RECEIVE_QUEUE = 1_000
"""Number of live messages that ZMQ queues here. More wait in the engine, which drops some after 100,000."""
REPLAY_QUEUE = 64
"""Number of replayed messages that ZMQ queues here."""
REPLAY_BYTES = 32 * 1024 * 1024
"""Bytes of one replay that were read and wait to be applied. vLLM sends a replay at once and drops what its
reader does not take, which is about 1,000 messages after the reader stops."""
MOST_REPLAYS = 8
"""Number of replays that one gateway reads at once. Together they hold MOST_REPLAYS × REPLAY_BYTES = 256 MiB
at most, besides the messages in ZMQ's queues."""
REPLAY_TIMEOUT_S = 2.0
"""Seconds to wait for a connection, and for each further message of a replay."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds to wait for the first message once connected. vLLM's publisher serves one request after the other,
at about 0.5 s for 10,000 messages, also those of readers that have gone: who asks again early makes it
later."""
SPREAD_S = 0.2
"""Largest random pause in seconds before a replay, so that gateways that start together ask one after the
other."""
PAUSE_S = 0.2
"""Mean pause in seconds before the next request of the same replay. It doubles while nothing new comes."""
TRIES = 3
"""Number of requests in a row that bring nothing new before a replay has failed."""
REPLAYED_MESSAGES = 1_000_000
"""Maximum number of messages in one replay; vLLM keeps 10,000 by default."""
GONE_S = 1.0
"""Seconds within which ZMQ says that it tries again to connect; usually at once."""
_BLOCKS = 128
"""Number of blocks that are applied in one step: below 1 ms."""
_MESSAGES = 64
"""Number of live messages after which a feed looks at its connection."""


class Publisher(NamedTuple):
    """The addresses at which one rank of an engine publishes its KV events."""

    endpoint: str
    rank: int
    events: str
    """ZMQ address of the live events."""
    replay: str = ""
    """ZMQ address of the replay socket; empty when there is none."""
    instance: str = ""
    """What is at the endpoint's address; with another one the feed starts over."""


class ResetCause(StrEnum):
    """Why an endpoint's blocks must be forgotten."""

    RESTARTED = "restarted"
    LOST = "lost"
    """Messages are missing and could not be replayed."""
    MALFORMED = "malformed"
    """A message could not be read."""
    FAILED = "failed"
    """The feed has failed and starts over."""
    UNFOLLOWED = "unfollowed"
    """The pool no longer lists the publisher."""


class Sink(Protocol):
    """Receives what a feed reads."""

    def batch(self, endpoint: str, rank: int, batch: Batch, lag_s: float) -> None:
        """Apply a batch. A long one comes in several parts. `lag_s` is the seconds from its publication to
        its receipt; NaN for a replayed one."""

    def reset(self, endpoint: str, rank: int, cause: ResetCause) -> None:
        """Forget all blocks of this rank."""


@dataclass(slots=True)
class Counters:
    """Counts of one feed, for metrics."""

    connected: bool = False
    """Whether the ZMQ connection to the publisher is up."""
    lag_s: float = nan
    """Seconds from publication to receipt of the last live batch."""
    behind_s: float = 0.0
    """Seconds that the last live batch took longer than the fastest one; 0 when no message waits."""
    caught_up: bool = False
    """Whether the feed has once been connected and read what was announced before, as far as it is told."""
    failure: str = ""
    """Why the feed does not run; empty when it does."""
    heard_at: float = nan
    """Time of receipt of the last live batch, in Unix seconds."""
    lost_at: float = nan
    """Time when a gap could last not be filled."""
    lost: Lost | None = None
    """Why not."""
    catching_up: int = 0
    """1 while a replay is read or waited for."""
    batches: int = 0
    blocks: int = 0
    """Number of blocks that were stored or removed."""
    gaps: int = 0
    replayed: int = 0
    rebuilds: int = 0
    """Number of gaps that could not be filled."""
    restarts: int = 0
    old: int = 0
    malformed: int = 0
    unknown: int = 0
    """Number of events of unknown types."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all feeds of one gateway share."""

    context: zmq.Context[Socket]
    clock: Callable[[], float]
    """Wall-clock time in seconds, for the lag."""
    rng: Random
    turns: Turns = field(default_factory=Turns)
    replays: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_REPLAYS))
    replay_timeout_s: float = REPLAY_TIMEOUT_S
    answer_timeout_s: float = ANSWER_TIMEOUT_S
    spread_s: float = SPREAD_S
    pause_s: float = PAUSE_S


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
    """The message at which a feed has stopped reading."""

    gap: int
    """Its number when messages before it are missing; else 0."""
    frames: list[bytes]
    received_s: float


class _Answer(StrEnum):
    """What one message of a replay shows."""

    GOES_ON = auto()
    ENDED = auto()
    BROKEN = auto()
    """Messages before it were dropped on their way."""
    RESTARTED = auto()


class _Feed:
    """The feed of one rank, by the steps of the module's header."""

    def __init__(self, publisher: Publisher, sink: Sink, shared: Shared, counters: Counters) -> None:
        self._publisher = publisher
        self._endpoint, self._rank = publisher.endpoint, publisher.rank
        self._sink = sink
        self._shared = shared
        self._counters = counters
        self._tracker = SequenceTracker()
        self._least_lag_s = inf
        self._behind = True
        """Whether messages may be missing that a replay would bring."""
        self._gone = False
        """Whether the connection has ended and ZMQ has not said yet that it tries again."""
        self._has_blocks = False
        """Whether a batch was applied since the last reset."""
        self._logged_unreadable = False
        """Whether the log already says that messages cannot be read. Cleared by the next readable one."""

    async def follow(self, socket: Socket, monitor: Socket) -> None:
        """Apply live messages until cancelled. Raises ProtocolError when the connection ended for good."""
        while True:
            while frames := take(monitor):
                self._connection(parse_monitor_message(frames)["event"])
            if self._behind and self._counters.connected:
                self._behind = False
                await self.catch_up()
                self._counters.caught_up = True
            held = await self._shared.turns.run(self._arrived(socket))
            if held is None:
                self._counters.behind_s = 0.0
                await self._wait(socket, monitor)
            elif held.gap:
                await self._gap(held.gap)
                await self._shared.turns.run(self._live(held.frames, held.received_s, asked=True))

    def _connection(self, event: int) -> None:
        self._counters.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._counters.connected:
            self._counters.failure = ""
        if event == zmq.EVENT_DISCONNECTED:
            self._behind = self._gone = True
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._gone = False

    async def _wait(self, socket: Socket, monitor: Socket) -> None:
        try:
            # Not wait_for: that of Python 3.11 may lose a cancellation.
            async with asyncio.timeout(GONE_S if self._gone else None):
                await readable(socket, monitor)
        except TimeoutError:
            self._counters.malformed += 1
            raise ProtocolError(
                f"a message of more than {zmq_sockets.MAX_MESSAGE_BYTES} bytes, or none of ZMQ"
            ) from None

    # -- live messages -----------------------------------------------------------------------------

    def _arrived(self, socket: Socket) -> Work[_Held | None]:
        """Apply the messages that have arrived, until one shows a gap. Return None when none is left."""
        held = None
        for _ in range(_MESSAGES):
            frames = take(socket)
            if frames is None:
                return None
            received_s = self._shared.clock()
            gap = yield from self._live(frames, received_s)
            held = _Held(gap, frames, received_s)
            if gap:
                break
        return held

    def _live(self, frames: list[bytes], received_s: float, *, asked: bool = False) -> Work[int]:
        """Apply one message. If messages before it are missing and were not asked for yet, apply nothing and
        return its number; else return 0."""
        seq = None
        try:
            seq, payload = live_frames(frames)
            batch = decode(payload)
        except ProtocolError as error:
            self._unreadable(seq, error)
            return 0
        order = self._tracker.order(seq, batch.published_s)
        if order is Order.RESTART:
            self._restarted()
            order = self._tracker.order(seq, batch.published_s)
        if order is Order.GAP and not asked:
            return seq
        if order is Order.OLD:
            self._counters.old += 1
            return 0
        lag_s = received_s - batch.published_s
        self._least_lag_s = min(self._least_lag_s, lag_s)
        self._counters.lag_s, self._counters.behind_s = lag_s, lag_s - self._least_lag_s
        self._counters.heard_at = received_s
        yield from self._apply(seq, batch, lag_s)
        return 0

    async def _gap(self, seq: int) -> None:
        """Request the messages missing before `seq`. When they are lost the rank is reset, unless nothing was
        applied yet."""
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
        lost = await self.catch_up()
        if lost and not fresh:
            self._rebuild(lost)

    # -- replays -----------------------------------------------------------------------------------

    async def catch_up(self) -> Lost | None:
        """Request a replay of what was missed and apply it, in as many requests as it takes. If that fails,
        part of it may be applied; return why."""
        if not self._publisher.replay:
            return Lost.NO_REPLAY
        shared, counters, tries, before = self._shared, self._counters, 0, self._counters.replayed
        counters.catching_up = 1
        try:
            while tries < TRIES:
                had, restarts = counters.replayed, counters.restarts
                await asyncio.sleep(shared.rng.uniform(0.0, shared.spread_s))
                async with shared.replays:
                    if await self._replay(before + REPLAYED_MESSAGES):
                        return None
                tries = 0 if (counters.replayed, counters.restarts) != (had, restarts) else tries + 1
                await asyncio.sleep(shared.rng.uniform(0.5, 1.5) * shared.pause_s * 2**tries)
            log.warning("KV event replay not answered endpoint=%s rank=%d", self._endpoint, self._rank)
            return Lost.UNANSWERED
        except ProtocolError as error:
            counters.malformed += 1
            log.warning(
                "KV event replay cannot be read endpoint=%s rank=%d error=%s",
                self._endpoint,
                self._rank,
                error,
            )
            return Lost.UNREADABLE
        finally:
            counters.catching_up = 0

    async def _replay(self, most: int) -> bool:
        """Make one request and apply the answers up to the first hole. Return whether the replay ended; if
        not, the next number is to be asked for. Raises ProtocolError, also when more than `most` messages
        have been replayed."""
        shared, answer, first = self._shared, _Answer.GOES_ON, True
        waiting: deque[list[bytes]] = deque()
        held_bytes = 0
        socket = zmq_sockets.new_socket(shared.context, zmq.DEALER, REPLAY_QUEUE)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            zmq_sockets.connect(socket, self._publisher.replay)
            asked = max(self._tracker.expected - 1, 0)
            socket.send_multipart([b"", asked.to_bytes(8, "big")], zmq.NOBLOCK)
            patience_s = shared.replay_timeout_s
            while answer is _Answer.GOES_ON:
                while held_bytes < REPLAY_BYTES and (frames := take(socket)):
                    waiting.append(frames)
                    held_bytes += len(frames[-1])
                if waiting:
                    frames = waiting.popleft()
                    held_bytes -= len(frames[-1])
                    answer = await shared.turns.run(self._replayed(frames, first, most))
                    first, patience_s = False, shared.replay_timeout_s
                elif take(monitor):
                    patience_s = shared.answer_timeout_s
                else:
                    async with asyncio.timeout(patience_s):
                        await readable(socket, monitor)
        except TimeoutError:
            return False
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
        return answer is _Answer.ENDED

    def _replayed(self, frames: list[bytes], first: bool, most: int) -> Work[_Answer]:
        """Apply one answer, by rules 4 and 5 of kv_sequence.py."""
        seq, payload = replay_frames(frames)
        batch = decode(payload) if payload is not None else None
        tracker = self._tracker
        if first:
            shown = judge(tracker, seq, batch.published_s) if batch else judge(tracker, None)
            if shown is Replayed.RESTARTED:
                self._restarted()
                return _Answer.RESTARTED
            if shown is Replayed.LOST:
                self._rebuild(Lost.TOO_OLD)
        if batch is None:
            return _Answer.ENDED
        if first and seq == tracker.expected - 1:
            return _Answer.GOES_ON  # it shows that the rest continues what was applied
        if seq < tracker.expected or self._counters.replayed >= most:
            raise ProtocolError(f"a replay that does not end, at message {seq}")
        if seq > tracker.expected and not tracker.fresh:
            return _Answer.BROKEN
        self._counters.replayed += 1
        yield from self._apply(seq, batch, nan)
        return _Answer.GOES_ON

    # -- what was read -----------------------------------------------------------------------------

    def _apply(self, seq: int, batch: Batch, lag_s: float) -> Work[None]:
        self._has_blocks = True
        self._logged_unreadable = self._logged_unreadable and bool(batch.malformed)
        self._counters.failure = ""
        self._counters.batches += 1
        self._counters.unknown += batch.unknown
        if batch.malformed:
            self._damaged(batch.malformed)
        self._tracker.applied(seq, batch.published_s)
        for part in pieces(batch, _BLOCKS):
            yield
            self._counters.blocks += sum(
                len(event.block_hashes) for event in part.events if not isinstance(event, AllBlocksCleared)
            )
            self._sink.batch(self._endpoint, self._rank, part, lag_s)

    def _damaged(self, events: int) -> None:
        """Log the first of several batches in a row in which events could not be read."""
        self._counters.malformed += events
        if not self._logged_unreadable:
            log.warning(
                "KV events left out, they cannot be read endpoint=%s rank=%d events=%d",
                *(self._endpoint, self._rank, events),
            )
        self._logged_unreadable = True

    def _restarted(self) -> None:
        self._counters.restarts += 1
        self._reset(ResetCause.RESTARTED)

    def _rebuild(self, lost: Lost) -> None:
        counters = self._counters
        counters.rebuilds += 1
        counters.lost, counters.lost_at = lost, self._shared.clock()
        self._reset(ResetCause.LOST)

    def _unreadable(self, seq: int | None, error: ProtocolError) -> None:
        """Reset the rank, because the events of an unreadable message are lost; a replay would bring the same
        bytes. Log only the first of several in a row. When `seq` is None, the next message shows a gap."""
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
