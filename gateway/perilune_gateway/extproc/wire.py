"""Converts between Envoy's ext_proc messages in protobuf and the values in `messages`.

`decode` turns bytes into an inbound value. It reads what routing needs and skips the rest:

- The body modes of both directions are in `protocol_config` of a stream's first message. Envoy 1.40 always
  sends it there, as an empty message when both are NONE. When it is missing, the request's body counts
  as buffered and the response's as not sent.
- The endpoints to choose from are in the metadata `envoy.lb.subset_hint`: a list, or one comma-separated
  string, as a header-to-metadata filter writes it.
- Whether an endpoint broke off before it answered is in the attribute `response.code_details`.
- The endpoint that served the request is in the response's `envoy.lb` metadata, else in the attribute
  `upstream.address`.

`encode` turns an outbound value into bytes. A pick sets a request header and `envoy.lb` metadata to the same
value. Header values are sent as `raw_value`, the only field that current versions of Envoy read.

`envelope` reads headers and bodies, without protobuf. Protobuf reads the fields after them, the context,
which are the same in most messages, so that the result is cached by their bytes. Messages that are not
written as Envoy writes them are read by protobuf alone. Both ways give the same values.

A message with headers takes about 4 µs instead of 10, a body 1 µs and one copy instead of two. In the
benchmark of growing conversations that is 9 to 20 % of all CPU for requests decided by their headers, and up
to 11 % for others (docs/benchmarks.md). Raises ProtocolError for invalid messages.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.message import DecodeError

from perilune_api import extproc_pb2 as pb
from perilune_api.names import (
    AUTHORIZATION_HEADER,
    CODE_DETAILS,
    DATA_PARALLEL_RANK_HEADER,
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    INTERNAL_HEADERS,
    REFUSE_REASON_HEADER,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)
from perilune_gateway.extproc import envelope
from perilune_gateway.extproc.messages import (
    Body,
    BodyMode,
    Continue,
    Echo,
    Immediate,
    Inbound,
    Kind,
    Outbound,
    Override,
    Pick,
    RequestHeaders,
    ResponseHeaders,
    Trailers,
)
from perilune_gateway.model import ProtocolError, RequestHead

_MODE_NUMBERS: dict[BodyMode, pb.ProcessingMode.BodySendMode] = {
    mode: pb.ProcessingMode.BodySendMode.Value(mode.name)  # type: ignore[misc]  # the stub wants a literal
    for mode in BodyMode
}
_MODES: dict[int, BodyMode] = {number: mode for mode, number in _MODE_NUMBERS.items()}
_RESETS = tuple(
    f"upstream_reset_before_response_started{{{cause}" for cause in ("connection_termination", "remote_reset")
)
"""Envoy's words for endpoints that broke off; those that it could not connect to have others."""
MEMO_BYTES = 4096
"""Contexts of at most this many bytes are cached."""


class _Context(NamedTuple):
    """The fields of a ProcessingRequest that come after the headers or the body."""

    subset: frozenset[str] | None
    modes: tuple[int, int] | None
    """Body modes of request and response, as protobuf numbers; None when the message has none."""
    served: str
    """The endpoint that served the request; empty when the message names none."""
    reset: bool
    """Whether it broke off before it answered."""


def decode(raw: bytes) -> Inbound:
    """Read one ProcessingRequest. Raises ProtocolError."""
    found = envelope.read(raw)
    if found is None:
        return by_protobuf(raw)
    cached = len(found.rest) <= MEMO_BYTES
    context = (_context_of_bytes if cached else _context_of_bytes.__wrapped__)(found.rest)
    if context is None:
        return by_protobuf(raw)
    kind = found.kind
    if kind is Kind.REQUEST_HEADERS:
        return _request_headers(found.headers, found.end_of_stream, context)
    if kind is Kind.RESPONSE_HEADERS:
        return _response_headers(found.headers, found.end_of_stream, context)
    return Body(kind, found.body, found.end_of_stream)


def by_protobuf(raw: bytes) -> Inbound:
    """Decode as `decode` does, by protobuf alone, which is slower. Raises ProtocolError."""
    try:
        message = pb.ProcessingRequest.FromString(raw)
    except DecodeError as error:
        raise ProtocolError(f"not a ProcessingRequest: {error}") from None
    match message.WhichOneof("request"):
        case "request_headers":
            request = message.request_headers
            context = _context_of(message)
            return _request_headers(_headers(request.headers), request.end_of_stream, context)
        case "response_headers":
            response = message.response_headers
            context = _context_of(message)
            return _response_headers(_headers(response.headers), response.end_of_stream, context)
        case "request_body":
            return Body(Kind.REQUEST_BODY, message.request_body.body, message.request_body.end_of_stream)
        case "response_body":
            return Body(Kind.RESPONSE_BODY, message.response_body.body, message.response_body.end_of_stream)
        case "request_trailers" | "response_trailers" as kind:
            return Trailers(Kind(kind))
        case _:
            raise ProtocolError("a ProcessingRequest without a known message")


def _request_headers(headers: dict[str, str], end_of_stream: bool, context: _Context) -> RequestHeaders:
    method, path = headers.get(":method", ""), headers.get(":path", "")
    head = RequestHead(
        method=method, path=path, headers=headers, subset=context.subset, has_body=not end_of_stream
    )
    return RequestHeaders(head, *(_modes(context.modes) or (BodyMode.BUFFERED, BodyMode.NONE)))


def _response_headers(headers: dict[str, str], end_of_stream: bool, context: _Context) -> ResponseHeaders:
    status, content_type = headers.get(":status", ""), headers.get("content-type", "")
    if not (status.isascii() and status.isdigit()):
        raise ProtocolError(f"response status {status!r}")
    modes = _modes(context.modes)
    mode = modes[1] if modes else None
    return ResponseHeaders(
        status=int(status),
        content_type=content_type,
        served=context.served,
        end_of_stream=end_of_stream,
        response_mode=mode,
        reset=context.reset,
    )


@lru_cache
def _modes(numbers: tuple[int, int] | None) -> tuple[BodyMode, BodyMode] | None:
    if numbers is None:
        return None
    request, response = numbers
    try:
        return _MODES[request], _MODES[response]
    except KeyError as mode:
        raise ProtocolError(f"unknown body mode {mode}") from None


@lru_cache(maxsize=256)
def _context_of_bytes(rest: bytes) -> _Context | None:
    """Return the context in the bytes after the headers or the body; None when they are not protobuf, or
    contain another such message."""
    try:
        message = pb.ProcessingRequest.FromString(rest)
    except DecodeError:
        return None
    return _context_of(message) if message.WhichOneof("request") is None else None


def _context_of(message: pb.ProcessingRequest) -> _Context:
    modes = None
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = config.request_body_mode, config.response_body_mode
    return _Context(_subset(message.metadata_context), modes, _served(message), _reset(message))


def _headers(found: pb.HeaderMap) -> dict[str, str]:
    """Return the headers by lower-case name. The values of repeated names are joined as HTTP prescribes."""
    headers: dict[str, str] = {}
    for header in found.headers:
        name = header.key.lower()
        value = str(header.raw_value, "utf-8", "replace") or header.value
        if name in headers:
            value = f"{headers[name]}{'; ' if name == 'cookie' else ', '}{value}"
        headers[name] = value
    return headers


def _subset(metadata: pb.Metadata) -> frozenset[str] | None:
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET_KEY not in fields:
        return None
    hint = fields[SUBSET_KEY]
    if hint.WhichOneof("kind") == "list_value":
        entries: Iterable[str] = (entry.string_value for entry in hint.list_value.values)
    else:
        entries = hint.string_value.split(",")
    return frozenset(entry.strip() for entry in entries if entry.strip())


def _served(message: pb.ProcessingRequest) -> str:
    metadata = message.metadata_context.filter_metadata
    if DESTINATION_NAMESPACE in metadata:
        fields = metadata[DESTINATION_NAMESPACE].fields
        if DESTINATION_SERVED in fields and (served := fields[DESTINATION_SERVED].string_value):
            return served
    for attributes in message.attributes.values():
        if "upstream.address" in attributes.fields:
            return attributes.fields["upstream.address"].string_value
    return ""


def _reset(message: pb.ProcessingRequest) -> bool:
    details = (attributes.fields.get(CODE_DETAILS) for attributes in message.attributes.values())
    return any(found.string_value.startswith(_RESETS) for found in details if found)


def encode(outbound: Outbound) -> bytes:
    """Write one ProcessingResponse. Answers without a body are cached, since there are few different ones."""
    match outbound:
        case Continue() | Pick(body=None, headers=()):
            return _encode_again(outbound)
    return _encode(outbound)


@lru_cache(maxsize=4096)
def _encode_again(outbound: Continue | Pick) -> bytes:
    return _encode(outbound)


def _encode(outbound: Outbound) -> bytes:
    message = pb.ProcessingResponse()
    match outbound:
        case Continue(to, headers, override):
            _answer(message, to, headers)
            _override(message, override)
        case Pick(body=body) as pick:
            value = ",".join(pick.destinations)
            changed = [(DESTINATION_HEADER, value), *pick.headers]
            if pick.rank is not None:
                changed.append((DATA_PARALLEL_RANK_HEADER, str(pick.rank)))
            if pick.authorization:
                changed.append((AUTHORIZATION_HEADER, pick.authorization))
            if body is not None:  # Envoy refuses a new body of another length than the header has
                changed.append(("content-length", str(len(body))))
            common = _answer(message, pick.to, changed)
            if pick.decoded:
                common.header_mutation.remove_headers.append("content-encoding")
            ours = {name for name, _ in changed}
            common.header_mutation.remove_headers.extend(n for n in INTERNAL_HEADERS if n not in ours)
            common.clear_route_cache = True
            metadata = message.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value
            metadata.fields[DESTINATION_HEADER].string_value = value
            _override(message, pick.override)
            if body is not None:
                common.body_mutation.body = body
        case Echo(to, chunk, end_of_stream):
            part = _answer(message, to).body_mutation.streamed_response
            part.body = chunk
            part.end_of_stream = end_of_stream
        case Immediate():
            _immediate(message.immediate_response, outbound)
    return message.SerializeToString()


def _answer(
    message: pb.ProcessingResponse, to: Kind, headers: Iterable[tuple[str, str]] = ()
) -> pb.CommonResponse:
    """Make `message` an answer to a message of kind `to`, and return the part that all answers have in
    common. Answers to trailers have none, so what is written into theirs is dropped."""
    answer = getattr(message, to)
    answer.SetInParent()
    if to in (Kind.REQUEST_TRAILERS, Kind.RESPONSE_TRAILERS):
        return pb.CommonResponse()
    common: pb.CommonResponse = answer.response
    _set_headers(common.header_mutation, headers)
    return common


def _set_headers(mutation: pb.HeaderMutation, headers: Iterable[tuple[str, str]]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key = name
        option.header.raw_value = value.encode()


def _override(message: pb.ProcessingResponse, override: Override | None) -> None:
    """Ask Envoy for the response's headers, which have the status and the endpoint that served it, and for
    its trailers, without which Envoy ends the stream at once when no body is sent."""
    if override is None:
        return
    mode = message.mode_override
    mode.request_body_mode = _MODE_NUMBERS[override.request_body]
    mode.response_body_mode = _MODE_NUMBERS[override.response_body]
    mode.response_header_mode = pb.ProcessingMode.SEND
    mode.response_trailer_mode = pb.ProcessingMode.SEND


def _immediate(answer: pb.ImmediateResponse, immediate: Immediate) -> None:
    answer.status.code = immediate.status
    answer.body = immediate.body
    answer.details = f"perilune_{immediate.reason or 'answered'}"
    headers = [("content-type", "application/json")]
    if immediate.reason:
        headers.append((REFUSE_REASON_HEADER, immediate.reason))
    if immediate.retry_after_s > 0:
        headers.append(("retry-after", str(math.ceil(immediate.retry_after_s))))
    _set_headers(answer.headers, headers)
