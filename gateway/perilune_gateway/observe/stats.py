"""What state looks like from outside at one moment: the rows that the admin pages and gauges show.

Values only. `snapshot` builds them from the live state when somebody asks; no request keeps them up to date.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan

from perilune_gateway.model import Endpoint, Load
from perilune_gateway.model.kv_events import EventStats
from perilune_gateway.moves.planner import PlannerStats
from perilune_gateway.state.calibration import EndpointCalibration
from perilune_gateway.state.prefix_index import EndpointBlocks, IndexStats


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
    bodies_parsed_in_part: int = 0
    """Number of bodies that begin as an earlier one did; see `request.known_bodies`."""
    unused_blocks: Mapping[str, int] = field(default_factory=dict)
    """Blocks that KV events named and that changed nothing, by `engine_blocks.Unused`."""
    decision_log: LogStats | None = None
    """None: there is none."""
    moves: PlannerStats | None = None
