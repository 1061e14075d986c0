"""HTTP/2 frames (RFC 9113): the table of their types, and functions that write frames.

A frame has a header of 9 bytes (length, type, flags, stream) and a payload. `RULES` says for each type where
it may appear and how long it may be, so that a frame can be refused before its payload is awaited. Types that
are not in the table are skipped, as the RFC demands.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from perilune_gateway.extproc.h2.limits import FRAME_BYTES
from perilune_gateway.extproc.service import Closed
from perilune_gateway.model import ProtocolError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER = struct.Struct(">HBBBI")
"""Length (high 16 bits, low 8), type, flags, stream (whose highest bit is reserved)."""
HEADER_BYTES = HEADER.size
MAX_STREAM = MAX_WINDOW = 0x7FFF_FFFF
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
LARGEST_FRAME_BYTES = (1 << 24) - 1


class Type(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Code(IntEnum):
    """Why a stream was reset or a connection ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


END_STREAM = ACK = 0x01
END_HEADERS = 0x04
PADDED = 0x08
PRIORITY = 0x20


@dataclass(frozen=True, slots=True)
class Rule:
    """Where frames of a type may appear, how long they may be, and what handles them."""

    on_connection: bool
    on_stream: bool
    min_bytes: int
    max_bytes: int
    handler: str
    """Name, without `_on_`, of the method of Connection that takes (flags, stream, payload)."""


_CONNECTION, _STREAM, _EITHER = (True, False), (False, True), (True, True)

RULES: Mapping[int, Rule] = {
    Type.DATA: Rule(*_STREAM, 0, FRAME_BYTES, "data"),
    Type.HEADERS: Rule(*_STREAM, 0, FRAME_BYTES, "headers"),
    Type.PRIORITY: Rule(*_STREAM, 5, 5, "skip"),
    Type.RST_STREAM: Rule(*_STREAM, 4, 4, "rst_stream"),
    Type.SETTINGS: Rule(*_CONNECTION, 0, FRAME_BYTES, "settings"),
    Type.PUSH_PROMISE: Rule(*_STREAM, 0, FRAME_BYTES, "push_promise"),
    Type.PING: Rule(*_CONNECTION, 8, 8, "ping"),
    Type.GOAWAY: Rule(*_CONNECTION, 8, FRAME_BYTES, "skip"),
    Type.WINDOW_UPDATE: Rule(*_EITHER, 4, 4, "window_update"),
    Type.CONTINUATION: Rule(*_STREAM, 0, FRAME_BYTES, "continuation"),
}
UNKNOWN = Rule(*_EITHER, 0, FRAME_BYTES, "skip")


class FrameError(ProtocolError):
    """The peer violated HTTP/2, so the connection ends with this code."""

    cause = Closed.PROTOCOL_ERROR

    def __init__(self, code: Code, what: str) -> None:
        super().__init__(what)
        self.code = code


class FloodError(FrameError):
    """The peer exceeded one of `limits`."""

    cause = Closed.FLOOD

    def __init__(self, what: str) -> None:
        super().__init__(Code.ENHANCE_YOUR_CALM, what)


def header(length: int, kind: int, flags: int, stream: int) -> bytes:
    return HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return header(len(payload), kind, flags, stream) + payload


def settings(values: Mapping[Setting, int]) -> bytes:
    return frame(Type.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *item) for item in values.items()))


def number(kind: Type, stream: int, value: int) -> bytes:
    """Write an RST_STREAM or WINDOW_UPDATE frame."""
    return frame(kind, 0, stream, value.to_bytes(4, "big"))


def goaway(last_stream: int, code: Code, why: str = "") -> bytes:
    return frame(Type.GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + why.encode()[:256])


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the content of a DATA or HEADERS frame. Raises FrameError for more padding than payload."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise FrameError(Code.PROTOCOL_ERROR, "padding beyond the frame")
    return payload[1 : len(payload) - payload[0]]


def literal(name: bytes, value: bytes) -> bytes:
    """Write a header field without use of the tables. Name and value have at most 126 bytes."""
    assert len(name) < 127, name
    assert len(value) < 127, value
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value
