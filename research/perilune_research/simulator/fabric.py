"""KV transfers between engines: one queue per source NIC, bandwidth by distance, slow links and outliers."""

from __future__ import annotations

from random import Random

from perilune_api.topology import Level
from perilune_research.simulator.faults import Faults
from perilune_research.simulator.h20 import Hardware


class SimulatedFabric:
    def __init__(self, hardware: Hardware, faults: Faults, rng: Random) -> None:
        self._hardware = hardware
        self._faults = faults
        self._rng = rng
        self._free_s: dict[int, float] = {}
        """When each NIC has sent what is queued."""
        self.bytes = 0
        self.seconds: list[float] = []
        """Seconds of each transfer, including its wait."""

    def level(self, a: int, b: int) -> Level:
        """The topology level that two endpoints share."""
        h = self._hardware
        if a == b:
            return Level.NODE
        rack_a, rack_b = a // h.endpoints_per_rack, b // h.endpoints_per_rack
        if rack_a == rack_b:
            return Level.RACK
        return Level.SPINE if rack_a // h.racks_per_spine == rack_b // h.racks_per_spine else Level.FABRIC

    def send(self, source: int, target: int, tokens: int, now: float) -> float:
        """Starts to send the KV of `tokens`; returns the time of its arrival."""
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
