"""Asks an engine for the KV messages that were missed, and applies them.

A replay is applied message by message while it is read; REPLAY_BYTES of it may wait, and what the engine
sends faster than that waits in TCP's buffers. vLLM drops the rest without a word, also the end of the replay,
so a hole or a missing end is asked for again from the next number. A request names the first message only,
and vLLM's publisher sends all later ones before it publishes again. So requests are few: at most MOST_REPLAYS
at once in one gateway, at random moments, and with growing pauses where nothing new comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from enum import StrEnum, auto
from math import nan

import zmq

from perilune_gateway.feeds import zmq_sockets
from perilune_gateway.feeds.kv_events import decode, replay_frames
from perilune_gateway.feeds.kv_rank import Rank, Shared
from perilune_gateway.feeds.kv_sequence import Replayed, judge
from perilune_gateway.feeds.turns import Work
from perilune_gateway.feeds.zmq_sockets import Socket, readable, take
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.kv_events import Lost

log = logging.getLogger(__name__)

REPLAY_QUEUE = 64
"""Number of replayed messages that ZMQ queues here."""
REPLAY_BYTES = 32 * 1024 * 1024
"""Bytes of one replay that were read and wait to be applied. vLLM sends a replay at once and drops what its
reader does not take, which is about 1,000 messages after the reader stops. All replays together hold
kv_rank.MOST_REPLAYS × REPLAY_BYTES = 256 MiB at most, besides the messages in ZMQ's queues."""
TRIES = 3
"""Number of requests in a row that bring nothing new before a replay has failed."""
REPLAYED_MESSAGES = 1_000_000
"""Maximum number of messages in one replay; vLLM keeps 10,000 by default."""


class _Answer(StrEnum):
    """What one message of a replay shows."""

    GOES_ON = auto()
    ENDED = auto()
    BROKEN = auto()
    """Messages before it were dropped on their way."""
    RESTARTED = auto()


class _Inbox:
    """What was read of one replay and not applied yet."""

    def __init__(self, socket: Socket) -> None:
        self.taken = 0
        """Number of messages that were taken out."""
        self._socket = socket
        self._waiting: deque[list[bytes]] = deque()
        self._bytes = 0

    def fill(self) -> bool:
        """Read what the socket has, and return whether a message waits."""
        while self._bytes < REPLAY_BYTES and (frames := take(self._socket)):
            self._waiting.append(frames)
            self._bytes += len(frames[-1])
        return bool(self._waiting)

    def take(self) -> list[bytes]:
        frames = self._waiting.popleft()
        self._bytes -= len(frames[-1])
        self.taken += 1
        return frames


class Replays:
    """The replays of one rank."""

    def __init__(self, rank: Rank, shared: Shared) -> None:
        self._rank = rank
        self._shared = shared

    async def catch_up(self) -> Lost | None:
        """Request a replay of what was missed and apply it, in as many requests as it takes. If that fails,
        part of it may be applied; return why."""
        if not self._rank.publisher.replay:
            return Lost.NO_REPLAY
        shared, counters = self._shared, self._rank.counters
        tries, before = 0, counters.replayed
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
            log.warning("KV event replay not answered endpoint=%s rank=%d", *self._rank.publisher[:2])
            return Lost.UNANSWERED
        except ProtocolError as error:
            counters.malformed += 1
            log.warning(
                "KV event replay cannot be read endpoint=%s rank=%d error=%s",
                *self._rank.publisher[:2],
                error,
            )
            return Lost.UNREADABLE
        finally:
            counters.catching_up = 0

    async def _replay(self, most: int) -> bool:
        """Make one request and apply the answers up to the first hole. Return whether the replay ended; if
        not, the next number is to be asked for. Raises ProtocolError, also when more than `most` messages
        have been replayed."""
        shared, answer = self._shared, _Answer.GOES_ON
        socket = zmq_sockets.new_socket(shared.context, zmq.DEALER, REPLAY_QUEUE)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            zmq_sockets.connect(socket, self._rank.publisher.replay)
            asked = max(self._rank.tracker.expected - 1, 0)
            socket.send_multipart([b"", asked.to_bytes(8, "big")], zmq.NOBLOCK)
            patience_s, inbox = shared.replay_timeout_s, _Inbox(socket)
            while answer is _Answer.GOES_ON:
                if inbox.fill():
                    answer = await shared.turns.run(self._arrived(inbox, most))
                    patience_s = shared.replay_timeout_s
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

    def _arrived(self, inbox: _Inbox, most: int) -> Work[_Answer]:
        """Apply the answers that have come, and those that come meanwhile."""
        answer = _Answer.GOES_ON
        while answer is _Answer.GOES_ON and inbox.fill():
            first = not inbox.taken
            answer = yield from self._replayed(inbox.take(), first, most)
            yield None
        return answer

    def _replayed(self, frames: list[bytes], first: bool, most: int) -> Work[_Answer]:
        """Apply one answer, by rules 4 and 5 of kv_sequence.py."""
        seq, payload = replay_frames(frames)
        batch = decode(payload) if payload is not None else None
        rank, tracker = self._rank, self._rank.tracker
        if first:
            shown = judge(tracker, seq, batch.published_s) if batch else judge(tracker, None)
            if shown is Replayed.RESTARTED:
                rank.restarted()
                return _Answer.RESTARTED
            if shown is Replayed.LOST:
                rank.rebuild(Lost.TOO_OLD)
        if batch is None:
            return _Answer.ENDED
        if first and seq == tracker.expected - 1:
            return _Answer.GOES_ON  # it shows that the rest continues what was applied
        if seq < tracker.expected or rank.counters.replayed >= most:
            raise ProtocolError(f"a replay that does not end, at message {seq}")
        if seq > tracker.expected and not tracker.fresh:
            return _Answer.BROKEN
        rank.counters.replayed += 1
        yield from rank.apply(seq, batch, nan)
        return _Answer.GOES_ON
