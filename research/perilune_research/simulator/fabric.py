"""KV transfers between engines.

Each source NIC sends one transfer after the other. The bandwidth depends on the topology level that both
endpoints share. Faults can make links slow and single transfers outliers.
"""

from __future__ import annotations

from random import Random

from perilune_api.topology import Level
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import Hardware


class SimulatedFabric:
    """The network between the engines, and statistics of what was sent over it."""

    def __init__(self, hardware: Hardware, faults: Faults, rng: Random) -> None:
        self._hardware = hardware
        self._faults = faults
        self._rng = rng
        self._free_s: dict[int, float] = {}
        """NIC → the time at which it will have sent everything in its queue."""
        self.bytes = 0
        self.seconds: list[float] = []
        """Seconds of each transfer, including its wait for the NIC."""

    def level(self, a: int, b: int) -> Level:
        """Return the lowest topology level that contains both endpoints, given by their numbers."""
        h = self._hardware
        if a == b:
            return Level.NODE
        rack_a, rack_b = a // h.endpoints_per_rack, b // h.endpoints_per_rack
        if rack_a == rack_b:
            return Level.RACK
        return Level.SPINE if rack_a // h.racks_per_spine == rack_b // h.racks_per_spine else Level.FABRIC

    def send(self, source: int, target: int, tokens: int, now: float) -> float:
        """Queues the transfer of the KV of `tokens`; returns the time of its arrival, in seconds."""
        h, f = self._hardware, self._faults
        seconds = h.transfer_s(tokens, self.level(source, target)) * f.link_factor
        if f.outlier_share and self._rng.random() < f.outlier_share:
            seconds *= f.outlier_factor
        nic = source // h.endpoints_per_nic
        ends_s = max(now, self._free_s.get(nic, 0.0)) + seconds
        self._free_s[nic] = ends_s
        self.bytes += h.engine.kv_bytes(tokens)
        self.seconds.append(ends_s - now)
        return ends_s
