"""What state looks like from outside at one moment: the rows that the admin pages and gauges show.

Values only. `snapshot` builds them from the live state when somebody asks; no request keeps them up to date.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import TYPE_CHECKING

from perilune_gateway.model import Endpoint, Load

if TYPE_CHECKING:
    from perilune_gateway.planner import PlannerStats


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


@dataclass(frozen=True, slots=True)
class EndpointBlocks:
    """Blocks that the prefix index knows at one endpoint, its ranks summed."""

    device: int = 0
    host: int = 0
    speculative: int = 0


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Observed / predicted seconds of something, averaged."""

    ratio: float = 1.0
    observations: int = 0
    age_s: float = 0.0
    """Since the last observation."""


@dataclass(frozen=True, slots=True)
class EndpointCalibration:
    """What was learned of one endpoint."""

    prefill: RatioStats = RatioStats()
    ttft: RatioStats = RatioStats()
    decode_s: float = 0.0
    """Seconds that a request decodes; 0: unknown."""
    sends: RatioStats = RatioStats()
    """Transfers that others pulled from it."""
    store: RatioStats = RatioStats()
    """What it loaded from the shared store."""


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """One endpoint."""

    endpoint: Endpoint
    load: Load = Load()
    index: EndpointBlocks = EndpointBlocks()
    prefix_queries_tokens: float = 0.0
    """Prompt tokens that the engine has looked up in its prefix cache, as its metrics say."""
    prefix_hits_tokens: float = 0.0
    events: EventStats | None = None
    """None: it publishes no events, its index is approximate."""
    parity: str = ""
    """State of the comparison of computed and announced block hashes; empty: nothing to compare."""
    parity_cause: str = ""
    """Where they differ: the likely cause."""
    parity_cure: str = ""
    block_size: int = 0
    """As the engine says; 0: it did not."""
    seconds_since_move: float = inf
    calibration: EndpointCalibration = EndpointCalibration()
    silent: bool = False
    """Not ready because its metrics fail, and for nothing else."""

    @property
    def engine_hit_ratio(self) -> float:
        """Since the engine's start; NaN before its first request."""
        return self.prefix_hits_tokens / self.prefix_queries_tokens if self.prefix_queries_tokens else nan


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


@dataclass(frozen=True, slots=True)
class SessionStats:
    """One session. Several tenants may use one id."""

    session_id: str
    tenant: str
    """As `identity` knows it; the pages show a hash of it."""
    host: str
    turns: int
    context_tokens: int
    moves: int
    seconds_since_move: float
    idle_s: float
    """Since its last request."""


@dataclass(frozen=True, slots=True)
class LogStats:
    """The decision log. Entries are decisions and endings."""

    path: str
    written: int = 0
    dropped: int = 0
    queued: int = 0
    error: str = ""
    """Why nothing is written at present; empty: it is."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a scrape mirrors."""

    endpoints: tuple[EndpointStats, ...] = ()
    index: IndexStats = IndexStats()
    sessions_bound: int = 0
    sessions_evicted: int = 0
    unused_blocks: Mapping[str, int] = field(default_factory=dict)
    """Blocks that KV events named and that changed nothing, by `engine_blocks.Unused`."""
    decision_log: LogStats | None = None
    """None: there is none."""
    moves: PlannerStats | None = None
