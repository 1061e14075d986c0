"""What a KV event has changed in the prefix index."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perilune_gateway.model.endpoint import Tier


class Applied(Struct, frozen=True, gc=False, kw_only=True):
    """The changes that one event made."""

    endpoint: str
    tier: Tier = Tier.DEVICE
    parent: int = 0
    """Our hash of the block before the first stored one, or the root of the chain. Only for the device."""
    stored: Sequence[int] = ()
    """Our hashes of the stored blocks, on the device in prompt order. An engine's block is `stride` of
    them."""
    removed: int = 0
    """Number of removed blocks."""
    cleared: bool = False
    """Whether the cache was emptied."""
    session_id: str = ""
    """Session id that the client sent to the engine; mostly empty."""
    unused: int = 0
    """Number of blocks in the event that changed nothing yet."""
    stride: int = 1
    """The engine's block size over the pool's."""
