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
        pytest.param(b"GIF89a" + bytes(20), None, id="another format"),
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
        pytest.param(b64encode(b"GIF89a" + bytes(20)).decode(), id="another format"),
        pytest.param(b64encode(PNG + b"\2" + bytes(MOST_BYTES)).decode(), id="too large"),
    ],
)
def test_what_has_no_name(base64: str) -> None:
    assert of_picture(base64, "m") == ""


def test_without_the_engines_model_there_is_no_name() -> None:
    assert name(PNG + b"\2" + bytes(99), model="") == ""
