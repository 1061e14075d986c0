"""The endpoints and their load.

The load of an endpoint is made of the requests that this gateway sent to it and that have not ended (`start`
to `finish`), corrected by the engine's metrics. Pending prefill is counted in tokens and seconds. It ends
with the first of these: a KV event with the prompt's last block (`blocks_stored`), the head of an answer that
is not streamed (`prefill_done`), the predicted time where no event is expected (`expect_prefilled`), or the
end of the request (`finish`, which raises KeyError if called twice).
`progress` releases it in steps where KV events only show a session's growth.

An endpoint is ready until it is suspected dead: Envoy used another endpoint, a connection failed (`suspect`),
or two scrapes in a row failed. It is ready again after its next good scrape, or after SUSPECT_S seconds if
its metrics are not scraped. If no endpoint is left, `as_last_resort` admits those whose metrics alone fail,
because engines that are too busy to answer scrapes may still serve.

Where several gateways share their state, `set_elsewhere` adds the load that another one has sent to an
endpoint, and `own` returns what they are told of this one's.

`view` and `recent` only release prefills whose predicted time is over, and cost O(endpoints); `recent` reuses
what has not changed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from perilune_api.pool import Role, Topology
from perilune_api.topology import Link
from perilune_gateway.model import Endpoint, EngineMetrics, Load

SUSPECT_S = 5.0
"""Seconds after which a suspected endpoint without metrics is ready again."""
DEAD_SCRAPES = 2
"""Number of failed scrapes in a row after which an endpoint is suspected; one may fail in a busy moment."""
RECENT_S = 1.0
"""Maximum age in seconds of the entries that `recent` returns."""
FRESH_S = 15.0
"""Maximum age in seconds of engine metrics that are used."""


class EndpointView(NamedTuple):
    """One endpoint at one moment."""

    endpoint: Endpoint
    load: Load
    seconds_since_move: float
    links: Mapping[str, Link]
    ejected: str = ""
    """Why the endpoint is ejected; empty if it is not, or if it would not be ready anyway."""


class Requests(NamedTuple):
    """Requests in flight at an endpoint, as numbers that add up."""

    in_flight: int = 0
    prefilling: int = 0
    pending_tokens: int = 0
    pending_s: float = 0.0
    context_tokens: int = 0


NO_REQUESTS = Requests()


class _InFlight(Struct, gc=False):
    address: str
    tokens: int
    """Number of prefill tokens that are still pending."""
    total_tokens: int
    total_s: float
    context_tokens: int
    tenant: str
    awaited: int
    """Block whose KV event ends the prefill; 0: unknown, or the prefill has ended."""


class _Queued(Struct, gc=False):
    """The pending prefill of one tenant in the whole pool."""

    requests: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _State:
    endpoint: Endpoint
    links: Mapping[str, Link]
    in_flight: set[int] = field(default_factory=set)
    prefilling: int = 0
    pending_tokens: int = 0
    pending_s: float = 0.0
    context_tokens: int = 0
    moved_at: float = -inf
    suspect_at: float = -inf
    unreached_at: float = -inf
    """Time of the last failed connection; failed scrapes do not count."""
    metrics: EngineMetrics | None = None
    metrics_at: float = -inf
    failed_scrapes: int = 0
    """Number of scrapes that failed in a row."""
    ejected: str = ""
    """Why it is ejected; empty if it is not."""
    position: int = 0
    """Position in the pool's order."""
    by_replica: dict[str, Requests] = field(default_factory=dict)
    """Other replica of the gateway → the requests that it has sent here."""
    elsewhere: Requests = NO_REQUESTS
    """Their sum."""


class Fleet:
    """The endpoints of a pool and their requests in flight."""

    def __init__(self, kv_pool_tokens: int) -> None:
        self.kv_pool_tokens = kv_pool_tokens
        self._states: dict[str, _State] = {}
        self._requests: dict[int, _InFlight] = {}
        self._queued: dict[str, _Queued] = {}
        """Tenant → its pending prefill; only tenants that have some."""
        self._awaited: dict[tuple[str, int], list[int]] = {}
        """(address, last block of a prompt) → tickets of the requests whose prefill that block's event
        ends."""
        self._expected: list[tuple[float, int]] = []
        """(time, ticket) of prefills that end at a predicted time; a heap."""
        self._legs = 0
        self._recent: list[EndpointView] = []
        """Last result of `recent`; replaced, never changed in place."""
        self._recent_until = -inf
        """Time from which `recent` computes every entry again."""
        self._changed: set[str] = set()
        """Addresses of endpoints that have changed since the last result of `recent`."""
        self.on_load: Callable[[str], object] = lambda address: None
        """Called with every endpoint whose load of this gateway's requests changes."""

    def sessions_changed(self, address: str) -> None:
        """Note that the number of sessions bound to the endpoint has changed."""
        self._changed.add(address)

    # -- endpoints ---------------------------------------------------------------------------------

    def set_endpoints(self, endpoints: Iterable[Endpoint], topology: Topology) -> list[str]:
        """Replace the endpoints; those that stay keep their load. Returns the addresses that left."""
        old, self._states = self._states, {}
        wanted = {e.address: e for e in endpoints}
        for position, (address, endpoint) in enumerate(wanted.items()):
            links = MappingProxyType(
                {a: topology.link(endpoint.place, e.place) for a, e in wanted.items() if a != address}
            )
            state = self._states[address] = old.get(address) or _State(endpoint, links)
            state.endpoint, state.links, state.position = endpoint, links, position
        self._recent_until = -inf
        return [address for address in old if address not in wanted]

    def __len__(self) -> int:
        return len(self._states)

    def addresses(self) -> list[str]:
        return list(self._states)

    def endpoints(self) -> list[Endpoint]:
        return [state.endpoint for state in self._states.values()]

    def get(self, address: str) -> Endpoint | None:
        state = self._states.get(address)
        return state.endpoint if state else None

    def link(self, target: str, source: str) -> Link | None:
        """Return the link from `source` to `target`; None if one of them is unknown."""
        state = self._states.get(target)
        return state.links.get(source) if state else None

    def takes_sessions(self, address: str, now: float) -> bool:
        """Whether sessions may be bound to the endpoint: it is ready, does not drain, and decodes."""
        state = self._states.get(address)
        if state is None or not state.endpoint.ready or state.endpoint.draining:
            return False
        if state.endpoint.role is Role.PREFILL:
            return False
        return not self._is_suspect(state, now)

    def view(self, now: float, sessions: Mapping[str, int] = MappingProxyType({})) -> list[EndpointView]:
        """Return every endpoint with its load, in the pool's order. `sessions` maps addresses to the number
        of sessions bound there."""
        self._release(now)
        return [self._view(state, now, sessions.get(address, 0)) for address, state in self._states.items()]

    def recent(self, now: float, sessions: Mapping[str, int] = MappingProxyType({})) -> list[EndpointView]:
        """Return what `view` returns, with entries of unchanged endpoints up to RECENT_S old. The caller must
        report changes of `sessions` with `sessions_changed`."""
        self._release(now)
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
            view._replace(endpoint=replace(view.endpoint, ready=True), ejected="")
            if view.ejected or view.endpoint.address in silent
            else view
            for view in views
        ]

    def usable(self, now: float) -> set[str]:
        """Return the endpoints to which a new session may go."""
        return {
            address
            for address, state in self._states.items()
            if state.endpoint.ready
            and not (state.endpoint.draining or state.ejected or self._is_suspect(state, now))
        }

    def set_ejected(self, address: str, cause: str) -> None:
        """Record why the endpoint is ejected; with an empty cause, that it is not any more."""
        if state := self._states.get(address):
            state.ejected = cause
            self._changed.add(address)

    def _look(self, state: _State, now: float, sessions: int) -> EndpointView:
        view = self._view(state, now, sessions)
        if self._recent_until > (turn := state.metrics_at + FRESH_S) > now:
            self._recent_until = turn
        if self._recent_until > (turn := state.suspect_at + SUSPECT_S) > now:
            self._recent_until = turn
        return view

    def _view(self, state: _State, now: float, sessions: int) -> EndpointView:
        metrics, metrics_age_s, there = state.metrics, now - state.metrics_at, state.elsewhere
        pool = (metrics.kv_tokens if metrics else 0) or self.kv_pool_tokens
        context_tokens = state.context_tokens + there.context_tokens
        uncommitted = max(0, pool - context_tokens)
        if metrics and metrics_age_s <= FRESH_S:
            running, waiting, usage = metrics.running, metrics.waiting, metrics.kv_usage
            free = min(int(pool * (1.0 - usage)), uncommitted)
        else:
            running, waiting, usage = 0, 0, min(1.0, context_tokens / pool)
            free = uncommitted
        load = Load(
            state.pending_tokens + there.pending_tokens,
            max(0.0, state.pending_s) + there.pending_s,
            len(state.in_flight) + there.in_flight,
            running,
            waiting,
            usage,
            max(0, free),
            sessions,
            metrics_age_s,
            state.prefilling + there.prefilling,
            context_tokens,
            pool,
        )
        endpoint = state.endpoint
        ejected = ""
        if endpoint.ready and (state.ejected or self._is_suspect(state, now)):
            endpoint = replace(endpoint, ready=False)
            ejected = "" if self._is_suspect(state, now) else state.ejected
        return EndpointView(endpoint, load, now - state.moved_at, state.links, ejected)

    # -- requests ----------------------------------------------------------------------------------

    def leg_ticket(self) -> int:
        """Return a ticket for a request that the gateway itself makes. It is negative; those of clients'
        requests are not."""
        self._legs += 1
        return -self._legs

    def start(
        self,
        ticket: int,
        address: str,
        *,
        uncached_tokens: int,
        prefill_s: float,
        context_tokens: int,
        last_block: int = 0,
        tenant: str = "",
    ) -> None:
        """Add a request to the load of `address`. `last_block` is our hash of the prompt's last full block,
        or 0 if it is unknown or already cached there."""
        request = _InFlight(
            address, uncached_tokens, uncached_tokens, prefill_s, context_tokens, tenant, last_block
        )
        self._requests[ticket] = request
        if uncached_tokens:
            queued = self._queued.setdefault(tenant, _Queued())
            queued.requests += 1
            queued.seconds += prefill_s
        if last_block:
            self._awaited.setdefault((address, last_block), []).append(ticket)
        if state := self._states.get(address):
            self._loaded(address)
            state.in_flight.add(ticket)
            state.context_tokens += context_tokens
            if uncached_tokens:
                state.prefilling += 1
                state.pending_tokens += uncached_tokens
                state.pending_s += prefill_s

    def blocks_stored(self, address: str, blocks: Sequence[int]) -> list[int]:
        """Record a KV event: it ends the prefills whose last block is in `blocks`. Returns their tickets."""
        if not self._awaited:
            return []
        awaited = self._awaited
        done = [ticket for block in blocks for ticket in awaited.get((address, block), ())]
        for ticket in done:
            self.prefill_done(ticket)
        return done

    def progress(self, ticket: int, tokens: int) -> None:
        """Record that `tokens` more tokens of the request's prompt are cached. Ignores ended requests, and
        endpoints that left the pool in between."""
        request = self._requests.get(ticket)
        if request is not None:
            self._progress(ticket, request, min(tokens, request.tokens))

    def _progress(self, ticket: int, request: _InFlight, done: int) -> None:
        """Release `done` of the request's pending tokens."""
        if not done:
            return
        request.tokens -= done
        released_s = request.total_s * done / request.total_tokens
        queued = self._queued[request.tenant]
        queued.seconds -= released_s
        queued.requests -= not request.tokens
        if not queued.requests:
            del self._queued[request.tenant]
        if (state := self._states.get(request.address)) and ticket in state.in_flight:
            self._loaded(request.address)
            state.prefilling -= not request.tokens
            state.pending_tokens -= done
            if state.prefilling:
                state.pending_s -= released_s
            else:
                state.pending_s = 0.0  # removes rounding errors

    def prefill_done(self, ticket: int) -> None:
        """Release the request's whole pending prefill. Ignores ended requests."""
        request = self._requests.get(ticket)
        if request is not None:
            self._prefilled(ticket, request)

    def _prefilled(self, ticket: int, request: _InFlight) -> None:
        self._progress(ticket, request, request.tokens)
        if request.awaited and (tickets := self._awaited.get((request.address, request.awaited))):
            if ticket in tickets:
                tickets.remove(ticket)
            if not tickets:
                del self._awaited[request.address, request.awaited]
        request.awaited = 0

    def expect_prefilled(self, ticket: int, at: float) -> None:
        """The request's prefill counts as done at the time `at`, if nothing ended it before."""
        heappush(self._expected, (at, ticket))

    def _release(self, now: float) -> None:
        while self._expected and self._expected[0][0] <= now:
            self.prefill_done(heappop(self._expected)[1])

    def served_by(self, ticket: int, address: str) -> None:
        """Move the request's load to the endpoint that Envoy used instead of the first one."""
        request = self._requests[ticket]
        tokens, awaited = request.tokens, request.awaited
        self.finish(ticket)
        self.start(
            ticket,
            address,
            uncached_tokens=tokens,
            prefill_s=request.total_s,
            context_tokens=request.context_tokens,
            last_block=awaited,
            tenant=request.tenant,
        )

    def share_of_queue_s(self, tenant: str) -> float:
        """Return how many seconds the tenant's pending prefill takes if all tenants that have some get equal
        shares of all endpoints."""
        queued = self._queued.get(tenant)
        return queued.seconds * len(self._queued) / max(1, len(self._states)) if queued else 0.0

    def finish(self, ticket: int) -> None:
        """End the request. Raises KeyError if it has already ended."""
        request = self._requests.pop(ticket)
        if request.tokens or request.awaited:
            self._prefilled(ticket, request)
        state = self._states.get(request.address)
        if state is None:
            return
        self._loaded(request.address)
        if ticket in state.in_flight:
            state.in_flight.remove(ticket)
            state.context_tokens -= request.context_tokens

    def context_tokens(self, ticket: int) -> int:
        """Return the context tokens of a request. Raises KeyError if it has ended."""
        return self._requests[ticket].context_tokens

    def runs(self, ticket: int) -> bool:
        """Whether this request has started and not ended."""
        return ticket in self._requests

    @property
    def in_flight(self) -> int:
        """Number of requests that have started and not ended."""
        return len(self._requests)

    def engine_metrics(self, address: str) -> EngineMetrics | None:
        """Return the result of the endpoint's last good scrape, or None."""
        state = self._states.get(address)
        return state.metrics if state else None

    def metrics_at(self, address: str) -> float:
        """Return when the endpoint's last good scrape was, in monotonic seconds; -inf: never."""
        state = self._states.get(address)
        return state.metrics_at if state else -inf

    # -- other replicas of the gateway -------------------------------------------------------------

    def own(self, address: str) -> Requests:
        """Return the requests that this gateway has sent to the endpoint."""
        state = self._states.get(address)
        if state is None:
            return NO_REQUESTS
        return Requests(
            len(state.in_flight),
            state.prefilling,
            state.pending_tokens,
            max(0.0, state.pending_s),
            state.context_tokens,
        )

    def set_elsewhere(self, replica: str, address: str, requests: Requests) -> None:
        """Record which requests another replica has in flight at the endpoint."""
        if state := self._states.get(address):
            self._changed.add(address)
            if requests.in_flight:
                state.by_replica[replica] = requests
            else:
                state.by_replica.pop(replica, None)
            state.elsewhere = Requests(*map(sum, zip(*state.by_replica.values(), strict=True)))

    def _loaded(self, address: str) -> None:
        self._changed.add(address)
        self.on_load(address)

    # -- observations ------------------------------------------------------------------------------

    def metrics(self, address: str, metrics: EngineMetrics | None, now: float) -> None:
        """Record a scrape: its result, or None if it failed."""
        state = self._states.get(address)
        if state is None:
            return
        self._changed.add(address)
        if metrics is None:
            state.failed_scrapes += 1
            if state.failed_scrapes >= DEAD_SCRAPES:
                state.suspect_at = now
        else:
            state.metrics, state.metrics_at = metrics, now
            state.suspect_at = state.unreached_at = -inf
            state.failed_scrapes = 0

    def suspect(self, address: str, now: float) -> None:
        """Record that the endpoint could not be reached."""
        if state := self._states.get(address):
            state.suspect_at = state.unreached_at = now
            self._changed.add(address)

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
