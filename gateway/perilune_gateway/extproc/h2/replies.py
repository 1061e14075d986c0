"""Writes gRPC replies: response headers, message prefixes, and statuses in trailers, all as literal HPACK."""

from __future__ import annotations

from enum import IntEnum

from perilune_gateway.extproc.h2.frames import literal
from perilune_gateway.extproc.h2.inbox import PREFIX

STATUS_200 = b"\x88"
CONTENT_TYPE = b"\x0f\x10\x10application/grpc"
RESPONSE_HEADERS = STATUS_200 + CONTENT_TYPE
TRAILERS_OK = literal(b"grpc-status", b"0")


class Status(IntEnum):
    """The gRPC statuses that we send."""

    OK = 0
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


def message(payload: bytes) -> bytes:
    """Return an uncompressed gRPC message."""
    return PREFIX.pack(0, len(payload)) + payload


def trailers(status: Status, reason: str) -> bytes:
    if status is Status.OK:
        return TRAILERS_OK
    text = "".join(c if " " <= c <= "~" and c != "%" else f"%{ord(c):02X}" for c in reason)[:100]
    return literal(b"grpc-status", str(status.value).encode()) + literal(b"grpc-message", text.encode())
