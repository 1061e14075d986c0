"""An endpoint, its load, its overlap with a prompt, and all of these together as a candidate.

An endpoint is identified by its address: `ip:port` of its server. A server with data-parallel ranks has a
cache and a queue for each, so each rank is an endpoint, with the address `ip:port#rank`. Names that end in
`_s` are seconds; `kv_usage` is between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from perilune_api.pool import Role
from perilune_api.topology import Link, Place
from perilune_gateway.model.engine_model import H20_30B, EngineModel


class Tier(StrEnum):
    """Where a block is cached. `device` and `host` memory belong to an endpoint, `store` to the pool."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One vLLM server, or one data-parallel rank of it, as configured or observed."""

    address: str
    place: Place = Place()
    events: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    ready: bool = True
    draining: bool = False
    bootstrap: str = ""
    """Address of its KV connector's bootstrap page, `ip:port`; empty if it hands no KV over."""
    role: Role = Role.BOTH
    peer: str = ""
    """Address at which other engines read its host memory, `ip:port`; empty if they cannot."""
    instance: str = ""
    """What is at the address, as in the pool document."""
    kv_name: str = ""
    """What its KV means, as in the pool document. Empty if it means the same as that of all others."""
    superseded: bool = False
    """Whether it will soon be replaced."""
    first_rank: int = 0
    """Number of its server's first rank among all ranks of the engine."""

    @property
    def server(self) -> str:
        return server_of(self.address)

    @property
    def engine_rank(self) -> int | None:
        """The number by which its engine's metrics and events call it, which is that among all ranks of the
        engine; None if its server has no ranks. Requests name the rank of the address (`rank_of`), which
        counts those of its server."""
        rank = rank_of(self.address)
        return None if rank is None else self.first_rank + rank


def server_of(address: str) -> str:
    """Return the `ip:port` of an endpoint's address."""
    return address.partition("#")[0]


def rank_of(address: str) -> int | None:
    """Return the data-parallel rank in an endpoint's address; None if its server has no ranks."""
    rank = address.partition("#")[2]
    return int(rank) if rank else None


class Load(NamedTuple):
    """The work that an endpoint has to do."""

    pending_prefill_tokens: int = 0
    """Number of uncached prompt tokens whose prefill waits or runs."""
    pending_prefill_s: float = 0.0
    """Predicted seconds of that prefill, and of reading from the store before it."""
    in_flight: int = 0
    """Number of requests that this gateway sent to the endpoint and that have not ended."""
    running: int = 0
    """Number of running requests, by the engine's metrics."""
    waiting: int = 0
    """Number of waiting requests, by the engine's metrics."""
    kv_usage: float = 0.0
    """Used share of the device's KV pool, 0 to 1."""
    kv_free_tokens: int = 0
    """Number of tokens that still fit into the device's KV pool."""
    sessions: int = 0
    """Number of sessions bound to the endpoint."""
    metrics_age_s: float = inf
    """Seconds since the engine's metrics were read; inf if they never were."""
    prefilling: int = 0
    """Number of requests in flight whose prefill has not ended."""
    active_kv_tokens: int = 0
    """Number of context tokens of the requests in flight."""
    kv_pool_tokens: int = 0
    """Number of tokens that fit into the device's KV pool; 0 if unknown."""

    @property
    def decoding(self) -> int:
        return max(0, self.in_flight - self.prefilling)

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.pending_prefill_s or self.running or self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """Metrics of one endpoint."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Used share of the device's KV pool, 0 to 1."""
    prefix_queries_tokens: float = 0.0
    """Number of prompt tokens looked up in the prefix cache since the engine started."""
    prefix_hits_tokens: float = 0.0
    """Number of those tokens that were cached."""
    block_size: int = 0
    """Tokens per KV block; 0 if not reported."""
    gpu_blocks: int = 0
    """Number of KV blocks on the device; 0 if not reported."""
    started_s: float = 0.0
    """When the process started, in Unix seconds; 0 if not reported."""
    asleep: bool = False
    """Whether it sleeps (`/sleep`): it serves nothing, and has no KV any more."""

    def restarted_since(self, before: EngineMetrics) -> bool:
        """Return whether the process that reports this is another one than before, so that its cache was
        empty."""
        later = before.started_s and self.started_s > before.started_s
        return bool(later) or self.prefix_queries_tokens < before.prefix_queries_tokens

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit into the device's KV pool; 0 if not reported."""
        return self.block_size * self.gpu_blocks


class Overlap(NamedTuple):
    """Number of leading prompt tokens that are cached for an endpoint, cumulative by tier: `host_tokens`
    counts those on device or host, `store_tokens` those on any tier."""

    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0


class Candidate(Struct, frozen=True, gc=False, kw_only=True):
    """An endpoint that may be chosen, with every fact that a policy needs."""

    endpoint: Endpoint
    load: Load = Load()
    overlap: Overlap = Overlap()
    prefill_s: float = 0.0
    """Predicted seconds of the prefill of this prompt, without its overlap."""
    seconds_since_move: float = inf
    """Seconds since a session last moved to or from the endpoint."""
    links: Mapping[str, Link] = MappingProxyType({})
    """Links to other endpoints by address, at least to the locations of the prompt's prefix."""
    engine: EngineModel = H20_30B
    """Speed of the engine, corrected by measurement."""
    decode_s: float = 0.0
    """Mean measured seconds that a request decodes on the endpoint; 0 if unknown."""
    ttft_ratio: float = 1.0
    """Measured divided by predicted seconds to the first token."""

    @property
    def address(self) -> str:
        return self.endpoint.address

    @property
    def draining(self) -> bool:
        return self.endpoint.draining
