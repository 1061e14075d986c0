"""Header blocks out of HEADERS and CONTINUATION frames, and the path that each names.

A block that means the same at any time (see `hpack`) is remembered, which is what makes streams cheap: Envoy
sends the same one for every stream. Raises FrameError.
"""

from __future__ import annotations

from perilune_gateway.extproc.h2 import frames
from perilune_gateway.extproc.h2.frames import (
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    PADDED,
    PRIORITY,
    Code,
    FrameError,
    unpadded,
)
from perilune_gateway.extproc.h2.hpack import Decoder

MAX_MEMO = 128
"""Header blocks whose meaning is remembered."""


class HeaderBlocks:
    """Of one connection, one after the other."""

    def __init__(self) -> None:
        self.stream = 0
        self.ends_stream = False
        """Of the last block that began."""
        self._parts: list[bytes] | None = None
        self._bytes = 0
        self._hpack = Decoder()
        self._memo: dict[bytes, str] = {}

    def begin(self, flags: int, stream: int, payload: bytes) -> str | None:
        """A HEADERS frame. The path, or None where the block goes on."""
        block = unpadded(flags, payload) if flags & PADDED else payload
        if flags & PRIORITY:
            if len(block) < 5:
                raise FrameError(Code.FRAME_SIZE_ERROR, "HEADERS without its priority")
            block = block[5:]
        self.stream, self.ends_stream = stream, bool(flags & END_STREAM)
        if flags & END_HEADERS:
            return self._memo.get(block) or self._path(block)
        self._parts, self._bytes = [block], len(block)
        return None

    def go_on(self, flags: int, payload: bytes) -> str | None:
        """A CONTINUATION frame; as `begin`."""
        if self._parts is None:
            raise FrameError(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._parts.append(payload)
        self._bytes += len(payload) + HEADER_BYTES
        if self._bytes > frames.BLOCK_BYTES:
            raise FrameError(Code.ENHANCE_YOUR_CALM, "a header block is too long")
        if not flags & END_HEADERS:
            return None
        block, self._parts = b"".join(self._parts), None
        return self._path(block)

    def _path(self, block: bytes) -> str:
        known = self._memo.get(block)
        if known is not None:
            return known
        fields, stateless = self._hpack.decode(block)
        path = next((value for name, value in fields if name == ":path"), "")
        if not stateless or len(self._memo) >= MAX_MEMO:
            self._memo.clear()
        if stateless:
            self._memo[block] = path
        return path
