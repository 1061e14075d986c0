"""The names that vLLM gives to pictures, from their bytes alone: nothing is fetched, no pixel is decoded.

vLLM 0.32 hashes the bytes of a picture's file, the model's name and, if it converted the picture to RGB, how.
Whether it does the file's head tells. With a name, an engine's KV events tell what a picture becomes whoever
sent it, and whenever; without one, only those of the first prompt with it do (media_spans.py). The name that
a client gives (`uuid`) is taken as it is.

No name is given to sound and video, whose decoded samples are hashed; to pictures of other formats than PNG,
JPEG, WebP and GIF; and to those of requests with arguments for media. Engines of other versions, or with
arguments for media of their own, have other names; then these are not used.

Costs what decoding base64 and the hash do: some milliseconds a megabyte.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

from blake3 import blake3

MOST_BYTES = 4_000_000
"""Larger pictures have no name."""
HASHES: dict[str, Callable[[bytes], bytes]] = {
    "blake3": lambda data: blake3(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "sha512": lambda data: hashlib.sha512(data).digest(),
}
"""vLLM's `--mm-hasher-algorithm`."""
_CONVERTED = {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}
_NOTHING, _SEQUENCE, _MAPPING, _LEAF = b"\0", b"\1", b"\2", b"\3"
_JPEG_FRAME = re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]")


def of_picture(base64: str, model: str, algorithm: str = "blake3") -> str:
    """Return the name of a picture; empty if it cannot be told. `model`: what the engine was told to load."""
    if not model or len(base64) > MOST_BYTES * 4 // 3:
        return ""
    try:
        data = binascii.a2b_base64(base64.encode(), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        return ""  # the engine refuses it
    if (rgb := is_rgb(data)) is None:
        return ""
    item: Any = data if rgb else {"io_config": _CONVERTED, "data": data}
    told = b"".join((*_named("image", _Item(item)), *_named("model_id", model)))
    return HASHES[algorithm](told).hex()


def is_rgb(data: bytes) -> bool | None:
    """Return whether a picture is red, green and blue without transparency, so that vLLM does not convert it;
    None for an unknown format."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) > 25:
        return data[25] == 2
    if data.startswith(b"\xff\xd8"):
        return _jpeg_components(data) == 3 if _jpeg_components(data) else None
    if data.startswith((b"GIF87a", b"GIF89a")):
        return False
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        match data[12:16]:
            case b"VP8 ":
                return True
            case b"VP8L" if len(data) > 24:
                return not data[24] & 0x10
            case b"VP8X" if len(data) > 20:
                return not data[20] & 0x10
    return None


def _jpeg_components(data: bytes) -> int:
    """Return the number of a JPEG's colours; 0 if its head does not tell."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker, size = data[at + 1], struct.unpack_from(">H", data, at + 2)[0]
        if _JPEG_FRAME.match(data, at):
            return data[at + 9]
        at += 1 if marker == 0xFF else 2 + size
    return 0


class _Item:
    """A picture's bytes, which are hashed under a name of their own."""

    def __init__(self, data: Any) -> None:
        self.data = data


def _named(name: str, value: Any) -> Iterator[bytes]:
    yield from _framed(name.encode())
    yield from _value(value)


def _value(value: Any) -> Iterator[bytes]:
    match value:
        case None:
            yield _NOTHING
        case tuple():
            yield _SEQUENCE + len(value).to_bytes(8, "little")
            for one in value:
                yield from _value(one)
        case dict():
            yield _MAPPING + len(value).to_bytes(8, "little")
            for name, one in value.items():
                yield from _named(name, one)
        case _Item(data=data):
            yield _LEAF
            yield from _named("image", data)
        case _:
            yield _LEAF
            yield from _framed(_bytes(value))


def _bytes(value: Any) -> bytes:
    match value:
        case int():
            return value.to_bytes(8, "little", signed=True)
        case str():
            return value.encode()
    return bytes(value)


def _framed(data: bytes) -> Iterator[bytes]:
    yield len(data).to_bytes(8, "little")
    yield data
