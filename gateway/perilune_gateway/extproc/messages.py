"""What one ext_proc stream says, as values: inbound from Envoy, outbound to Envoy.

`wire` turns Envoy's protobuf into inbound values and outbound values into protobuf; `exchange` knows only
these. Frozen, no behaviour. Bodies are bytes, as they came. Structs, since several are made per message:
they cost a third of dataclasses.
"""

from enum import StrEnum
from typing import ClassVar

from msgspec import Struct

from perilune_gateway.model import RefuseReason, RequestHead


class Kind(StrEnum):
    """The six messages of a stream; an answer carries the kind of what it answers."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


class BodyMode(StrEnum):
    """How Envoy sends one direction's body; its names, in lower case."""

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


class ResponseHeaders(Struct, frozen=True, gc=False):
    kind: ClassVar[Kind] = Kind.RESPONSE_HEADERS
    status: int
    content_type: str = ""
    served: str = ""
    """The endpoint that really answered; empty: Envoy did not say, or nobody did."""
    end_of_stream: bool = False
    response_mode: BodyMode | None = None
    """Only where these headers open the stream, another filter having answered."""


class Body(Struct, frozen=True, gc=False):
    """A part of a body, or all of it; `kind` is REQUEST_BODY or RESPONSE_BODY."""

    kind: Kind
    chunk: bytes
    end_of_stream: bool = True
    """Nothing follows: no further part, no trailers."""


class Trailers(Struct, frozen=True, gc=False):
    """`kind` is REQUEST_TRAILERS or RESPONSE_TRAILERS."""

    kind: Kind


Inbound = RequestHeaders | ResponseHeaders | Body | Trailers


class Override(Struct, frozen=True, gc=False):
    """Asks Envoy to send other messages of this request than it is configured to. Only in an answer to
    headers, ignored in full duplex and where the filter does not allow it."""

    request_body: BodyMode


class Continue(Struct, frozen=True, gc=False):
    """Go on with the message as it is; `headers` are added to it."""

    to: Kind
    headers: tuple[tuple[str, str], ...] = ()
    override: Override | None = None


class Pick(Struct, frozen=True, gc=False):
    """Go on, to these endpoints in this order. Answers the request's headers or its (buffered) body."""

    to: Kind
    destinations: tuple[str, ...]
    override: Override | None = None
    body: bytes | None = None
    """In place of the (buffered) body; None: that stays."""


class Echo(Struct, frozen=True, gc=False):
    """Full duplex: a part of the body that goes on, as it came."""

    to: Kind
    chunk: bytes
    end_of_stream: bool


class Immediate(Struct, frozen=True, gc=False):
    """An answer to the client from us; the request goes nowhere."""

    status: int
    reason: RefuseReason
    body: bytes
    """JSON, see openai.error_body."""
    retry_after_s: float = 0.0


Outbound = Continue | Pick | Echo | Immediate
