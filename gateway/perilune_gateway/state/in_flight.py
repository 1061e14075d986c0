"""The record of a routed request until its end, and all requests that are in flight.

A decision makes the record. Lifecycle (routing/lifecycle.py) writes what happens to the request, and each
listener that has to remember something of it has one field for that: `load`, `wait`, `transfer`, `claimed`,
`move`, `number`, `traced`. Nothing else is kept by request anywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from math import inf

from msgspec import Struct

from perilune_api.trial import Tally
from perilune_gateway.model import DecisionRecord, Move
from perilune_gateway.model.forecast import NO_PREFILL, PrefillForecast
from perilune_gateway.model.handoff import Content, GivenUp
from perilune_gateway.state.session import Session


class Cause(StrEnum):
    """The fault of an endpoint, or of one answer."""

    FAILURES = "failures"
    """Answers with statuses that clients cannot cause, see `Ejection.is_failure`."""
    LATE = "late"
    """No first token, or too late."""


class Sums(Struct, gc=False, kw_only=True):
    """The load at one endpoint, as sums over its requests."""

    in_flight: int = 0
    begun: int = 0
    """Number of requests that were ever in flight."""
    prefilling: int = 0
    pending_tokens: int = 0
    pending_s: float = 0.0
    context_tokens: int = 0


class Load(Struct, gc=False, kw_only=True, eq=False):
    """What a request, or a leg of a transfer, is as load; state/loads.py counts it."""

    address: str
    sums: Sums
    """Where it counts."""
    tokens: int
    """Number of prefill tokens that are still pending."""
    total_tokens: int
    total_s: float
    context_tokens: int
    tenant: str
    awaited: int
    """Block whose KV event ends the prefill. 0 if it is unknown, or if the prefill has ended."""
    ticket: int
    """Of the request. -1 for a leg, which the gateway sends itself."""
    rank: float = 0.0
    """Its place in the engine's queue where engines rank tenants: lower ones are served first."""
    expected_at: float = inf
    """When the prefill counts as done if nothing ended it before."""
    over: bool = False

    @property
    def pending_s(self) -> float:
        """Predicted seconds of the prefill that is still pending."""
        return self.total_s * self.tokens / self.total_tokens if self.total_tokens else 0.0


class Wait(Struct, gc=False, kw_only=True):
    """That a request has no first sign yet; state/ejection.py judges by it."""

    address: str
    tenant: str
    source: Hashable
    """Its session, or the request itself."""
    since: float
    alone_s: float
    """Predicted seconds until the first sign on a healthy and idle endpoint."""
    by_event: bool
    """Whether that sign is a KV event."""
    cause: Cause | None = None
    """The bad evidence that it has given; then it gives no more."""


class Transfer(Struct, gc=False, kw_only=True, eq=False):
    """The KV that comes from another endpoint for a request; routing/request_transfers.py lists who writes
    it."""

    move: Move
    began_at: float
    tokens: int
    """Prompt tokens that the transfer is about."""
    cause: GivenUp | None = None
    """Why it was given up. None if it was not."""


class InFlight(Struct, gc=False, kw_only=True, eq=False):
    """A routed request that has not ended: what was decided, what is predicted, and what has happened. Times
    are monotonic seconds."""

    ticket: int
    target: str
    """The endpoint that has it, as far as is known."""
    join: int
    """Number of the target's joining the pool. With another one, another endpoint is at its address."""
    started_at: float
    sent_at: float
    """When the endpoint got the request: when it started, or later if it was held before."""
    tenant: str = ""
    prompt_tokens: int = 0
    session: Session | None = None
    final: bool = False
    """Whether it is the last one of its session."""
    cache_key: str = ""
    """OpenAI's `prompt_cache_key`."""
    blocks: Sequence[int] = ()
    announced_tokens: int = 0
    """Prompt tokens that its endpoint itself has on its device, by its KV events. 0 if they do not say."""
    claim_s: float | None = None
    """Seconds for which its blocks count as cached if they are not announced. None if as the pool says."""
    awaited: int = 0
    """The block whose KV event ends the prefill. 0 if none is known."""
    told: bool = False
    """Whether KV events end its prefill: the awaited block's, or those that continue the session."""
    expects_ratio: float = 0.0
    """Where no KV event ends the prefill: its time over the predicted one, at most. 0 if an event does."""
    patience_s: float | None = None
    """Predicted seconds until the first sign on a healthy and idle endpoint. None if nobody judges the
    endpoint by this request."""
    forecast: PrefillForecast = NO_PREFILL
    alone: PrefillForecast | None = None
    """The forecast if the KV does not come from another endpoint after all. None if none would come."""
    content: Content | None = None
    """What its endpoint fetches from another one before it gets the request."""
    learns: bool = False
    """Whether its prefill tells how fast the endpoint is."""
    arrived_at: float | None = None
    """When the request arrived. None if its first token is counted already, or if it has none."""
    name: int = 0
    """What it is called if it breaks engines, see state/resets.py."""
    tally: Tally | None = None
    """Where it counts in the trial of a canary. None if it counts nowhere."""

    # What has happened.
    prefilled_at: float = 0.0
    answered_at: float = 0.0
    served: str = ""
    """The endpoint that answers. Empty if no answer has come, or if it is unknown."""
    status: int = 0
    streamed: bool = False
    """Whether the answer's head has come, and the answer is a stream."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine had cached, as it reports. None if it has not reported."""

    output_tokens: int = 0
    """Tokens of the answer, as the engine reports. 0 if it has not reported."""
    first_token_at: float = 0.0

    # What listeners keep.
    load: Load | None = None
    wait: Wait | None = None
    transfer: Transfer | None = None
    claimed: Sequence[int] = ()
    """Those of its blocks that count as cached at the target, because it was sent there."""
    move: int = -1
    """The planner's ticket of the move that this request carries out. -1 if there is none, or if it is
    over."""
    number: int = -1
    """Number of its record among the kept decisions."""
    traced: DecisionRecord | None = None
    """The record of its decision, if its span is sent at its end."""
    fell_back: bool = False
    """Whether another policy decided because the one that should have had failed."""


class Requests:
    """The routed requests of one pool that have not ended. Lifecycle adds and removes them."""

    def __init__(self) -> None:
        self._open: dict[int, InFlight] = {}

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> Iterable[InFlight]:
        """Return all that are in flight, the oldest first. Nothing may be added or removed meanwhile."""
        return self._open.values()

    def get(self, ticket: int) -> InFlight | None:
        """Return the request with this ticket. None if it has ended."""
        return self._open.get(ticket)

    def __getitem__(self, ticket: int) -> InFlight:
        """Return the request with this ticket. Raise KeyError if it has ended."""
        return self._open[ticket]

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._open

    def add(self, request: InFlight) -> None:
        self._open[request.ticket] = request

    def pop(self, ticket: int) -> InFlight:
        """Remove a request that ends. Raise KeyError if it has ended before."""
        return self._open.pop(ticket)
