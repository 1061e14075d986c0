"""Endpoints that drain in virtual time, as the gateways read it in the pool document.

A rolling update drains all endpoints, one after the other. When no gateway uses one any longer, by the
gateway's own rule (`feeds/drained.py`), it comes back with an empty cache and the next one drains. It comes
back at once, whereas a real engine takes minutes to start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from perilune_api.pool import Pool
from perilune_lab.simulate.engine import SimulatedEngine
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.gateway import SimulatedGateway
from perilune_lab.simulate.loop import BEGIN_S, Loop

LOOK_S = 1.0
"""Seconds between two looks at an endpoint that is to come back."""


class Drains:
    """Lets endpoints drain."""

    def __init__(
        self,
        loop: Loop,
        pool: Pool,
        gateways: Sequence[SimulatedGateway],
        engines: Mapping[str, SimulatedEngine],
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._gateways = gateways
        self._engines = engines

    def plan(self, faults: Faults) -> None:
        """Let the endpoints drain that do so by `faults`."""
        if 0 <= faults.drain_endpoint < len(self._engines):
            drain = partial(self._change, faults.drain_endpoint, draining=True)
            self._loop.at(BEGIN_S + faults.drain_at_s, drain)
        if faults.rolling_at_s >= 0:
            self._loop.at(BEGIN_S + faults.rolling_at_s, partial(self._update, 0))

    def _update(self, number: int) -> None:
        """Update this endpoint, and then those after it."""
        if number < len(self._engines):
            self._change(number, draining=True)
            self._look(number)

    def _look(self, number: int) -> None:
        address = self._pool.spec.endpoints[number].address
        if all(g.has_left(address) for g in self._gateways) and self._engines[address].empty():
            self._change(number, draining=False, instance="updated")
            self._update(number + 1)
        else:
            self._loop.at(self._loop.now + LOOK_S, partial(self._look, number))

    def _change(self, number: int, **changes: Any) -> None:
        """Change an endpoint in the pool document, which all gateways get."""
        spec = self._pool.spec
        endpoints = list(spec.endpoints)
        endpoints[number] = replace(endpoints[number], **changes)
        self._pool = replace(self._pool, spec=replace(spec, endpoints=tuple(endpoints)))
        for gateway in self._gateways:
            gateway.configure(self._pool)
