"""Candidates: one row of facts per endpoint, made once per decision, so made cheaply.

What changes rarely is kept: speeds until something is observed (`calibration.changes`), links to the same few
holders until the endpoints change or a transfer was observed. What depends on the prompt is computed once for
all endpoints that hold equally much and are equally fast.

Costs about 0.8 µs an endpoint. Keeps nothing of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perilune_api.topology import Link
from perilune_gateway.engine_model import EngineModel
from perilune_gateway.model import Candidate, Overlap, Prefix
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.fleet import EndpointView

MAX_REMEMBERED = 256
"""Sets of holders whose links are remembered."""
Speed = tuple[EngineModel, float]
"""Engine as fast as observed, observed / predicted seconds to the first token."""
_new = tuple.__new__
"""A third of a named tuple's own constructor."""
Links = dict[str, Mapping[str, Link]]


class Candidates:
    """Makes the rows of one pool."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._engines: dict[tuple[float, float], EngineModel] = {}
        """By observed / predicted, of prefill and of the store."""
        self._speeds: dict[str, Speed] = {}
        self._links: dict[tuple[str, ...], Links] = {}
        """By holders: each endpoint's links to them."""
        self._seen = -1

    def configure(self, engine: EngineModel) -> None:
        """`engine`: the pool's, nothing observed. Call it whenever the endpoints change."""
        self._engine = engine
        self._engines.clear()
        self._speeds.clear()
        self._links.clear()

    def rows(
        self,
        views: Sequence[EndpointView],
        tokens: int,
        overlaps: Mapping[str, Overlap],
        elsewhere: Overlap,
        prefix: Prefix,
        now: float,
    ) -> list[Candidate]:
        """`elsewhere`: of the endpoints that are not in `overlaps`."""
        self._forget()
        holders = tuple([holder for holder, _ in prefix.locations])
        links = self._links_to(holders, views, now)
        speeds, decodes_s = self._speeds, self._calibration.decodes_s
        found: list[Candidate] = []
        before: tuple[Overlap, EngineModel] | None = None
        prefill_s = 0.0
        for endpoint, load, moved_s, all_links in views:
            address = endpoint.address
            to_holders = links.get(address)
            if to_holders is None:
                to_holders = links[address] = {a: all_links[a] for a in holders if a in all_links}
            overlap = overlaps.get(address, elsewhere)
            engine, ttft_ratio = speeds.get(address) or self._speed(address, now)
            if before is None or overlap is not before[0] or engine is not before[1]:
                prefill_s = engine.prefill_s(tokens - overlap.device_tokens, overlap.device_tokens)
                before = (overlap, engine)
            decode_s = decodes_s.get(address, 0.0)
            row = (endpoint, load, overlap, prefill_s, moved_s, to_holders, engine, decode_s, ttft_ratio)
            found.append(_new(Candidate, row))
        return found

    def engine_of(self, address: str, now: float) -> EngineModel:
        """As fast as it was observed to be, to a hundredth."""
        self._forget()
        return (self._speeds.get(address) or self._speed(address, now))[0]

    def _forget(self) -> None:
        if self._seen != self._calibration.changes:
            self._seen = self._calibration.changes
            self._speeds.clear()

    def _speed(self, address: str, now: float) -> Speed:
        calibration = self._calibration
        ratio = round(calibration.prefill_ratio(address, now), 2)
        store_ratio = round(calibration.store_ratio(address, now), 1)
        engine = self._engines.get((ratio, store_ratio))
        if engine is None:
            slower = self._engine.store_bytes_per_s / store_ratio
            engine = replace(self._engine.scaled(ratio), store_bytes_per_s=slower)
            self._engines[ratio, store_ratio] = engine
        speed = (engine, calibration.ttft_ratio(address, now))
        self._speeds[address] = speed
        return speed

    def _links_to(self, holders: tuple[str, ...], views: Sequence[EndpointView], now: float) -> Links:
        """As slow as they were observed to be, which changes with time; else what is remembered of them."""
        if self._calibration.transfers:
            return {v.endpoint.address: self._slow(v, holders, now) for v in views}
        if len(self._links) >= MAX_REMEMBERED:
            self._links.clear()
        return self._links.setdefault(holders, {})

    def _slow(self, view: EndpointView, holders: Sequence[str], now: float) -> Mapping[str, Link]:
        here, links = view.endpoint.address, {}
        for there in holders:
            if link := view.links.get(there):
                slowdown = self._calibration.slowdown(there, here, now)
                links[there] = link if slowdown == link.slowdown else link._replace(slowdown=slowdown)
        return links
