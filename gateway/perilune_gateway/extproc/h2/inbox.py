"""Joins the pieces in which one stream's DATA arrives into gRPC messages.

A message has a prefix of 5 bytes (a compression flag and its length) and a payload. Pieces are joined once,
when a message is complete. Small pieces are joined as they come, so that a peer that sends single bytes uses
no more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import msgspec

PREFIX = Struct(">BI")
"""The prefix: compression flag, length."""
PREFIX_BYTES = PREFIX.size
SMALL_BYTES = 4096
"""Size up to which a piece is joined with the one before it."""


class MessageError(ValueError):
    """The peer violated gRPC."""


class CompressedError(MessageError):
    """A compressed message, although we offer no compression."""


class TooLongError(MessageError):
    """A message that is larger than the limit."""


class Inbox(msgspec.Struct, gc=False):
    """The bytes of one stream that are not yet a complete message."""

    max_message_bytes: int
    missing_bytes: int = PREFIX_BYTES
    """Number of bytes until the prefix, or the message that is arriving, is complete."""
    _pieces: list[bytes] = []

    @property
    def empty(self) -> bool:
        """Whether no message has begun, so that the stream may end here."""
        return not self._pieces

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def take(self, piece: bytes) -> Sequence[bytes]:
        """Return the messages that `piece` completes. After a MessageError the stream must be ended."""
        self._keep(piece)
        self.missing_bytes -= len(piece)
        if self.missing_bytes > 0:
            return ()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        messages: list[bytes] = []
        at, left = 0, len(data)
        missing = PREFIX_BYTES - left
        while missing <= 0:
            compressed, size = PREFIX.unpack_from(data, at)
            if compressed:
                raise CompressedError("compressed messages are not accepted")
            if size > self.max_message_bytes:
                raise TooLongError(f"a message of {size} bytes")
            missing = PREFIX_BYTES + size - left
            if missing > 0:
                break
            start, at = at + PREFIX_BYTES, at + PREFIX_BYTES + size
            messages.append(data[start:at])
            left = -missing
            missing = PREFIX_BYTES - left
        self.missing_bytes = missing
        self._pieces = [data[at:]] if left else []
        return messages

    def _keep(self, piece: bytes) -> None:
        if self._pieces and len(self._pieces[-1]) + len(piece) <= SMALL_BYTES:
            self._pieces[-1] += piece
        elif piece:
            self._pieces.append(piece)
