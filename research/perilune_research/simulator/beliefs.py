"""What the gateway of a simulation believes about its endpoints: load, readiness, sessions, speeds.

The accounting is that of the gateway's `Fleet`, `InFlight` and `Sessions`, and a property test compares them.
Here an endpoint's `Load` is built again only when it has changed, which keeps decisions cheap. Speeds and
links start wrong, by the factors in `Faults`. The gateway's own `Calibration` corrects them from what a
gateway can observe: when it decided, and the event that ends the prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from perilune_api.pool import Role
from perilune_api.topology import Level, Link, Place
from perilune_gateway.feeds.engine_metrics import interval_s
from perilune_gateway.model import Endpoint, Load, Location
from perilune_gateway.state.calibration import Calibration
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import Hardware
from perilune_research.simulator.engine import SimulatedEngine
from perilune_research.simulator.fabric import SimulatedFabric
from perilune_research.simulator.request import SimulatedRequest

_LINK_S = 5.0
"""Seconds for which a link is not looked up again."""
_POOL_S = 5.0
"""Seconds between two updates of all endpoints' speeds."""


@dataclass(slots=True, kw_only=True)
class KnownSession:
    """A session as the gateway remembers it. Times are in seconds of the simulation."""

    name: str
    host: int = -1
    """Number of the endpoint to which it is bound; -1 before its first turn and after its end."""
    moved_s: float = -inf
    """When it last moved to another endpoint."""
    turns: int = 0
    context_tokens: int = 0
    number: int = 0
    run: int = -1
    """Run in which the session's last prompt ends; -1 before the first."""
    seen_s: float = -inf
    """When its last turn was routed; set only while the planner runs."""


class Beliefs:
    """The gateway's beliefs about its endpoints, which are given by their numbers."""

    def __init__(
        self,
        engines: list[SimulatedEngine],
        hardware: Hardware,
        faults: Faults,
        fabric: SimulatedFabric,
        roles: list[Role],
    ) -> None:
        n = len(engines)
        self.engines = engines
        self.pool_tokens = hardware.kv_pool_tokens
        self.endpoints = [
            Endpoint(
                address=f"10.{i >> 16}.{(i >> 8) & 255}.{i & 255}:8000",
                place=Place(
                    f"node{i}",
                    f"rack{i // hardware.endpoints_per_rack}",
                    f"spine{i // hardware.endpoints_per_rack // hardware.racks_per_spine}",
                ),
                events=("tcp",),
                role=roles[i],
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
        self.calibration = Calibration()
        self.uncorrected = hardware.engine.scaled(faults.engine_belief)
        """The engine model that the gateway believes before it has observed anything."""
        self._bandwidth = [
            hardware.bandwidth_bytes_per_s(level) * hardware.link.share / faults.link_belief
            for level in Level
        ]
        self._fabric = fabric
        self.models = [self.uncorrected] * n
        """Engine model of each endpoint, corrected by observations."""
        self.ttft_ratio = [1.0] * n
        """Observed over predicted TTFT of each endpoint."""
        self.unseen = set(range(n))
        """Endpoints without observations. The gateway believes that they are like the rest of the pool."""
        self._pool_ratio = 1.0
        self._all_due_s = 0.0
        self._links: list[dict[str, tuple[float, Link]]] = [{} for _ in range(n)]
        """Per target, by source: (time until which the link is valid, link)."""
        self._prefilled_s = [0.0] * n
        """When each endpoint's last observed prefill ended."""
        self._loads: list[Load | None] = [None] * n
        self.changed = set(range(n))
        """Endpoints whose load, speed or readiness changed since this set was last cleared."""
        self._metrics = [(0, 0, 0.0)] * n
        """Each engine's (running, waiting, KV usage) when its metrics were last read."""
        self._metrics_s = 0.0
        self._interval_s = interval_s(n)

    # -- reading -----------------------------------------------------------------------------------

    def load(self, e: int, now: float) -> Load:
        """Return the endpoint's load as the gateway believes it."""
        known = self._loads[e]
        if known is not None:
            return known
        running, waiting, usage = self._metrics[e]
        pool = self.pool_tokens
        context = self.context_tokens[e]
        free = min(int(pool * (1.0 - usage)), pool - context)
        load = self._loads[e] = Load(
            pending_prefill_tokens=self.pending_tokens[e],
            pending_prefill_s=max(0.0, self.pending_s[e]),
            in_flight=self.in_flight[e],
            running=running,
            waiting=waiting,
            kv_usage=usage,
            kv_free_tokens=max(0, free),
            sessions=self.bound[e],
            metrics_age_s=now - self._metrics_s,
            prefilling=self.prefilling[e],
            active_kv_tokens=context,
            kv_pool_tokens=pool,
        )
        return load

    def scrape(self, now: float) -> None:
        """Read all engines' metrics if the interval since the last time has passed."""
        if now - self._metrics_s < self._interval_s and self._metrics_s:
            return
        self._metrics_s = now
        for e, engine in enumerate(self.engines):
            self._metrics[e] = (engine.running, engine.waiting, min(1.0, engine.kv_usage))
        self._loads = [None] * len(self.engines)

    def links(self, target: int, locations: Iterable[Location], now: float) -> dict[str, Link]:
        """Return the links from the locations' endpoints to the target, by address, with the slowdown that
        the gateway has observed. A link is looked up again after `_LINK_S`, since observations fade."""
        known, here = self._links[target], self.endpoints[target].address
        links = {}
        for address, *_ in locations:
            if address != here:
                entry = known.get(address)
                if entry is None or entry[0] < now:
                    level = self._fabric.level(self.number[address], target)
                    slowdown = self.calibration.slowdown(address, here, now)
                    link = Link(level, self._bandwidth[level], slowdown)
                    entry = known[address] = (now + _LINK_S, link)
                links[address] = entry[1]
        return links

    def link(self, source: int, target: int) -> float:
        """Return the bytes per second between two endpoints that the gateway believes before it has observed
        a transfer."""
        return self._bandwidth[self._fabric.level(source, target)]

    @contextmanager
    def peeking(self) -> Iterator[None]:
        """Keep values that are read within this context out of the caches."""
        loads, links = self._loads[:], [known.copy() for known in self._links]
        yield
        self._loads, self._links = loads, links

    # -- requests ----------------------------------------------------------------------------------

    def _touch(self, e: int) -> None:
        """Mark an endpoint as changed."""
        self._loads[e] = None
        self.changed.add(e)

    def start(self, e: int, context_tokens: int) -> None:
        """Record that a request goes to an endpoint."""
        self.in_flight[e] += 1
        self.context_tokens[e] += context_tokens
        self._touch(e)

    def prefill_starts(self, e: int, uncached_tokens: int, prefill_s: float) -> None:
        """Record a prefill on endpoint `e`; nothing if `e` is negative, since no endpoint runs it yet."""
        if e < 0:
            return
        self.pending_tokens[e] += uncached_tokens
        self.pending_s[e] += prefill_s
        self.prefilling[e] += uncached_tokens > 0
        self._touch(e)

    def prefill_done(self, e: int, uncached_tokens: int, prefill_s: float) -> None:
        """Record that a prefill has ended; takes the arguments of its `prefill_starts`."""
        if e < 0:
            return
        self.pending_tokens[e] -= uncached_tokens
        self.pending_s[e] -= prefill_s
        self.prefilling[e] -= uncached_tokens > 0
        self._touch(e)

    def finish(self, e: int, context_tokens: int, decoded_s: float) -> None:
        """Record the end of a request, after `prefill_done`. `decoded_s`: seconds from the first token to
        the last; 0 if unknown."""
        self.in_flight[e] -= 1
        self.context_tokens[e] -= context_tokens
        if not self.in_flight[e]:
            self.pending_s[e] = 0.0
        if decoded_s > 0:
            self.calibration.decoded(self.endpoints[e].address, decoded_s)
        self._touch(e)

    def bind(self, session: KnownSession, e: int, now: float) -> None:
        """Make `e` the session's host. If the session had another host, it has moved now."""
        if session.host == e:
            return
        if session.host >= 0:
            self.bound[session.host] -= 1
            self._touch(session.host)
            session.moved_s = now
        session.host = e
        self.bound[e] += 1
        self._touch(e)

    def unbind(self, session: KnownSession) -> None:
        """Record that the session has ended."""
        if session.host >= 0:
            self.bound[session.host] -= 1
            self._touch(session.host)
            session.host = -1

    def moved(self, source: int, target: int, now: float) -> None:
        """Record that a session has moved between two endpoints."""
        self.moved_s[source] = self.moved_s[target] = now

    def dead(self, e: int) -> None:
        """Record that a connection to the endpoint failed."""
        self.ready[e] = False
        self.endpoints[e] = replace(self.endpoints[e], ready=False)
        self._touch(e)

    def observe_prefill(self, request: SimulatedRequest, now: float) -> None:
        """Learns from the event that ends the request's prefill.

        Engines prefill one request after the other, so this prefill began when the previous one had ended or
        when the gateway routed the request, whichever was later. In the latter case, its time includes the
        request's overhead. If the endpoint pulled KV, the time that the predicted prefill does not explain
        counts as the time of the pull.
        """
        e, new = request.endpoint, request.uncached_tokens
        before, self._prefilled_s[e] = self._prefilled_s[e], now
        alone_s = now - max(request.routed_s, before)
        expected_s = self.uncorrected.prefill_s(new, max(0, request.prompt_tokens - new))
        address, know = self.endpoints[e].address, self.calibration
        if request.held_s and request.source < 0:
            return  # a leg failed, and the gateway does not know what it has left on the endpoint
        if request.source >= 0 and not request.held_s:
            if before < request.routed_s:
                source = self.endpoints[request.source].address
                bandwidth = self._bandwidth[self._fabric.level(request.source, e)]
                rest_s = expected_s * know.prefill_ratio(address, now)
                rest_s += self.uncorrected.request_overhead_s(request.prompt_tokens)
                pull_s = self.uncorrected.transfer_s(request.moved_tokens, bandwidth) + request.loaded_s
                know.transfer(source, address, max(0.001, alone_s - rest_s), pull_s, now)
                self._forget_links(source)
        elif expected_s:
            if before <= request.routed_s:
                expected_s += self.uncorrected.request_overhead_s(request.prompt_tokens)
            know.prefill(address, alone_s, expected_s, now)
            know.ttft(address, now - request.routed_s, request.expected_ttft_s, now)
            self._learned(e, now)

    def observe_transfer(self, source: int, target: int, tokens: int, seconds: float, now: float) -> None:
        """Learns from KV that was handed over before its request was sent."""
        there, here = self.endpoints[source].address, self.endpoints[target].address
        predicted_s = self.uncorrected.transfer_s(tokens, self.link(source, target))
        self.calibration.transfer(there, here, seconds, predicted_s, now)
        self._forget_links(there)

    def _forget_links(self, source: str) -> None:
        """Has the links from an endpoint looked up again."""
        for links in self._links:
            links.pop(source, None)

    def _learned(self, e: int, now: float) -> None:
        """Update speeds after an observation of `e`. It also changes the ratios of the whole pool, which are
        the priors of all other endpoints: those without observations follow at once, the others with the next
        update of all endpoints."""
        know, n = self.calibration, len(self.endpoints)
        self.unseen.discard(e)
        self.changed.add(e)
        pool = (round(know.prefill_ratio("", now), 2), know.ttft_ratio("", now))
        if now >= self._all_due_s:
            self._all_due_s = now + _POOL_S
            for i in range(n):
                self._read(i, now)
            return
        self._read(e, now)
        if pool[0] != self._pool_ratio:
            self._pool_ratio = pool[0]
            model = self.uncorrected.scaled(pool[0])
            for i in self.unseen:
                self.models[i], self.ttft_ratio[i] = model, pool[1]

    def _read(self, e: int, now: float) -> None:
        address, know = self.endpoints[e].address, self.calibration
        self.ttft_ratio[e] = know.ttft_ratio(address, now)
        ratio = round(know.prefill_ratio(address, now), 2)
        if self.models[e].scale != self.uncorrected.scale * ratio:
            self.models[e] = self.uncorrected.scaled(ratio)
            if e not in self.unseen:
                self.changed.add(e)
