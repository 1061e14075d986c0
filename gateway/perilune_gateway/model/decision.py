"""A decision: the chosen endpoint or a refusal, the reason, the costs, and how the request ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from perilune_gateway.model.moves import Move


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


class Outcome(StrEnum):
    """How a routed request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """The client or Envoy went away before the answer ended."""
    FAILED = "failed"
    """The endpoint answered 5xx, or broke off."""


class Step(StrEnum):
    """Steps of one decision: keys of `DecisionRecord.timings_us`."""

    PARSE = "parse"
    TOKENIZE = "tokenize"
    HASH = "hash"
    INDEX = "index"
    POLICY = "policy"
    TOTAL = "total"


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
