"""The load client reads streamed answers of every API."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_lab.load import streams

CHAT = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":" ba"},"finish_reason":null}]}\n\n'
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":" n\\u00e9"},"finish_reason":"length"}]}\n\n'
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    b"data: [DONE]\n\n"
)


def at_once(data: bytes) -> streams.Answer:
    return streams.read([(1.0, data)])


def test_a_chat_answer_is_measured():
    assert at_once(CHAT) == streams.Answer(
        text=" ba né",
        token_times_s=(1.0, 1.0),
        prompt_tokens=9,
        cached_tokens=4,
        output_tokens=2,
        done=True,
    )


def test_tokens_arrive_with_the_chunk_that_completes_their_event():
    first, second = CHAT.split(b'" ba"')
    answer = streams.read([(1.0, first + b'" ba"'), (2.5, second)])
    assert answer.token_times_s == (2.5, 2.5)


def test_the_role_event_is_no_token():
    *events, end = CHAT.split(b"\n\n")
    answer = streams.read([(float(i), event + b"\n\n") for i, event in enumerate(events)])
    assert end == b""
    assert answer.token_times_s == (1.0, 2.0)


@given(st.lists(st.integers(0, len(CHAT)), max_size=6))
def test_any_cut_says_the_same(cuts: list[int]):
    edges = [0, *sorted(cuts), len(CHAT)]
    chunks = [(0.0, CHAT[a:b]) for a, b in itertools.pairwise(edges)]
    answer = streams.read(chunks)
    assert (answer.text, answer.output_tokens, answer.done, answer.error) == (" ba né", 2, True, "")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(
            b'data: {"choices":[{"text":" x"}]}\n\ndata: [DONE]\n\n',
            streams.Answer(text=" x", token_times_s=(1.0,), output_tokens=1, done=True),
            id="completions-without-usage-counts-events",
        ),
        pytest.param(
            b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0,'
            b'"prompt_tokens_details":null}}\r\n\r\ndata:[DONE]\r\n\r\n',
            streams.Answer(prompt_tokens=3, done=True),
            id="crlf-and-no-cached-tokens",
        ),
        pytest.param(
            b'data: {"choices":[{"delta":{"reasoning_content":" hm"}}]}\n\n: ping\n\n',
            streams.Answer(text=" hm", token_times_s=(1.0,), output_tokens=1),
            id="reasoning-counts-and-the-stream-is-cut",
        ),
        pytest.param(
            b'data: {"error":{"message":"engine died","code":500}}\n\ndata: [DONE]\n\n',
            streams.Answer(done=True, error="engine died"),
            id="error-inside-the-stream",
        ),
        pytest.param(b'data: {"choices":[{"delta":{"content":" x"', streams.Answer(), id="half-an-event"),
    ],
)
def test_other_answers_are_measured(data: bytes, expected: streams.Answer):
    assert at_once(data) == expected


def test_garbage_is_an_error_and_not_an_exception():
    answer = at_once(b'data: {"choices": 7}\n\ndata: \xff\n\n')
    assert answer.error.startswith("an event is not what OpenAI's API says: Expected `array`")


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(b'{"choices":[{"text":"\xff"}]}', id="no UTF-8"),
        pytest.param(b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}", id="nested deeply"),
    ],
)
def test_an_event_that_cannot_be_read_is_an_error(event: bytes):
    answer = streams.read([(0.0, b"data: " + event + b"\n\n")])
    assert answer.error.startswith("an event is not what OpenAI's API says")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_an_exception(data: bytes):
    streams.read([(0.0, b"data: " + data + b"\n\n")])
