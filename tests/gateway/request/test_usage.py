"""An engine's count of cached prompt tokens is found in the answer, however that is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.request.usage import CachedTokens

CHAT = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 96}}
WHOLE = json.dumps({"choices": [{"message": {"content": 'say "cached_tokens": 5'}}], "usage": CHAT}, indent=2)
STREAM = (
    'data: {"choices":[{"delta":{"content":"\\"cached_tokens\\": 5"}}]}\n\n'
    f"data: {json.dumps({'choices': [], 'usage': CHAT}, separators=(',', ':'))}\n\ndata: [DONE]\n\n"
)
RESPONSE = json.dumps({"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 1234}}})
MESSAGE = (
    'event: message_start\ndata: {"message":{"usage":{"input_tokens":4,"cache_read_input_tokens":96}}}\n\n'
    'event: message_delta\ndata: {"usage":{"output_tokens":3}}\n\n'
)


def read(*parts: bytes) -> int | None:
    answer = CachedTokens()
    for part in parts:
        answer.read(part)
    return answer.value


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        pytest.param(WHOLE, 96, id="chat"),
        pytest.param(STREAM, 96, id="streamed"),
        pytest.param(RESPONSE, 1234, id="responses"),
        pytest.param(MESSAGE, 96, id="Anthropic"),
        pytest.param('{"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}', 0, id="none cached"),
        pytest.param('{"usage": {"prompt_tokens_details": null}}', None, id="not reported"),
        pytest.param('{"usage": {"cached_tokens": 1.5}}', None, id="a fraction"),
        pytest.param('{"usage": {"cached_tokens": 1e9}}', None, id="an exponent"),
        pytest.param('{"usage": {"cached_tokens": -5}}', None, id="below zero"),
        pytest.param('{"usage": {"cached_tokens": "96"}}', None, id="a text"),
        pytest.param('{"usage": {"cached_tokens": [96]}}', None, id="a list"),
        pytest.param('{"usage": {"cached_tokens": 1234567890123}}', None, id="too many digits"),
        pytest.param('{"usage": {"cached_tokens": 96', None, id="broken off"),
        pytest.param('{"cached_tokens": 96, "later": {"cached_tokens": null}}', 96, id="then nothing"),
        pytest.param('{"text": "\\"cached_tokens\\": 5"}', None, id="only said in a text"),
        pytest.param("", None, id="no body"),
    ],
)
@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_the_count_is_found_however_the_body_is_cut(body: str, tokens: int | None, cuts: list[int]) -> None:
    data = body.encode()
    ends = [0, *sorted(cuts), len(data)]
    assert read(*(data[a:b] for a, b in pairwise(ends))) == tokens


@given(st.lists(st.binary()))
def test_any_bytes_are_read(parts: list[bytes]) -> None:
    read(*parts)
