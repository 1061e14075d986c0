"""The values that pass between the gateway's parts. Frozen but for one field, no behaviour beyond
derived numbers.

    RequestHead ──▶ RequestView ──┐
                                  ├─▶ policy ─▶ Decision │ Refusal │ NeedBody ─▶ Routed
    Endpoint, Load, Overlap ─▶ Candidate ──┘

Units are in the names; token counts are ints, seconds floats; `kv_usage` is 0–1. An endpoint is named by
its address, `ip:port`, everywhere.

What each decision makes is a frozen struct, a fifth of a frozen dataclass's cost, or, where there is one per
endpoint, a named tuple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from perilune_api.pool import Role
from perilune_api.topology import Link, Place
from perilune_gateway.engine_model import H20_30B, EngineModel

if TYPE_CHECKING:
    from perilune_gateway.identity import Identity
    from perilune_gateway.migration import Move
    from perilune_gateway.openai import ParsedRequest


class Reason(StrEnum):
    """Why an endpoint was chosen: metric label, log field, test assertion."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    COLD = "cold"
    """No host yet (or its host is gone): the endpoint with the fewest pending prefill tokens."""
    HOST = "host"
    """The session's host, which is not hot."""
    MOVED = "moved"
    """The host is hot, drains, or costs more by enough: the session moves with this request."""
    HOT_COOLDOWN = "hot_cooldown"
    """The session would move, but it moved too recently: it stays."""
    HOT_NOWHERE = "hot_nowhere"
    """The host is hot, but no endpoint with KV room has less pending: it stays."""
    PASS_THROUGH = "pass_through"
    """Not a request for the model: any ready endpoint."""
    FORCED = "forced"
    """Named by the conformance header (only with --conformance)."""
    LOWEST_COST = "lowest_cost"
    """The policy's formula gives it the lowest cost."""
    SAMPLED = "sampled"
    """Drawn; the lower the cost, the likelier."""
    CACHE_NODE = "cache_node"
    """It holds the prefix, has KV room and a short queue: the shortest of such queues."""
    NEAR_CACHE = "near_cache"
    """No holder of the prefix will do; it is near one, by distance and queue."""
    NO_CACHE = "no_cache"
    """Nothing worth using is cached: the least loaded."""
    CACHE_AWARE = "cache_aware"
    """Lowest predicted TTFT with what it holds itself."""
    CACHE_BALANCING = "cache_balancing"
    """Lowest predicted TTFT with the best holder's prefix transferred to it."""
    NOT_WORTH = "not_worth"
    """Another endpoint is cheaper than the session's host, but not by enough to move the session."""
    SPLIT = "split"
    """Prefill on one endpoint, decode on another."""
    PLANNED = "planned"
    """The migration planner moves the session; `Decision.move` says why."""
    REPLICA = "replica"
    """The migration planner wants a copy of the prompt's prefix there."""


MOVING = frozenset({Reason.MOVED, Reason.PLANNED})
"""Reasons with which a session leaves its host."""


class RefuseReason(StrEnum):
    """Why no endpoint was chosen: metric label, response header, error code."""

    BAD_JSON = "bad_json"
    NO_MODEL = "no_model"
    BAD_REQUEST = "bad_request"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LONG = "context_length_exceeded"
    BODY_TOO_LARGE = "body_too_large"
    NO_ENDPOINT = "no_endpoint"
    SUBSET_EMPTY = "subset_empty"
    OVERLOADED = "overloaded"
    INTERNAL = "internal"


STATUS: Mapping[RefuseReason, int] = {
    RefuseReason.BAD_JSON: 400,
    RefuseReason.NO_MODEL: 400,
    RefuseReason.BAD_REQUEST: 400,
    RefuseReason.UNKNOWN_MODEL: 404,
    RefuseReason.TOO_LONG: 400,
    RefuseReason.BODY_TOO_LARGE: 413,
    RefuseReason.NO_ENDPOINT: 503,
    RefuseReason.SUBSET_EMPTY: 503,
    RefuseReason.OVERLOADED: 429,
    RefuseReason.INTERNAL: 500,
}


class TokenSource(StrEnum):
    """Where a prompt's token count comes from."""

    LOCAL = "local"
    ENGINE = "engine"
    ESTIMATE = "estimate"
    """From bytes: no ids, so no exact overlap."""
    GIVEN = "given"
    """The request itself carries token ids."""


class Tier(StrEnum):
    """Where a block lies; `device` and `host` belong to an endpoint, `store` to the pool."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


class Phase(StrEnum):
    """When a decision was taken: the body unseen, or seen."""

    HEADERS = "headers"
    BODY = "body"


class Outcome(StrEnum):
    """How a routed request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """The client or Envoy went away before the answer ended."""
    FAILED = "failed"
    """The endpoint answered 5xx, or broke off."""


class RequestHead(Struct, gc=False):
    """What request headers say. Header names are lower case. Frozen but for `identity`."""

    method: str
    path: str
    headers: Mapping[str, str]
    subset: frozenset[str] | None = None
    """Endpoints to choose from; None: all; empty: none is allowed."""
    has_body: bool = True
    identity: Identity | None = None
    """Whose request that makes it; the router fills it in, by the keys that its pool then has."""

    @property
    def content_length(self) -> int:
        """Bytes of the body, 0 when the client did not say."""
        value = self.headers.get("content-length", "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else 0


class Tokens(Struct, frozen=True, gc=False):
    """A prompt as tokens."""

    count: int
    source: TokenSource
    ids: Sequence[int] | None = None
    """None with TokenSource.ESTIMATE."""


class SessionView(Struct, frozen=True, gc=False):
    """A session as a policy sees it."""

    session_id: str
    host: str = ""
    """Address it is bound to; empty: not bound."""
    seconds_since_move: float = inf
    context_tokens: int = 0
    """Tokens of its last prompt and answer, as far as known."""
    turns: int = 0
    parent_host: str = ""
    """Host of the session that started this one, else of the last with its `prompt_cache_key`: they share a
    prefix, probably."""


class Location(NamedTuple):
    """An endpoint that holds leading prompt tokens."""

    address: str
    tokens: int


class Prefix(Struct, frozen=True, gc=False):
    """What is known of the longest prefix of a prompt that any endpoint itself holds."""

    locations: tuple[Location, ...] = ()
    """Who holds most of it on device or host, most first: a few, not all. They need not be candidates."""
    hits: int = 0
    """Times that a match ended here."""
    frequency_score: float = 0.0
    """hits / sqrt(seconds since it was first known): Conductor's hotness."""
    pullable: bool = False
    """An endpoint can pull KV from another."""

    @property
    def tokens(self) -> int:
        return self.locations[0].tokens if self.locations else 0


NO_PREFIX = Prefix()


class RequestView(Struct, frozen=True, gc=False):
    """A request as a policy sees it."""

    request_id: str
    ordinal: int
    """Counts the pool's requests from 0."""
    prompt_tokens: int
    phase: Phase = Phase.BODY
    session: SessionView | None = None
    model: str = ""
    output_tokens: int = 0
    """Upper bound from the request, 0: unknown."""
    token_source: TokenSource = TokenSource.LOCAL
    priority: int = 0
    """Of the body, for the engine: lower is served first."""
    level: int = 0
    """For admission: below 0 is refused earlier, above 0 later."""
    slo_ttft_s: float = 0.0
    """The request's or else the pool's; 0: none."""
    slo_tpot_s: float = 0.0
    prefix: Prefix = NO_PREFIX
    block_size: int = 16
    """Tokens per KV block, for formulas that count blocks."""
    prefill_queue: int = 0
    """Requests in the pool's prefill queue, where it has one."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One vLLM server, as configured or observed."""

    address: str
    role: Role = Role.BOTH
    place: Place = Place()
    events: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    ready: bool = True
    draining: bool = False


class Load(NamedTuple):
    """What an endpoint has to do."""

    pending_prefill_tokens: int = 0
    """Uncached prompt tokens waiting or running."""
    pending_prefill_s: float = 0.0
    in_flight: int = 0
    """Requests that this gateway sent there and that have not ended."""
    running: int = 0
    """As the engine's metrics say."""
    waiting: int = 0
    kv_usage: float = 0.0
    kv_free_tokens: int = 0
    sessions: int = 0
    metrics_age_s: float = inf
    """Seconds since its metrics were read; inf: never."""
    prefilling: int = 0
    """Of the requests in flight, those whose prefill has not ended."""
    active_kv_tokens: int = 0
    """Context tokens of the requests in flight."""
    kv_pool_tokens: int = 0
    """Tokens that its device KV pool holds; 0: unknown."""

    @property
    def decoding(self) -> int:
        return max(0, self.in_flight - self.prefilling)

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.pending_prefill_s or self.running or self.waiting)


class Overlap(NamedTuple):
    """Leading prompt tokens that are cached for an endpoint, counted cumulatively by tier:
    `host_tokens` are those that device or host hold, `store_tokens` those that any tier holds."""

    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0


class Candidate(NamedTuple):
    """An endpoint that may be chosen, with every fact that a formula needs."""

    endpoint: Endpoint
    load: Load = Load()
    overlap: Overlap = Overlap()
    prefill_s: float = 0.0
    """Predicted seconds of prefill of this prompt here, its overlap subtracted."""
    seconds_since_move: float = inf
    """Since a session last moved in or out."""
    links: Mapping[str, Link] = MappingProxyType({})
    """To the endpoints that hold the prefix (at least to the prefix's locations), by address."""
    engine: EngineModel = H20_30B
    """How fast it is, as believed and corrected by what was observed."""
    decode_s: float = 0.0
    """Seconds that a request decodes there, as observed; 0: unknown."""
    ttft_ratio: float = 1.0
    """Observed / predicted seconds to the first token there."""

    @property
    def address(self) -> str:
        return self.endpoint.address

    @property
    def draining(self) -> bool:
        return self.endpoint.draining


class Cost(NamedTuple):
    """One candidate's cost; lower is better. `terms` are its named parts."""

    address: str
    total: float
    terms: Mapping[str, float]


class Decision(Struct, frozen=True, gc=False):
    """What a policy chose, and the numbers it chose by."""

    target: str
    reason: Reason
    costs: Sequence[Cost] = ()
    """Of every candidate, in the candidates' order."""
    moved_from: str = ""
    """The host that the session leaves, if it moves."""
    prefill: str = ""
    """Where the prefill runs, if not on the target; the target then decodes."""
    prefill_queued: bool = False
    """The prefill goes into the pool's prefill queue: whichever prefill endpoint is free takes it."""
    replicate_from: str = ""
    """Whom the prefilling endpoint pulls the prefix from, before or while it prefills the rest. A pull that
    fails means recompute. Empty: it uses what it holds itself or the shared store."""
    cached_tokens: int = 0
    """Prompt tokens that the policy counts on not having to prefill; 0 where it does not look."""
    estimated_ttft_s: float = 0.0
    """Queue, fetching and prefill as the policy reckoned; 0: it did not."""
    estimated_tpot_s: float = 0.0
    move: Move | None = None
    """The planner's offer that is carried out, with its reason and numbers."""

    @property
    def prefill_endpoint(self) -> str:
        """Empty while the prefill is queued."""
        return "" if self.prefill_queued else self.prefill or self.target


class Refusal(Struct, frozen=True, gc=False):
    """No endpoint; the client gets an error in OpenAI's form."""

    reason: RefuseReason
    message: str
    retry_after_s: float = 0.0

    @property
    def status(self) -> int:
        return STATUS[self.reason]


class NeedBody(Struct, frozen=True, gc=False):
    """The headers do not suffice; decide when the body is there."""


NEED_BODY = NeedBody()
Verdict = Decision | Refusal | NeedBody


class Routed(Struct, frozen=True, gc=False):
    """A decision that has been recorded: what Envoy must be told, and the ticket of its load."""

    ticket: int
    """Names the request until `router.finished(ticket)`, which must come exactly once."""
    destinations: tuple[str, ...]
    """The chosen endpoint, then fallbacks."""
    request_id: str
    decision_header: str = ""
    """Value of the response header x-perilune-decision, where asked for."""
    priority: int | None = None
    """To be written into the body, for the engine; None: the body stays as it is."""


class Encode(Struct, frozen=True, gc=False):
    """Tokenization has to wait (a thread, the engine): the driver answers with `router.on_tokens`."""

    head: RequestHead
    request: ParsedRequest
    body_bytes: int
