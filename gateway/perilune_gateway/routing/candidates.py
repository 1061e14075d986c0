"""Candidates: one row of facts per endpoint, for every decision, so made cheaply (`rows.Rows`).

What changes rarely is kept: speeds until something is observed (`calibration.changes`), ten seconds at most,
since what was learned of the store fades; links to the same few holders until the endpoints change or a
transfer was observed.

Costs some µs, whatever the number of endpoints, and 0.4 µs for each if a policy looks at all of them. Keeps
nothing of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter

from perilune_api.topology import Link
from perilune_gateway.model import Endpoint, EngineModel, Overlap
from perilune_gateway.routing.rows import Rows
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.fleet import EndpointView

SPEEDS_S = 10.0
"""What was learned of the store fades by a hundredth meanwhile."""
MAX_REMEMBERED = 256
"""Sets of holders whose links are remembered."""
Speed = tuple[EngineModel, float]
"""Engine as fast as observed, observed / predicted seconds to the first token."""
Links = list[Mapping[str, Link] | None]
_endpoint = itemgetter(0)


class Candidates:
    """Makes the rows of one pool."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._engines: dict[tuple[float, float], EngineModel] = {}
        """By observed / predicted, of prefill and of the store."""
        self._endpoints: tuple[Endpoint, ...] = ()
        """Of the last rows. What follows is of each of them, in their order."""
        self._addresses: list[str] = []
        self._positions: dict[str, int] = {}
        self._speeds: tuple[list[EngineModel], list[float]] = ([], [])
        self._alike = False
        """All engines are equally fast."""
        self._links: dict[tuple[str, ...], Links] = {}
        """By holders: links to them; None: not looked at yet."""
        self._seen = -1
        """`calibration.changes` when the speeds were made."""
        self._until = inf
        """When they are made anew all the same."""

    def configure(self, engine: EngineModel) -> None:
        """`engine`: the pool's, nothing observed. Call it whenever the endpoints change."""
        self._engine = engine
        self._engines.clear()
        self._endpoints = ()
        self._seen = -1

    def rows(
        self,
        views: Sequence[EndpointView],
        tokens: int,
        overlaps: Mapping[str, Overlap],
        elsewhere: Overlap,
        holders: tuple[str, ...],
        now: float,
    ) -> Rows:
        """`elsewhere`: of the endpoints that are not in `overlaps`. `holders`: of the prefix, links to whom
        are wanted."""
        endpoints = tuple(map(_endpoint, views))
        if endpoints != self._endpoints:
            self._endpoints, self._addresses = endpoints, [endpoint.address for endpoint in endpoints]
            self._positions = {address: at for at, address in enumerate(self._addresses)}
            self._links.clear()
            self._seen = -1
        if self._seen != self._calibration.changes or now >= self._until:
            self._seen, self._until = self._calibration.changes, now + SPEEDS_S
            speeds = [self._speed(address, now) for address in self._addresses]
            self._speeds = ([engine for engine, _ in speeds], [ratio for _, ratio in speeds])
            self._alike = all(engine is speeds[0][0] for engine, _ in speeds)
        engines, ttft_ratios = self._speeds
        return Rows(
            views,
            self._addresses,
            self._positions,
            tokens,
            overlaps,
            elsewhere,
            holders,
            self._links_to(holders, views, now),
            engines,
            self._alike,
            self._calibration.decodes_s,
            ttft_ratios,
        )

    def engine_of(self, address: str, now: float) -> EngineModel:
        """As fast as it was observed to be, to a hundredth."""
        return self._speed(address, now)[0]

    def _speed(self, address: str, now: float) -> Speed:
        calibration = self._calibration
        ratio = round(calibration.prefill_ratio(address, now), 2)
        store_ratio = round(calibration.store_ratio(address, now), 1)
        if ratio == store_ratio == 1.0:
            return self._engine, calibration.ttft_ratio(address, now)
        engine = self._engines.get((ratio, store_ratio))
        if engine is None:
            slower = self._engine.store_bytes_per_s / store_ratio
            engine = replace(self._engine.scaled(ratio), store_bytes_per_s=slower)
            self._engines[ratio, store_ratio] = engine
        return engine, calibration.ttft_ratio(address, now)

    def _links_to(self, holders: tuple[str, ...], views: Sequence[EndpointView], now: float) -> Links:
        """As slow as they were observed to be, which changes with time; else what is remembered of them."""
        if self._calibration.transfers:
            return [self._slow(v, holders, now) for v in views]
        if len(self._links) >= MAX_REMEMBERED:
            self._links.clear()
        links = self._links.get(holders)
        if links is None:
            links = self._links[holders] = [None] * len(views)
        return links

    def _slow(self, view: EndpointView, holders: Sequence[str], now: float) -> Mapping[str, Link]:
        here, links = view.endpoint.address, {}
        for there in holders:
            if link := view.links.get(there):
                slowdown = self._calibration.slowdown(there, here, now)
                links[there] = link if slowdown == link.slowdown else link._replace(slowdown=slowdown)
        return links
