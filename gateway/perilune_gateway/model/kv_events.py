"""KV events: blocks that an engine's cache gained or lost. feeds/kv_events.py reads them from the wire."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import msgspec

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


@dataclass(frozen=True, slots=True)
class Batch:
    """What an engine announced in one step."""

    published_s: float
    """The engine's wall clock."""
    events: tuple[Event, ...]
    rank: int | None = None
    unknown: int = 0
    """Events of types that this module does not know."""


@dataclass(frozen=True, slots=True)
class EventStats:
    """One endpoint's KV event feed, its data-parallel ranks summed; lag is the slowest rank's."""

    connected: bool = False
    """All publishers have shaken hands and have not gone since."""
    lag_s: float = nan
    """Of the last batch: received − published; NaN before the first."""
    batches: int = 0
    gaps: int = 0
    """Times that batches were missing, whether or not a replay filled them."""
    replayed: int = 0
    """Batches that a replay brought."""
    rebuilds: int = 0
    """Times that the endpoint's blocks were dropped because a gap could not be filled."""
    restarts: int = 0
    """Times that the engine began anew."""
    malformed: int = 0
    """Messages that could not be read."""
    old: int = 0
    """Batches that had come before."""
    unknown: int = 0
    """Events of types that this version does not know."""
