"""Follows what one engine (one data-parallel rank of it) announces of its cache, over ZMQ, and hands it on.

`run`, a task for each `Source`:

1. subscribe, then ask the replay address for everything from 0 on, to catch up with what was announced
   before we came;
2. each message is of its turn, old, or tells of a gap or a restart (kv_sequence.py). The next one is applied,
   an old one left out; a restarted engine has forgotten its cache: reset, begin anew;
3. a gap is asked from the replay address. If it comes, it is applied as if nothing had been. If not (no
   address, no answer, buffer too short), what the gap said is lost: reset, apply what there is;
4. the question of step 3 is asked after each reconnection too, so that an engine that restarts and then idles
   is not credited with what it held before;
5. a message that cannot be read may have removed anything: reset, go on with the next.

Costs about 3 µs per event, within a budget for each turn of the event loop (turn_budget.py); a replay is held
whole until it is known to continue. Does not: know what a block is good for; hold anything else but the
sequence number; bound a message's length (to ZMQ who sends a longer one is gone for good). Events leave an
engine with its next step, so an idle one looks stale; nothing can be done about that here.
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
from perilune_gateway.feeds.kv_sequence import Replayed, SequenceTracker, Step, judge
from perilune_gateway.feeds.turn_budget import TurnBudget
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.kv_events import Batch

log = logging.getLogger(__name__)

RECEIVE_HWM = 100_000
"""Messages that may wait here; ZMQ drops what is above, which is then a gap."""
REPLAY_TIMEOUT_S = 2.0
"""For each message of a replay. The publisher answers within 0.1 s."""
REPLAYED_MESSAGES = 100_000
"""In one replay at most; vLLM keeps 10,000 by default."""
_YIELD_EVERY = 32
"""Replayed messages that are applied before others may run."""


class Source(NamedTuple):
    """What is followed."""

    endpoint: str
    rank: int
    events: str
    """ZMQ address of the publisher."""
    replay: str = ""
    """Of its replay socket; empty: it has none."""


class ResetCause(StrEnum):
    """Why an endpoint's blocks must be forgotten."""

    RESTARTED = "restarted"
    LOST = "lost"
    """Messages are missing and could not be replayed."""
    MALFORMED = "malformed"
    """A message could not be read."""
    UNFOLLOWED = "unfollowed"
    """Nobody listens any more: the pool names it no more, or the feed has failed."""


class Sink(Protocol):
    """Where events go."""

    def batch(self, endpoint: str, rank: int, batch: Batch, lag_s: float) -> None:
        """`lag_s`: received − published; NaN for a replayed batch."""

    def reset(self, endpoint: str, rank: int, cause: ResetCause) -> None:
        """Forget what this rank holds."""


@dataclass(slots=True)
class Counters:
    """One feed in numbers, for metrics."""

    connected: bool = False
    """The publisher has shaken hands and has not gone since."""
    lag_s: float = nan
    """Of the last live batch."""
    batches: int = 0
    gaps: int = 0
    replayed: int = 0
    rebuilds: int = 0
    """Gaps that could not be filled."""
    restarts: int = 0
    old: int = 0
    malformed: int = 0
    unknown: int = 0
    """Events of types that this version does not know."""


async def run(
    source: Source,
    sink: Sink,
    clock: Callable[[], float],
    context: zmq.asyncio.Context,
    counters: Counters | None = None,
    replay_timeout_s: float = REPLAY_TIMEOUT_S,
    budget: TurnBudget | None = None,
) -> None:
    """Feed `sink` until cancelled. `clock` is wall-clock time, for the lag. Raises SpecError when an address
    is none."""
    feed = _Feed(source, sink, clock, context, counters or Counters(), replay_timeout_s)
    socket = _socket(context, zmq.SUB)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 5_000)
    socket.set(zmq.HEARTBEAT_IVL, 10_000)
    socket.set(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.subscribe(b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        _connect(socket, source.events, source.endpoint)
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
        raise SpecError(f"{url!r} of {endpoint} is no ZMQ address: {error}") from None


class _Feed:
    """One rank's feed; the steps of the module's header."""

    def __init__(
        self,
        source: Source,
        sink: Sink,
        clock: Callable[[], float],
        context: zmq.asyncio.Context,
        counters: Counters,
        replay_timeout_s: float,
    ) -> None:
        self._source = source
        self._endpoint, self._rank = source.endpoint, source.rank
        self._sink = sink
        self._clock = clock
        self._context = context
        self._counters = counters
        self._replay_timeout_s = replay_timeout_s
        self._tracker = SequenceTracker()
        self._holds = False
        """Something was applied since the last reset."""
        self._told = False
        """That messages cannot be read; until one can."""

    async def follow(
        self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, budget: TurnBudget, *, behind: bool
    ) -> None:
        """Live messages as they come; `behind`: catch up when the publisher shakes hands."""
        poller = zmq.asyncio.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        while True:
            for ready, _ in await poller.poll():
                if ready is monitor:
                    happened = parse_monitor_message(await monitor.recv_multipart())["event"]
                    self._counters.connected = happened != zmq.EVENT_DISCONNECTED
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
        """Ask for what was missed, by the same process or a new one, and apply it. False: no answer."""
        if not self._source.replay:
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
            self._not_read(seq, error)
            return
        step = self._tracker.step(seq, batch.published_s)
        if step is Step.RESTART:
            self._restarted()
            step = self._tracker.step(seq, batch.published_s)
        if step is Step.GAP:
            await self._gap(seq)
            step = self._tracker.step(seq, batch.published_s)
        if step is Step.OLD:
            self._counters.old += 1
            return
        self._counters.lag_s = received_s - batch.published_s
        self._apply(seq, batch, self._counters.lag_s)

    async def _gap(self, seq: int) -> None:
        """Messages before `seq` are missing (nothing is lost where we just came)."""
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
        """Everything from `first` on that the publisher still has; None: it does not answer."""
        socket = _socket(self._context, zmq.DEALER)
        replayed: list[tuple[int, Batch]] = []
        try:
            _connect(socket, self._source.replay, self._endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(self._replay_timeout_s):  # not wait_for: 3.11's may lose a cancel
                    frames = await socket.recv_multipart()
                seq, payload = replay_frames(frames)
                if payload is None:
                    return replayed
                if len(replayed) == REPLAYED_MESSAGES or (replayed and seq <= replayed[-1][0]):
                    raise ProtocolError(f"a replay that does not end, at message {seq}")
                replayed.append((seq, decode(payload)))
        except TimeoutError:
            log.warning("No replay of KV events endpoint=%s rank=%d", self._endpoint, self._rank)
            return None
        except ProtocolError as error:
            self._counters.malformed += 1
            log.warning(
                "Unreadable replay of KV events endpoint=%s rank=%d error=%s",
                self._endpoint,
                self._rank,
                error,
            )
            return None
        finally:
            socket.close(linger=0)

    def _apply(self, seq: int, batch: Batch, lag_s: float) -> None:
        self._holds, self._told = True, False
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

    def _not_read(self, seq: int | None, error: ProtocolError) -> None:
        """Whatever it said is lost, and asking again would bring the same. (An engine of another make says so
        with every step: it is told once.) `seq` None: if it had a number, the next message tells of a gap."""
        self._counters.malformed += 1
        if not self._told:
            log.warning(
                "KV events cannot be read endpoint=%s rank=%d error=%s", self._endpoint, self._rank, error
            )
        self._told = True
        if seq is None:
            return
        published_s = self._tracker.published_s
        if self._holds:
            self._reset(ResetCause.MALFORMED)
        self._tracker.applied(seq, published_s)

    def _reset(self, cause: ResetCause) -> None:
        self._holds = False
        self._tracker.forget()
        self._sink.reset(self._endpoint, self._rank, cause)
