"""The prefix index in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EndpointBlocks:
    """Blocks that the prefix index knows at one endpoint, its ranks summed."""

    device: int = 0
    host: int = 0
    speculative: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The prefix index in numbers. `recent_*` are about the last 1,000 prompts."""

    entries: int = 0
    depth_blocks: int = 0
    """Deepest recent match."""
    speculative: int = 0
    evicted: int = 0
    store: int = 0
    endpoints: Mapping[str, EndpointBlocks] = field(default_factory=dict)
    recent_missed: int = 0
    """Prompts of which nobody held anything."""
    recent_partial: int = 0
    recent_full: int = 0
    recent_hit_ratio: float = 0.0
    """Blocks matched / blocks asked for, at the best holder."""
