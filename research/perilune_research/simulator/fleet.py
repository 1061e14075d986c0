"""The fleet of a simulation: the number and kind of its engines, and the tiers below their devices."""

from __future__ import annotations

from dataclasses import dataclass

from perilune_lab.simulate.h20 import H20, Hardware

_STORE_TOKENS = 40_000_000
"""Default size of the shared store: about 4 TB of BF16 KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFleet:
    """The number and kind of engines, and the tiers below their devices."""

    endpoints: int = 8
    hardware: Hardware = H20
    store: bool = False
    store_tokens: int = _STORE_TOKENS
    host_tokens: int = 0
    """Tokens that each engine can keep in its own host memory. 0 if it has none."""
    overlapped: bool = False
    """True: KV arrives layer by layer while the endpoint prefills the rest of the prompt. False: the prefill
    begins when all KV has arrived."""
    prefill_endpoints: int = 0
    """The first this many endpoints only prefill and the others only decode. If it is 0, all do both."""
