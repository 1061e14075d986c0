"""The load that requests are at each endpoint, from their decision to their end.

The pending prefill of a request is counted in tokens and seconds, which include those of reading the shared
store: an engine reads for one request after the other. It ends with the first of these: a KV event
with the prompt's last block, the head of an answer that is not streamed, the predicted time where no event is
expected, or the end of the request. KV events that only show a session's growth release it in steps.

The legs of transfers, which the gateway sends itself, are load too: `start` and `finish`.

Where several gateways share their state, `set_elsewhere` adds the load that another one has sent to an
endpoint, and `own` returns what they are told of this one's. `set_queued_elsewhere` and `queued` do the same
for tenants' pending prefill. Every method costs O(1), except `follow`, and O(tenants with pending prefill)
for those about tenants. `goes_before` costs O(requests with pending prefill at the endpoint).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heappop, heappush, nlargest
from math import inf
from typing import NamedTuple

from msgspec import Struct, field

from perilune_gateway.model import Tier
from perilune_gateway.state.facts import BlocksChanged, LoadChanged, Tell, nobody
from perilune_gateway.state.in_flight import InFlight, Load, Sums
from perilune_gateway.state.request_facts import (
    Answered,
    Decided,
    Ended,
    Progressed,
    Rerouted,
    Sent,
    Withdrawn,
)


class AtEndpoint(NamedTuple):
    """Requests in flight at an endpoint, as numbers that add up."""

    in_flight: int = 0
    prefilling: int = 0
    pending_tokens: int = 0
    pending_s: float = 0.0
    context_tokens: int = 0


NOTHING = AtEndpoint()


class _Queued(Struct, gc=False):
    """The pending prefill of one tenant in the whole pool."""

    name: Hashable
    """What all gateways call the tenant."""
    requests: int = 0
    seconds: float = 0.0


class _Endpoint(Struct, gc=False):
    """The requests at one endpoint."""

    sums: Sums = field(default_factory=Sums)
    """Of this gateway's requests."""
    pending: dict[Load, None] = field(default_factory=dict)
    """Those with pending prefill, where engines rank tenants."""
    by_replica: dict[str, AtEndpoint] = field(default_factory=dict)
    """Other replica of the gateway → the requests that it has sent here."""
    elsewhere: AtEndpoint = NOTHING
    """Their sum."""


class Loads:
    """The load at a pool's endpoints."""

    def __init__(self, tell: Tell = nobody, shared_tenant: Callable[[str], Hashable] = str) -> None:
        """`tell` hears `LoadChanged`. `shared_tenant` returns what all gateways call a tenant."""
        self.ranks_tenants = False
        """Whether tenants' shares count, so that other gateways are told of their pending prefill."""
        self._tell = tell
        self._shared_tenant = shared_tenant
        self._endpoints: dict[str, _Endpoint] = {}
        self._queued: dict[str, _Queued] = {}
        """Tenant → its pending prefill here; only tenants that have some."""
        self._queued_by_replica: dict[str, Mapping[Hashable, float]] = {}
        """Other replica of the gateway → tenant, as all call it → seconds of its pending prefill there."""
        self._queued_elsewhere: Mapping[Hashable, float] = {}
        """Their sum."""
        self._awaited: dict[str, dict[int, list[Load]]] = {}
        """Address → last block of a prompt → the loads whose prefill that block's event ends."""
        self._expected: list[tuple[float, int, Load]] = []
        """A heap of (time, tie breaker, load): prefills that end at a predicted time."""
        self._pushed = 0

    def follow(self, addresses: Iterable[str]) -> None:
        """Count the load of these endpoints from now on; those that stay keep theirs."""
        self._endpoints = {address: self._endpoints.get(address) or _Endpoint() for address in addresses}

    def own(self, address: str) -> AtEndpoint:
        """Return the requests that this gateway has sent to the endpoint."""
        endpoint = self._endpoints.get(address)
        return _own(endpoint.sums) if endpoint else NOTHING

    def at(self, address: str) -> AtEndpoint:
        """Return the requests of all gateways at the endpoint."""
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            return NOTHING
        own = _own(endpoint.sums)
        return _sum(own, endpoint.elsewhere) if endpoint.by_replica else own

    def begun(self, address: str) -> int:
        """Return how many requests this gateway has begun at the endpoint since it joined the pool."""
        endpoint = self._endpoints.get(address)
        return endpoint.sums.begun if endpoint else 0

    def share_of_queue_s(self, tenant: str) -> float:
        """Return how many seconds the tenant's pending prefill takes if all tenants that have some get equal
        shares of all endpoints. All gateways' requests count."""
        queued, elsewhere = self._queued.get(tenant), self._queued_elsewhere
        seconds, tenants = queued.seconds if queued else 0.0, len(self._queued)
        if elsewhere:
            seconds += elsewhere.get(queued.name if queued else self._shared_tenant(tenant), 0.0)
            tenants += len(elsewhere) - sum(other.name in elsewhere for other in self._queued.values())
        return seconds * tenants / max(1, len(self._endpoints))

    @property
    def contended(self) -> bool:
        """Whether engines rank tenants, and one has pending prefill."""
        return self.ranks_tenants and bool(self._queued)

    def rank(self, tenant: str, now: float) -> float:
        """Return the place in engines' queues of a request of the tenant that comes now, as seconds."""
        return now + self.share_of_queue_s(tenant)

    def goes_before(self, address: str, rank: float) -> float:
        """Return the share of the endpoint's pending prefill that a request with that place waits for: what
        has places before it, and what runs. Judged by this gateway's requests."""
        endpoint = self._endpoints.get(address)
        if endpoint is None or not endpoint.pending:
            return 1.0
        total_s = before_s = runs_s = 0.0
        first = inf
        for load in endpoint.pending:
            left_s = load.pending_s
            total_s += left_s
            if load.rank <= rank:
                before_s += left_s
            if load.rank < first:
                first, runs_s = load.rank, left_s
        return max(before_s, runs_s) / total_s if total_s else 1.0

    def queued(self, most: int) -> Mapping[Hashable, float]:
        """Return the seconds of pending prefill here of the tenants that have the most, by the names that all
        gateways call them."""
        if not self.ranks_tenants:
            return {}
        each = nlargest(most, self._queued.values(), key=lambda queued: queued.seconds)
        return {queued.name: max(0.0, queued.seconds) for queued in each}

    def awaiting(self, address: str, blocks: Sequence[int]) -> list[int]:
        """Return the tickets of the requests whose prefill ends when the endpoint announces these blocks."""
        return [load.ticket for load in self._awaiting(address, blocks) if load.ticket >= 0]

    def _awaiting(self, address: str, blocks: Sequence[int]) -> list[Load]:
        awaited = self._awaited.get(address)
        if not awaited:
            return []
        return [load for block in awaited.keys() & blocks for load in awaited[block]]

    # -- what happens to requests ------------------------------------------------------------------

    def on_decided(self, fact: Decided) -> None:
        request = fact.request
        self._begin(request, request.prompt_tokens, request.tenant, request.awaited)
        self._expect(request)

    def on_sent(self, fact: Sent) -> None:
        request = fact.request
        if fact.alone:
            self._again(request, request.awaited)
        self._expect(request)

    def on_rerouted(self, fact: Rerouted) -> None:
        request = fact.request
        self._again(request, request.awaited if request.forecast.uncached_tokens else 0)
        self._expect(request)

    def on_progressed(self, fact: Progressed) -> None:
        if load := fact.request.load:
            self.progress(load, fact.tokens)

    def on_blocks_changed(self, fact: BlocksChanged) -> None:
        applied = fact.applied
        if applied.tier is Tier.DEVICE:
            for load in self._awaiting(applied.endpoint, applied.stored):
                self.prefilled(load)

    def on_answered(self, fact: Answered) -> None:
        request = fact.request
        if request.load and not request.streamed:
            self.prefilled(request.load)

    def on_ended(self, fact: Ended) -> None:
        self._end(fact.request)

    def on_withdrawn(self, fact: Withdrawn) -> None:
        self._end(fact.request)

    def _begin(self, request: InFlight, context_tokens: int, tenant: str, awaited: int) -> None:
        forecast = request.forecast
        request.load = self.start(
            request.target,
            uncached_tokens=forecast.uncached_tokens,
            prefill_s=forecast.engine_s,
            context_tokens=context_tokens,
            last_block=awaited,
            tenant=tenant,
            ticket=request.ticket,
            rank=self.rank(tenant, request.started_at) if self.ranks_tenants else 0.0,
        )

    def _again(self, request: InFlight, awaited: int) -> None:
        """Count another prefill than the request had at its start, there or at another endpoint. Its tenant
        and its context stay."""
        before = request.load
        assert before, "it was decided"
        self.finish(before)
        self._begin(request, before.context_tokens, before.tenant, awaited)

    def _expect(self, request: InFlight) -> None:
        """If no KV event ends the prefill, it ends as predicted."""
        if request.expects_ratio and request.load:
            self.expect(request.load, request.sent_at + request.expects_ratio * request.forecast.ttft_s)

    def _end(self, request: InFlight) -> None:
        if request.load:
            self.finish(request.load)
            request.load = None

    # -- any load ----------------------------------------------------------------------------------

    def start(
        self,
        address: str,
        *,
        uncached_tokens: int,
        prefill_s: float,
        context_tokens: int,
        last_block: int = 0,
        tenant: str = "",
        ticket: int = -1,
        rank: float = 0.0,
    ) -> Load:
        """Add to the load of `address`. `last_block` is our hash of the prompt's last full block, or 0 if it
        is unknown or already cached there. `ticket` is that of a request; a leg has none."""
        endpoint = self._endpoints.get(address)
        load = Load(
            address=address,
            sums=endpoint.sums if endpoint else Sums(),
            tokens=uncached_tokens,
            total_tokens=uncached_tokens,
            total_s=prefill_s,
            context_tokens=context_tokens,
            tenant=tenant,
            awaited=last_block,
            ticket=ticket,
            rank=rank,
        )
        if uncached_tokens:
            if endpoint and self.ranks_tenants:
                endpoint.pending[load] = None
            queued = self._queued.get(tenant)
            if queued is None:
                queued = self._queued[tenant] = _Queued(self._shared_tenant(tenant))
            queued.requests += 1
            queued.seconds += prefill_s
        if last_block:
            self._awaited.setdefault(address, {}).setdefault(last_block, []).append(load)
        sums = load.sums
        sums.in_flight += 1
        sums.begun += 1
        sums.context_tokens += context_tokens
        if uncached_tokens:
            sums.prefilling += 1
            sums.pending_tokens += uncached_tokens
            sums.pending_s += prefill_s
        self._tell(LoadChanged(address, True))
        return load

    def progress(self, load: Load, tokens: int) -> None:
        """Release `tokens` of the pending prefill, or what is left of it."""
        if done := min(tokens, load.tokens):
            load.tokens -= done
            released_s = load.total_s * done / load.total_tokens
            queued = self._queued[load.tenant]
            queued.seconds -= released_s
            queued.requests -= not load.tokens
            if not queued.requests:
                del self._queued[load.tenant]
            if not load.tokens and (endpoint := self._endpoints.get(load.address)):
                endpoint.pending.pop(load, None)
            sums = load.sums
            sums.prefilling -= not load.tokens
            sums.pending_tokens -= done
            if sums.prefilling:
                sums.pending_s -= released_s
            else:
                sums.pending_s = 0.0  # removes rounding errors
            self._tell(LoadChanged(load.address, True))

    def prefilled(self, load: Load) -> None:
        """Release the whole pending prefill. A second call does nothing."""
        self.progress(load, load.tokens)
        if load.awaited:
            awaited = self._awaited[load.address]
            awaited[load.awaited].remove(load)
            if not awaited[load.awaited]:
                del awaited[load.awaited]
            if not awaited:
                del self._awaited[load.address]
            load.awaited = 0

    def expect(self, load: Load, at: float) -> None:
        """Let the prefill count as done at the time `at` if nothing ended it before. A later call replaces an
        earlier one."""
        load.expected_at = at
        self._pushed += 1
        heappush(self._expected, (at, self._pushed, load))

    def pass_time(self, now: float) -> None:
        """End the prefills whose predicted time is over."""
        while self._expected and self._expected[0][0] <= now:
            at, _, load = heappop(self._expected)
            if load.expected_at == at and not load.over:
                self.prefilled(load)

    def finish(self, load: Load) -> None:
        """End the load. Raise ValueError if it has ended before."""
        if load.over:
            raise ValueError("this load has ended before")
        self.prefilled(load)
        load.over = True
        load.sums.in_flight -= 1
        load.sums.context_tokens -= load.context_tokens
        self._tell(LoadChanged(load.address, True))

    # -- other replicas of the gateway -------------------------------------------------------------

    def set_elsewhere(self, replica: str, address: str, requests: AtEndpoint) -> None:
        """Record which requests another replica has in flight at the endpoint."""
        if endpoint := self._endpoints.get(address):
            if requests.in_flight:
                endpoint.by_replica[replica] = requests
            else:
                endpoint.by_replica.pop(replica, None)
            endpoint.elsewhere = _sum(*endpoint.by_replica.values())
            self._tell(LoadChanged(address, False))

    def set_queued_elsewhere(self, replica: str, queued: Mapping[Hashable, float]) -> None:
        """Record which tenants have pending prefill at another replica."""
        if queued:
            self._queued_by_replica[replica] = queued
        else:
            self._queued_by_replica.pop(replica, None)
        total: dict[Hashable, float] = {}
        for each in self._queued_by_replica.values():
            for tenant, seconds in each.items():
                total[tenant] = total.get(tenant, 0.0) + seconds
        self._queued_elsewhere = total


def _own(sums: Sums) -> AtEndpoint:
    pending_s = sums.pending_s if sums.pending_s > 0.0 else 0.0  # rounding may leave less
    return AtEndpoint(sums.in_flight, sums.prefilling, sums.pending_tokens, pending_s, sums.context_tokens)


def _sum(*many: AtEndpoint) -> AtEndpoint:
    return AtEndpoint(*map(sum, zip(*many, strict=True)))
