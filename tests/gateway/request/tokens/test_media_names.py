"""The names of pictures and sound, as vLLM 0.32 computes them."""

import struct
from base64 import b64encode

import pytest

from perilune_gateway.request.tokens.media_names import (
    MOST_BYTES,
    MOST_SAMPLES,
    Name,
    Named,
    is_rgb,
    of,
    samples_of,
)

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(8) + b"\x08"
JPEG = b"\xff\xd8\xff\xe0\0\x04ab\xff\xc2\0\x11\x08\0\x10\0\x10"
WEBP = b"RIFF\0\0\0\0WEBP"


@pytest.mark.parametrize(
    ("data", "rgb"),
    [
        pytest.param(PNG + b"\2", True, id="PNG"),
        pytest.param(PNG + b"\6", False, id="PNG with transparency"),
        pytest.param(PNG + b"\3", False, id="PNG with a palette"),
        pytest.param(PNG + b"\0", False, id="grey PNG"),
        pytest.param(PNG, None, id="no whole head"),
        pytest.param(JPEG + b"\3" + bytes(9), True, id="JPEG"),
        pytest.param(JPEG + b"\1" + bytes(9), False, id="grey JPEG"),
        pytest.param(JPEG + b"\4" + bytes(9), False, id="JPEG for print"),
        pytest.param(b"\xff\xd8\xff", None, id="JPEG without a head"),
        pytest.param(WEBP + b"VP8 " + bytes(20), True, id="WebP"),
        pytest.param(WEBP + b"VP8L" + bytes(20), True, id="lossless WebP"),
        pytest.param(WEBP + b"VP8L" + bytes(8) + b"\x10" + bytes(20), False, id="with transparency"),
        pytest.param(WEBP + b"VP8X" + bytes(4) + b"\x10" + bytes(20), False, id="WebP with transparency"),
        pytest.param(b"GIF89a" + bytes(20), False, id="GIF"),
        pytest.param(b"BM" + bytes(20), None, id="another format"),
        pytest.param(b"", None, id="nothing"),
    ],
)
def test_whether_a_picture_is_converted(data: bytes, rgb: bool | None) -> None:
    assert is_rgb(data) is rgb


def name(data: bytes, model: str = "m", algorithm: str = "blake3") -> str:
    return of("image", b64encode(data).decode(), model, algorithm).name


def test_a_name_covers_bytes_model_and_conversion() -> None:
    whole = PNG + b"\2" + bytes(99)
    names = [name(whole), name(whole + b"x"), name(whole, "n"), name(PNG + b"\6" + bytes(99))]
    assert len({*names}) == 4
    assert {len(each) for each in names} == {64}
    assert name(whole) == name(whole)
    assert len(name(whole, algorithm="sha512")) == 128


@pytest.mark.parametrize(
    ("base64", "why"),
    [
        pytest.param("", Named.FORMAT, id="nothing"),
        pytest.param("A", Named.BAD_BASE64, id="no base64"),
        pytest.param("AA AA", Named.BAD_BASE64, id="spaces, which the engine refuses"),
        pytest.param("\ud83d", Named.BAD_BASE64, id="half a sign"),
        pytest.param(b64encode(b"BM" + bytes(20)).decode(), Named.FORMAT, id="another format"),
        pytest.param(b64encode(PNG + b"\2" + bytes(MOST_BYTES)).decode(), Named.TOO_LARGE, id="too large"),
    ],
)
def test_what_has_no_name(base64: str, why: Named) -> None:
    assert of("image", base64, "m") == Name("", why)
    assert of("audio", base64, "m") == Name("", why)


def test_without_the_engines_model_there_is_no_name() -> None:
    assert name(PNG + b"\2" + bytes(99), model="") == ""


@pytest.mark.parametrize(
    ("base64", "name"),
    [
        pytest.param(
            "iVBORw0KGgoAAAANSUhEUgAAABgAAAASCAIAAADOjonJAAAAHklEQVR4nGM8IZfMQA3ARBVTRg0aNWjU"
            "oFGDBpFBAPhlAW2ZJqLkAAAAAElFTkSuQmCC",
            "11ac8bdf0bc7dbbed0771f48487e6d3084fd3e6c9da5f94b7ec06daeca062b30",
            id="PNG",
        ),
        pytest.param(
            "iVBORw0KGgoAAAANSUhEUgAAABgAAAASCAQAAADr5dYVAAAAGUlEQVR4nGOM/M9AEmAiTfmohlENoxqQ"
            "AQDgiwF84K2sgAAAAABJRU5ErkJggg==",
            "e7be78c2a3e262e93a03a7851f69daab3c5ef4deb6174910972faf77a807681f",
            id="grey PNG with transparency",
        ),
        pytest.param(
            "UklGRh4AAABXRUJQVlA4TBEAAAAvF0AEAAdQjyJ3rP+BiOh/AAA=",
            "8fc47d21fe4b850198530cadf871a268e47c9247279925ff0a85dda107cc046a",
            id="WebP with transparency",
        ),
        pytest.param(
            "R0lGODdhGAASAIIAAJkAM8wAM5kzM8wzM5kAZswAZpkzZswzZiwAAAAAGAASAEAIgQAPFBBIcKDBgggP"
            "DgRwgKCBgw8bFoio8MAAAgIpJkSoEeMBjxgnDgTZMKRDhQYQSsxIcGPLgS9XbjwYs2KAmQIHZLw58OZK"
            "mEB/rkxJs2LMo0GR4qxYVKLOnk6dNg3KVGVNmU1dejy4tSbFAVXBChVIVajRmxh5HhBQNalbrAIDAgA7",
            "ffb2035c18e0bbcf4df21563f4f3d0d552636a170db96c3fb5a0fa6e29c8a767",
            id="GIF",
        ),
    ],
)
def test_vllms_own_names(base64: str, name: str) -> None:
    """Computed by vLLM 0.32 of pictures that Pillow wrote."""
    assert of("image", base64, "/models/x") == Name(name, Named.BYTES)


def wav(
    body: bytes, *, kind: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16, more: bytes = b""
) -> bytes:
    align = channels * bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * align, align, bits) + more
    chunks = [(b"fmt ", head), (b"LIST", b"odd"), (b"data", body)]
    told = b"".join(name + struct.pack("<I", len(of)) + of + bytes(len(of) % 2) for name, of in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(told)) + b"WAVE" + told


EXTENSIBLE = struct.pack("<HHIH14s", 22, 16, 4, 1, bytes(14))


@pytest.mark.parametrize(
    ("data", "samples"),
    [
        pytest.param(wav(struct.pack("<3h", -32768, 0, 16384)), (-1.0, 0.0, 0.5), id="PCM"),
        pytest.param(wav(struct.pack("<2h", 1, -1)), (2**-15, -(2**-15)), id="the smallest steps"),
        pytest.param(
            wav(struct.pack("<4h", 32767, 32767, 1, -32768), channels=2),
            (32767 / 32768, -32767 / 65536),
            id="two channels: their mean",
        ),
        pytest.param(wav(struct.pack("<2f", 0.1, -2), kind=3, bits=32), (0.1, -2.0), id="floats"),
        pytest.param(wav(struct.pack("<h", 8192), kind=0xFFFE, more=EXTENSIBLE), (0.25,), id="extensible"),
    ],
)
def test_the_samples_of_sound(data: bytes, samples: tuple[float, ...]) -> None:
    assert samples_of(data) == struct.pack(f"<{len(samples)}f", *samples)


WHOLE = wav(bytes(64))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"ID3" + bytes(99), Named.FORMAT, id="MP3"),
        pytest.param(wav(bytes(64), rate=44_100), Named.RATE, id="another rate"),
        pytest.param(wav(bytes(64), bits=24), Named.FORMAT, id="24 bits"),
        pytest.param(wav(bytes(64), kind=7, bits=8), Named.FORMAT, id="mu-law"),
        pytest.param(wav(bytes(60), channels=6), Named.FORMAT, id="six channels"),
        pytest.param(wav(bytes(63)), Named.FORMAT, id="half a sample"),
        pytest.param(wav(b""), Named.FORMAT, id="silence of no length"),
        pytest.param(WHOLE[:-1], Named.FORMAT, id="cut"),
        pytest.param(WHOLE[:20], Named.FORMAT, id="no whole head"),
        pytest.param(WHOLE[:4] + bytes(4) + b"AVI " + WHOLE[12:], Named.FORMAT, id="no WAV"),
        pytest.param(wav(bytes(2 * MOST_SAMPLES + 2)), Named.TOO_LARGE, id="too long"),
        pytest.param(wav(bytes(64), kind=0xFFFE), Named.FORMAT, id="extensible without an extension"),
    ],
)
def test_sound_without_a_name(data: bytes, why: Named) -> None:
    assert samples_of(data) is why
    assert of("audio", b64encode(data).decode(), "m") == Name("", why)


def test_sound_and_a_picture_of_the_same_bytes_have_different_names() -> None:
    data = b64encode(WHOLE).decode()
    assert of("audio", data, "m").name
    assert of("image", data, "m") == Name("", Named.FORMAT)
