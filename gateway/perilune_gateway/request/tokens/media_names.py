"""The names that vLLM gives to pictures and sound, from their bytes: nothing is fetched, no pixel is decoded.

vLLM 0.32 hashes a medium with the model's name: the bytes of a picture's file and, if it converted it to RGB,
how, which the file's head tells; of sound the samples at the model's rate, which a WAV file of that rate
contains. With a name, an engine's KV events tell what a medium becomes whoever sent it, and whenever;
without one, only those of the first prompt with it do (media_spans.py). The name that a client gives (`uuid`)
is taken as it is.

`Named` lists what has no name. Engines of other versions, or with arguments for media of their own, have
other names; then these are not used.

Costs what decoding base64 and the hash do: some milliseconds a megabyte; of sound about 40 ns a sample.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from operator import add
from typing import Any, NamedTuple

from blake3 import blake3

MOST_BYTES, MOST_SAMPLES = 4_000_000, 1_000_000
"""Larger media have no name."""
SOUND_HZ = 16_000
"""The rate of nearly all models that hear. They resample other sound, which changes its samples."""
HASHES: dict[str, Callable[[bytes], bytes]] = {
    "blake3": lambda data: blake3(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "sha512": lambda data: hashlib.sha512(data).digest(),
}
"""vLLM's `--mm-hasher-algorithm`."""
_CONVERTED = {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}
_NOTHING, _SEQUENCE, _MAPPING, _LEAF = b"\0", b"\1", b"\2", b"\3"
_JPEG_FRAME = re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]")


class Named(StrEnum):
    """Who gives a medium the name by which an engine's events tell of it, or why the gateway knows none; also
    a metric label."""

    BYTES = "bytes"
    CLIENT = "client"
    FETCHED = "fetched"
    ARGUMENTS = "arguments"
    VIDEO = "video"
    FORMAT = "format"
    RATE = "rate"
    TOO_LARGE = "too_large"
    BAD_BASE64 = "bad_base64"
    MODEL = "model"
    UNPLACED = "unplaced"


WORDS: Mapping[Named, str] = {
    Named.BYTES: "its bytes give it its name, as in engines",
    Named.CLIENT: "the client gives it its name",
    Named.FETCHED: "only its address is in the request, and the gateway fetches nothing",
    Named.ARGUMENTS: "the request has arguments for media, which change what engines make of it",
    Named.VIDEO: "engines choose and decode frames of a video",
    Named.FORMAT: "its format is not one of PNG, JPEG, WebP, GIF and PCM in WAV, so engines decode it first",
    Named.RATE: f"its rate is not {SOUND_HZ:,} Hz, so engines resample it first",
    Named.TOO_LARGE: f"it has more than {MOST_BYTES // 1_000_000} MB, or than {MOST_SAMPLES:,} samples",
    Named.BAD_BASE64: "it is no base64, so engines refuse it",
    Named.MODEL: "no engine has told yet which model it loaded",
    Named.UNPLACED: "the gateway has no template with a place for it, or an engine tokenizes",
}
"""What this means for a medium."""
KNOWN = frozenset((Named.BYTES, Named.CLIENT))
"""All others have no name."""


class Name(NamedTuple):
    """The name of a medium."""

    name: str
    """Empty if it has none."""
    named: Named


def of(kind: str, base64: str, model: str, algorithm: str = "blake3") -> Name:
    """Return the name of a picture (`image`) or sound (`audio`). `model`: what the engine has loaded."""
    if not model:
        return Name("", Named.MODEL)
    if len(base64) > MOST_BYTES * 4 // 3:
        return Name("", Named.TOO_LARGE)
    try:
        data = binascii.a2b_base64(base64.encode(), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        return Name("", Named.BAD_BASE64)
    item = _picture(data) if kind == "image" else _sound(data)
    if isinstance(item, Named):
        return Name("", item)
    told = b"".join((*_named(kind, item), *_named("model_id", model)))
    return Name(HASHES[algorithm](told).hex(), Named.BYTES)


def _picture(data: bytes) -> _Item | Named:
    if (rgb := is_rgb(data)) is None:
        return Named.FORMAT
    return _Item("image", data if rgb else {"io_config": _CONVERTED, "data": data})


def _sound(data: bytes) -> _Item | Named:
    samples = samples_of(data)
    if isinstance(samples, Named):
        return samples
    shape = (len(samples) // 4,)
    return _Item("ndarray", {"dtype": "<f4", "shape": shape, "data": samples})


def samples_of(data: bytes) -> bytes | Named:
    """Return the samples of a WAV file, of all channels together, as vLLM has them: as little-endian 32-bit
    floats. Or why they cannot be told: known are PCM of 16 bits with one or two channels, and floats of 32
    bits with one."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return Named.FORMAT
    chunks = _chunks(data)
    head, body = chunks.get(b"fmt ", b""), chunks.get(b"data", b"")
    if len(head) < 16 or not body:
        return Named.FORMAT
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", head)
    if kind == _EXTENSIBLE and len(head) >= 26:
        kind = struct.unpack_from("<H", head, 24)[0]
    if (kind, bits, channels) not in _SOUND or len(body) % (channels * bits // 8):
        return Named.FORMAT
    if rate != SOUND_HZ:
        return Named.RATE
    if len(body) > MOST_SAMPLES * channels * bits // 8:
        return Named.TOO_LARGE
    return body if kind == _FLOATS else _as_floats(body, channels)


_PCM, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE
_SOUND = frozenset({(_PCM, 16, 1), (_PCM, 16, 2), (_FLOATS, 32, 1)})
"""(kind, bits of a sample, channels) that all of vLLM's decoders make the same samples of."""


def _chunks(data: bytes) -> Mapping[bytes, bytes]:
    """Return the chunks of a RIFF file that are whole, the first of each name."""
    found, at = dict[bytes, bytes](), 12
    while at + 8 <= len(data):
        size = struct.unpack_from("<I", data, at + 4)[0]
        if at + 8 + size > len(data):
            break
        found.setdefault(data[at : at + 4], data[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    return found


def _as_floats(body: bytes, channels: int) -> bytes:
    given = array("h", body)
    if sys.byteorder == "big":
        given.byteswap()
    sums = given if channels == 1 else map(add, given[::2], given[1::2])
    made = array("f", map((1 / (channels << 15)).__mul__, sums))
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


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


class _Item(NamedTuple):
    """A medium's content, which is hashed under a name of its own."""

    name: str
    data: Any


def _named(name: str, value: Any) -> Iterator[bytes]:
    yield from _framed(name.encode())
    yield from _value(value)


def _value(value: Any) -> Iterator[bytes]:
    match value:
        case None:
            yield _NOTHING
        case _Item(name=name, data=data):
            yield _LEAF
            yield from _named(name, data)
        case tuple():
            yield _SEQUENCE + len(value).to_bytes(8, "little")
            for one in value:
                yield from _value(one)
        case dict():
            yield _MAPPING + len(value).to_bytes(8, "little")
            for name, one in value.items():
                yield from _named(name, one)
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
