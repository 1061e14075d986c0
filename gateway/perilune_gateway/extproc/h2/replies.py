"""What we say in gRPC: response headers, message prefixes, statuses in trailers. All of it literal HPACK."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

from perilune_gateway.extproc.h2.frames import literal
from perilune_gateway.extproc.h2.inbox import PREFIX, PREFIX_BYTES
from perilune_gateway.extproc.h2.reader import DATA

STATUS_200 = b"\x88"
CONTENT_TYPE = b"\x0f\x10\x10application/grpc"
RESPONSE_HEADERS = STATUS_200 + CONTENT_TYPE
TRAILERS_OK = literal(b"grpc-status", b"0")


class Status(IntEnum):
    """gRPC's, those that we say."""

    OK = 0
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


_MESSAGE_HEADER = Struct(">HBBBIBI")
"""A frame's header, then a message's prefix."""


def prefix(payload: bytes) -> bytes:
    return PREFIX.pack(0, len(payload))


def message_header(stream: int, size_bytes: int) -> bytes:
    """Of a DATA frame that holds one whole message, without which it is."""
    length = PREFIX_BYTES + size_bytes
    return _MESSAGE_HEADER.pack(length >> 8, length & 0xFF, DATA, 0, stream, 0, size_bytes)


def trailers(status: Status, message: str) -> bytes:
    if status is Status.OK:
        return TRAILERS_OK
    said = "".join(c if " " <= c <= "~" and c != "%" else f"%{ord(c):02X}" for c in message)[:100]
    return literal(b"grpc-status", str(status.value).encode()) + literal(b"grpc-message", said.encode())
