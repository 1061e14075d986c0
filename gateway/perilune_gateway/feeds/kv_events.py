"""Decodes vLLM's and SGLang's KV events: the bytes of a message → the blocks that a cache gained and lost.

Messages of vLLM 0.15 to 0.33:

- live: multipart `[topic, seq u64 big-endian, payload]`;
- replayed: a DEALER sends `[b"", start u64]`; the answers are `[b"", topic, seq, payload]`, without the topic
  before 0.26, and the last one has seq ff×8;
- payload: msgpack `[ts, [event, …], dp_rank]`. Events are maps since 0.24, arrays before. Hashes are the low
  64 bits of the digest, or all its bytes. SGLang sends the same maps; with speculative decoding its tokens
  are pairs, of each token and the next one, of which the first is taken.

    frames ─▶ live_frames, replay_frames ─▶ seq, payload ─▶ decode ─▶ Batch of BlockStored, BlockRemoved, …

Engines send one removal per block; a row of them is one event here, which costs its readers half the time.
A damaged event costs that event only; but if it may have removed blocks, everything before it is forgotten.
Pure. Costs about 3 µs per event. Any bytes give a value or a ProtocolError. kv_sequence.py finds missing
messages, kv_feed.py reads sockets, and state/engine_blocks.py decides what a block means for routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isfinite
from typing import Any

import msgspec

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.kv_events import (
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
)

MAX_NESTING = 16
"""Largest nesting depth of a block's extra keys; engines use three levels."""
END = b"\xff" * 8
"""The sequence number of a replay's last answer."""


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", kw_only=True):
    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _StoredPairs(msgspec.Struct, tag_field="type", tag="BlockStored", kw_only=True):
    """SGLang's blocks of pairs of tokens."""

    block_hashes: tuple[BlockHash, ...]
    token_ids: tuple[tuple[int, int], ...]
    block_size: int
    parent_block_hash: BlockHash | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None


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


class _Maps(msgspec.Struct, array_like=True):
    ts: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None


_maps = msgspec.msgpack.Decoder(_Maps)
_payload = msgspec.msgpack.Decoder(_Payload)
_map_event = msgspec.msgpack.Decoder(Event)
_pairs = msgspec.msgpack.Decoder(_StoredPairs)
_map_type = msgspec.msgpack.Decoder(_Type)
_array_event = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_array_type = msgspec.msgpack.Decoder(list[Any])
_TYPES = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def decode(payload: bytes) -> Batch:
    """Decode one message's payload, in either encoding. Events of unknown types are counted and left out, and
    so are damaged ones; unknown fields are ignored. Raises ProtocolError for anything else."""
    unknown = malformed = 0
    events: list[Event] = []
    try:
        try:
            raw: _Maps | _Payload = _maps.decode(payload)  # in half the time, where all is known
            events.extend(raw.events)  # type: ignore[arg-type]
        except UNREADABLE:  # of one event, or of the whole
            raw = _payload.decode(payload)
            for one in raw.events:
                try:
                    event = _event(one)
                except UNREADABLE:
                    malformed += 1
                    if not _stores(one):
                        events.append(AllBlocksCleared())
                else:
                    unknown += event is None
                    events += [event] if event else []
    except UNREADABLE as error:
        raise ProtocolError(f"not a batch of KV events: {error}") from None
    if not isfinite(raw.ts):  # no message could be recognised as published later
        raise ProtocolError(f"not a batch of KV events: published at {raw.ts}")
    usable, deep = _usable(events)
    return Batch(raw.ts, usable, raw.data_parallel_rank, unknown, malformed + deep)


def _usable(events: Iterable[Event]) -> tuple[tuple[Event, ...], int]:
    """Return the events, with each row of removals from the same place as one, and without those that nest
    too deep; and how many do."""
    usable: list[Event] = []
    rows: list[tuple[int, BlockRemoved, list[BlockHash]]] = []
    first, hashes, deep = None, list[BlockHash](), 0
    for event in events:
        if type(event) is BlockRemoved:
            if first and event.medium == first.medium and event.group_idx == first.group_idx:
                hashes += event.block_hashes
                continue
            first, hashes = event, list(event.block_hashes)
            rows.append((len(usable), first, hashes))
        else:
            first = None
            keys = event.extra_keys if type(event) is BlockStored else None
            if keys and any(keys) and _is_deep(keys):  # most engines send None for each block
                deep += 1
                continue
        usable.append(event)
    for at, event, hashes in rows:
        usable[at] = BlockRemoved(tuple(hashes), event.medium, event.group_idx)
    return tuple(usable), deep


def _stores(raw: msgspec.Raw) -> bool:
    """Return whether a damaged event surely removes nothing: as far as it can be read, it is a
    BlockStored."""
    try:
        return _name(raw) == "BlockStored"
    except UNREADABLE:
        return False


def _name(raw: msgspec.Raw) -> object:
    """Return the name of an event's type, if it has one. Raises one of UNREADABLE."""
    return _map_type.decode(raw).type if _is_map(raw) else next(iter(_array_type.decode(raw)), None)


def _is_map(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def _is_deep(value: Any, levels: int = MAX_NESTING) -> bool:
    """Return whether a value is nested too deep; hashing the keys is recursive."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    if not isinstance(value, list | tuple):
        return False
    return not levels or any(_is_deep(item, levels - 1) for item in value)


def _event(raw: msgspec.Raw) -> Event | None:
    """Return the event; None for one of an unknown type."""
    try:
        return _map_event.decode(raw) if _is_map(raw) else _from_array(_array_event.decode(raw))
    except msgspec.ValidationError:
        name = _name(raw)
        if name == "BlockStored" and _is_map(raw):
            return _from_pairs(_pairs.decode(raw))
        if not isinstance(name, str) or name in _TYPES:
            raise
        return None


def _from_pairs(stored: _StoredPairs) -> Event:
    """Return the event with the first token of each pair: that of the pair's own position."""
    return BlockStored(
        block_hashes=stored.block_hashes,
        parent_block_hash=stored.parent_block_hash,
        token_ids=tuple(first for first, _ in stored.token_ids),
        block_size=stored.block_size,
        lora_id=stored.lora_id,
        medium=stored.medium,
        lora_name=stored.lora_name,
        session_id=stored.session_id,
        cache_salt=stored.cache_salt,
    )


def _from_array(old: _StoredArray | _RemovedArray | _ClearedArray) -> Event:
    if isinstance(old, _StoredArray):
        return BlockStored(
            block_hashes=old.block_hashes,
            parent_block_hash=old.parent_block_hash,
            token_ids=old.token_ids,
            block_size=old.block_size,
            lora_id=old.lora_id,
            medium=old.medium,
            lora_name=old.lora_name,
            extra_keys=old.extra_keys,
            group_idx=old.group_idx,
            kv_cache_spec_kind=old.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=old.kv_cache_spec_sliding_window,
        )
    if isinstance(old, _RemovedArray):
        return BlockRemoved(old.block_hashes, old.medium, old.group_idx)
    return AllBlocksCleared()


def count_blocks(events: Iterable[Event]) -> int:
    """Return how many blocks the events store and remove."""
    return sum([len(event.block_hashes) for event in events if not isinstance(event, AllBlocksCleared)])


def pieces(batch: Batch, blocks: int) -> Iterator[Batch]:
    """Yield the batch in parts of at most so many blocks, in order, for readers that must not take long. A
    long BlockStored becomes several, which name the last block before them as their parent."""
    if count_blocks(batch.events) <= blocks:
        yield batch
        return
    for event in batch.events:
        for part in _parts(event, blocks):
            yield replace(batch, events=(part,))


def _parts(event: Event, blocks: int) -> Iterator[Event]:
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= blocks:
        yield event
        return
    hashes = event.block_hashes
    tokens = event.block_size if isinstance(event, BlockStored) else 0
    if isinstance(event, BlockStored) and len(event.token_ids) not in (0, len(hashes) * tokens):
        yield event  # it is malformed, which only its reader may say
        return
    for at in range(0, len(hashes), blocks):
        end = at + blocks
        if isinstance(event, BlockRemoved):
            yield msgspec.structs.replace(event, block_hashes=hashes[at:end])
            continue
        yield msgspec.structs.replace(
            event,
            block_hashes=hashes[at:end],
            parent_block_hash=hashes[at - 1] if at else event.parent_block_hash,
            token_ids=event.token_ids[at * tokens : end * tokens],
            extra_keys=event.extra_keys[at:end] if event.extra_keys else event.extra_keys,
        )


def live_frames(frames: list[bytes]) -> tuple[int, bytes]:
    """Return (sequence number, payload) of a published message. Raises ProtocolError."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise ProtocolError(f"not a KV event message: frames of {[*map(len, frames[:5])]} bytes")
    return int.from_bytes(frames[1], "big"), frames[2]


def replay_frames(frames: list[bytes]) -> tuple[int, bytes | None]:
    """Return (sequence number, payload) of one answer, with or without a topic. The payload is None at the
    end of the replay. Raises ProtocolError."""
    if not 3 <= len(frames) <= 4 or frames[0] != b"" or len(frames[-2]) != 8:
        raise ProtocolError("not a replayed KV event message")
    if frames[-2] == END:
        return -1, None
    return int.from_bytes(frames[-2], "big"), frames[-1]
