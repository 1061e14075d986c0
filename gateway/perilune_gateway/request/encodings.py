"""Decodes request bodies that clients compress, because engines cannot.

A small body may unpack to any size, so no more is unpacked than the pool accepts, and one byte. A body of
32 MB takes about 0.1 s.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Mapping

from perilune_gateway.model import Refusal, RefuseReason
from perilune_gateway.request.refusal_body import too_large

MOST_ENCODINGS = 2
"""A body is compressed at most so often."""


class _DamagedError(Exception):
    """The body is not in the encoding that its header names."""


def decoded(body: bytes, header: str, most_bytes: int) -> bytes | Refusal:
    """Return the body without the encodings that its `content-encoding` names, or why that cannot be."""
    names = [name for text in header.split(",") if (name := text.strip().lower()) not in ("", "identity")]
    unknown = [name for name in names if name not in _DECODERS]
    if unknown or len(names) > MOST_ENCODINGS:
        known = f"Known are {', '.join(_DECODERS)}, at most {MOST_ENCODINGS} at once"
        what = ", ".join(unknown or names)[:200]
        return Refusal(
            RefuseReason.UNSUPPORTED_ENCODING, f"The body's encoding {what} is not supported. {known}"
        )
    for name in reversed(names):
        try:
            body = _DECODERS[name](body, most_bytes + 1)
        except _DamagedError as error:
            return Refusal(RefuseReason.BAD_REQUEST, f"The body is not valid {name}: {error}")
        if len(body) > most_bytes:
            return too_large(most_bytes)
    return body


def _gzip(body: bytes, size: int) -> bytes:
    try:
        return gzip.GzipFile(fileobj=io.BytesIO(body)).read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise _DamagedError(error) from None


def _deflate(body: bytes, size: int) -> bytes:
    """Decompress: within zlib's frame, as the standard has it, or without, as some clients send it."""
    for window in (zlib.MAX_WBITS, -zlib.MAX_WBITS):
        unpacker = zlib.decompressobj(window)
        try:
            text = unpacker.decompress(body, size)
        except zlib.error:
            continue
        if unpacker.eof or len(text) == size:
            return text
    raise _DamagedError("it is cut short, or something else")


def _zstd(body: bytes, size: int) -> bytes:
    import zstandard  # most clients do not need it

    unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    try:
        with unpacker.stream_reader(body, read_across_frames=True) as reader:
            return _all(reader.read, size)
    except zstandard.ZstdError as error:
        raise _DamagedError(error) from None


_WINDOW_BYTES = 8 * 1024 * 1024
"""The most memory that a zstd body may ask for, as RFC 8878 recommends."""


def _brotli(body: bytes, size: int) -> bytes:
    import brotli  # type: ignore[import-untyped]

    unpacker = brotli.Decompressor()
    parts, left = [], size
    try:
        parts.append(unpacker.process(body, output_buffer_limit=left))
        left -= len(parts[0])
        while left > 0 and not unpacker.is_finished() and not unpacker.can_accept_more_data():
            parts.append(unpacker.process(b"", output_buffer_limit=left))
            left -= len(parts[-1])
    except brotli.error as error:
        raise _DamagedError(error) from None
    if left > 0 and not unpacker.is_finished():
        raise _DamagedError("it is cut short")
    return b"".join(parts)[:size]


def _all(read: Callable[[int], bytes], size: int) -> bytes:
    parts, left = [], size
    while left > 0 and (part := read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


_DECODERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
    "br": _brotli,
}
