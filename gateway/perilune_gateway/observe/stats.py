"""The state at one moment as values, for admin pages and metrics.

`snapshot` builds them from the current state for each page and each scrape; requests do not update them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import TYPE_CHECKING

from perilune_gateway.model import Endpoint, Load, server_of
from perilune_gateway.model.kv_events import EventStats, IngestStats
from perilune_gateway.model.shared import SharedStats
from perilune_gateway.moves.planner import PlannerStats
from perilune_gateway.observe.canary import CanaryStats
from perilune_gateway.observe.findings import Lack
from perilune_gateway.request.tokens.proof import Outcome
from perilune_gateway.routing.handing_over import HandoffStats
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_gateway.routing.request_transfers import TransferStats
from perilune_gateway.state.calibration import EndpointCalibration
from perilune_gateway.state.ejection import EjectionStats
from perilune_gateway.state.in_flight import Cause
from perilune_gateway.state.prefix_index import EndpointBlocks, IndexStats

if TYPE_CHECKING:
    from perilune_gateway.observe.shadow.tally import ShadowStats  # it imports this module


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStats:
    """One endpoint at one moment."""

    endpoint: Endpoint
    tls: bool = False
    """Whether its engine is called over TLS."""
    load: Load = Load()
    index: EndpointBlocks = EndpointBlocks()
    prefix_queries_tokens: float = 0.0
    """Number of prompt tokens that the engine has looked up in its prefix cache, from its metrics."""
    prefix_hits_tokens: float = 0.0
    """Number of those that were cached."""
    recent_hits_tokens: float = 0.0
    """Number of those that were cached lately: each counts half as much five minutes later."""
    events: EventStats | None = None
    """None when it publishes no events, so that its part of the index is approximate."""
    parity: str = ""
    """State of the comparison of our block hashes with the engine's; empty when there are no events."""
    parity_cause: str = ""
    """The likely cause when they differ; else empty."""
    parity_cure: str = ""
    block_size: int = 0
    """Tokens per block as reported by the engine; 0 when it did not report it."""
    seconds_since_move: float = inf
    calibration: EndpointCalibration = EndpointCalibration()
    silent: bool = False
    """Whether it is not ready only because its metrics cannot be read."""
    asleep: bool = False
    """Whether it is not ready only because its engine sleeps."""
    ejection: EjectionStats | None = None
    """Why it is ejected; None if it is not."""
    ejections: Mapping[Cause, int] = field(default_factory=dict)
    """Number of its ejections by cause."""
    waiting_blocks: int = 0
    """Number of its blocks that are not used yet, because their parents are not known."""
    strange_group: str = ""
    """A kind of KV cache group in its events that this version does not know; else empty."""

    @property
    def curl(self) -> str:
        """Return the beginning of a command that asks the engine: curl, and the URL up to its path."""
        scheme = "-k https" if self.tls else "http"  # its certificate is for another name
        return f"curl {scheme}://{server_of(self.endpoint.address)}"

    @property
    def engine_hit_ratio(self) -> float:
        """Share of cached prompt tokens since the engine's start; NaN before its first request."""
        return self.prefix_hits_tokens / self.prefix_queries_tokens if self.prefix_queries_tokens else nan


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """One session at one moment. Several tenants may use the same id."""

    session_id: str
    tenant: str
    """The tenant of `request.identity`; the pages show a hash of it."""
    host: str
    turns: int
    context_tokens: int
    moves: int
    seconds_since_move: float
    idle_s: float
    """Seconds since its last request."""


@dataclass(frozen=True, slots=True)
class LogStats:
    """Numbers of entries of the decision log; an entry is a decision or an ending."""

    path: str
    written: int = 0
    dropped: int = 0
    queued: int = 0
    error: str = ""
    """Why nothing can be written at present; empty when it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All state that a scrape exports."""

    endpoints: tuple[EndpointStats, ...] = ()
    index: IndexStats = IndexStats()
    sessions_bound: int = 0
    sessions_evicted: int = 0
    bodies_parsed_in_part: int = 0
    """Number of bodies whose new part alone was parsed; see `request.known_bodies`."""
    unused_blocks: Mapping[str, int] = field(default_factory=dict)
    """Number of blocks in KV events that changed nothing, by `engine_blocks.Unused`."""
    decision_log: LogStats | None = None
    """None when no decision log is written."""
    moves: PlannerStats | None = None
    ingest: IngestStats = IngestStats()
    handoffs: HandoffStats | None = None
    new_sessions: SessionAdmissionStats = SessionAdmissionStats()
    drained: Mapping[str, str] = field(default_factory=dict)
    """The marks of draining pods that this gateway no longer uses, by name."""
    remote_prefills: TransferStats | None = None
    store_unlearnt: int = 0
    """Number of blocks that the store has and no known prompt contains."""
    pulls: TransferStats | None = None
    shared: SharedStats | None = None
    """None when no state is shared with other gateways."""
    lacks: tuple[Lack, ...] | None = None
    """What engines that others run lack; None for engines of the pool's own."""
    shadow: ShadowStats | None = None
    """None without shadow policies."""
    canary: CanaryStats | None = None
    """None without a canary."""
    proofs: Mapping[Outcome, int] | None = None
    """Number of verdicts on the tokens that engines make; None if no tokens are made."""
