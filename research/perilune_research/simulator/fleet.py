"""The engines of a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from perilune_research.simulator.h20 import H20, Hardware

_STORE_TOKENS = 40_000_000
"""About 4 TB of BF16 KV."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """How many, of what kind, with which tiers below the device."""

    endpoints: int = 8
    hardware: Hardware = H20
    store: bool = False
    store_tokens: int = _STORE_TOKENS
    host_tokens: int = 0
    """DRAM tier of each endpoint; 0: none."""
    overlapped: bool = False
    """KV comes while the rest is prefilled, layer by layer, instead of before."""
    prefill_endpoints: int = 0
    """The first so many only prefill, the others only decode; 0: all do both."""
