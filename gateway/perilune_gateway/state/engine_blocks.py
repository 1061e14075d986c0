"""Engines' block hashes → ours, and their events into the prefix index.

An engine's hash depends on its algorithm and seed, so it is only a name here; events carry the token ids,
from which our own chain is computed:

1. *stored on the device*: parent's name → our hash of the parent (no parent: the root of its LoRA and cache
   salt) → chain over the tokens → index; the names are remembered. Multimodal keys enter our hash too.
2. *stored elsewhere* (`CPU`: the host's memory; `cpu`: Mooncake's shared store): mapped by name, because
   these events may lack tokens, parent and extra keys. The device had announced the same hash before.
3. *removed*, *cleared*: by name. A name outlives its block: its children may still be announced, a store's
   copy too.

A name is bound to the same block everywhere in the pool, whichever engine said it; names of blocks that
nobody holds are forgotten when there are more than `max_names` (see `block_names`). What cannot be used is
counted by `Unused` and dropped: the index then knows less than the engine, not more. (Rows in the host's
memory or the store come without parents. They are taken for blocks that follow each other.)

Costs: about 1.3 µs per stored block of 16 tokens, 1 µs per removed one. Raises nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from perilune_gateway.model import Tier
from perilune_gateway.model.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.prefix_index import FIRST, PrefixIndex
from perilune_gateway.state.prefix_index.block_names import Names

STORE_MEDIUM = "cpu"
"""vLLM's MooncakeStoreConnector, lower case; it never announces a removal."""
_TIERS = {"": Tier.DEVICE, "gpu": Tier.DEVICE, "CPU": Tier.HOST, STORE_MEDIUM: Tier.STORE}
_64_BITS = (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode


class Unused(StrEnum):
    """Why an announced block did not enter the index, or a removal did not touch it."""

    UNKNOWN_PARENT = "unknown_parent"
    UNKNOWN_BLOCK = "unknown_block"
    """Mapped by name, but nobody has announced that name on a device."""
    BLOCK_SIZE = "block_size"
    """Not the pool's."""
    MALFORMED = "malformed"
    """Token ids do not fit the number of blocks, or are no token ids."""
    GROUP = "group"
    """Of another KV cache group than the first (hybrid models)."""
    MEDIUM = "medium"
    """A medium that is no tier here (disk, or a store that the pool does not have)."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What one event changed."""

    endpoint: str
    tier: Tier = Tier.DEVICE
    parent: int = 0
    """Our hash of the block before the first stored one, or the chain's root. Device tier only."""
    stored: tuple[int, ...] = ()
    """Our hashes, in prompt order."""
    removed: int = 0
    """Blocks."""
    cleared: bool = False
    session_id: str = ""
    """As the engine was told by the client, empty mostly."""
    rank: int = 0
    unused: int = 0
    """Blocks that the event named and that changed nothing, see `EngineBlocks.unused`."""


class EngineBlocks:
    """The names of one pool's blocks."""

    def __init__(
        self, index: PrefixIndex, block_size: int, *, store: bool, max_names: int = 2_000_000
    ) -> None:
        """`store`: the pool shares a KV store. `max_names`: at least twice the index's `max_blocks`, so that
        the names of what is held stay."""
        self._index = index
        self._block_size = block_size
        self._store = store
        self._names = Names(max_names)
        self.unused: Counter[Unused] = Counter()

    def __len__(self) -> int:
        return len(self._names)

    def widen(self, max_names: int) -> None:
        """Hold at least so many from now on: the pool has grown."""
        self._names.widen(max_names)

    def ours(self, name: BlockHash) -> int | None:
        """Our hash of an engine's block."""
        return self._names.get(_key(name))

    def apply(self, endpoint: str, event: Event, now: float, rank: int = 0) -> Applied:
        """Bring one event into the index."""
        if isinstance(event, AllBlocksCleared):
            self._index.cleared(endpoint, rank)
            return Applied(endpoint, cleared=True, rank=rank)
        tier = _TIERS.get(_medium(event.medium))
        if tier is None or (tier is Tier.STORE and not self._store):
            return self._skip(endpoint, event, rank, Unused.MEDIUM)
        if event.group_idx:
            return self._skip(endpoint, event, rank, Unused.GROUP)
        if isinstance(event, BlockRemoved):
            return self._removed(endpoint, tier, event, rank)
        if tier is Tier.DEVICE:
            return self._on_device(endpoint, event, now, rank)
        return self._elsewhere(endpoint, tier, event, now, rank)

    def reset(self, endpoint: str, rank: int) -> Applied:
        """This rank's feed begins anew: forget what it holds."""
        self._index.cleared(endpoint, rank)
        return Applied(endpoint, cleared=True, rank=rank)

    # ----------------------------------------------------------------------------------------------

    def _on_device(self, endpoint: str, event: BlockStored, now: float, rank: int) -> Applied:
        if event.block_size != self._block_size:
            return self._skip(endpoint, event, rank, Unused.BLOCK_SIZE)
        if len(event.token_ids) != len(event.block_hashes) * self._block_size:
            return self._skip(endpoint, event, rank, Unused.MALFORMED)
        salt, extra = _extra(event)
        if event.parent_block_hash is None:
            parent = blocks.prefix_root(lora_of(event), salt)
        else:
            known = self._names.get(_key(event.parent_block_hash))
            if known is None:
                return self._skip(endpoint, event, rank, Unused.UNKNOWN_PARENT)
            parent = known
        try:
            ours = blocks.chain(event.token_ids, self._block_size, parent, extra)
        except (ValueError, TypeError):
            return self._skip(endpoint, event, rank, Unused.MALFORMED)
        self._names.enter(_keys(event.block_hashes), ours)
        before = FIRST if event.parent_block_hash is None else parent
        self._index.stored(endpoint, Tier.DEVICE, ours, now, rank, before)
        self._names.shrink(self._index.__contains__)
        return Applied(
            endpoint, Tier.DEVICE, parent, tuple(ours), session_id=event.session_id or "", rank=rank
        )

    def _elsewhere(self, endpoint: str, tier: Tier, event: BlockStored, now: float, rank: int) -> Applied:
        named, unused = self._by_name(event.block_hashes)
        ours = list(dict.fromkeys(named))
        self._index.stored(endpoint, tier, ours, now, rank)
        return Applied(
            endpoint, tier, stored=tuple(ours), session_id=event.session_id or "", rank=rank, unused=unused
        )

    def _removed(self, endpoint: str, tier: Tier, event: BlockRemoved, rank: int) -> Applied:
        ours, unused = self._by_name(event.block_hashes)
        if tier is not Tier.STORE:  # a store belongs to nobody, so nobody can empty it
            self._index.removed(endpoint, tier, ours, rank)
        return Applied(endpoint, tier, removed=len(ours), rank=rank, unused=unused)

    def _by_name(self, names: Sequence[BlockHash]) -> tuple[list[int], int]:
        get = self._names.get
        ours = [block for name in _keys(names) if (block := get(name)) is not None]
        unused = len(names) - len(ours)
        if unused:
            self.unused[Unused.UNKNOWN_BLOCK] += unused
        return ours, unused

    def _skip(self, endpoint: str, event: BlockStored | BlockRemoved, rank: int, why: Unused) -> Applied:
        self.unused[why] += len(event.block_hashes)
        return Applied(endpoint, rank=rank, unused=len(event.block_hashes))


def lora_of(event: BlockStored) -> str:
    """The LoRA's name; engines too old to say it give an id."""
    if event.lora_name:
        return event.lora_name
    return "" if event.lora_id is None else f"#{event.lora_id}"


def salt_of(event: BlockStored) -> str:
    """The cache salt of a prompt's first block."""
    return _split(event)[0]


def mm_of(event: BlockStored) -> list[tuple[Any, ...]]:
    """Per block its multimodal keys (identifier, offset), as far as the event shows them."""
    return _split(event)[1]


def _split(event: BlockStored) -> tuple[str, list[tuple[Any, ...]]]:
    """Events show LoRA name and salt as bare strings in their order: LoRA, multimodal, salt (first block)."""
    salt = ""
    rest: list[tuple[Any, ...]] = []
    for i, keys in enumerate(event.extra_keys or ()):
        left = [_bare(key) for key in keys] if isinstance(keys, list | tuple) else []
        if left and event.lora_name and left[0] == event.lora_name:
            left = left[1:]
        if i == 0 and event.parent_block_hash is None and left and isinstance(left[-1], str):
            salt = left.pop()
        rest.append(tuple(left))
    return salt, rest


def _bare(key: Any) -> Any:
    """Tagged keys without their tag, should an engine show them."""
    if isinstance(key, list | tuple) and key:
        if key[0] in ("lora", "cache_salt") and len(key) > 1:
            return key[1]
        if key[0] == "mm" and len(key) == 3:
            return tuple(key[1:])
        return tuple(key)
    return key


def _extra(event: BlockStored) -> tuple[str, list[bytes | None] | None]:
    """(salt, bytes that each block's hash must cover besides its tokens)."""
    if not event.extra_keys or not any(event.extra_keys):
        return "", None
    salt, rest = _split(event)
    extra = [_encode(keys) if keys else None for keys in rest]
    extra.extend([None] * (len(event.block_hashes) - len(extra)))
    return salt, extra


def _key(name: BlockHash) -> int:
    """A digest and its low 64 bits are one name; so is a number below 0 (old engines) and its 64 bits."""
    return name & _64_BITS if isinstance(name, int) else blocks.low64(name)


def _keys(names: Sequence[BlockHash]) -> Sequence[int]:
    try:
        return array("Q", names)  # type: ignore[arg-type]  # which is what it finds out
    except (TypeError, OverflowError):
        return [_key(name) for name in names]


def _medium(medium: str | None) -> str:
    """`GPU` in any case; `CPU` and `cpu` are two things."""
    if medium is None:
        return ""
    return "gpu" if medium.lower() == "gpu" else medium
