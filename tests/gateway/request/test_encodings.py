"""Bodies that clients compress are decoded, and never to more than the pool accepts."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from perilune_gateway.model import Refusal, RefuseReason
from perilune_gateway.request.encodings import decoded

TEXT = b'{"model": "m", "prompt": "hi"}' * 100
Pack = Callable[[bytes], bytes]


def bare_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def streamed_zstd(body: bytes) -> bytes:
    """Without the size of its content."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(body) + packer.flush()


PACKED = [
    pytest.param("gzip", gzip.compress, id="gzip"),
    pytest.param("X-Gzip", gzip.compress, id="gzip by its older name"),
    pytest.param("gzip", lambda b: gzip.compress(b[:50]) + gzip.compress(b[50:]), id="gzip in two parts"),
    pytest.param("deflate", zlib.compress, id="deflate"),
    pytest.param("deflate", bare_deflate, id="deflate without a frame"),
    pytest.param("zstd", zstandard.ZstdCompressor().compress, id="zstd"),
    pytest.param("zstd", streamed_zstd, id="zstd, streamed"),
    pytest.param("zstd", lambda b: streamed_zstd(b[:50]) + streamed_zstd(b[50:]), id="zstd in two frames"),
    pytest.param("br", brotli.compress, id="brotli"),
    pytest.param("gzip, br", lambda b: brotli.compress(gzip.compress(b)), id="one in another"),
]


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_what_was_compressed_is_read(encoding: str, pack: Pack) -> None:
    assert decoded(pack(TEXT), encoding, len(TEXT)) == TEXT


@pytest.mark.parametrize("encoding", ["", "identity", " , identity"])
def test_what_was_not_is_left_as_it_is(encoding: str) -> None:
    assert decoded(TEXT, encoding, len(TEXT)) is TEXT


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_a_byte_more_than_accepted_is_too_much(encoding: str, pack: Pack) -> None:
    refusal = decoded(pack(TEXT), encoding, len(TEXT) - 1)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (413, RefuseReason.BODY_TOO_LARGE)


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_a_small_body_that_unpacks_to_much_is_not_unpacked(encoding: str, pack: Pack) -> None:
    bomb, limit = pack(b"\0" * 20_000_000), 1_000_000
    tracemalloc.start()
    refusal = decoded(bomb, encoding, limit)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(refusal, Refusal)
    assert refusal.status == 413
    assert most < 8 * limit


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_a_damaged_body_is_a_bad_request(encoding: str, pack: Pack) -> None:
    for body in (pack(TEXT)[:-9], b"no such thing", b""):
        refusal = decoded(body, encoding, len(TEXT))
        assert isinstance(refusal, Refusal) or (refusal != TEXT and TEXT.startswith(refusal))


@pytest.mark.parametrize(
    "encoding", ["compress", "aes128gcm", "gzip, lzma", "gzip, gzip, gzip", "x" * 10_000]
)
def test_an_unknown_encoding_is_named(encoding: str) -> None:
    refusal = decoded(TEXT, encoding, len(TEXT))
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (415, RefuseReason.UNSUPPORTED_ENCODING)
    assert encoding.rpartition(" ")[2][:100] in refusal.message
    assert len(refusal.message) < 400
