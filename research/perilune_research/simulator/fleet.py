"""The engines of a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from perilune_research.simulator.h20 import H20, Hardware

_STORE_TOKENS = 40_000_000
"""About 4 TB of BF16 KV."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The number and kind of engines, and the tiers below their devices."""

    endpoints: int = 8
    hardware: Hardware = H20
    store: bool = False
    store_tokens: int = _STORE_TOKENS
    host_tokens: int = 0
    """Tokens of each endpoint's DRAM tier; 0 without one."""
    overlapped: bool = False
    """Transferred KV arrives layer by layer while the rest is prefilled, instead of before it."""
    prefill_endpoints: int = 0
    """Number of endpoints, from the first, that only prefill while the others only decode; 0 if all do
    both."""
