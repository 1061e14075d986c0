"""Header blocks: the examples of the RFC, what is stateless, and nothing but FrameError out of nonsense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.extproc.h2.frames import Code, FrameError, literal
from perilune_gateway.extproc.h2.hpack import Decoder, huffman

GET = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]
GET_AGAIN = [*GET, ("cache-control", "no-cache")]
CUSTOM = [
    *[(":method", "GET"), (":scheme", "https"), (":path", "/index.html"), (":authority", "www.example.com")],
    ("custom-key", "custom-value"),
]

# RFC 7541, appendix C.3 and C.4: three requests on one connection.
PLAIN = [
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
]
CODED = [
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
]


@pytest.mark.parametrize("blocks", [PLAIN, CODED], ids=["plain", "huffman"])
def test_examples_of_the_rfc(blocks):
    decoder = Decoder()
    found = [decoder.decode(bytes.fromhex(block)) for block in blocks]
    assert found == [(GET, False), (GET_AGAIN, False), (CUSTOM, False)]


def test_entries_are_evicted():
    """RFC 7541, appendix C.6: responses, a table of 256 bytes."""
    decoder = Decoder(256)
    first = (
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82"
        "ae43d3"
    )
    date, location = "Mon, 21 Oct 2013 20:13:21 GMT", "https://www.example.com"
    rest = [("cache-control", "private"), ("date", date), ("location", location)]
    assert decoder.decode(bytes.fromhex(first))[0] == [(":status", "302"), *rest]
    assert decoder.decode(bytes.fromhex("4883640effc1c0bf"))[0] == [(":status", "307"), *rest]
    with pytest.raises(FrameError):
        decoder.decode(b"\xc2")  # the fifth entry, of which four fit


@pytest.mark.parametrize(
    ("block", "stateless"),
    [
        pytest.param(b"\x82\x86", True, id="static entries"),
        pytest.param(literal(b"a", b"b"), True, id="literal"),
        pytest.param(b"\x40\x01a\x01b", False, id="literal to be remembered"),
        pytest.param(b"\x20", False, id="size of the table"),
    ],
)
def test_a_block_that_uses_no_dynamic_table_is_known_as_such(block, stateless):
    assert Decoder().decode(block)[1] is stateless


def test_nothing_is_remembered_in_a_table_of_no_size():
    decoder = Decoder()
    assert decoder.decode(b"\x20\x40\x01a\x01b") == ([("a", "b")], False)
    assert decoder.decode(b"\x40\x01a\x01b") == ([("a", "b")], True)


@pytest.mark.parametrize(
    ("block", "code"),
    [
        pytest.param(b"\x80", Code.COMPRESSION_ERROR, id="index 0"),
        pytest.param(b"\xbe", Code.COMPRESSION_ERROR, id="index beyond the table"),
        pytest.param(b"\x00\x05ab", Code.COMPRESSION_ERROR, id="string cut short"),
        pytest.param(b"\x00", Code.COMPRESSION_ERROR, id="no name"),
        pytest.param(b"\xff", Code.COMPRESSION_ERROR, id="integer cut short"),
        pytest.param(b"\xff\xff\xff\xff\xff\xff", Code.COMPRESSION_ERROR, id="integer without end"),
        pytest.param(b"\x82\x20", Code.COMPRESSION_ERROR, id="table size after a field"),
        pytest.param(b"\x3f\xff\x7f", Code.COMPRESSION_ERROR, id="table larger than allowed"),
        pytest.param(b"\x00\x81\x00\x00", Code.COMPRESSION_ERROR, id="huffman: wrong padding"),
        pytest.param(b"\x00\x84\xff\xff\xff\xff\x00", Code.COMPRESSION_ERROR, id="huffman: end of string"),
        pytest.param(b"\x82" * 300, Code.ENHANCE_YOUR_CALM, id="too many fields"),
    ],
)
def test_broken_header_blocks_raise_an_error(block, code):
    with pytest.raises(FrameError) as error:
        Decoder().decode(block)
    assert error.value.code is code


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_are_decoded_or_raise_an_error(blocks):
    decoder = Decoder()
    for block in blocks:
        try:
            decoder.decode(block)
        except FrameError:
            return


@given(st.binary(max_size=40))
def test_any_huffman_text_is_decoded_or_raises_an_error(data):
    try:
        huffman(data)
    except FrameError:
        pass
