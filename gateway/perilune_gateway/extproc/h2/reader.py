"""Bytes, in whatever pieces they arrive → frames that may come here (RFC 9113, sections 3.4, 4 and 6).

Steps per frame: its header is checked against `frames.RULES` and against what has to come next (SETTINGS
first; a header block goes on until its end) → DATA is handed over at once, in the pieces in which it
arrives, without its padding; any other frame when it is whole.

Costs about 1 µs per frame, and no copy but of a frame that is cut by the end of what has arrived. Raises
FrameError; nothing can be read after that.
"""

from __future__ import annotations

from collections.abc import Iterator

from perilune_gateway.extproc.h2.frames import (
    ACK,
    END_HEADERS,
    HEADER,
    HEADER_BYTES,
    MAX_STREAM,
    PADDED,
    PREFACE,
    RULES,
    UNKNOWN,
    Code,
    FrameError,
    Type,
    unpadded,
)

DATA, SETTINGS, CONTINUATION = int(Type.DATA), int(Type.SETTINGS), int(Type.CONTINUATION)

Piece = tuple[int, int, int, bytes, int, int, int, bool]
"""A frame, or of a DATA frame what has come of it: type, flags, stream; data, start, stop: the content is
`data[start:stop]`; the bytes that flow control counts (with padding); does the frame end with it?
A bare tuple, since there is one per frame."""


class Reader:
    """Of one connection."""

    def __init__(self) -> None:
        self.greeted = False
        """The peer's SETTINGS have come: it speaks HTTP/2."""
        self._prefaced = False
        self._next: tuple[int, int] | None = (
            SETTINGS,
            0,
        )  # the only type and stream that may come; None: any
        self._held: list[bytes] = []  # bytes of a frame that is not whole yet
        self._held_bytes = 0
        self._wanted_bytes = len(PREFACE)
        self._data_left = 0  # bytes of the current DATA frame that are still to come
        self._data_stream = 0
        self._data_flags = 0

    def frames(self, data: bytes) -> Iterator[Piece]:
        """Run it to its end before the next bytes come."""
        if self._held:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._wanted_bytes:
                return
            data, self._held = b"".join(self._held), []
        at, end, unpack = 0, len(data), HEADER.unpack_from
        if not self._prefaced:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise FrameError(Code.PROTOCOL_ERROR, "not the preface of HTTP/2")
            if end < len(PREFACE):
                return self._hold(data, len(PREFACE))
            self._prefaced, at = True, len(PREFACE)
        elif self._data_left:
            at = min(end, self._data_left)
            self._data_left -= at
            yield DATA, self._data_flags, self._data_stream, data, 0, at, at, not self._data_left
        while end - at >= HEADER_BYTES:
            high, low, kind, flags, stream = unpack(data, at)
            length = high << 8 | low
            stream &= MAX_STREAM
            rule = RULES.get(kind, UNKNOWN)
            if not rule.min_bytes <= length <= rule.max_bytes:
                raise FrameError(Code.FRAME_SIZE_ERROR, f"frame {kind} of {length} bytes")
            if not (rule.on_stream if stream else rule.on_connection):
                raise FrameError(Code.PROTOCOL_ERROR, f"frame {kind} on stream {stream}")
            if self._next is not None:
                self._check_next(kind, flags, stream)
            start = at + HEADER_BYTES
            at = start + length
            if kind == DATA and not flags & PADDED:
                if at > end:
                    self._data_left, self._data_stream, self._data_flags = at - end, stream, flags
                    if start < end:
                        yield DATA, flags, stream, data, start, end, end - start, False
                    return
                yield DATA, flags, stream, data, start, at, length, True
                continue
            if at > end:
                return self._hold(data[start - HEADER_BYTES :], HEADER_BYTES + length)
            if kind == DATA:
                content = unpadded(flags, data[start:at])
                yield DATA, flags, stream, content, 0, len(content), length, True
                continue
            self._passed(kind, flags, stream)
            yield kind, flags, stream, data, start, at, length, True
        if at < end:
            self._hold(data[at:], HEADER_BYTES)

    def _check_next(self, kind: int, flags: int, stream: int) -> None:
        if not self.greeted:
            if kind != SETTINGS or flags & ACK:
                raise FrameError(Code.PROTOCOL_ERROR, "the first frame has to be SETTINGS")
        elif (kind, stream) != self._next:
            raise FrameError(Code.PROTOCOL_ERROR, "a header block is interrupted")

    def _passed(self, kind: int, flags: int, stream: int) -> None:
        """What may follow it."""
        if kind in (Type.HEADERS, CONTINUATION):
            self._next = None if flags & END_HEADERS else (CONTINUATION, stream)
        elif not self.greeted:
            self.greeted, self._next = True, None

    def _hold(self, data: bytes, wanted_bytes: int) -> None:
        self._held, self._held_bytes, self._wanted_bytes = [data], len(data), wanted_bytes
