"""What one ext_proc stream says, as values: inbound from Envoy, outbound to Envoy.

`wire` turns Envoy's protobuf into inbound values and outbound values into protobuf; `exchange` knows only
these. Frozen, no behaviour. Bodies are bytes, as they came.
"""

from dataclasses import dataclass
from enum import StrEnum

from perilune_gateway.model import RefuseReason, RequestHead


class ProtocolError(ValueError):
    """The peer said something that its protocol does not allow here."""


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


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    head: RequestHead
    request_mode: BodyMode = BodyMode.BUFFERED
    response_mode: BodyMode = BodyMode.NONE

    @property
    def kind(self) -> Kind:
        return Kind.REQUEST_HEADERS


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    status: int
    content_type: str = ""
    served: str = ""
    """The endpoint that really answered; empty: Envoy did not say, or nobody did."""
    end_of_stream: bool = False
    response_mode: BodyMode | None = None
    """Only where these headers open the stream, another filter having answered."""

    @property
    def kind(self) -> Kind:
        return Kind.RESPONSE_HEADERS


@dataclass(frozen=True, slots=True)
class Body:
    """A part of a body, or all of it; `kind` is REQUEST_BODY or RESPONSE_BODY."""

    kind: Kind
    chunk: bytes
    end_of_stream: bool = True
    """Nothing follows: no further part, no trailers."""


@dataclass(frozen=True, slots=True)
class Trailers:
    """`kind` is REQUEST_TRAILERS or RESPONSE_TRAILERS."""

    kind: Kind


Inbound = RequestHeaders | ResponseHeaders | Body | Trailers


@dataclass(frozen=True, slots=True)
class Override:
    """Asks Envoy to send other messages of this request than it is configured to. Only in an answer to
    headers, ignored in full duplex and where the filter does not allow it."""

    request_body: BodyMode


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on with the message as it is; `headers` are added to it."""

    to: Kind
    headers: tuple[tuple[str, str], ...] = ()
    override: Override | None = None


@dataclass(frozen=True, slots=True)
class Pick:
    """Go on, to these endpoints in this order. Answers the request's headers or its (buffered) body."""

    to: Kind
    destinations: tuple[str, ...]
    override: Override | None = None
    body: bytes | None = None
    """In place of the (buffered) body; None: that stays."""


@dataclass(frozen=True, slots=True)
class Echo:
    """Full duplex: a part of the body that goes on, as it came."""

    to: Kind
    chunk: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class Immediate:
    """An answer to the client from us; the request goes nowhere."""

    status: int
    reason: RefuseReason
    body: bytes
    """JSON, see openai.error_body."""
    retry_after_s: float = 0.0


Outbound = Continue | Pick | Echo | Immediate
