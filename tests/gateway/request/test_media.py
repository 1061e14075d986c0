"""Files in the bytes of a conversation: each long run of base64 is replaced by bytes that follow from it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.request.media import digested

SIGN = b'"base64",'
TEXT = st.binary(max_size=40).map(lambda some: some.replace(b"=", b" "))
RUN = st.integers(1, 2_100).map(lambda size: b"a" * size)


@pytest.mark.parametrize(
    ("before", "size", "after"), [(0, 1024, 0), (1023, 1024, 1), (1024, 1024, 1023), (5, 4000, 5)]
)
def test_a_file_is_replaced_wherever_it_is(before, size, after):
    text = b" " * before + b"A" * size + b" " * after
    assert len(digested(SIGN + text, 64)) == len(SIGN) + before + 64 + after


@given(st.lists(TEXT | RUN, max_size=8).map(b"".join))
def test_only_a_long_run_is_taken_for_a_file(text):
    runs = re.findall(rb"(?:[A-Za-z0-9+/=_-]|\\/)+", text)
    longest = max((len(run.replace(b"\\/", b"/")) for run in runs), default=0)
    assert (digested(SIGN + text, 64) != SIGN + text) == (longest >= 1024)


def test_long_words_without_a_sign_of_a_file_stay():
    assert digested(b"a" * 5_000, 64) == b"a" * 5_000
