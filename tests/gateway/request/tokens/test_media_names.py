"""The names of pictures, as vLLM 0.32 computes them."""

from base64 import b64encode

import pytest

from perilune_gateway.request.tokens.media_names import MOST_BYTES, is_rgb, of_picture

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
    return of_picture(b64encode(data).decode(), model, algorithm)


def test_a_name_covers_bytes_model_and_conversion() -> None:
    whole = PNG + b"\2" + bytes(99)
    names = [name(whole), name(whole + b"x"), name(whole, "n"), name(PNG + b"\6" + bytes(99))]
    assert len({*names}) == 4
    assert {len(each) for each in names} == {64}
    assert name(whole) == name(whole)
    assert len(name(whole, algorithm="sha512")) == 128


@pytest.mark.parametrize(
    "base64",
    [
        pytest.param("", id="nothing"),
        pytest.param("A", id="no base64"),
        pytest.param("AA AA", id="spaces, which the engine refuses"),
        pytest.param("\ud83d", id="half a sign"),
        pytest.param(b64encode(b"BM" + bytes(20)).decode(), id="another format"),
        pytest.param(b64encode(PNG + b"\2" + bytes(MOST_BYTES)).decode(), id="too large"),
    ],
)
def test_what_has_no_name(base64: str) -> None:
    assert of_picture(base64, "m") == ""


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
    assert of_picture(base64, "/models/x") == name
