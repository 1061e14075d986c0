"""BLAKE3 in plain Python gives the hashes of the original."""

import pytest

from perilune_gateway.request.blake3 import digest


@pytest.mark.parametrize(
    ("size", "begins"),
    [
        pytest.param(0, "af1349b9f5f9a1a6", id="nothing"),
        pytest.param(1, "2d3adedff11b61f1", id="a byte"),
        pytest.param(63, "e9bc37a594daad83", id="less than a block"),
        pytest.param(64, "4eed7141ea4a5cd4", id="a block"),
        pytest.param(65, "de1e5fa0be70df6d", id="more than a block"),
        pytest.param(1023, "10108970eeda3eb9", id="less than a chunk"),
        pytest.param(1024, "42214739f095a406", id="a chunk"),
        pytest.param(1025, "d00278ae47eb27b3", id="more than a chunk"),
        pytest.param(2048, "e776b6028c7cd22a", id="two chunks"),
        pytest.param(3073, "7124b49501012f81", id="more than three"),
        pytest.param(5000, "ee78d92070de3df1", id="five"),
        pytest.param(31_744, "62b6960e1a44bcc1", id="thirty-one"),
        pytest.param(102_400, "bc3e3d41a1146b06", id="a hundred"),
    ],
)
def test_the_hash_of_so_many_bytes(size: int, begins: str) -> None:
    told = digest(bytes(i % 251 for i in range(size)))
    assert len(told) == 32
    assert told.hex().startswith(begins)
