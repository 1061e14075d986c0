"""What the gateway knows of its endpoints in a simulation: load, readiness, sessions, and how fast things are.

The same accounting as the gateway's `Fleet` and `Sessions` (a property test holds them side by side), kept so that a
decision costs only what changed since the last one: an endpoint's `Load` is built again when it changed. Speeds and
links start wrong by the faults' beliefs and are corrected by what a gateway can observe: the time from a decision to
the event that ends the prefill, where the endpoint had nothing else to prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from perilune_api.pool import Role
from perilune_api.topology import Link, Place
from perilune_gateway.engine_model import EngineModel
from perilune_gateway.feeds.engine_metrics import interval_s
from perilune_gateway.model import Endpoint, Load
from perilune_lab.simulator.engine import Engine, Sequence
from perilune_lab.simulator.fabric import Fabric
from perilune_lab.simulator.faults import Faults
from perilune_lab.simulator.h20 import Hardware

_WEIGHT = 0.1
"""Of a new observation in an average."""
_BOUNDS = (0.1, 30.0)
_LEAST_TOKENS = 1_024
"""Shorter prefills and transfers say more of overheads than of speed."""


class Ratio:
    """Observed / predicted, averaged and bounded; the first observations weigh more."""

    __slots__ = ("seen", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self.seen = 0

    def observe(self, observed: float, predicted: float) -> None:
        """`predicted` is before correction."""
        low, high = _BOUNDS
        ratio = min(high, max(low, observed / predicted))
        self.seen += 1
        self.value += (ratio - self.value) * max(_WEIGHT, 1.0 / (self.seen + 1))


@dataclass(slots=True)
class Session:
    """As the gateway remembers it."""

    name: str
    host: int = -1
    moved_s: float = -inf
    turns: int = 0
    context_tokens: int = 0


class Beliefs:
    """Endpoints are numbers."""

    def __init__(
        self, engines: list[Engine], hardware: Hardware, faults: Faults, fabric: Fabric, roles: list[Role]
    ) -> None:
        n = len(engines)
        self.engines = engines
        self.pool_tokens = hardware.kv_pool_tokens
        self.endpoints = [
            Endpoint(
                f"10.{i >> 16}.{(i >> 8) & 255}.{i & 255}:8000",
                roles[i],
                Place(
                    f"node{i}",
                    f"rack{i // hardware.endpoints_per_rack}",
                    f"spine{i // hardware.endpoints_per_rack // hardware.racks_per_spine}",
                ),
                events=("tcp",),
            )
            for i in range(n)
        ]
        self.number = {e.address: i for i, e in enumerate(self.endpoints)}
        self.pending_tokens = [0] * n
        self.pending_s = [0.0] * n
        self.in_flight = [0] * n
        self.prefilling = [0] * n
        self.context_tokens = [0] * n
        self.bound = [0] * n
        self.moved_s = [-inf] * n
        self.ready = [True] * n
        self.decode_s = [0.0] * n
        self.speed = [Ratio() for _ in range(n)]
        """Of prefill, per endpoint."""
        self.link_speed = [Ratio() for _ in range(n)]
        """Of transfers, per source."""
        self._model = hardware.engine.scaled(faults.engine_belief)
        self._bandwidth = [
            hardware.bandwidth_bytes_per_s(level) * hardware.link.share / faults.link_belief for level in range(4)
        ]
        self._fabric = fabric
        self._models: list[EngineModel | None] = [None] * n
        self._links: dict[tuple[int, int], Link] = {}
        self._loads: list[Load | None] = [None] * n
        self._metrics = [(0, 0, 0.0)] * n
        self._metrics_s = 0.0
        self._interval_s = interval_s(n)

    # -- reading -----------------------------------------------------------------------------------

    def load(self, e: int, now: float) -> Load:
        known = self._loads[e]
        if known is not None:
            return known
        running, waiting, usage = self._metrics[e]
        pool = self.pool_tokens
        context = self.context_tokens[e]
        free = min(int(pool * (1.0 - usage)), pool - context)
        load = self._loads[e] = Load(
            self.pending_tokens[e],
            max(0.0, self.pending_s[e]),
            self.in_flight[e],
            running,
            waiting,
            usage,
            max(0, free),
            self.bound[e],
            now - self._metrics_s,
            self.prefilling[e],
            context,
            pool,
        )
        return load

    def scrape(self, now: float) -> None:
        """Engine metrics, at their interval, all at once; a decision reads the last ones."""
        if now - self._metrics_s < self._interval_s and self._metrics_s:
            return
        self._metrics_s = now
        for e, engine in enumerate(self.engines):
            self._metrics[e] = (engine.running, engine.waiting, min(1.0, engine.kv_usage))
        self._loads = [None] * len(self.engines)

    def engine_model(self, e: int) -> EngineModel:
        """As believed of one endpoint, corrected."""
        model = self._models[e]
        if model is None:
            model = self._models[e] = self._model.scaled(self.speed[e].value)
        return model

    def link(self, source: int, target: int) -> Link:
        """As believed, with the observed slowdown of the source."""
        link = self._links.get((source, target))
        if link is None:
            level = self._fabric.level(source, target)
            link = Link(level, self._bandwidth[level], self.link_speed[source].value)
            self._links[source, target] = link
        return link

    def links(self, target: int, holders: Mapping[int, int]) -> dict[str, Link]:
        return {self.endpoints[s].address: self.link(s, target) for s in holders if s != target}

    # -- requests ----------------------------------------------------------------------------------

    def start(self, e: int, context_tokens: int) -> None:
        """A request goes there."""
        self.in_flight[e] += 1
        self.context_tokens[e] += context_tokens
        self._loads[e] = None

    def prefill_starts(self, e: int, uncached_tokens: int, prefill_s: float) -> None:
        """Its prefill runs there; nowhere yet: e < 0."""
        if e < 0:
            return
        self.pending_tokens[e] += uncached_tokens
        self.pending_s[e] += prefill_s
        self.prefilling[e] += 1
        self._loads[e] = None

    def prefill_done(self, e: int, uncached_tokens: int, prefill_s: float) -> None:
        if e < 0:
            return
        self.pending_tokens[e] -= uncached_tokens
        self.pending_s[e] -= prefill_s
        self.prefilling[e] -= 1
        self._loads[e] = None

    def finish(self, e: int, context_tokens: int, decoded_s: float) -> None:
        """After `prefill_done`. `decoded_s`: first token to last; 0: unknown."""
        self.in_flight[e] -= 1
        self.context_tokens[e] -= context_tokens
        if not self.in_flight[e]:
            self.pending_s[e] = 0.0
        if decoded_s > 0:
            before = self.decode_s[e]
            self.decode_s[e] = before + (decoded_s - before) * _WEIGHT if before else decoded_s
        self._loads[e] = None

    def bind(self, session: Session, e: int, now: float) -> None:
        """The session's host is `e`; leaving another one is a move."""
        if session.host == e:
            return
        if session.host >= 0:
            self.bound[session.host] -= 1
            self._loads[session.host] = None
            session.moved_s = now
        session.host = e
        self.bound[e] += 1
        self._loads[e] = None

    def unbind(self, session: Session) -> None:
        """The session is over."""
        if session.host >= 0:
            self.bound[session.host] -= 1
            self._loads[session.host] = None
            session.host = -1

    def moved(self, source: int, target: int, now: float) -> None:
        self.moved_s[source] = self.moved_s[target] = now

    def dead(self, e: int) -> None:
        """A connection to it failed."""
        self.ready[e] = False
        self.endpoints[e] = replace(self.endpoints[e], ready=False)

    # -- what is learned ---------------------------------------------------------------------------

    def observe_prefill(self, sequence: Sequence, waited_s: float, source: int) -> None:
        """`waited_s`: decision to the end of the prefill, on an endpoint that had nothing else to prefill."""
        e, new = sequence.endpoint, sequence.uncached_tokens
        overhead_s = self._model.request_overhead_s(sequence.prompt_tokens)
        if source >= 0:
            fetched = sequence.moved_tokens
            link = self.link(source, e)
            expected_s = self._model.transfer_s(fetched, link.bandwidth_bytes_per_s)
            rest_s = self.engine_model(e).prefill_s(new, sequence.prompt_tokens - new)
            if fetched >= _LEAST_TOKENS:
                self.link_speed[source].observe(max(1e-3, waited_s - overhead_s - rest_s), expected_s)
                self._links = {pair: known for pair, known in self._links.items() if pair[0] != source}
        elif new >= _LEAST_TOKENS:
            expected_s = self._model.prefill_s(new, sequence.prompt_tokens - new)
            self.speed[e].observe(max(1e-3, waited_s - overhead_s), expected_s)
            self._models[e] = None
