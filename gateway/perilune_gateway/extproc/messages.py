"""The messages of one ext_proc stream as values: inbound from Envoy, outbound to Envoy.

`wire` converts them from and to protobuf; `exchange` uses only these values. They are msgspec Structs, which
take a third of the time of dataclasses, because several are made for each message.
"""

from enum import StrEnum
from typing import ClassVar

from msgspec import Struct

from perilune_gateway.model import RefuseReason, RequestHead


class Kind(StrEnum):
    """The six kinds of messages of a stream. An answer has the kind of the message that it answers."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


class BodyMode(StrEnum):
    """How Envoy sends the body of one direction: Envoy's names in lower case."""

    NONE = "none"
    STREAMED = "streamed"
    BUFFERED = "buffered"
    BUFFERED_PARTIAL = "buffered_partial"
    FULL_DUPLEX_STREAMED = "full_duplex_streamed"
    GRPC = "grpc"


class RequestHeaders(Struct, frozen=True, gc=False):
    kind: ClassVar[Kind] = Kind.REQUEST_HEADERS
    head: RequestHead
    request_mode: BodyMode = BodyMode.BUFFERED
    response_mode: BodyMode = BodyMode.NONE


class ResponseHeaders(Struct, frozen=True, gc=False, kw_only=True):
    kind: ClassVar[Kind] = Kind.RESPONSE_HEADERS
    status: int
    content_type: str = ""
    served: str = ""
    """The endpoint that answered; empty when Envoy does not name one."""
    end_of_stream: bool = False
    response_mode: BodyMode | None = None
    """The mode of the response's body, in the first message of a stream; None in later messages."""
    reset: bool = False
    """Whether the endpoint got the request and broke off before it answered, so that Envoy answers."""


class Body(Struct, frozen=True, gc=False):
    """A part of a body, or a whole one. `kind` is REQUEST_BODY or RESPONSE_BODY."""

    kind: Kind
    chunk: bytes
    end_of_stream: bool = True
    """Whether nothing follows, neither another part nor trailers."""


class Trailers(Struct, frozen=True, gc=False):
    """`kind` is REQUEST_TRAILERS or RESPONSE_TRAILERS."""

    kind: Kind


Inbound = RequestHeaders | ResponseHeaders | Body | Trailers


class Override(Struct, frozen=True, gc=False):
    """Asks Envoy to send other messages of this request than it is configured to. It is allowed only in an
    answer to headers. Envoy ignores it in full duplex, and when the filter does not allow overrides."""

    request_body: BodyMode
    response_body: BodyMode = BodyMode.NONE


class Continue(Struct, frozen=True, gc=False):
    """Tells Envoy to continue with the message, to which `headers` are added."""

    to: Kind
    headers: tuple[tuple[str, str], ...] = ()
    override: Override | None = None


class Pick(Struct, frozen=True, gc=False, kw_only=True):
    """Routes the request to these endpoints, tried in this order. Answers the request's headers or its
    buffered body."""

    to: Kind
    destinations: tuple[str, ...]
    override: Override | None = None
    body: bytes | None = None
    """Replaces the buffered body; None keeps it."""
    rank: int | None = None
    """The data-parallel rank that the engine is told."""
    authorization: str = ""
    """Replaces the client's Authorization header; empty keeps it."""
    headers: tuple[tuple[str, str], ...] = ()
    """Added to the request."""
    decoded: bool = False
    """Whether `body` is without the encoding that the request's headers name."""


class Echo(Struct, frozen=True, gc=False):
    """Passes on a part of a body, in full-duplex mode."""

    to: Kind
    chunk: bytes
    end_of_stream: bool


class Immediate(Struct, frozen=True, gc=False):
    """Answers the client directly; the request reaches no endpoint."""

    status: int
    reason: RefuseReason | None
    """None if it is no refusal."""
    body: bytes
    """JSON; of a refusal that of `refusal_body.error_body`."""
    retry_after_s: float = 0.0


Outbound = Continue | Pick | Echo | Immediate
