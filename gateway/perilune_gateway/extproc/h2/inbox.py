"""gRPC messages out of the pieces in which one stream's DATA arrives.

A message is 5 bytes (a compression flag and its length) and its payload. Pieces are kept and joined once,
when a message is whole. Small pieces are joined at once, so that a peer that sends single bytes costs no more
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import msgspec

PREFIX = Struct(">BI")
"""Compression flag, length."""
PREFIX_BYTES = PREFIX.size
SMALL_BYTES = 4096


class MessageError(ValueError):
    """The peer broke gRPC."""


class CompressedError(MessageError):
    """A compressed message; we announce no compression."""


class TooLongError(MessageError):
    """A message beyond the limit."""


class Inbox(msgspec.Struct, gc=False):
    """The bytes of one stream that are not a whole message yet."""

    max_message_bytes: int
    missing_bytes: int = PREFIX_BYTES
    """Until the prefix or the message that is arriving is whole."""
    _pieces: list[bytes] = []

    @property
    def empty(self) -> bool:
        """No message has begun, so the stream may end here."""
        return not self._pieces

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def take(self, piece: bytes) -> Sequence[bytes]:
        """Return the messages that `piece` completes. Raises MessageError, after which the stream is lost."""
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
                raise CompressedError("compressed messages are not taken")
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
