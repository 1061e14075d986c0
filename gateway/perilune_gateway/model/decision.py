"""A decision: the chosen endpoint or a refusal, the reason, the costs, and how the request ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from perilune_gateway.model.handoff import Attachment, KvPull, RemotePrefill
from perilune_gateway.model.moves import Move
from perilune_gateway.model.request import Unpulled, Unsplit


class Reason(StrEnum):
    """Why an endpoint was chosen: metric label, log field, test assertion."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    COLD = "cold"
    """The session has no host, or its host is gone; the endpoint has the lowest cost."""
    HOST = "host"
    """The session stays on its host, which is not hot."""
    MOVED = "moved"
    """The session leaves its host, which is hot, drains, or costs enough more than the target."""
    HOT_COOLDOWN = "hot_cooldown"
    """The host is hot, but the session moved too recently and stays."""
    HOT_NOWHERE = "hot_nowhere"
    """The host is hot, but no endpoint with KV room has fewer pending tokens, so the session stays."""
    PASS_THROUGH = "pass_through"
    """The request is not for the model and goes to any ready endpoint."""
    FORCED = "forced"
    """The conformance header names the endpoint (only with --conformance)."""
    LOWEST_COST = "lowest_cost"
    """The endpoint has the lowest cost by the policy's formula."""
    SAMPLED = "sampled"
    """The policy chose randomly; endpoints with a lower cost are more probable."""
    CACHE_NODE = "cache_node"
    """The endpoint caches the prefix, has KV room, and has the shortest queue of such endpoints."""
    NEAR_CACHE = "near_cache"
    """No endpoint that caches the prefix is suitable; this one is near such an endpoint."""
    NO_CACHE = "no_cache"
    """No useful prefix is cached; the endpoint is the least loaded."""
    CACHE_AWARE = "cache_aware"
    """The endpoint has the lowest predicted TTFT with its own cached prefix."""
    CACHE_BALANCING = "cache_balancing"
    """The endpoint has the lowest predicted TTFT, with the longest cached prefix transferred to it."""
    NOT_WORTH = "not_worth"
    """Another endpoint is cheaper than the session's host, but not by enough to move the session."""
    AWAITS_KV = "awaits_kv"
    """The policy prefers another endpoint, but the session's KV is being handed over, so it stays until that
    has arrived."""
    SPLIT = "split"
    """Prefill runs on one endpoint, decode on another."""
    PLANNED = "planned"
    """The migration planner moves the session; `Decision.move` says why."""
    REPLICA = "replica"
    """The migration planner copies the prompt's prefix to this endpoint."""


MOVING = frozenset({Reason.MOVED, Reason.PLANNED})
"""Reasons for which a session leaves its host."""


class RefuseReason(StrEnum):
    """Why a request was refused: metric label, response header, error code."""

    BAD_JSON = "bad_json"
    NO_MODEL = "no_model"
    BAD_REQUEST = "bad_request"
    UNKNOWN_MODEL = "unknown_model"
    NOT_FOUND = "not_found"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    """The body is compressed in a way that we cannot read."""
    UPGRADE = "upgrade"
    """The request asks for another protocol, such as a web socket."""
    TOO_LONG = "context_length_exceeded"
    BODY_TOO_LARGE = "body_too_large"
    RESETS = "resets_engines"
    """Engines broke off before they answered the same request."""
    NO_ENDPOINT = "no_endpoint"
    STARTING = "starting"
    """No endpoint is ready, and one should be soon."""
    SUBSET_EMPTY = "subset_empty"
    OVERLOADED = "overloaded"
    NO_ROOM = "no_room"
    """The session is new, and the KV cache is full of active sessions."""
    INTERNAL = "internal"


STATUS: Mapping[RefuseReason, int] = {
    RefuseReason.BAD_JSON: 400,
    RefuseReason.NO_MODEL: 400,
    RefuseReason.BAD_REQUEST: 400,
    RefuseReason.UNKNOWN_MODEL: 404,
    RefuseReason.NOT_FOUND: 404,
    RefuseReason.UNSUPPORTED_ENCODING: 415,
    RefuseReason.UPGRADE: 426,
    RefuseReason.TOO_LONG: 400,
    RefuseReason.BODY_TOO_LARGE: 413,
    RefuseReason.RESETS: 400,
    RefuseReason.NO_ENDPOINT: 503,
    RefuseReason.STARTING: 429,
    RefuseReason.SUBSET_EMPTY: 503,
    RefuseReason.OVERLOADED: 429,
    RefuseReason.NO_ROOM: 429,
    RefuseReason.INTERNAL: 500,
}
"""HTTP status of each refusal."""


class Outcome(StrEnum):
    """How a routed request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """The client or Envoy closed the stream before the answer ended."""
    FAILED = "failed"
    """The endpoint answered with 5xx, or its answer broke off."""


class Step(StrEnum):
    """Steps of one decision; the keys of `DecisionRecord.timings_us`."""

    PARSE = "parse"
    TOKENIZE = "tokenize"
    HASH = "hash"
    INDEX = "index"
    POLICY = "policy"
    TOTAL = "total"


class Cost(NamedTuple):
    """One candidate's cost; lower is better."""

    address: str
    total: float
    terms: Mapping[str, float] = MappingProxyType({})
    """The named numbers that make up the total; none if it is a single fact of the candidate."""


class Chosen(Struct, frozen=True, gc=False):
    """What every policy says of its choice, in this order; all else of a `Decision` has a name."""

    target: str
    reason: Reason
    costs: Sequence[Cost] = ()
    """Cost of every candidate, in the candidates' order."""


class Decision(Chosen, frozen=True, gc=False, kw_only=True):
    """The endpoint that a policy chose, and the numbers behind the choice."""

    moved_from: str = ""
    """Address of the host that the session leaves; empty if it does not move."""
    prefill: str = ""
    """Address where the prefill runs, if not on the target; the target then only decodes."""
    prefill_costs: Sequence[Cost] = ()
    """Seconds that the prompt's prefill costs, first at the endpoint that the policy chose, then at each
    prefill endpoint with room that the first can fetch from. Empty if they were not compared."""
    replicate_from: str = ""
    """Address that the prefilling endpoint pulls the prefix from; if that fails, it recomputes the prefix.
    Empty if it uses its own caches and the shared store."""
    cached_tokens: int = 0
    """Number of prompt tokens that the policy expects to be cached; 0 if it does not predict that."""
    estimated_ttft_s: float = 0.0
    """Predicted seconds of queue, fetch and prefill; 0 if the policy does not predict them."""
    estimated_tpot_s: float = 0.0
    """Predicted seconds per output token; 0 if the policy does not predict them."""
    move: Move | None = None
    """The planner's proposal that this decision carries out, with its reason and numbers."""
    unsplit: Unsplit | None = None
    """Why the target prefills the prompt itself; None if it does not, or without prefill endpoints."""
    unpulled: Unpulled | None = None
    """Why the target computes what another endpoint caches; None if it does not, or if no other caches
    more."""

    @property
    def prefill_endpoint(self) -> str:
        """Address where the prefill runs."""
        return self.prefill or self.target


class Refusal(Struct, frozen=True, gc=False):
    """No endpoint was chosen; the client gets an error in OpenAI's format."""

    reason: RefuseReason
    message: str
    retry_after_s: float = 0.0

    @property
    def status(self) -> int:
        return STATUS[self.reason]


class Answer(Struct, frozen=True, gc=False):
    """The gateway answers the client itself; the request reaches no endpoint."""

    body: bytes
    """JSON, which goes with status 200."""


class NeedBody(Struct, frozen=True, gc=False):
    """The headers do not suffice; the decision waits for the body."""


NEED_BODY = NeedBody()
Verdict = Decision | Refusal | NeedBody


class EngineFields(Struct, frozen=True, gc=False):
    """What the gateway writes into a request's body for the engine. Defaults leave the body as it is."""

    priority: int | None = None
    cache_salt: str = ""
    request_id: str = ""
    """The id of the response, in /v1/responses."""
    full_report: bool = False
    """Whether to ask the engine (vLLM >= 0.32; older ones ignore it) to announce the prompt's cached blocks
    again."""


NO_FIELDS = EngineFields()


class Routed(Struct, frozen=True, gc=False, kw_only=True):
    """A recorded decision: the answer for Envoy, and the ticket of the request's load."""

    ticket: int
    """Identifies the request until `router.finished(ticket)`, which must be called exactly once."""
    destinations: tuple[str, ...]
    """`ip:port` of the chosen endpoint, followed by the fallbacks."""
    request_id: str
    decision_header: str = ""
    """Value of the response header x-perilune-decision where the chosen endpoint answers; empty if the client
    did not ask for it."""
    fields: EngineFields = NO_FIELDS
    """What to write into the body."""
    rank: int | None = None
    """The chosen data-parallel rank, which the engine is told; None if the server has no ranks."""
    remote: RemotePrefill | None = None
    """The prompt's KV, which another endpoint must have accepted to compute before the request goes on."""
    pull: KvPull | None = None
    """The prompt's KV, which the endpoint fetches from another one before the request goes on."""
    attachment: Attachment | None = None
    """What to add to the request so that its endpoint reads the prompt's KV from another one."""
