"""Values of a hand-off: the KV of a session or a prefix, copied from one engine to another."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from perilune_gateway.model.moves import Move


class Immovable(StrEnum):
    """Why a session's or a prefix's KV cannot be handed over at all."""

    TOKENS = "tokens"
    """The engine did not announce its token ids, or they were forgotten."""
    PICTURES = "pictures"
    """Its blocks depend on more than tokens: pictures, or embeddings of the client."""
    ADAPTER = "adapter"
    """Its LoRA adapter is not one of the pool's."""
    CHAIN = "chain"
    """Its requests name earlier responses, which only the engine's process has."""
    GROUPS = "groups"
    """The model has several KV cache groups, whose blocks are not followed."""
    RANKS = "ranks"
    """An endpoint has several data-parallel ranks, and its next request may go to another one."""
    NO_GIVER = "no_giver"
    """The host's bootstrap page does not answer."""
    GAVE_UP = "gave_up"
    """It was tried several times within a minute."""


class GivenUp(StrEnum):
    """Why a hand-off ended before its KV was of use."""

    PAGE = "page"
    """The host's bootstrap page does not answer."""
    REFUSED = "refused"
    """An engine refused a leg."""
    UNREACHABLE = "unreachable"
    """A leg's connection failed."""
    BROKE_OFF = "broke_off"
    """The prefill endpoint ended the connection before it had computed the prompt."""
    NOT_ACCEPTED = "not_accepted"
    """The host did not accept the give leg in time."""
    NOT_TAKEN = "not_taken"
    """The target did not finish the take leg in time; or the request took longer than it would have taken
    without reading from another endpoint."""
    UNCONFIRMED = "unconfirmed"
    """The target finished, but its events did not announce the blocks."""
    RECOMPUTED = "recomputed"
    """The target answered, but it had to compute what it should have fetched."""
    OUTRUN = "outrun"
    """The session grew faster than it could be copied."""
    BUSY = "busy"
    """The session's turn on the host did not end in time."""
    LEFT = "left"
    """The session ended, or has another host by now."""
    TARGET = "target"
    """The target left the pool, drains or is not ready any more."""
    ELSEWHERE = "elsewhere"
    """The proxy sent the request to another endpoint than the target."""
    ERROR = "error"
    """The gateway itself failed, as its log says."""


EXPIRED = frozenset({GivenUp.NOT_ACCEPTED, GivenUp.NOT_TAKEN, GivenUp.UNCONFIRMED, GivenUp.BUSY})
"""Causes by which a wait's bound passed; all others are failures."""


class HandoffOutcome(StrEnum):
    """How a hand-off ended."""

    SWITCHED = "switched"
    """The target has the session's KV, and the session is bound to it."""
    COPIED = "copied"
    """The target has the prefix."""
    UNSEEN = "unseen"
    """The request was served, and its engine's report of cached tokens, by which it would be known whether
    the target had the prefix, did not pass the gateway."""
    EXPIRED = "expired"
    FAILED = "failed"


class Leg(StrEnum):
    """The two requests to engines by which KV is handed over."""

    GIVE = "give"
    TAKE = "take"


class Content(Struct, frozen=True, gc=False):
    """A prompt of whole blocks, as the engines announced it."""

    ids: array[int]
    blocks: Sequence[int]
    """Our hashes of its blocks."""
    lora: str = ""
    salt: str = ""

    @property
    def tokens(self) -> int:
        return len(self.ids)


class RemotePrefill(Struct, frozen=True, gc=False, kw_only=True):
    """The KV of a request's prompt, which one endpoint computes and another one fetches."""

    transfer_id: str
    source: str
    """Address of the endpoint that computes it."""
    target: str
    bootstrap: str
    """The source's bootstrap page, `ip:port`."""
    accept_s: float
    """Seconds within which the source must accept the prompt."""
    give_s: float
    """Seconds within which the source must have computed it."""


class KvPull(Struct, frozen=True, gc=False, kw_only=True):
    """The KV of a request's prefix, which its endpoint fetches from another one before it gets the
    request."""

    transfer_id: str
    model: str
    content: Content
    source: str
    target: str
    bootstrap: str
    """The source's bootstrap page, `ip:port`."""
    within_s: float
    """Seconds within which the target must have it."""
    first: bool = False
    """Whether the engines' queues let its legs overtake all that waits."""


class Attachment(Struct, frozen=True, gc=False):
    """What a request needs so that its engine fetches the prompt's KV. Only the engine that the headers name
    obeys it."""

    params: bytes
    """JSON of `kv_transfer_params`."""
    headers: tuple[tuple[str, str], ...]


class Fetched(Struct, frozen=True, gc=False):
    """The request's endpoint has the KV; nothing is attached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRecord:
    """A hand-off that has ended."""

    move: Move
    outcome: HandoffOutcome
    cause: GivenUp | None
    tokens: int
    """Number of tokens that the target was to have."""
    pulled_tokens: int
    """Number of tokens that it found in its cache or pulled, by its last answer."""
    transfer_bytes: int
    """Bytes that all rounds asked for."""
    rounds: int
    seconds: float
    """Time from the start of the first give leg to the end."""
    time: float
    """Unix seconds of the end."""
