"""What gateway replicas tell each other: changes, and their bytes.

A replica writes batches of changes to a stream of the shared server. A change is a value of one of the types
of `KINDS`; its bytes are a MessagePack array that begins with the type's tag. Readers ignore fields and types
that they do not know, so replicas of neighbouring versions understand each other.

Every change except `Measured`, `Learned`, `Claimed` and `Alive` sets one register, named by its key. *The
later stamp wins*: a register keeps the change with the greatest `Stamp`; of one turn, its end wins. So
replicas that have received the same changes agree, in whatever order and however often the changes arrived.
Measurements count once, however often they arrive; what was learned from them is taken over where nothing was
measured.

Nothing here is readable: sessions and tenants are keyed hashes (`Names`), prompts are hashes of blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from math import inf
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.topology import Level
from perilune_gateway.model.moves import MoveReason
from perilune_gateway.model.request import SessionKey

NAME_BYTES = 16
AHEAD_US = 3_600_000_000
"""Microseconds by which another host's clock may be ahead of ours."""
MOST = 2**40
"""No count of a session or an endpoint is larger."""
MAX_CLAIMED_BLOCKS = 4_096
"""Maximum number of blocks of one claim, from the prompt's beginning."""
Count = Annotated[int, Meta(ge=0, lt=2**62)]
"""A number or a time that fits in 64 bits even when it is increased. A change with another one is damaged."""
Amount = Annotated[float, Meta(ge=0, le=1e9)]
"""As `Count`, for seconds and ratios."""
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
"""A time that was measured, or for which something stands."""
Name = Annotated[bytes, Meta(max_length=64)]
"""The name of a session, a tenant or a prefix."""
Text = Annotated[str, Meta(max_length=1024)]
"""An address, a cause, or another short text."""
Block = Annotated[int, Meta(ge=0)]
"""Hash of a block."""


class Stamp(NamedTuple):
    """The moment of a change, and the replica that made it. Stamps are totally ordered."""

    at_us: int
    """Microseconds since 1970, and later than every change that the replica had seen."""
    replica: str


NEVER = Stamp(0, "")


class Bound(Struct, frozen=True, gc=False, array_like=True, tag="bound", kw_only=True):
    """A session's latest turn: where it went and what is known of the session's context."""

    at_us: Count
    session: Name
    """See `Names`."""
    host: Text
    """Empty if the session has ended."""
    turns: Count = 0
    context_tokens: Count = 0
    body_bytes: Count = 0
    bytes_per_token: Amount = 0.0
    blocks: Count = 0
    """Number of blocks of its chain; 0 if unknown."""
    tail: Block = 0
    """Hash of the last of them."""
    prompt_blocks: Count = 0
    """Number of full blocks of its last prompt that was read; 0 if none was read."""
    prompt_tail: Block = 0
    prompt_tokens: Count = 0
    inferred: Text = ""
    """Id of an inferred session, which is random; empty if clients name the session."""
    tenant: Name = b""
    """Name of the tenant of an inferred session."""
    chained: bool = False
    running: bool = False
    """Whether the turn still runs at the sender. Its end is told only while a move of the session is
    offered."""
    moved_from: Text = ""
    """The host from which the planner has moved the session, without a turn; empty if this is a turn. The
    replica that decided the latest turn then announces the session again."""


class BoundElsewhere(Struct, frozen=True, gc=False):
    """A session whose requests have all gone to other replicas."""

    bound: Bound
    stamp: Stamp
    heard_at: float
    """Monotonic seconds of this replica, as `moved_at`."""
    moved_at: float = -inf
    """When its host changed; -inf: not since this replica knows it."""


class Loaded(Struct, frozen=True, gc=False, array_like=True, tag="loaded", kw_only=True):
    """The load of the sender's own requests in flight at one endpoint."""

    at_us: Count
    endpoint: Text
    in_flight: Count = 0
    prefilling: Count = 0
    pending_tokens: Count = 0
    pending_s: Amount = 0.0
    context_tokens: Count = 0


class Ejected(Struct, frozen=True, gc=False, array_like=True, tag="ejected"):
    """An endpoint was ejected or, with an empty cause, is healthy again."""

    at_us: Count
    endpoint: Text
    cause: Text


class Counted(Struct, frozen=True, gc=False, array_like=True, tag="counted"):
    """What the sender counts for session admission."""

    at_us: Count
    active_tokens: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    """Expected tokens of the active contexts whose latest turn it routed."""
    waiting: Count = 0
    """Number of new sessions that wait there; `InLine` tells which."""


class PlaceInLine(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """A new session that waits at the sender, or was refused there and is to come back."""

    session: Name
    tenant: Name
    tokens: Count
    arrived_us: Count
    """When it first came, and the rank by which it begins, in microseconds since 1970."""
    rank_us: Count
    number: Count
    """Settles ties of ranks."""
    back_s: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    """Seconds until its client is expected back; None if it waits."""


class TenantInLine(Struct, frozen=True, gc=False, array_like=True):
    """What a tenant's sessions were given at the sender while others waited."""

    tenant: Name
    tokens: Amount
    seconds: Amount
    """Seconds since the latest of them began; the tokens are as of then."""


class InLine(Struct, frozen=True, gc=False, array_like=True, tag="in_line"):
    """All new sessions that wait at the sender."""

    at_us: Count
    places: Sequence[PlaceInLine] = ()
    tenants: Sequence[TenantInLine] = ()
    pace: Amount = 0.0
    """Tokens of its sessions that begin per second while others wait."""


MAX_QUEUEING = 64
"""Maximum number of tenants of which the others are told."""


class QueuedOf(Struct, frozen=True, gc=False, array_like=True):
    """The pending prefill of one tenant's requests at the sender."""

    tenant: Name
    pending_s: Amount


class Queueing(Struct, frozen=True, gc=False, array_like=True, tag="queueing"):
    """The tenants that have pending prefill at the sender: all of them, or those with the most. Told where
    engines rank requests by tenants' shares."""

    at_us: Count
    tenants: Annotated[Sequence[QueuedOf], Meta(max_length=MAX_QUEUEING)] = ()


class OfferStage(StrEnum):
    """How far an offered move is."""

    OFFERED = "offered"
    COPYING = "copying"
    """Its KV is on its way."""
    COPIED = "copied"
    """The target has announced its KV."""
    OVER = "over"
    """It was carried out, given up or withdrawn."""


class Offered(Struct, frozen=True, gc=False, array_like=True, tag="offered", kw_only=True):
    """A planned move of a session, or a planned copy of a prefix, as the replica describes it that offered
    it or carried it out."""

    at_us: Count
    subject: Name
    """Name of the session, or the last block of the prefix, see `prefix_name`."""
    reason: MoveReason
    source: Text
    target: Text
    stage: OfferStage
    seconds: Seconds
    """Time for which it stands unless it is told again."""
    begun_s: Amount | None = None
    """Seconds since it began; None if it has not begun."""
    transfer_bytes: Count = 0
    """Bytes that the target pulls from the source."""
    tokens: Count = 0
    """Number of tokens of the KV that is copied."""
    tail: Block = 0
    """Hash of the last block of it."""
    cost_s: Amount = 0.0
    benefit_s: Annotated[float, Meta(ge=-1e9, le=1e9)] = 0.0
    turns: Amount = 0.0
    """As of the `Move`."""


class Measure(StrEnum):
    """What was measured of an endpoint, in seconds."""

    PREFILL = "prefill"
    """A prefill that ran alone."""
    TTFT = "ttft"
    """From a decision to the end of its prefill, including the queue."""
    STORE = "store"
    """Loading KV from the shared store."""
    TRANSFER = "transfer"
    """Pulling KV from another endpoint."""
    DECODE = "decode"
    """From a request's first to its last token; nothing was predicted."""


class Measured(Struct, frozen=True, gc=False, array_like=True, tag="measured", kw_only=True):
    """A measurement, from which every replica corrects its predictions."""

    of: Measure
    endpoint: Text
    observed_s: Seconds
    predicted_s: Seconds = 0.0
    source: Text = ""
    """The endpoint from which KV was pulled."""
    at_us: Count = 0


MAX_LEARNED = 4_096
"""Maximum number of averages that the server keeps of a pool."""


class Learned(Struct, frozen=True, gc=False, array_like=True, tag="learned", kw_only=True):
    """An average of measurements, with which a replica that starts begins. Kept by the server; the stream has
    the measurements."""

    of: Measure
    endpoint: Text = ""
    """Empty: all endpoints together. Of a transfer it is the one that pulled."""
    source: Text = ""
    """The endpoint from which KV was pulled."""
    level: Level | None = None
    """The nearest level that the endpoints of the transfers share; None if the average is not of a level."""
    learned: Amount
    """Sum of the observations, each times its weight."""
    weight: Annotated[float, Meta(ge=0, le=1)]
    """Sum of these weights."""
    told: Amount
    """How much the observations tell, each 1 at most."""
    count: Annotated[int, Meta(ge=1, le=MOST)]
    """Number of observations."""
    seconds: Amount
    """Seconds since the latest of them, at the time of the stamp."""
    at_us: Count = 0


class Claimed(Struct, frozen=True, gc=False, array_like=True, tag="claimed"):
    """Blocks that an endpoint will cache, because a prompt with them was sent there."""

    endpoint: Text
    blocks: Annotated[bytes, Meta(max_length=8 * MAX_CLAIMED_BLOCKS)]
    """Hashes as little-endian unsigned 64-bit numbers, in the prompt's order."""
    seconds: Seconds | None
    """Time for which they count as cached if the endpoint does not announce them; None for the time that the
    pool says."""
    parent: int | None = None
    """The block before them, which the endpoint has announced; 0 if there is none, None if unknown."""


class Alive(Struct, frozen=True, gc=False, array_like=True, tag="alive"):
    """A sign of life, with which a replica repeats all of its load."""

    leaving: bool = False
    """Whether it is the last sign: the replica stops."""


Change = (
    Bound | Loaded | Queueing | Ejected | Counted | InLine | Offered | Measured | Learned | Claimed | Alive
)
KINDS: tuple[type[Change], ...] = (
    Bound,
    Loaded,
    Queueing,
    Ejected,
    Counted,
    InLine,
    Offered,
    Measured,
    Learned,
    Claimed,
    Alive,
)


class Batch(Struct, frozen=True, gc=False):
    """Changes that one replica made, in order."""

    replica: str
    changes: Sequence[Change]
    number: int = 0
    """Number of the batch among those that its replica has written to the stream, from 1; 0 if it is kept."""
    unknown: int = 0
    """Number of further changes: of types that this version does not know, or damaged."""
    damage: Sequence[str] = ()
    """What is wrong with those that are damaged."""


class _Envelope(Struct, frozen=True, gc=False, array_like=True):
    replica: Annotated[str, Meta(min_length=1, max_length=64)]
    number: Count
    changes: Sequence[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(_Envelope)
_changes = msgspec.msgpack.Decoder(Change)
_tags = {kind.__struct_config__.tag for kind in KINDS}


def encode(batch: Batch) -> bytes:
    return _encoder.encode((batch.replica, batch.number, batch.changes))


def decode(message: bytes) -> Batch:
    """Return the batch of a message. Raises one of UNREADABLE if it is not one."""
    known: list[Change] = []
    damage: list[str] = []
    envelope = _envelopes.decode(message)
    for raw in envelope.changes:
        try:
            known.append(_changes.decode(raw))
        except UNREADABLE as error:
            if kind := _kind(raw):  # else a newer version's
                damage.append(f"{kind}: {error}")
    return Batch(envelope.replica, known, envelope.number, len(envelope.changes) - len(known), tuple(damage))


def _kind(raw: msgspec.Raw) -> str:
    """Return the type of a change that could not be read; empty if this version does not know it."""
    try:
        read = msgspec.msgpack.decode(raw)
    except UNREADABLE:
        return "unreadable"
    tag = read[0] if isinstance(read, list) and read else None
    if not isinstance(tag, str):
        return "unreadable"
    return tag if tag in _tags else ""


def implausible(change: Change, now_us: int) -> str:
    """Return why the change cannot be true at the time `now_us`; empty if it can."""
    if not isinstance(change, Claimed | Alive) and change.at_us > now_us + AHEAD_US:
        return f"its stamp is {(change.at_us - now_us) / 1e6:.0f} s ahead of this host's clock"
    match change:
        case Bound():
            context = change.turns, change.context_tokens, change.body_bytes, change.blocks
            prompt = change.prompt_blocks, change.prompt_tokens
            return "a number is too large" if max(*context, *prompt) > MOST else ""
        case Loaded():
            load = change.in_flight, change.prefilling, change.pending_tokens, change.context_tokens
            return "a number is too large" if max(load) > MOST else ""
        case InLine():
            if any(place.tokens > MOST or place.arrived_us > now_us + AHEAD_US for place in change.places):
                return "a place's number or time is too large"
            late_us = (place.rank_us - place.arrived_us for place in change.places)
            return "" if all(abs(us) <= AHEAD_US for us in late_us) else "a place's rank is wrong"
        case Claimed():
            return "" if len(change.blocks) % 8 == 0 else "its blocks are not whole"
    return ""


def packed(blocks: Sequence[int]) -> bytes:
    return array("Q", blocks).tobytes()


def unpacked(blocks: bytes) -> Sequence[int]:
    """Return the hashes in these bytes. Raises ValueError if they are not whole hashes."""
    return array("Q", blocks)


def prefix_name(block: int) -> bytes:
    """Return the name of the prefix that ends with this block."""
    return block.to_bytes(8, "little")


class Names:
    """Keyed hashes of sessions and tenants: who lacks the key cannot find a name by trying names."""

    def __init__(self, key: bytes) -> None:
        self._session = blake2b(digest_size=NAME_BYTES, key=blake2b(key).digest(), person=b"session")
        self._tenant = blake2b(digest_size=NAME_BYTES, key=blake2b(key).digest(), person=b"tenant")

    def session(self, key: SessionKey) -> bytes:
        """Return the session's name."""
        digest = self._session.copy()
        digest.update(f"{len(key.tenant)}:{key.tenant}{key.session_id}".encode(errors="surrogatepass"))
        return digest.digest()

    def tenant(self, tenant: str) -> bytes:
        """Return the tenant's name."""
        digest = self._tenant.copy()
        digest.update(tenant.encode(errors="surrogatepass"))
        return digest.digest()


class SharedStats(Struct, frozen=True, gc=False, kw_only=True):
    """The shared state at one moment."""

    server: str
    """Its address, without a password."""
    connected: bool = False
    error: str = ""
    """Why there is no connection; empty while there is one."""
    alone_s: float = 0.0
    """Seconds without a connection; 0 while there is one."""
    lag_s: float = 0.0
    """Seconds from writing the latest batch to reading it back."""
    peers: int = 0
    """Number of other replicas that are alive."""
    sessions: int = 0
    """Number of sessions that only other replicas have routed."""
    sent: int = 0
    """Number of changes, as `received` and `dropped`."""
    received: int = 0
    dropped: int = 0
    """Changes that could not be used: of an unknown type, malformed, or cut from the stream before they were
    read."""
    reconnects: int = 0
