import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.request import openai
from perilune_gateway.request.known_bodies import KnownBodies
from perilune_gateway.request.parsed import ParsedRequest

CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
CHUNK = 16


def turns(count: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n} {'words ' * 5}"} for n in range(count)]


def body(count: int, **more) -> bytes:
    return json.dumps({"model": "m", "messages": turns(count), "stream": True} | more).encode()


def text(document: str) -> bytes:
    """@ stands for a message."""
    return document.replace("@", json.dumps(turns(1)[0])).encode()


def known(*bodies: bytes, path: str = CHAT) -> KnownBodies:
    it = KnownBodies(chunk_bytes=CHUNK)
    for asked in bodies:
        assert it.parse(path, asked) == openai.parse(path, asked)
    return it


@pytest.mark.parametrize(
    ("bodies", "in_part"),
    [
        pytest.param([body(3), body(5), body(7)], 2, id="a conversation grows"),
        pytest.param([body(3), body(3)], 1, id="a request comes again"),
        pytest.param([body(3), body(5, max_tokens=7, user="u")], 1, id="what follows the messages changes"),
        pytest.param([body(3), body(5), body(4), body(6)], 3, id="the last turns are taken back"),
        pytest.param([body(3), body(5).replace(b"words", b"WORDS")], 0, id="a conversation is rewritten"),
        pytest.param([body(3), body(5).replace(b'"m"', b'"n"')], 0, id="another model before the messages"),
        pytest.param([body(3), body(5)[:-1]], 0, id="the end is no JSON"),
        pytest.param([body(3), body(5).replace(b"assistant", b'assis"ant')], 0, id="a message is no JSON"),
        pytest.param([body(3), body(5).replace(b'"stream": true', b'"stream": {}')], 0, id="a wrong type"),
        pytest.param([text('{"model":"m","messages":[]}   '), body(3)], 0, id="no message yet"),
        pytest.param(
            [text('{"model":"m","messages":[@ ,@  ] }'), text('{"model":"m","messages":[@ ,@  ,@]}')], 1,
            id="blanks",
        ),
        pytest.param(
            [text('{"model":"m","messages":[@,@]}'), text('{"model":"m","messages":[@,@],"messages":[]}')], 0,
            id="two fields messages, the first is known",
        ),
        pytest.param(
            [text('{"messages":[@],"model":"m","messages":[@,@]}'),
             text('{"messages":[@],"model":"m","messages":[@,@,@]}')], 1,
            id="two fields messages, the second is known",
        ),
        pytest.param(
            [text('{"model":"m","messages":[@],"messages":[@]}')] * 2, 0, id="two fields messages, both alike"
        ),
        pytest.param(
            [text('{"metadata":{"x":[@,@]},"messages":[@,@],"model":"m"}'),
             text('{"metadata":{"x":[@,@]},"messages":[@,@,@],"model":"m"}')], 0,
            id="the same conversation in another field",
        ),
        pytest.param([b"[" * 100, b"{" * 100, b"", body(3)], 0, id="no bodies"),
    ],
)  # fmt: skip
def test_a_body_is_read_as_ever(bodies, in_part):
    assert known(*bodies).parsed_in_part == in_part


@pytest.mark.parametrize("count", [1, 5])
def test_the_apis_are_kept_apart(count):
    it = known(body(3), body(count + 3, system="s"))
    assert it.parse(MESSAGES, body(count + 3)) == openai.parse(MESSAGES, body(count + 3))
    assert it.parse(COMPLETIONS, body(3)) == openai.parse(COMPLETIONS, body(3))
    assert it.parsed_in_part == 1
    assert known(body(3, max_tokens=1), body(5, max_tokens=1), path=MESSAGES).parsed_in_part == 1


def test_its_conversation_is_the_bodys_own():
    it = known(body(3))
    request = it.parse(CHAT, body(5))
    assert isinstance(request, ParsedRequest)
    assert it.parsed_in_part == 1
    messages = request.prompt.messages
    assert msgspec.json.decode(messages) == turns(5)
    assert msgspec.json.decode(msgspec.json.encode({"messages": messages}))["messages"] == turns(5)
    assert bytes(request.prefix_text()) == bytes(messages)[:-1]


def test_the_oldest_known_body_is_forgotten():
    it = KnownBodies(max_known=1, chunk_bytes=CHUNK)
    for model in "abc":
        it.parse(CHAT, body(3).replace(b'"m"', f'"{model}"'.encode()))
    it.parse(CHAT, body(5).replace(b'"m"', b'"a"'))
    assert it.parsed_in_part == 0
    it.parse(CHAT, body(5).replace(b'"m"', b'"c"'))
    assert it.parsed_in_part == 1


MESSAGE = st.sampled_from(["@", "1", '""', "[]", "[[@]]", '{"messages":[@]}', '"]"', '"\\""', " ", "@ @"])
DOCUMENT = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(['{"model":"m","messages":[', '{"messages":[', '{"a":[@,@],"messages" : [ ', "["]),
    st.lists(MESSAGE, max_size=6).map(",".join),
    st.sampled_from(["]", " ]", "]]", ",", ""]),
    st.sampled_from(
        ["}", ',"model":"m"}', ',"messages":[@],"model":"m"}', "} ", "", ',"\\u006dessages":[@]}']
    ),
)


@given(documents=st.lists(DOCUMENT.map(text), max_size=8), cut=st.integers(0, 40))
def test_whatever_comes_is_read_as_ever(documents, cut):
    known(*documents, *[document[: len(document) - cut] for document in documents], *documents)
