"""gRPC messages out of the pieces in which one stream's DATA arrives.

A message is 5 bytes (compressed or not, length) and its payload. Pieces are kept as they come and joined
once, when the message is whole; small ones at once, so that a peer which sends single bytes costs no more
memory.
"""

from __future__ import annotations

PREFIX_BYTES = 5
SMALL_BYTES = 4096


class MessageError(ValueError):
    """The peer broke gRPC."""


class CompressedError(MessageError):
    """A compressed message; we have said that we take none."""


class TooLongError(MessageError):
    """A message beyond the limit."""


class Inbox:
    """What has arrived of one stream and is no whole message yet."""

    __slots__ = ("_in_message", "_max_bytes", "_parts", "_size_bytes", "_wanted_bytes")

    def __init__(self, max_message_bytes: int) -> None:
        self._max_bytes = max_message_bytes
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._wanted_bytes = PREFIX_BYTES
        self._in_message = False  # its prefix has arrived

    @property
    def empty(self) -> bool:
        """Nothing has begun: the stream may end here."""
        return not self._parts and not self._in_message

    @property
    def missing_bytes(self) -> int:
        """Until the prefix, or the message, that is arriving is whole."""
        return self._wanted_bytes - self._size_bytes

    @property
    def pieces(self) -> int:
        return len(self._parts)

    def take(self, piece: bytes) -> list[bytes]:
        """The messages that this piece completes. Raises MessageError; then the stream is lost."""
        if self._parts and len(self._parts[-1]) + len(piece) <= SMALL_BYTES:
            self._parts[-1] += piece
        else:
            self._parts.append(piece)
        self._size_bytes += len(piece)
        return self._cut() if self._size_bytes >= self._wanted_bytes else []

    def _cut(self) -> list[bytes]:
        """One join, and no copy of a message that ends with the last piece."""
        messages: list[bytes] = []
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        at, end = 0, len(data)
        while end - at >= self._wanted_bytes:
            start, at = at, at + self._wanted_bytes
            if self._in_message:
                messages.append(data[start:at])
                self._wanted_bytes = PREFIX_BYTES
            else:
                self._wanted_bytes = int.from_bytes(data[start + 1 : at], "big")
                if data[start]:
                    raise CompressedError("compressed messages are not taken")
                if self._wanted_bytes > self._max_bytes:
                    raise TooLongError(f"a message of {self._wanted_bytes} bytes")
            self._in_message = not self._in_message
        self._parts = [data[at:]] if at < end else []
        self._size_bytes = end - at
        return messages
