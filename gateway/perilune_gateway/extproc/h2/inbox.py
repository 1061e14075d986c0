"""gRPC messages out of the pieces in which one stream's DATA arrives.

A message is 5 bytes (compressed or not, length) and its payload. Pieces are kept as they come and joined
once, when the message is whole; small ones at once, so that a peer which sends single bytes costs no more
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import msgspec

PREFIX = Struct(">BI")
"""Compressed or not, length."""
PREFIX_BYTES = PREFIX.size
SMALL_BYTES = 4096


class MessageError(ValueError):
    """The peer broke gRPC."""


class CompressedError(MessageError):
    """A compressed message; we have said that we take none."""


class TooLongError(MessageError):
    """A message beyond the limit."""


class Inbox(msgspec.Struct, gc=False):
    """What has arrived of one stream and is no whole message yet."""

    max_message_bytes: int
    missing_bytes: int = PREFIX_BYTES
    """Until the prefix, or the message, that is arriving is whole."""
    _wanted_bytes: int = PREFIX_BYTES
    _in_message: bool = False
    """Its prefix has arrived."""
    _parts: list[bytes] = []

    @property
    def empty(self) -> bool:
        """Nothing has begun: the stream may end here."""
        return not self._parts and not self._in_message

    @property
    def pieces(self) -> int:
        return len(self._parts)

    def take(self, data: bytes, start: int, stop: int) -> Sequence[bytes]:
        """The messages that the piece `data[start:stop]` completes. Raises MessageError; then the stream is
        lost. One join, and no copy of a message that ends with the last piece."""
        missing = self.missing_bytes - (stop - start)
        if missing > 0:
            self.missing_bytes = missing
            self._keep(data[start:stop])
            return ()
        if not self._parts and not self._in_message:  # mostly one message is one piece
            compressed, size = PREFIX.unpack_from(data, start)
            if size == -missing <= self.max_message_bytes and not compressed:
                return (data[start + PREFIX_BYTES : stop],)
        if self._parts:
            data, self._parts = b"".join((*self._parts, data[start:stop])), []
            start, stop = 0, len(data)
        wanted = self._wanted_bytes
        messages: list[bytes] = []
        while stop - start >= wanted:
            if self._in_message:
                messages.append(data[start : start + wanted])
                self._in_message, start, wanted = False, start + wanted, PREFIX_BYTES
                continue
            compressed, wanted = PREFIX.unpack_from(data, start)
            if compressed:
                raise CompressedError("compressed messages are not taken")
            if wanted > self.max_message_bytes:
                raise TooLongError(f"a message of {wanted} bytes")
            self._in_message, start = True, start + PREFIX_BYTES
        self._wanted_bytes, self.missing_bytes = wanted, wanted - (stop - start)
        if start < stop:
            self._parts = [data[start:stop]]
        return messages

    def _keep(self, piece: bytes) -> None:
        if self._parts and len(self._parts[-1]) + len(piece) <= SMALL_BYTES:
            self._parts[-1] += piece
        elif piece:
            self._parts.append(piece)
