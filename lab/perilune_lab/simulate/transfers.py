"""KV on its way in virtual time: between engines, and through the shared store.

The rules of a hand-off are those of `engine/connector.py`. A transfer takes the time of the link between the
two engines (`h20.LinkModel`); a network card sends one transfer after the other.

A transfer begins when the giver has computed the prompt, as with vLLM 0.32's MooncakeConnector. Where
transfers *overlap*, a model of engines that can do so, layers follow the prefill one by one:

    begin = when the prefill has begun, the taker waits, and the card is free
    end   = the later of begin + serial seconds, and the prefill's end + serial seconds / layers
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from perilune_api.topology import Level
from perilune_lab.engine.request import Finish, Give, Request, Take
from perilune_lab.simulate.engine import SimulatedEngine
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import Hardware
from perilune_lab.simulate.loop import Loop

KEPT_S = 480.0
"""Seconds for which an engine keeps KV that nobody fetches, and waits for KV that nobody gives
(`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`)."""


@dataclass(slots=True, kw_only=True)
class _Transfer:
    """One transfer: the ends that are known, and whether it goes on."""

    giver: SimulatedEngine | None = None
    given: Request | None = None
    taker: SimulatedEngine | None = None
    taken: Request | None = None
    asked_s: float = 0.0
    """When the taker began to wait."""
    missing_tokens: int = 0
    begun: bool = False


class Fabric:
    """The network of a fleet, and what is on its way in it."""

    def __init__(
        self, loop: Loop, hardware: Hardware, faults: Faults, rng: Random, *, overlap: bool = False
    ) -> None:
        """`overlap`: whether transfers overlap with prefills."""
        self.bytes = 0
        """Bytes that were sent."""
        self.seconds: list[float] = []
        """Seconds of each transfer, with its wait for the network card, from the end of the prefill."""
        self._loop = loop
        self._hardware = hardware
        self._faults = faults
        self._rng = rng
        self._overlap = overlap
        self._free_s: dict[int, float] = {}
        """Network card → when it will have sent what waits for it."""
        self._open: dict[str, _Transfer] = {}

    def gives(self, transfer_id: str, engine: SimulatedEngine, request: Request) -> None:
        """Hear that an engine has computed the prompt and keeps it to be fetched."""
        one = self._known(transfer_id)
        one.giver, one.given = engine, request
        self._begin(transfer_id, one)

    def takes(self, transfer_id: str, engine: SimulatedEngine, request: Request) -> None:
        """Hear that an engine waits for the prompt."""
        one = self._known(transfer_id)
        one.taker, one.taken, one.asked_s = engine, request, self._loop.now
        one.missing_tokens = request.prompt_tokens - request.computed
        self._begin(transfer_id, one)

    def is_taken(self, transfer_id: str) -> bool:
        """Return whether the transfer to the taker has not ended."""
        return transfer_id in self._open

    def _known(self, transfer_id: str) -> _Transfer:
        one = self._open.get(transfer_id)
        if one is None:
            one = self._open[transfer_id] = _Transfer()
            self._loop.at(self._loop.now + KEPT_S, partial(self._expire, transfer_id, one))
        return one

    def _begin(self, transfer_id: str, one: _Transfer) -> None:
        if one.giver and one.given and one.taker:
            one.begun = True
            from_s = max(one.asked_s, one.given.scheduled_s) if self._overlap else self._loop.now
            ends_s = self._sent_s(one.giver.number, one.taker.number, one.missing_tokens, from_s)
            self._loop.at(ends_s, partial(self._end, transfer_id, one))

    def _expire(self, transfer_id: str, one: _Transfer) -> None:
        if self._open.get(transfer_id) is one and not one.begun:
            self._end(transfer_id, one)

    def _end(self, transfer_id: str, one: _Transfer) -> None:
        del self._open[transfer_id]
        if one.giver and one.given and one.giver.alive:
            one.giver.release(one.given)
        if one.taker and one.taken and one.taker.alive:
            one.taker.fetched(one.taken, arrived=one.giver is not None and one.giver.alive)

    def _sent_s(self, source: int, target: int, tokens: int, from_s: float) -> float:
        """Queue the KV of `tokens`, whose prefill has ended now, at the source's network card. Return when it
        has arrived. `from_s`: when it could be sent at the earliest, before now where transfers overlap."""
        h, faults, now = self._hardware, self._faults, self._loop.now
        seconds = h.transfer_s(tokens, self._level(source, target)) * faults.link_factor
        if faults.outlier_share and self._rng.random() < faults.outlier_share:
            seconds *= faults.outlier_factor
        card = source // h.endpoints_per_nic
        ends_s = self._free_s[card] = max(from_s, self._free_s.get(card, 0.0)) + seconds
        if self._overlap:
            ends_s = max(ends_s, now + seconds / h.layers)
        self.bytes += h.engine.kv_bytes(tokens)
        self.seconds.append(ends_s - now)
        return ends_s

    def _level(self, a: int, b: int) -> Level:
        h = self._hardware
        rack_a, rack_b = a // h.endpoints_per_rack, b // h.endpoints_per_rack
        if rack_a == rack_b:
            return Level.RACK
        return Level.SPINE if rack_a // h.racks_per_spine == rack_b // h.racks_per_spine else Level.FABRIC


class SimulatedConnector:
    """The KV connector of one engine, as its scheduler sees it."""

    def __init__(self, engine: SimulatedEngine, fabric: Fabric) -> None:
        self._engine = engine
        self._fabric = fabric

    def takes(self, request: Request) -> bool:
        if not isinstance(request.leg, Take):
            return False
        self._fabric.takes(request.leg.transfer_id, self._engine, request)
        return True

    def keeps(self, request: Request) -> bool:
        match request.leg:
            case Take(transfer_id=transfer_id):
                return request.finish is Finish.ABORT and self._fabric.is_taken(transfer_id)
            case Give(transfer_id) if request.finish is Finish.LENGTH:
                self._fabric.gives(transfer_id, self._engine, request)
                return True
        return False


class SharedStore:
    """The KV store that all engines share: the least recently used block goes first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._evicted: dict[bytes, None] = {}
        """Since the last call of `lost`."""

    def leading(self, digests: Sequence[bytes]) -> int:
        held = self._held
        for n, digest in enumerate(digests):
            if digest not in held:
                return n
            held.move_to_end(digest)
        return len(digests)

    def put(self, digests: Sequence[bytes]) -> list[bool]:
        held, new = self._held, []
        for digest in digests:
            new.append(digest not in held)
            held[digest] = None
            held.move_to_end(digest)
        while len(held) > self._blocks:
            gone, _ = held.popitem(last=False)
            self._evicted[gone] = None
        return new

    def lost(self) -> list[bytes]:
        """Return the blocks that were evicted since the last call and are not there."""
        gone = [digest for digest in self._evicted if digest not in self._held]
        self._evicted.clear()
        return gone
