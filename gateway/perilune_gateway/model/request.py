"""What is known of a request: its head, its identity, its prompt, and the view of it that policies get.

Token counts are integers; names that end in `_s` are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple

from msgspec import Struct


class SessionKey(NamedTuple):
    """What a binding is found under."""

    tenant: str
    session_id: str


class Identity(NamedTuple):
    """Empty strings: not told."""

    tenant: str = ""
    session_id: str = ""
    parent_id: str = ""
    final: bool = False
    inferred: bool = False
    """No client has named the session."""

    @property
    def key(self) -> SessionKey | None:
        return SessionKey(self.tenant, self.session_id) if self.session_id else None

    @property
    def parent_key(self) -> SessionKey | None:
        return SessionKey(self.tenant, self.parent_id) if self.parent_id else None


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


class TokenSource(StrEnum):
    """Where a prompt's token count comes from."""

    LOCAL = "local"
    ENGINE = "engine"
    ESTIMATE = "estimate"
    """From bytes: no ids, so no exact overlap."""
    GIVEN = "given"
    """The request itself carries token ids."""


class Tokens(Struct, frozen=True, gc=False):
    """A prompt as tokens."""

    count: int
    source: TokenSource
    ids: Sequence[int] | None = None
    """None with TokenSource.ESTIMATE."""


class Phase(StrEnum):
    """When a decision was taken: the body unseen, or seen."""

    HEADERS = "headers"
    BODY = "body"


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
