"""The requests in flight, and the load that they are at each endpoint.

A request is load from `start` to `finish`, which raises KeyError if called twice. Its pending prefill is
counted in tokens and seconds. It ends with the first of these: a KV event with the prompt's last block
(`blocks_stored`), the head of an answer that is not streamed (`prefill_done`), the predicted time where no
event is expected (`expect_prefilled`), or the end of the request. `progress` releases it in steps where KV
events only show a session's growth.

Where several gateways share their state, `set_elsewhere` adds the load that another one has sent to an
endpoint, and `own` returns what they are told of this one's. Every method costs O(1), except `follow`.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from msgspec import Struct, field


class Requests(NamedTuple):
    """Requests in flight at an endpoint, as numbers that add up."""

    in_flight: int = 0
    prefilling: int = 0
    pending_tokens: int = 0
    pending_s: float = 0.0
    context_tokens: int = 0


NO_REQUESTS = Requests()


class _Request(Struct, gc=False):
    """A request that has not ended."""

    address: str
    tokens: int
    """Number of prefill tokens that are still pending."""
    total_tokens: int
    total_s: float
    context_tokens: int
    tenant: str
    awaited: int
    """Block whose KV event ends the prefill; 0: unknown, or the prefill has ended."""
    expected_at: float = inf
    """When the prefill counts as done if nothing ended it before."""


class _Queued(Struct, gc=False):
    """The pending prefill of one tenant in the whole pool."""

    requests: int = 0
    seconds: float = 0.0


class _Load(Struct, gc=False):
    """The requests at one endpoint."""

    in_flight: set[int] = field(default_factory=set)
    """Tickets."""
    begun: int = 0
    """Number of requests that were ever in flight."""
    prefilling: int = 0
    pending_tokens: int = 0
    pending_s: float = 0.0
    context_tokens: int = 0
    by_replica: dict[str, Requests] = field(default_factory=dict)
    """Other replica of the gateway → the requests that it has sent here."""
    elsewhere: Requests = NO_REQUESTS
    """Their sum."""


class InFlight:
    """The requests in flight at a pool's endpoints, by their tickets."""

    def __init__(self, on_load: Callable[[str], object] = lambda address: None) -> None:
        """`on_load` is called with every endpoint whose load of this gateway's requests changes."""
        self._on_load = on_load
        self._changed: set[str] = set()
        self._loads: dict[str, _Load] = {}
        self._requests: dict[int, _Request] = {}
        self._queued: dict[str, _Queued] = {}
        """Tenant → its pending prefill; only tenants that have some."""
        self._awaited: dict[tuple[str, int], list[int]] = {}
        """(address, last block of a prompt) → tickets of the requests whose prefill that block's event
        ends."""
        self._expected: list[tuple[float, int]] = []
        """(time, ticket) of prefills that end at a predicted time; a heap."""
        self._legs = 0

    def follow(self, addresses: Iterable[str]) -> None:
        """Count the load of these endpoints from now on; those that stay keep theirs."""
        self._loads = {address: self._loads.get(address) or _Load() for address in addresses}

    def own(self, address: str) -> Requests:
        """Return the requests that this gateway has sent to the endpoint."""
        load = self._loads.get(address)
        return _own(load) if load else NO_REQUESTS

    def at(self, address: str) -> Requests:
        """Return the requests of all gateways at the endpoint."""
        load = self._loads.get(address)
        if load is None:
            return NO_REQUESTS
        return _sum(_own(load), load.elsewhere) if load.by_replica else _own(load)

    def take_changed(self) -> set[str]:
        """Return the endpoints whose load has changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def begun(self, address: str) -> int:
        """Return how many requests this gateway has begun at the endpoint since it joined the pool."""
        load = self._loads.get(address)
        return load.begun if load else 0

    # -- this gateway's requests -------------------------------------------------------------------

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
        request = _Request(
            address, uncached_tokens, uncached_tokens, prefill_s, context_tokens, tenant, last_block
        )
        self._requests[ticket] = request
        if uncached_tokens:
            queued = self._queued.setdefault(tenant, _Queued())
            queued.requests += 1
            queued.seconds += prefill_s
        if last_block:
            self._awaited.setdefault((address, last_block), []).append(ticket)
        if load := self._loads.get(address):
            self._loaded(address)
            load.in_flight.add(ticket)
            load.begun += 1
            load.context_tokens += context_tokens
            if uncached_tokens:
                load.prefilling += 1
                load.pending_tokens += uncached_tokens
                load.pending_s += prefill_s

    def blocks_stored(self, address: str, blocks: Sequence[int]) -> list[int]:
        """Record a KV event: it ends the prefills whose last block is in `blocks`. Returns their tickets."""
        if not self._awaited:
            return []
        awaited = self._awaited
        done = [ticket for block in blocks for ticket in awaited.get((address, block), ())]
        for ticket in done:
            self.prefill_done(ticket)
        return done

    def progress(self, ticket: int, tokens: int) -> float:
        """Record that `tokens` more tokens of the request's prompt are cached. Returns the share of its
        prefill that is left. Ignores ended requests, and endpoints that left the pool in between."""
        request = self._requests.get(ticket)
        if request is None:
            return 0.0
        self._progress(ticket, request, min(tokens, request.tokens))
        return request.tokens / request.total_tokens if request.tokens else 0.0

    def _progress(self, ticket: int, request: _Request, done: int) -> None:
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
        if (load := self._loads.get(request.address)) and ticket in load.in_flight:
            self._loaded(request.address)
            load.prefilling -= not request.tokens
            load.pending_tokens -= done
            if load.prefilling:
                load.pending_s -= released_s
            else:
                load.pending_s = 0.0  # removes rounding errors

    def prefill_done(self, ticket: int) -> None:
        """Release the request's whole pending prefill. Ignores ended requests."""
        request = self._requests.get(ticket)
        if request is not None:
            self._prefilled(ticket, request)

    def _prefilled(self, ticket: int, request: _Request) -> None:
        self._progress(ticket, request, request.tokens)
        if request.awaited and (tickets := self._awaited.get((request.address, request.awaited))):
            if ticket in tickets:
                tickets.remove(ticket)
            if not tickets:
                del self._awaited[request.address, request.awaited]
        request.awaited = 0

    def expect_prefilled(self, ticket: int, at: float) -> None:
        """The request's prefill counts as done at the time `at`, if nothing ended it before. A later call
        replaces an earlier one."""
        self._requests[ticket].expected_at = at
        heappush(self._expected, (at, ticket))

    def release(self, now: float) -> None:
        """End the prefills whose predicted time is over."""
        while self._expected and self._expected[0][0] <= now:
            at, ticket = heappop(self._expected)
            request = self._requests.get(ticket)
            if request and request.expected_at == at:
                self._prefilled(ticket, request)

    def begin_again(
        self, ticket: int, address: str, *, uncached_tokens: int, prefill_s: float, last_block: int
    ) -> None:
        """The request has another prefill than it had at its start, there or at another endpoint. Its tenant
        and its context stay."""
        request = self._requests[ticket]
        self.finish(ticket)
        self.start(
            ticket,
            address,
            uncached_tokens=uncached_tokens,
            prefill_s=prefill_s,
            context_tokens=request.context_tokens,
            last_block=last_block,
            tenant=request.tenant,
        )

    def share_of_queue_s(self, tenant: str) -> float:
        """Return how many seconds the tenant's pending prefill takes if all tenants that have some get equal
        shares of all endpoints."""
        queued = self._queued.get(tenant)
        return queued.seconds * len(self._queued) / max(1, len(self._loads)) if queued else 0.0

    def finish(self, ticket: int) -> None:
        """End the request. Raises KeyError if it has already ended."""
        request = self._requests.pop(ticket)
        if request.tokens or request.awaited:
            self._prefilled(ticket, request)
        load = self._loads.get(request.address)
        if load is None:
            return
        self._loaded(request.address)
        if ticket in load.in_flight:
            load.in_flight.remove(ticket)
            load.context_tokens -= request.context_tokens

    def runs(self, ticket: int) -> bool:
        """Whether this request has started and not ended."""
        return ticket in self._requests

    @property
    def count(self) -> int:
        """Number of requests that have started and not ended."""
        return len(self._requests)

    # -- other replicas of the gateway -------------------------------------------------------------

    def set_elsewhere(self, replica: str, address: str, requests: Requests) -> None:
        """Record which requests another replica has in flight at the endpoint."""
        if load := self._loads.get(address):
            self._changed.add(address)
            if requests.in_flight:
                load.by_replica[replica] = requests
            else:
                load.by_replica.pop(replica, None)
            load.elsewhere = _sum(*load.by_replica.values())

    def _loaded(self, address: str) -> None:
        self._changed.add(address)
        self._on_load(address)


def _own(load: _Load) -> Requests:
    pending_s = load.pending_s if load.pending_s > 0.0 else 0.0  # rounding may leave less
    return Requests(len(load.in_flight), load.prefilling, load.pending_tokens, pending_s, load.context_tokens)


def _sum(*many: Requests) -> Requests:
    return Requests(*map(sum, zip(*many, strict=True)))
