"""An endpoint: what it is, what it has to do, what it holds of a prompt, and all of it as a candidate.

An endpoint is named by its address, `ip:port`, everywhere. Names that end in `_s` are seconds; `kv_usage` is
between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from perilune_api.topology import Link, Place
from perilune_gateway.model.engine_model import H20_30B, EngineModel


class Tier(StrEnum):
    """Where a block lies; `device` and `host` belong to an endpoint, `store` to the pool."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One vLLM server, as configured or observed."""

    address: str
    place: Place = Place()
    events: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    ready: bool = True
    draining: bool = False


class Load(NamedTuple):
    """What an endpoint has to do."""

    pending_prefill_tokens: int = 0
    """Uncached prompt tokens waiting or running."""
    pending_prefill_s: float = 0.0
    in_flight: int = 0
    """Requests that this gateway sent there and that have not ended."""
    running: int = 0
    """As the engine's metrics say."""
    waiting: int = 0
    kv_usage: float = 0.0
    kv_free_tokens: int = 0
    sessions: int = 0
    metrics_age_s: float = inf
    """Seconds since its metrics were read; inf: never."""
    prefilling: int = 0
    """Of the requests in flight, those whose prefill has not ended."""
    active_kv_tokens: int = 0
    """Context tokens of the requests in flight."""
    kv_pool_tokens: int = 0
    """Tokens that its device KV pool holds; 0: unknown."""

    @property
    def decoding(self) -> int:
        return max(0, self.in_flight - self.prefilling)

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.pending_prefill_s or self.running or self.waiting)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One server, its data-parallel ranks summed (`kv_usage`: their mean). Counters start with the engine."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """0 to 1."""
    prefix_queries_tokens: float = 0.0
    """Prompt tokens that were looked up in its prefix cache, and those of them that were found."""
    prefix_hits_tokens: float = 0.0
    block_size: int = 0
    """0: not said."""
    gpu_blocks: int = 0
    """KV blocks on the device; 0: not said."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that its device KV pool holds; 0: not said."""
        return self.block_size * self.gpu_blocks


class Overlap(NamedTuple):
    """Leading prompt tokens that are cached for an endpoint, counted cumulatively by tier:
    `host_tokens` are those that device or host hold, `store_tokens` those that any tier holds."""

    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0


class Candidate(NamedTuple):
    """An endpoint that may be chosen, with every fact that a formula needs."""

    endpoint: Endpoint
    load: Load = Load()
    overlap: Overlap = Overlap()
    prefill_s: float = 0.0
    """Predicted seconds of prefill of this prompt here, its overlap subtracted."""
    seconds_since_move: float = inf
    """Since a session last moved in or out."""
    links: Mapping[str, Link] = MappingProxyType({})
    """To the endpoints that hold the prefix (at least to the prefix's locations), by address."""
    engine: EngineModel = H20_30B
    """How fast it is, as believed and corrected by what was observed."""
    decode_s: float = 0.0
    """Seconds that a request decodes there, as observed; 0: unknown."""
    ttft_ratio: float = 1.0
    """Observed / predicted seconds to the first token there."""

    @property
    def address(self) -> str:
        return self.endpoint.address

    @property
    def draining(self) -> bool:
        return self.endpoint.draining
