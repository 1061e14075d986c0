"""Damage in what gateway replicas tell each other costs what is damaged."""

import pytest

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.model.shared import Alive, Batch, Loaded, decode, encode


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"10.0.0.1", b"10.0.\xe8.1"), (b"\x07", b"\xcf" + b"\xff" * 8)],
    ids=["no text", "too large a number"],
)
def test_a_damaged_change_is_counted_and_the_others_are_read(before: bytes, after: bytes) -> None:
    message = encode(Batch("a", (Loaded(at_us=7, endpoint="10.0.0.1"), Alive()), 1))
    assert message.count(before) == 1
    message = message.replace(before, after)
    found = decode(message)
    assert (found.changes, found.unknown, len(found.damage)) == ([Alive()], 1, 1)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_load_that_is_no_time_is_damaged(seconds: float) -> None:
    message = encode(
        Batch(
            "a",
            (
                Loaded(
                    at_us=7,
                    endpoint="10.0.0.1",
                    in_flight=1,
                    prefilling=1,
                    pending_tokens=10,
                    pending_s=seconds,
                ),
            ),
            1,
        )
    )
    found = decode(message)
    assert (found.changes, found.unknown, len(found.damage)) == ([], 1, 1)


def test_text_that_is_no_batch_is_refused() -> None:
    with pytest.raises(UNREADABLE):
        decode(b"\x93\xa1\xe8\x01\x90")
