"""A request: its headers, its identity, its prompt, and the view of it that policies get.

Token counts are integers; names that end in `_s` are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple

from msgspec import Struct

from perilune_gateway.model.tracing import Trace


class SessionKey(NamedTuple):
    """Identifies a session."""

    tenant: str
    session_id: str


class Identity(NamedTuple):
    """The tenant and the session of a request. An empty string means that the request does not name it."""

    tenant: str = ""
    session_id: str = ""
    parent_id: str = ""
    final: bool = False
    """Whether this is the session's last request."""
    inferred: bool = False
    """Whether the gateway inferred the session from the prompt instead of a name."""

    @property
    def key(self) -> SessionKey | None:
        return SessionKey(self.tenant, self.session_id) if self.session_id else None

    @property
    def parent_key(self) -> SessionKey | None:
        return SessionKey(self.tenant, self.parent_id) if self.parent_id else None


class RequestHead(Struct, gc=False, kw_only=True):
    """The headers of a request. Header names are lower case. Immutable except for `identity`,
    `arrived_at`, `trace` and `name`."""

    method: str
    path: str
    headers: Mapping[str, str]
    subset: frozenset[str] | None = None
    """Addresses to choose from; None for all endpoints, empty if no endpoint is allowed."""
    has_body: bool = True
    identity: Identity | None = None
    """Tenant and session by the headers; the router fills it in from the pool's session keys."""
    arrived_at: float | None = None
    """When the gateway got it, on the router's clock; the router fills it in."""
    trace: Trace | None = None
    """Our span; None without tracing, or if the client's trace is not recorded."""
    name: int = 0
    """What the request is called if it breaks engines (state/resets.py); 0 if it is not followed."""

    @property
    def encoded(self) -> bool:
        """Whether the body is compressed."""
        return self.headers.get("content-encoding", "").strip().lower() not in ("", "identity")

    @property
    def content_length(self) -> int:
        """Bytes of the body; 0 without a valid content-length header."""
        value = self.headers.get("content-length", "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else 0


class TokenSource(StrEnum):
    """Where a prompt's token count comes from."""

    LOCAL = "local"
    ENGINE = "engine"
    ESTIMATE = "estimate"
    """Estimated from the body's bytes, without token ids, so overlaps are approximate."""
    GIVEN = "given"
    """The request itself contains token ids."""


class MediaSpan(NamedTuple):
    """A picture, sound or video that lies in a prompt."""

    start: int
    """Position of its first token."""
    end: int
    identifier: str
    """The engine's name for it, which its blocks' hashes cover."""


class AwaitedMedium(NamedTuple):
    """A medium of a prompt that is not known, or that follows such a one."""

    key: bytes
    """A digest of its bytes in the body."""
    own: tuple[int, ...]
    """The template's tokens for it, one of which the engine replaces."""
    after: tuple[int, ...]
    """Some of the prompt's tokens after these; all up to the next medium if that is awaited, too."""
    then: AwaitedMedium | None = None
    """The next medium, if it is in the body."""
    names: tuple[str, ...] = ()
    """The engine's name for it, as far as its bytes tell: one of these."""
    family: str = ""
    """Media whose names are made alike: the same engines have them, or have others."""


class Tokens(Struct, frozen=True, gc=False, kw_only=True):
    """A tokenized prompt."""

    count: int
    """Tokens of all prompts together, where a request has several."""
    source: TokenSource
    ids: Sequence[int] | None = None
    """Token ids of the first prompt; of one with media, those before the first medium that is not known. None
    if they are not known."""
    longest: int = 0
    """If a request has several prompts, the number of tokens of the longest one whose tokens are known, since
    an engine serves each for itself; 0 if it has one prompt."""
    media: tuple[MediaSpan, ...] = ()
    """The media that lie in `ids`."""
    awaited: AwaitedMedium | None = None
    """What comes after `ids`, if the engine can tell by its KV events what it is."""

    def __repr__(self) -> str:
        """Leave the ids out: there may be hundreds of thousands."""
        known = "no ids" if self.ids is None else f"{len(self.ids)} ids"
        return f"Tokens({self.count}, {self.source}, {known}, longest={self.longest})"


class Phase(StrEnum):
    """Whether a decision is taken before or after the body has arrived."""

    HEADERS = "headers"
    BODY = "body"


class Unsplit(StrEnum):
    """Why a prompt is prefilled where it is decoded, in a pool with prefill endpoints."""

    SHORT = "short"
    """The decoding endpoint caches all of it but a few tokens."""
    QUEUES_FULL = "queues_full"
    """Every prefill endpoint has as many prompts as it may have."""
    CHEAPER = "cheaper"
    """Prefilling there costs fewer seconds, those by which it delays other requests counted."""
    SLO = "slo"
    """Prefilling there meets the request's SLO, which the prefill endpoints would miss."""
    SLOW = "slow"
    """Queue and prefill would take longer than the engines wait for KV."""
    NO_GIVER = "no_giver"
    """No prefill endpoint is ready whose connector can hand KV to the decoding endpoint."""
    API = "api"
    """Requests of this API have no transfer parameters."""
    ANSWERS = "answers"
    """The request asks for several answers, or searches among them."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """The answer describes the prompt itself (`prompt_logprobs`, `echo`), so one engine has to compute all of
    it."""
    PICTURES = "pictures"
    """The prompt has pictures, sound or video."""
    PROMPTS = "prompts"
    """The request has several prompts, or embeddings instead of one."""
    GROUPS = "groups"
    """The model has several KV cache groups."""


COMPUTED_WHOLE = frozenset({Unsplit.ANSWERS, Unsplit.PROMPT_LOGPROBS, Unsplit.PICTURES, Unsplit.PROMPTS})
"""What a request itself has that its endpoint computes alone: nothing is fetched for it."""


class Unpulled(StrEnum):
    """Why an endpoint computes what it could fetch from another endpoint that caches more of the prompt."""

    SLOWER = "slower"
    """Fetching is not predicted to be faster than computing."""
    SLOW = "slow"
    """The two endpoints' queues, whichever is longer, and the transfer exceed what a request may be held."""
    BUSY = "busy"
    """One of the two endpoints, or the pool, has as many copies under way as it may have."""
    BUDGET = "budget"
    """Too many bytes are on their way over the link."""
    FAILED = "failed"
    """A fetch from that endpoint failed a moment ago."""
    NO_GIVER = "no_giver"
    """No endpoint that caches more can hand KV over to this one."""
    TOKENS = "tokens"
    """The engines did not announce the blocks' token ids, or they were forgotten."""
    PICTURES = "pictures"
    """The blocks depend on more than tokens: pictures, or embeddings of the client."""
    ADAPTER = "adapter"
    """The blocks' LoRA adapter is not one of the pool's."""
    GROUPS = "groups"
    """The model has several KV cache groups."""
    REQUEST = "request"
    """The request asks for several answers or for the prompt's log probabilities, or has several prompts, or,
    where it has to name the endpoint to read from, its API has no transfer parameters."""


class SessionView(Struct, frozen=True, gc=False, kw_only=True):
    """A session as a policy sees it."""

    session_id: str
    host: str = ""
    """Address of the endpoint that the session is bound to; empty if it is not bound."""
    seconds_since_move: float = inf
    context_tokens: int = 0
    """Number of tokens of its last prompt and answer, as far as known."""
    turns: int = 0
    """Number of requests so far."""
    parent_host: str = ""
    """Host of the parent session, or else of the last request with the same `prompt_cache_key`. It probably
    caches this session's prefix."""
    came_from: str = ""
    """The endpoint that handed the session's KV over to the host; empty if it did not come that way."""
    awaits_kv: bool = False
    """Whether the host hands its KV over to another endpoint, or is about to: until that has the KV, the
    session stays."""


class Location(NamedTuple):
    """An endpoint that caches leading prompt tokens, and how many."""

    address: str
    tokens: int
    wait_s: float = 0.0
    """Predicted seconds until it begins to hand KV over: its queue, and the requests that this takes. Of one
    whose host memory is read, until it has answered what it has."""
    offloaded_tokens: int = 0
    """How many leading tokens it has in host memory, where others can read that."""


class Prefix(Struct, frozen=True, gc=False, kw_only=True):
    """The longest prefix of a prompt that any endpoint caches on its device or in host memory."""

    locations: tuple[Location, ...] = ()
    """A few of the endpoints that cache the most of it, in descending order. They need not be candidates."""
    hits: int = 0
    """Number of look-ups that matched exactly this prefix."""
    frequency_score: float = 0.0
    """hits / sqrt(age in seconds), Conductor's measure of a hot prefix."""
    pullable: bool = False
    """Whether endpoints can fetch it from those of `locations` whose link carries KV."""
    fetch_within_s: float = 0.0
    """Seconds within which a fetch must be over, because the request is held for it; 0 for no bound."""
    legs_first: bool = False
    """Whether engines serve the two requests of a fetch before others that wait in their queues."""
    from_host: bool = False
    """Whether a fetch copies what `locations` have in host memory into the endpoint's own, instead of from
    device to device."""

    @property
    def tokens(self) -> int:
        return self.locations[0].tokens if self.locations else 0


NO_PREFIX = Prefix()


class RequestView(Struct, frozen=True, gc=False, kw_only=True):
    """A request as a policy sees it."""

    request_id: str
    ordinal: int
    """Number of the request in the pool, from 0."""
    prompt_tokens: int
    phase: Phase = Phase.BODY
    session: SessionView | None = None
    model: str = ""
    output_tokens: int = 0
    """Maximum number of output tokens that the request allows; 0 if unknown."""
    token_source: TokenSource = TokenSource.LOCAL
    priority: int = 0
    """The body's `priority` for the engine; lower is served first."""
    level: int = 0
    """Priority level for admission: below 0 the request is refused earlier, above 0 later."""
    slo_ttft_s: float = 0.0
    """Maximum seconds to the first token that the request, or else the pool, asks for; 0 for no limit."""
    slo_tpot_s: float = 0.0
    """Maximum seconds per output token that the request, or else the pool, asks for; 0 for no limit."""
    prefix: Prefix = NO_PREFIX
    block_size: int = 16
    """Tokens per KV block."""
    unsplit: Unsplit | None = None
    """Why the prompt can only be prefilled where it is decoded; None if another endpoint can do it, or in a
    pool without prefill endpoints."""
    unpulled: Unpulled | None = None
    """Why no endpoint can fetch the prompt's prefix from another one; None if one can, or in a pool that does
    not fetch KV with requests."""
