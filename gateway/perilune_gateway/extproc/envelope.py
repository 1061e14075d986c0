"""Reads the headers or the body of a ProcessingRequest directly from its bytes, faster than protobuf.

    tag, size, { headers or body, end_of_stream }, rest: metadata, attributes, modes

Envoy writes the headers or the body first, and all fields in the order of their numbers, so one pass
suffices: a field is its tag (number and type), the size of its content, and the content. `read` returns None
for a message in any other form; protobuf has to read that one. What `read` returns is exactly what protobuf
would return.

Eight headers take 3 µs, a body 0.6 µs and one copy: half of protobuf's time, and one copy less. The rest is
not read. It may contain headers or a body again, and those would then be the valid ones.

Headers that most requests of a client repeat (`USUAL`) are cached. All other headers are forgotten with their
request, since they may be secret keys.
"""

from msgspec import Struct

from perilune_gateway.extproc.messages import Kind

_KINDS = {
    0x12: Kind.REQUEST_HEADERS,
    0x1A: Kind.RESPONSE_HEADERS,
    0x22: Kind.REQUEST_BODY,
    0x2A: Kind.RESPONSE_BODY,
}
"""Kinds of messages by their tag in ProcessingRequest."""
_FIRST = 0x0A
"""The tag of the first field, which is: the headers in HttpHeaders, a header in HeaderMap, the key in
HeaderValue, the bytes in HttpBody."""
_RAW_VALUE = 0x1A
_HEADERS_END, _BODY_END = b"\x18\x01", b"\x10\x01"
"""The field `end_of_stream` with the value true."""
_LAST_SHORT = 0x7F
"""Sizes up to this one are written as one byte."""

USUAL = frozenset(
    {
        *(":method", ":scheme", ":authority", ":path", ":status", "host", "user-agent", "server", "date"),
        *("accept", "accept-encoding", "accept-language", "cache-control", "connection", "vary"),
        *("content-type", "content-length", "content-encoding", "transfer-encoding"),
        *("x-forwarded-proto", "x-envoy-upstream-service-time"),
        *("x-stainless-arch", "x-stainless-async", "x-stainless-lang", "x-stainless-os"),
        *("x-stainless-package-version", "x-stainless-read-timeout", "x-stainless-retry-count"),
        *("x-stainless-runtime", "x-stainless-runtime-version", "x-stainless-timeout"),
        *("anthropic-beta", "anthropic-version", "anthropic-dangerous-direct-browser-access", "x-app"),
    }
)
"""Headers that a client sends with the same value in every request and that contain no secret; a path
contains none when it has no query. OpenAI's and Anthropic's clients send about ten each."""
MEMO_ENTRIES = 4096
_QUERY = b"?"


class Envelope(Struct, frozen=True, gc=False):
    kind: Kind
    headers: dict[str, str]
    """Headers by lower-case name; empty for a body."""
    body: bytes
    end_of_stream: bool
    rest: bytes


class _OtherFormError(Exception):
    """The bytes are not in the form that Envoy writes. `read` returns None then."""


def read(raw: bytes) -> Envelope | None:
    """Return the headers or the body; None when the bytes are not in the form that Envoy writes."""
    try:
        kind = _KINDS.get(raw[0])
        if kind is None:
            return None
        size, at = _size(raw, 1)
        end = at + size
        start = at
        if at < end and raw[at] == _FIRST:
            size, start = _size(raw, at + 1)
            at = start + size
        if at > end or end > len(raw):
            return None
        if kind is Kind.REQUEST_BODY or kind is Kind.RESPONSE_BODY:
            headers, body, last = {}, raw[start:at], _BODY_END
        else:
            headers, body, last = _headers(raw, start, at), b"", _HEADERS_END
        if at < end and raw[at:end] != last:
            return None
    except (_OtherFormError, IndexError, UnicodeDecodeError):
        return None
    return Envelope(kind, headers, body, at < end, raw[end:])


def _headers(raw: bytes, at: int, end: int) -> dict[str, str]:
    headers: dict[str, str] = {}
    while at < end:
        stop = at + 2 + raw[at + 1]  # if the header is short; otherwise not in the cache
        header = _memo.get(raw[at:stop])
        if header is None:
            header, stop = _new_header(raw, at)
        at = stop
        name, value = header
        if name in headers:
            raise _OtherFormError
        headers[name] = value
    if at != end:
        raise _OtherFormError
    return headers


def _header(raw: bytes) -> tuple[str, str]:
    """Return the name (in lower case) and the value of the header in these bytes."""
    size, start = (raw[1], 2) if raw[1] <= _LAST_SHORT else _size(raw, 1)
    at = start + size
    name = raw[start:at].decode().lower()
    value = ""
    if at < len(raw):
        size, start = (raw[at + 1], at + 2) if raw[at + 1] <= _LAST_SHORT else _size(raw, at + 1)
        if raw[at] != _RAW_VALUE:
            raise _OtherFormError
        at = start + size
        value = str(raw[start:at], "utf-8", "replace")
    if raw[0] != _FIRST or at != len(raw):
        raise _OtherFormError
    return name, value


_memo: dict[bytes, tuple[str, str]] = {}
"""Cached headers, by their bytes with tag and size."""


def _new_header(raw: bytes, at: int) -> tuple[tuple[str, str], int]:
    """Return the header that starts at `at`, and the position after it. It is cached if it is short and in
    USUAL."""
    if raw[at] != _FIRST:
        raise _OtherFormError
    size, start = _size(raw, at + 1)
    stop = start + size
    header = _header(raw[start:stop])
    if size <= _LAST_SHORT and header[0] in USUAL and _QUERY not in raw[start:stop]:
        if len(_memo) >= MEMO_ENTRIES:
            _memo.clear()
        _memo[raw[at:stop]] = header
    return header, stop


def _size(raw: bytes, at: int) -> tuple[int, int]:
    """Return the size that is written at `at`, and the position after it."""
    low = raw[at]
    if low <= _LAST_SHORT:
        return low, at + 1
    high = raw[at + 1]
    if high <= _LAST_SHORT:
        return low & 0x7F | high << 7, at + 2
    size = shift = 0
    while (byte := raw[at]) > _LAST_SHORT:
        size |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if shift > 28:
            raise _OtherFormError
    return size | byte << shift, at + 1
