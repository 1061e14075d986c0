"""KV events: blocks that entered or left an engine's cache. feeds/kv_events.py decodes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import nan
from typing import Any

import msgspec

BlockHash = int | bytes
"""A block hash as the engine announces it: the digest, or the low 64 bits of it."""


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", gc=False, kw_only=True):
    """Full blocks of one request entered a cache, in prompt order."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None = None
    """Hash of the block before the first one; None if the first block begins the prompt."""
    token_ids: tuple[int, ...] = ()
    """Token ids of all blocks, `block_size` for each; some connectors leave them out."""
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    """Where the blocks are: `GPU`, `CPU` (host memory) or `cpu` (Mooncake's shared store). Old engines send
    None for the GPU. SGLang's words for the others are `CPU_PINNED`, `DISK` and `EXTERNAL`."""
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    """For each block None, or the other values that its hash covers: LoRA name, multimodal keys, and for the
    first block the cache salt."""
    group_idx: int | None = None
    """Number of the KV cache group; models with one kind of layers have only group 0."""
    kv_cache_spec_kind: str | None = None
    """Kind of the group's layers: `full_attention`, `sliding_window`, `mamba`, …; None for an old engine."""
    kv_cache_spec_sliding_window: int | None = None
    """Tokens of the group's sliding window."""
    session_id: str | None = None
    cache_salt: str | None = None
    """SGLang's: the salt of the whole prompt. vLLM has it in `extra_keys`."""


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks left a cache."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The cache was emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The events that an engine published in one message."""

    published_s: float
    """Time of publication by the engine's wall clock, in Unix seconds."""
    events: tuple[Event, ...]
    rank: int | None = None
    """Data-parallel rank that published them."""
    unknown: int = 0
    """Number of events whose type this module does not know."""
    malformed: int = 0
    """Number of events that could not be read; each one that may have removed blocks stands as
    `AllBlocksCleared`."""


class Lost(StrEnum):
    """Why missing batches could not be replayed."""

    NO_REPLAY = "no_replay"
    """The pool names no replay socket."""
    UNANSWERED = "unanswered"
    """The replay socket did not answer, or not to the end."""
    TOO_OLD = "too_old"
    """The engine's replay buffer begins after them."""
    UNREADABLE = "unreadable"
    """A replayed message could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStats:
    """Statistics of one endpoint's KV event feed, summed over its data-parallel ranks."""

    connected: bool = False
    """Whether all publishers are connected."""
    lag_s: float = nan
    """Seconds between publication and arrival of the last batch, of the slowest rank; NaN before the
    first."""
    failure: str = ""
    """Why the feed of a rank does not run; empty when all do."""
    heard_s: float | None = None
    """Seconds since the last batch that was not replayed; None before the first."""
    lost_s: float | None = None
    """Seconds since blocks were last dropped because a gap could not be filled; None if they never were."""
    lost: Lost | None = None
    """Why the last gap could not be filled."""
    catching_up: int = 0
    """Number of ranks that read a replay or wait for one."""
    batches: int = 0
    """Number of batches received."""
    gaps: int = 0
    """Number of times that batches were missing, whether or not a replay filled the gap."""
    replayed: int = 0
    """Number of batches received from a replay."""
    rebuilds: int = 0
    """Number of times that the endpoint's blocks were dropped because a gap could not be filled."""
    restarts: int = 0
    """Number of times that the engine restarted."""
    malformed: int = 0
    """Number of messages, and of events in other messages, that could not be decoded."""
    old: int = 0
    """Number of batches that were received twice."""
    unknown: int = 0
    """Number of events whose type this version does not know."""


@dataclass(frozen=True, slots=True)
class IngestStats:
    """How well one gateway keeps up with the KV events of its pool."""

    busy: float = 0.0
    """Share of the event loop's time that KV events take, 0 to 1."""
    behind_s: float = 0.0
    """Seconds by which the slowest feed is late, compared with its own best; 0 when nothing waits."""
    blocks: int = 0
    """Number of blocks stored or removed by the events applied so far."""
    catching_up: int = 0
    """Number of feeds that read a replay or wait for one."""
