"""vLLM's KV events: which blocks an engine's cache gained and lost, read from ZMQ.

One task per endpoint and data-parallel rank (`run`):

1. subscribe, then ask the replay address for everything from 0 on, to catch up with what was announced
   before we came;
2. each message carries a sequence number: the next one is applied; a lower one is old, or, if it was
   published later than the last, a restarted engine's: forget the endpoint, begin anew;
3. a gap is asked from the replay address. If it comes, it is applied as if nothing had been. If not (no
   address, no answer, buffer too short), what the gap said is lost: forget the endpoint, apply what there is;
4. a replay begins one message early: if that one is not the one we have, the engine has restarted unseen.
   The same question is asked after each reconnection, so that an engine that restarts and then idles is not
   credited with what it held before.

Wire (vLLM 0.15 to 0.33): multipart `[topic, seq u64 big-endian, payload]`; payload = msgpack
`[ts, [event, …], dp_rank]`; events are maps since 0.24, arrays before. Replay: DEALER sends
`[b"", start u64]`, answers are `[b"", topic, seq, payload]` (no topic before 0.26), the end is seq ff×8.
Hashes are the low 64 bits of the digest, or all its bytes.

Costs: about 3 µs per event. Does not: know what a block is good for; hold anything but the sequence number.
Events leave an engine with its next step, so an idle one looks stale; nothing can be done about that here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import nan
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from perilune_api.pool import SpecError
from perilune_gateway.messages import ProtocolError

log = logging.getLogger(__name__)

RECEIVE_HWM = 100_000
"""Messages that may wait here; ZMQ drops what is above, which is then a gap."""
REPLAY_TIMEOUT_S = 2.0
"""For each message of a replay. The publisher answers within 0.1 s."""
REPLAYED_MESSAGES = 100_000
"""In one replay at most; vLLM keeps 10,000 by default."""
END = b"\xff" * 8
_YIELD_EVERY = 32
SLICE_S = 0.0005
"""Of a turn of the event loop, for live batches of all feeds; a batch, an engine's step, is never split."""
MAX_NESTING = 16
"""Of a block's extra keys; engines nest three deep."""

BlockHash = int | bytes
"""As announced: the digest's low 64 bits, or the digest."""


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", gc=False):
    """Full blocks of one request that entered a cache, in prompt order."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None = None
    """The block before the first; None: the prompt begins here."""
    token_ids: tuple[int, ...] = ()
    """`block_size` for each block; some connectors leave them out."""
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    """`GPU`, `CPU`, …; None (old): the device. Lower-case `cpu`: the Mooncake store connector."""
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    """Per block None, or what else its hash covers: LoRA name, multimodal keys, cache salt (first block)."""
    group_idx: int | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks that left a cache."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _Type(msgspec.Struct):
    type: str


class _Payload(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What an engine announced in one step."""

    published_s: float
    """The engine's wall clock."""
    events: tuple[Event, ...]
    rank: int | None = None
    unknown: int = 0
    """Events of types that this module does not know."""


_payload = msgspec.msgpack.Decoder(_Payload)
_map_event = msgspec.msgpack.Decoder(Event)
_map_type = msgspec.msgpack.Decoder(_Type)
_array_event = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_array_type = msgspec.msgpack.Decoder(list[Any])
_TYPES = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def decode(payload: bytes) -> Batch:
    """One message's payload, in either encoding. Unknown event types are counted, unknown fields ignored.
    Raises ProtocolError for anything else."""
    try:
        raw = _payload.decode(payload)
        decoded = [_event(event) for event in raw.events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a batch of KV events: {error}") from None
    events = tuple(event for event in decoded if event is not None)
    if any(isinstance(e, BlockStored) and e.extra_keys and _is_deep(e.extra_keys) for e in events):
        raise ProtocolError(f"not a batch of KV events: extra keys are nested deeper than {MAX_NESTING}")
    return Batch(raw.ts, events, raw.data_parallel_rank, len(decoded) - len(events))


def _is_deep(value: Any, levels: int = MAX_NESTING) -> bool:
    """Whoever hashes keys follows them down, so there is an end."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    if not isinstance(value, list | tuple):
        return False
    return not levels or any(_is_deep(item, levels - 1) for item in value)


def _event(raw: msgspec.Raw) -> Event | None:
    """None: a type that is not known here."""
    first = memoryview(raw)[0]
    is_map = first & 0xF0 == 0x80 or first in (0xDE, 0xDF)
    try:
        return _map_event.decode(raw) if is_map else _from_array(_array_event.decode(raw))
    except msgspec.ValidationError:
        name = _map_type.decode(raw).type if is_map else next(iter(_array_type.decode(raw)), None)
        if not isinstance(name, str) or name in _TYPES:
            raise
        return None


def _from_array(old: _StoredArray | _RemovedArray | _ClearedArray) -> Event:
    if isinstance(old, _StoredArray):
        return BlockStored(
            old.block_hashes,
            old.parent_block_hash,
            old.token_ids,
            old.block_size,
            old.lora_id,
            old.medium,
            old.lora_name,
            old.extra_keys,
            old.group_idx,
        )
    if isinstance(old, _RemovedArray):
        return BlockRemoved(old.block_hashes, old.medium, old.group_idx)
    return AllBlocksCleared()


# -- sequence -------------------------------------------------------------------------------------------


class Step(StrEnum):
    """What to do with a message."""

    APPLY = "apply"
    GAP = "gap"
    """Messages from `SequenceTracker.expected` on are missing before it."""
    RESTART = "restart"
    """It is of a new engine process."""
    OLD = "old"


class SequenceTracker:
    """The last applied message of one publisher. Pure but for `applied` and `forget`."""

    __slots__ = ("expected", "published_s")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if nothing had ever come."""
        self.expected = 0
        """The sequence number that continues."""
        self.published_s = nan
        """Of the last applied message; NaN before the first."""

    @property
    def fresh(self) -> bool:
        return self.expected == 0

    def step(self, seq: int, published_s: float) -> Step:
        """An engine counts from 0 in each process, so a lower number is a repetition unless it is younger."""
        if seq == self.expected:
            return Step.APPLY
        if seq > self.expected:
            return Step.GAP
        return Step.RESTART if published_s > self.published_s else Step.OLD

    def applied(self, seq: int, published_s: float) -> None:
        self.expected = seq + 1
        self.published_s = published_s


class Replayed(StrEnum):
    """What a replay that was asked from the last applied message on says."""

    CONTINUES = "continues"
    LOST = "lost"
    """It begins too late."""
    RESTARTED = "restarted"
    """It is of another process: ours has a message that this one does not."""


def judge(tracker: SequenceTracker, replayed: Sequence[tuple[int, float]]) -> Replayed:
    """`replayed`: (sequence number, published) of the answer to `max(tracker.expected - 1, 0)`."""
    if tracker.fresh:
        return Replayed.CONTINUES
    if not replayed:
        return Replayed.RESTARTED
    seq, published_s = replayed[0]
    if seq == tracker.expected - 1:
        return Replayed.CONTINUES if published_s == tracker.published_s else Replayed.RESTARTED
    return Replayed.CONTINUES if seq == tracker.expected else Replayed.LOST


# -- feed -----------------------------------------------------------------------------------------------


class ResetCause(StrEnum):
    """Why an endpoint's blocks must be forgotten."""

    RESTARTED = "restarted"
    LOST = "lost"
    """Messages are missing and could not be replayed."""
    MALFORMED = "malformed"
    """A message could not be read."""


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
    unknown_events: int = 0


async def run(
    endpoint: str,
    events_url: str,
    replay_url: str,
    rank: int,
    sink: Sink,
    clock: Callable[[], float],
    context: zmq.asyncio.Context,
    counters: Counters | None = None,
    replay_timeout_s: float = REPLAY_TIMEOUT_S,
    slices: Slices | None = None,
) -> None:
    """Feed `sink` until cancelled. `replay_url` may be empty; `clock` is wall-clock time, for the lag.
    Raises SpecError when an address is none."""
    feed = _Feed(endpoint, replay_url, rank, sink, clock, context, counters or Counters(), replay_timeout_s)
    socket = context.socket(zmq.SUB)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, RECEIVE_HWM)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 5_000)
    socket.set(zmq.HEARTBEAT_IVL, 10_000)
    socket.set(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.subscribe(b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        try:
            socket.connect(events_url)
        except zmq.ZMQError as error:
            raise SpecError(f"{events_url!r} of {endpoint} is no ZMQ address: {error}") from None
        answered = await feed.catch_up()
        await feed.follow(socket, monitor, slices or Slices(), behind=not answered)
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)


class Slices:
    """What all feeds together may take of one turn of the event loop, so that an engine that has much to say,
    or many that speak at once, keep no request waiting for longer."""

    def __init__(self, budget_s: float = SLICE_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._spent_s = 0.0
        self._counting = False
        self._began_s = 0.0

    async def begin(self) -> None:
        """Waits until a turn of the loop has something left."""
        while self._spent_s >= self._budget_s:  # noqa: ASYNC110 - a turn is what is waited for
            await asyncio.sleep(0)
        self._began_s = self._clock()

    def end(self) -> None:
        """What was done since `begin` counts for this turn."""
        self._spent_s += self._clock() - self._began_s
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._spent_s, self._counting = 0.0, False


class _Feed:
    """One rank's feed; the steps of the module's header."""

    def __init__(
        self,
        endpoint: str,
        replay_url: str,
        rank: int,
        sink: Sink,
        clock: Callable[[], float],
        context: zmq.asyncio.Context,
        counters: Counters,
        replay_timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._replay_url = replay_url
        self._rank = rank
        self._sink = sink
        self._clock = clock
        self._context = context
        self._counters = counters
        self._replay_timeout_s = replay_timeout_s
        self._tracker = SequenceTracker()

    async def follow(
        self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, slices: Slices, *, behind: bool
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
                    await slices.begin()
                    await self._live(frames)
                    slices.end()
            await asyncio.sleep(0)

    async def catch_up(self) -> bool:
        """Ask for what was missed, by the same process or a new one, and apply it. False: no answer."""
        if not self._replay_url:
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
        if len(frames) != 3 or len(frames[1]) != 8:
            self._counters.malformed += 1
            log.warning("Not a KV event message endpoint=%s rank=%d", self._endpoint, self._rank)
            return
        seq = int.from_bytes(frames[1], "big")
        try:
            batch = decode(frames[2])
        except ProtocolError as error:
            self._unreadable(seq, error)
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
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, RECEIVE_HWM)
        replayed: list[tuple[int, Batch]] = []
        try:
            socket.connect(self._replay_url)
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
        except zmq.ZMQError as error:
            raise SpecError(f"{self._replay_url!r} of {self._endpoint} is no ZMQ address: {error}") from None
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
        self._counters.batches += 1
        self._counters.unknown_events += batch.unknown
        self._tracker.applied(seq, batch.published_s)
        self._sink.batch(self._endpoint, self._rank, batch, lag_s)

    def _restarted(self) -> None:
        self._counters.restarts += 1
        self._reset(ResetCause.RESTARTED)

    def _rebuild(self) -> None:
        self._counters.rebuilds += 1
        self._reset(ResetCause.LOST)

    def _unreadable(self, seq: int, error: ProtocolError) -> None:
        """Whatever it said is lost, and asking again would bring the same."""
        self._counters.malformed += 1
        log.warning(
            "Unreadable KV events endpoint=%s rank=%d seq=%d error=%s", self._endpoint, self._rank, seq, error
        )
        published_s = self._tracker.published_s
        self._reset(ResetCause.MALFORMED)
        self._tracker.applied(seq, published_s)

    def _reset(self, cause: ResetCause) -> None:
        log.info("KV events begin anew endpoint=%s rank=%d cause=%s", self._endpoint, self._rank, cause)
        self._tracker.forget()
        self._sink.reset(self._endpoint, self._rank, cause)


def replay_frames(frames: list[bytes]) -> tuple[int, bytes | None]:
    """(sequence number, payload) of one answer, with or without a topic; payload None: the end.
    Raises ProtocolError."""
    if not 3 <= len(frames) <= 4 or frames[0] != b"" or len(frames[-2]) != 8:
        raise ProtocolError("not a replayed KV event message")
    if frames[-2] == END:
        return -1, None
    return int.from_bytes(frames[-2], "big"), frames[-1]
