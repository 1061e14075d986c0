"""The prefix index in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EndpointBlocks:
    """Numbers of blocks that the prefix index knows at one endpoint, summed over its ranks."""

    device: int = 0
    host: int = 0
    speculative: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The prefix index in numbers. The `recent_*` fields cover the last 1,000 prompts."""

    entries: int = 0
    depth_blocks: int = 0
    """Deepest recent match."""
    speculative: int = 0
    evicted: int = 0
    store: int = 0
    endpoints: Mapping[str, EndpointBlocks] = field(default_factory=dict)
    recent_missed: int = 0
    """Prompts of which no endpoint held a block."""
    recent_partial: int = 0
    recent_full: int = 0
    recent_hit_ratio: float = 0.0
    """Blocks that the best holder held / blocks of the prompts, 0 to 1."""
