"""KV events in vLLM 0.32's wire format, and the ZMQ sockets that carry them.

    live:    [topic, seq, payload]                        on a PUB socket
    replay:  DEALER sends [empty, first seq]; ROUTER answers [empty, topic, seq, payload] …,
             then [empty, empty, eight 0xff, empty]
    seq      u64 big-endian, from 0 per process
    payload  msgpack [ts, [event, …], data_parallel_rank]; an event is a map, defaults left out

One batch per engine step that changed the cache, sent when the step ends. A store event holds all blocks
that one sequence filled in one step; a removal is one event per block. Blocks in the shared pool are
announced with medium `cpu`, one by one, without extra keys, and never removed, as Mooncake's connector
does it. Blocks in the engine's host memory are announced with medium `CPU`, one by one, with their tokens but
without extra keys, and removed, as vLLM's OffloadingConnector does it.

Cost: about 0.15 µs per token id and 0.5 µs per removal. Not done: full-digest hashes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from perilune_lab.engine.hashing import low64
from perilune_lab.engine.kv_cache import Change, Cleared, Medium, Removed, Stored

END_OF_REPLAY = (b"", b"", b"\xff" * 8, b"")
_HIGH_WATER_MARK = 100_000


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """Fields and their order are vLLM's; those without a default are always written."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared
_encode = msgspec.msgpack.Encoder().encode


def to_event(change: Change, block_size: int) -> Event:
    match change:
        case Stored():
            space, medium = change.namespace, change.medium
            shared, here = medium is Medium.SHARED, medium is Medium.DEVICE
            return BlockStored(
                block_hashes=[low64(digest) for digest in change.digests],
                parent_block_hash=None if change.parent is None else low64(change.parent),
                token_ids=change.tokens,
                block_size=block_size,
                lora_id=None if shared else space.lora_id or None,
                medium=medium,
                lora_name=None if shared else space.lora_name or None,
                extra_keys=_extra_keys(change) if here else None,
                group_idx=change.group,
                kv_cache_spec_kind=None if shared else _kind(change),
                kv_cache_spec_sliding_window=change.window or None,
                session_id=(change.session_id or None) if here else None,
            )
        case Removed():
            return BlockRemoved([low64(change.digest)], change.medium, change.group)
        case Cleared():
            return AllBlocksCleared()


def _extra_keys(change: Stored) -> list[list[str] | None] | None:
    return [change.namespace.announced(block) for block in change.positions] or None


def _kind(change: Stored) -> str:
    return "sliding_window" if change.window else "full_attention"


def encode_batch(changes: Sequence[Change], block_size: int, ts: float, rank: int = 0) -> bytes:
    """Encode one payload. `ts`: Unix seconds."""
    return _encode((ts, [to_event(change, block_size) for change in changes], rank))


class ReplayBuffer:
    """The last `steps` batches, numbered from 0."""

    def __init__(self, steps: int) -> None:
        self.next_seq = 0
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=steps)

    def append(self, payload: bytes) -> int:
        seq = self.next_seq
        self.next_seq += 1
        self._batches.append((seq, payload))
        return seq

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from number `first` on that the buffer still has."""
        return [batch for batch in self._batches if batch[0] >= first]


class Publisher:
    """The sockets. `events` and `replay` in the constructor may end in `:*`, for a free port; afterwards they
    are the real addresses. Raises zmq.ZMQError where a socket cannot be bound."""

    def __init__(
        self,
        events: str,
        replay: str,
        topic: str,
        block_size: int,
        buffer_steps: int,
        rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.topic = topic
        self.rank = rank
        self.buffer_steps = buffer_steps
        self._block_size = block_size
        self._clock = clock
        self._buffer = ReplayBuffer(buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router: zmq.asyncio.Socket = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        for sock, address in ((self._pub, events), (self._router, replay)):
            sock.set(zmq.IPV6, int("[" in address))
        try:
            self._pub.set_hwm(_HIGH_WATER_MARK)
            self._pub.bind(events)
            self._router.bind(replay)
        except zmq.ZMQError:
            self.close()
            raise
        self.events = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.get_string(zmq.LAST_ENDPOINT)
        self.high_water_mark = _HIGH_WATER_MARK

    def publish(self, changes: Sequence[Change]) -> None:
        """Send one batch with the next number; without a subscriber it is only kept for replay."""
        payload = encode_batch(changes, self._block_size, self._clock(), self.rank)
        seq = self._buffer.append(payload)
        self._pub.send_multipart((self.topic.encode(), seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled; ignore other messages."""
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
                continue
            peer, first = frames[0], int.from_bytes(frames[2], "big")
            for seq, payload in self._buffer.since(first):
                answer = (peer, b"", self.topic.encode(), seq.to_bytes(8, "big"), payload)
                await self._router.send_multipart(answer)
                await asyncio.sleep(0)
            await self._router.send_multipart((peer, *END_OF_REPLAY))

    def close(self) -> None:
        """Close the sockets; a second call does nothing."""
        self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()


_TRIES = 20


def publishers(
    events: str, replay: str, topic: str, block_size: int, buffer_steps: int, ranks: int
) -> list[Publisher]:
    """Return one publisher for each data-parallel rank, at consecutive ports as vLLM's: rank r at P+r. Raises
    zmq.ZMQError where a socket cannot be bound, and ValueError for several ranks at addresses without a port.

    Raises zmq.ZMQError where a socket cannot be bound, and ValueError for several ranks at addresses without
    a port."""
    for _ in range(_TRIES):
        bound = [Publisher(events, replay, topic, block_size, buffer_steps)]
        try:
            for rank in range(1, ranks):
                places = offset(bound[0].events, rank), offset(bound[0].replay, rank)
                bound.append(Publisher(*places, topic, block_size, buffer_steps, rank))
        except (zmq.ZMQError, ValueError) as error:
            for publisher in bound:
                publisher.close()
            if isinstance(error, ValueError) or not (events.endswith(":*") and replay.endswith(":*")):
                raise
        else:
            return bound
    raise zmq.ZMQError(zmq.EADDRINUSE)


def offset(address: str, rank: int) -> str:
    """Return the address at which vLLM's data-parallel rank publishes. Raises ValueError for other than
    TCP."""
    place, colon, port = address.rpartition(":")
    if not address.startswith("tcp://") or not colon or not port.isdigit():
        raise ValueError(f"several data-parallel ranks need addresses tcp://IP:PORT, got {address}")
    return f"{place}:{int(port) + rank}"
