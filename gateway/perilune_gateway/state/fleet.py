"""The endpoints: which there are, which may be used, and how loaded each one is.

The load of an endpoint is that of the requests in flight there (`loads.py`), corrected by the engine's
metrics.

An endpoint is ready until it is suspected dead: Envoy used another endpoint, a connection failed
(`Unreached`), or two scrapes in a row failed. It is ready again after its next good scrape, or after
SUSPECT_S seconds if its metrics are not scraped. One whose engine sleeps, by its metrics, is not ready until
it is awake. If no endpoint is left, `as_last_resort` admits those whose metrics alone fail, because engines
that are too busy to answer scrapes may still serve. If several endpoints take no connections and no other is
left, the gateway itself has been cut off, and `as_cut_off` admits them.

`view` and `recent` only read, and cost O(endpoints); `recent` reuses what has not changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp2, inf
from types import MappingProxyType

from msgspec import Struct, structs

from perilune_api.pool import Role, Topology
from perilune_api.topology import Level, Link
from perilune_gateway.model import Endpoint, EngineMetrics, Load, Tier
from perilune_gateway.state.facts import BlocksChanged, Judged, LoadChanged, SessionsChanged, Unreached
from perilune_gateway.state.loads import Loads
from perilune_gateway.state.request_facts import Decided

SUSPECT_S = 5.0
"""Seconds after which a suspected endpoint without metrics is ready again."""
DEAD_SCRAPES = 2
"""Number of failed scrapes in a row after which an endpoint is suspected; one may fail in a busy moment."""
RECENT_S = 1.0
"""Maximum age in seconds of the entries that `recent` returns."""
FRESH_S = 15.0
"""Maximum age in seconds of engine metrics that are used."""
HITS_HALF_S = 300.0
"""Seconds after which a token that was found in a prefix cache counts half."""


class EndpointView(Struct, frozen=True, gc=False, kw_only=True):
    """One endpoint at one moment."""

    endpoint: Endpoint
    load: Load
    seconds_since_move: float
    links: Mapping[str, Link]
    ejected: str = ""
    """Why the endpoint is ejected; empty if it is not, or if it would not be ready anyway."""
    asleep: bool = False
    """Whether the endpoint is not ready because its engine sleeps."""
    usual: bool = False
    """Whether any request may go there that has no wish of its own: it is ready, not ejected, and does not
    drain."""


@dataclass(slots=True, kw_only=True)
class _State:
    endpoint: Endpoint
    links: Mapping[str, Link]
    moved_at: float = -inf
    suspect_at: float = -inf
    unreached_at: float = -inf
    """Time of the last failed connection; failed scrapes do not count."""
    metrics: EngineMetrics | None = None
    metrics_at: float = -inf
    busy_at: float = -inf
    """Time of the last scrape at which requests ran or waited there, of any gateway."""
    failed_scrapes: int = 0
    """Number of scrapes that failed in a row."""
    recent_hits_tokens: float = 0.0
    """Tokens found in the prefix cache until the last good scrape; each counts half HITS_HALF_S later."""
    ejected: str = ""
    """Why it is ejected; empty if it is not."""

    drains_since: float = -inf
    """When it began to drain; -inf while it does not."""
    position: int = 0
    """Position in the pool's order."""
    join: int = 0
    """Number of its joining the pool."""
    joined_at: float = -inf
    stride: int = 1
    """Its engine's block size over the pool's, as its KV events tell."""

    @property
    def asleep(self) -> bool:
        """Whether the engine slept at the last good scrape."""
        return self.metrics is not None and self.metrics.asleep


class Fleet:
    """The endpoints of a pool."""

    def __init__(self, kv_pool_tokens: int, loads: Loads) -> None:
        """`kv_pool_tokens`: tokens that fit into an endpoint's KV pool if its metrics do not say. `loads`:
        what its requests are; this fleet tells it which endpoints there are."""
        self.kv_pool_tokens = kv_pool_tokens
        self._loads = loads
        self._states: dict[str, _State] = {}
        self._joins = 0
        self._recent: list[EndpointView] = []
        """Last result of `recent`; replaced, never changed in place."""
        self._recent_until = -inf
        """Time from which `recent` computes every entry again."""
        self._changed: set[str] = set()
        """Addresses of endpoints that have changed since the last result of `recent`."""

    # -- what happens ------------------------------------------------------------------------------

    def on_load_changed(self, fact: LoadChanged) -> None:
        self._changed.add(fact.address)

    def on_sessions_changed(self, fact: SessionsChanged) -> None:
        self._changed.add(fact.address)

    def on_judged(self, fact: Judged) -> None:
        if state := self._states.get(fact.address):
            state.ejected = fact.cause
            self._changed.add(fact.address)

    def on_unreached(self, fact: Unreached) -> None:
        if state := self._states.get(fact.address):
            state.suspect_at = state.unreached_at = fact.now
            self._changed.add(fact.address)

    def on_decided(self, fact: Decided) -> None:
        if source := fact.decision.moved_from:
            self.moved(source, fact.request.target, fact.now)

    def on_blocks_changed(self, fact: BlocksChanged) -> None:
        applied = fact.applied
        if applied.stored and applied.tier is Tier.DEVICE and (state := self._states.get(applied.endpoint)):
            state.stride = applied.stride

    # -- endpoints ---------------------------------------------------------------------------------

    def set_endpoints(self, endpoints: Iterable[Endpoint], topology: Topology, now: float = 0.0) -> list[str]:
        """Replace the endpoints; those that stay keep their load. Returns the addresses that left, or at
        which another endpoint is now."""
        wanted = {e.address: e for e in endpoints}
        left = [
            address
            for address, state in self._states.items()
            if address not in wanted or wanted[address].instance != state.endpoint.instance
        ]
        old = {address: state for address, state in self._states.items() if address not in left}
        self._states = {}
        for position, (address, endpoint) in enumerate(wanted.items()):
            links = MappingProxyType(
                {a: topology.link(endpoint.place, e.place) for a, e in wanted.items() if a != address}
            )
            state = self._states[address] = old.get(address) or self._joined(endpoint, links, now)
            if not endpoint.draining:
                state.drains_since = -inf
            elif state.drains_since == -inf:
                state.drains_since = now
            state.endpoint, state.links, state.position = endpoint, links, position
        self._loads.follow(old)
        self._loads.follow(wanted)
        self._recent_until = -inf
        return left

    def _joined(self, endpoint: Endpoint, links: Mapping[str, Link], now: float) -> _State:
        self._joins += 1
        return _State(endpoint=endpoint, links=links, join=self._joins, joined_at=now)

    def join(self, address: str) -> int:
        """Return the number of the endpoint's joining the pool, another one each time. 0 if it is not in the
        pool."""
        state = self._states.get(address)
        return state.join if state else 0

    def joined_at(self, address: str) -> float:
        """Return when the endpoint joined the pool; -inf: it is not in the pool."""
        state = self._states.get(address)
        return state.joined_at if state else -inf

    def __len__(self) -> int:
        return len(self._states)

    def addresses(self) -> list[str]:
        return list(self._states)

    def endpoints(self) -> list[Endpoint]:
        return [state.endpoint for state in self._states.values()]

    def get(self, address: str) -> Endpoint | None:
        state = self._states.get(address)
        return state.endpoint if state else None

    def engine_rank(self, address: str) -> int | None:
        """Return the number by which an engine's metrics call the endpoint; None if it has no ranks or is
        gone."""
        endpoint = self.get(address)
        return endpoint.engine_rank if endpoint else None

    def link(self, target: str, source: str) -> Link | None:
        """Return the link from `source` to `target`; None if one of them is unknown."""
        state = self._states.get(target)
        return state.links.get(source) if state else None

    def level(self, source: str, target: str) -> Level | None:
        """Return the nearest level that both endpoints share; None if one of them is unknown."""
        link = self.link(target, source)
        return link.distance if link else None

    def alike(self, source: str, target: str) -> bool:
        """Whether the KV of both endpoints means the same, as far as they have names for it."""
        one, other = self._states.get(source), self._states.get(target)
        if one is None or other is None:
            return True
        here, there = one.endpoint.kv_name, other.endpoint.kv_name
        return here == there or not (here and there)

    def takes_sessions(self, address: str, now: float) -> bool:
        """Return whether sessions may be bound to the endpoint: it is ready, does not drain, and decodes."""
        state = self._states.get(address)
        if state is None or not state.endpoint.ready or state.endpoint.draining or state.asleep:
            return False
        if state.endpoint.role is Role.PREFILL:
            return False
        return not self._is_suspect(state, now)

    def view(self, now: float, sessions: Mapping[str, int] = MappingProxyType({})) -> list[EndpointView]:
        """Return every endpoint with its load, in the pool's order. `sessions` maps addresses to the number
        of sessions bound there."""
        return [self._view(state, now, sessions.get(address, 0)) for address, state in self._states.items()]

    def recent(self, now: float, sessions: Mapping[str, int] = MappingProxyType({})) -> list[EndpointView]:
        """Return what `view` returns, with entries of unchanged endpoints up to RECENT_S old."""
        if now >= self._recent_until:
            self._recent_until = now + RECENT_S
            self._recent = [
                self._look(state, now, sessions.get(address, 0)) for address, state in self._states.items()
            ]
        elif self._changed:
            views = self._recent.copy()
            for address in self._changed:
                if state := self._states.get(address):
                    views[state.position] = self._look(state, now, sessions.get(address, 0))
            self._recent = views
        self._changed.clear()
        return self._recent

    def silent(self, now: float) -> set[str]:
        """Return the endpoints that are not ready only because their metrics, which were read before,
        fail."""
        return {
            address
            for address, state in self._states.items()
            if state.failed_scrapes >= DEAD_SCRAPES
            and state.metrics_at > -inf
            and state.endpoint.ready
            and now - state.unreached_at >= SUSPECT_S
        }

    def as_last_resort(self, views: Sequence[EndpointView], now: float) -> list[EndpointView]:
        """Return `views` with the silent and the ejected endpoints marked as ready."""
        silent = self.silent(now)
        return [
            structs.replace(view, endpoint=replace(view.endpoint, ready=True), ejected="")
            if view.ejected or view.endpoint.address in silent
            else view
            for view in views
        ]

    def as_cut_off(self, views: Sequence[EndpointView]) -> Sequence[EndpointView]:
        """Return `views` with the endpoints marked as ready that are listed so, if no endpoint of several
        servers takes connections although all of them did. Then it is likelier that this gateway has been cut
        off than that all are dead, and a request that comes makes it likely that the network is back."""
        states = [state for state in self._states.values() if not state.endpoint.draining]
        cut_off = all(state.metrics_at > -inf and state.unreached_at > -inf for state in states)
        if not cut_off or len({state.endpoint.server for state in states}) < 2:
            return views
        ready = {state.endpoint.address for state in states if state.endpoint.ready and not state.asleep}
        return [
            structs.replace(view, endpoint=replace(view.endpoint, ready=True))
            if view.endpoint.address in ready
            else view
            for view in views
        ]

    def usable(self, now: float) -> set[str]:
        """Return the endpoints to which a new session may go."""
        return {
            address
            for address, state in self._states.items()
            if state.endpoint.ready
            and not (state.endpoint.draining or state.ejected or state.asleep or self._is_suspect(state, now))
        }

    def _look(self, state: _State, now: float, sessions: int) -> EndpointView:
        view = self._view(state, now, sessions)
        if self._recent_until > (turn := state.metrics_at + FRESH_S) > now:
            self._recent_until = turn
        if self._recent_until > (turn := state.suspect_at + SUSPECT_S) > now:
            self._recent_until = turn
        return view

    def _view(self, state: _State, now: float, sessions: int) -> EndpointView:
        metrics, metrics_age_s = state.metrics, now - state.metrics_at
        requests = self._loads.at(state.endpoint.address)
        pool = (metrics.kv_tokens if metrics else 0) or self.kv_pool_tokens
        uncommitted = max(0, pool - requests.context_tokens)
        if metrics and metrics_age_s <= FRESH_S:
            running, waiting, usage = metrics.running, metrics.waiting, metrics.kv_usage
            free = min(int(pool * (1.0 - usage)), uncommitted)
        else:
            running, waiting, usage = 0, 0, min(1.0, requests.context_tokens / pool)
            free = uncommitted
        load = Load(
            pending_prefill_tokens=requests.pending_tokens,
            pending_prefill_s=requests.pending_s,
            in_flight=requests.in_flight,
            running=running,
            waiting=waiting,
            kv_usage=usage,
            kv_free_tokens=max(0, free),
            sessions=sessions,
            metrics_age_s=metrics_age_s,
            prefilling=requests.prefilling,
            active_kv_tokens=requests.context_tokens,
            kv_pool_tokens=pool,
        )
        endpoint, suspect = state.endpoint, self._is_suspect(state, now)
        asleep = endpoint.ready and state.asleep and not suspect
        ejected = state.ejected if endpoint.ready and not (suspect or asleep) else ""
        if endpoint.ready and (suspect or asleep or ejected):
            endpoint = replace(endpoint, ready=False)
        return EndpointView(
            endpoint=endpoint,
            load=load,
            seconds_since_move=now - state.moved_at,
            links=state.links,
            ejected=ejected,
            asleep=asleep,
            usual=endpoint.ready and not (ejected or endpoint.draining),
        )

    def use(self, server: str) -> tuple[int, int]:
        """Return how many requests this gateway has begun at a server since it joined the pool, and how many
        of them have not ended."""
        there = [a for a, state in self._states.items() if state.endpoint.server == server]
        return (
            sum(self._loads.begun(address) for address in there),
            sum(self._loads.own(address).in_flight for address in there),
        )

    # -- observations ------------------------------------------------------------------------------

    def engine_metrics(self, address: str) -> EngineMetrics | None:
        """Return the result of the endpoint's last good scrape, or None."""
        state = self._states.get(address)
        return state.metrics if state else None

    def kv_tokens(self, address: str) -> int:
        """Return how many tokens fit into the endpoint's KV cache."""
        metrics = self.engine_metrics(address)
        return (metrics.kv_tokens if metrics else 0) or self.kv_pool_tokens

    def recent_hits_tokens(self, address: str) -> float:
        """Return how many prompt tokens the engine has found in its prefix cache lately: each counts half as
        much HITS_HALF_S later."""
        state = self._states.get(address)
        return state.recent_hits_tokens if state else 0.0

    def metrics_at(self, address: str) -> float:
        """Return when the endpoint's last good scrape was, in monotonic seconds; -inf: never."""
        state = self._states.get(address)
        return state.metrics_at if state else -inf

    def busy_at(self, address: str) -> float:
        """Return when requests of any gateway last ran or waited at the endpoint, as scrapes found; -inf:
        never."""
        state = self._states.get(address)
        return state.busy_at if state else -inf

    def drains_since(self, address: str) -> float:
        """Return when the endpoint began to drain; -inf while it does not."""
        state = self._states.get(address)
        return state.drains_since if state else -inf

    def metrics(self, address: str, metrics: EngineMetrics | None, now: float) -> None:
        """Record a scrape: its result, or None if it failed."""
        state = self._states.get(address)
        if state is None:
            return
        self._changed.add(address)
        if self._loads.at(address).in_flight or (metrics and (metrics.running or metrics.waiting)):
            state.busy_at = now
        if metrics is None:
            state.failed_scrapes += 1
            if state.failed_scrapes >= DEAD_SCRAPES:
                state.suspect_at = now
        else:
            state.recent_hits_tokens = _recent_hits_tokens(state, metrics, now)
            state.metrics, state.metrics_at = metrics, now
            state.suspect_at = state.unreached_at = -inf
            state.failed_scrapes = 0

    def whole_blocks(self, address: str, blocks: int) -> int:
        """Return how many of a prompt's `blocks` the endpoint can cache: those of whole blocks of its
        engine."""
        return blocks - blocks % self.engine_blocks(address)

    def engine_blocks(self, address: str) -> int:
        """Return how many of the pool's blocks one block of the endpoint's engine is."""
        state = self._states.get(address)
        return state.stride if state else 1

    def moved(self, source: str, target: str, now: float) -> None:
        """Record that a session moved from `source` to `target`."""
        for address in (source, target):
            if state := self._states.get(address):
                state.moved_at = now
                self._changed.add(address)

    @staticmethod
    def _is_suspect(state: _State, now: float) -> bool:
        if state.metrics_at > -inf:  # the next good scrape resets it
            return state.suspect_at > -inf
        return now - state.suspect_at < SUSPECT_S


def _recent_hits_tokens(state: _State, metrics: EngineMetrics, now: float) -> float:
    """Return the hits, which begin at 0 with a gateway, because its engines may have counted for days, and
    with a new process of an engine, whose cache is empty."""
    if state.metrics is None or metrics.restarted_since(state.metrics):
        return 0.0
    found = metrics.prefix_hits_tokens - state.metrics.prefix_hits_tokens
    return found + state.recent_hits_tokens * exp2((state.metrics_at - now) / HITS_HALF_S)
