"""Messages read in place: what protobuf reads, or nothing."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perilune_api import extproc_pb2 as pb
from perilune_gateway.extproc import envelope, wire
from perilune_gateway.extproc.envelope import Envelope
from perilune_gateway.extproc.messages import Kind
from perilune_gateway.model import ProtocolError

REST = pb.ProcessingRequest(protocol_config=pb.ProtocolConfiguration(request_body_mode=2)).SerializeToString()


def header_map(*pairs: tuple[str, bytes]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value) for name, value in pairs])


def headers(*pairs: tuple[str, bytes], end: bool = False) -> bytes:
    told = pb.HttpHeaders(headers=header_map(*pairs), end_of_stream=end)
    return pb.ProcessingRequest(request_headers=told).SerializeToString()


def body(size: int, end: bool = True) -> bytes:
    told = pb.HttpBody(body=b"x" * size, end_of_stream=end)
    return pb.ProcessingRequest(request_body=told).SerializeToString()


LONG = [100, 127, 128, 300, 20_000]


@pytest.mark.parametrize("size", [0, 1, *LONG, 3_000_000])
@pytest.mark.parametrize("end", [True, False], ids=["ends", "goes on"])
def test_bodies_of_all_sizes(size, end):
    assert envelope.read(body(size, end) + REST) == Envelope(Kind.REQUEST_BODY, {}, b"x" * size, end, REST)


@pytest.mark.parametrize("size", [0, 1, *LONG])
def test_headers_of_all_sizes(size):
    pairs = [("A" * max(1, size), b"1"), ("b", b"v" * size), ("c", b"\xff")]
    expected = {"a" * max(1, size): "1", "b": "v" * size, "c": "\ufffd"}
    assert envelope.read(headers(*pairs, end=True) + REST) == Envelope(
        Kind.REQUEST_HEADERS, expected, b"", True, REST
    )


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(REST, id="no message proper"),
        pytest.param(REST + headers(("a", b"1")), id="not at the start"),
        pytest.param(headers(("a", b"1"), ("A", b"2")), id="equal names"),
        pytest.param(
            pb.ProcessingRequest(
                request_headers=pb.HttpHeaders(
                    headers=pb.HeaderMap(headers=[pb.HeaderValue(key="a", value="1")])
                )
            ).SerializeToString(),
            id="a value of an old Envoy",
        ),
        pytest.param(
            pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString(), id="trailers"
        ),
        pytest.param(body(10)[:-1], id="cut short"),
        pytest.param(b"\x22\x05\x0a\x01x\x18\x01", id="an unknown field"),
        pytest.param(b"\x22\xff\xff\xff\xff\xff\x01", id="a size beyond all"),
        pytest.param(b"\x12\x07\x0a\x05\x0a\x03\x0a\x02\xff", id="a name that is no text"),
    ],
)
def test_any_other_form_is_left_alone(raw):
    assert envelope.read(raw) is None


# What `wire` makes of it is what it makes of protobuf's own reading.

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.sampled_from([":status", ":method", ":path", "content-type", "X-A", "x-a", "cookie", ""]) | texts
values = st.sampled_from([b"200", b"text/event-stream", b"v" * 127, b"v" * 200]) | st.binary(max_size=40)
header_values = st.builds(pb.HeaderValue, key=names, raw_value=values) | st.builds(
    pb.HeaderValue, key=names, value=texts, raw_value=values
)
http_headers = st.builds(
    pb.HttpHeaders,
    headers=st.builds(pb.HeaderMap, headers=st.lists(header_values, max_size=5)),
    end_of_stream=st.booleans(),
)
http_body = st.builds(pb.HttpBody, body=st.binary(max_size=200), end_of_stream=st.booleans())
proper = st.one_of(
    st.fixed_dictionaries({"request_headers": http_headers}),
    st.fixed_dictionaries({"response_headers": http_headers}),
    st.fixed_dictionaries({"request_body": http_body}),
    st.fixed_dictionaries({"response_body": http_body}),
    st.just({"request_trailers": pb.HttpTrailers()}),
    st.just({}),
)
structs = st.dictionaries(
    st.sampled_from(
        [
            "x-gateway-destination-endpoint-subset",
            "x-gateway-destination-endpoint-served",
            "upstream.address",
            "other",
        ]
    ),
    st.sampled_from(["10.0.0.1:80", "a, b", "", ["a", "b"], 1.0, None]),
    max_size=3,
)


@st.composite
def requests(draw) -> bytes:
    message = pb.ProcessingRequest(**draw(proper))
    for name in draw(st.lists(st.sampled_from(["envoy.lb", "envoy.lb.subset_hint", "x"]), max_size=2)):
        message.metadata_context.filter_metadata[name].update(draw(structs))
    if draw(st.booleans()):
        message.attributes["envoy.filters.http.ext_proc"].update(draw(structs))
    if draw(st.booleans()):
        told = message.protocol_config
        told.request_body_mode, told.response_body_mode = draw(st.tuples(*[st.integers(0, 7)] * 2))
    return message.SerializeToString()


@st.composite
def spoilt(draw) -> bytes:
    """Messages, perhaps several in one, perhaps with bytes changed, added or cut off."""
    raw = bytearray(b"".join(draw(st.lists(requests(), min_size=1, max_size=2))))
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)):
        if at < len(raw):
            raw[at] = byte
    more = draw(st.binary(max_size=4))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw + more)


def said(decode, raw: bytes):
    try:
        return decode(raw)
    except ProtocolError:
        return ProtocolError


@given(requests() | spoilt() | st.binary(max_size=60))
@example(headers(("a", b"1")) + body(3))
@example(body(3) + headers(("a", b"1")))
def test_it_reads_what_protobuf_reads(raw):
    assert said(wire.decode, raw) == said(wire.by_protobuf, raw)


@given(requests())
def test_bodies_that_protobuf_writes_are_read_in_place(raw):
    kind = pb.ProcessingRequest.FromString(raw).WhichOneof("request")
    if kind in ("request_body", "response_body"):
        assert envelope.read(raw) is not None


# What stays of a header when its request is gone.


@pytest.mark.parametrize(
    ("name", "value", "stays"),
    [
        (":path", b"/v1/chat/completions", True),
        (":path", b"/v1/chat/completions?api_key=sk-1", False),
        ("content-type", b"application/json", True),
        ("User-Agent", b"curl/8.1", True),
        *(
            (name, b"sk-1", False)
            for name in (
                *("authorization", "Authorization", "proxy-authorization", "cookie", "set-cookie", "api-key"),
                *("x-api-key", "x-goog-api-key", "x-session-id", "x-request-id", "x-of-our-own", "referer"),
            )
        ),
    ],
)
def test_only_what_all_clients_say_alike_is_remembered(name, value, stays):
    """A remembered value is the very same object in the next request."""
    first, again = (envelope.read(headers((name, value)) + REST).headers for _ in range(2))
    assert first == again == {name.lower(): value.decode()}
    assert (first[name.lower()] is again[name.lower()]) == stays


def test_what_is_remembered_is_bounded():
    def value_of(number: int) -> str:
        told = envelope.read(headers(("user-agent", b"agent %d" % number)))
        assert told.headers == {"user-agent": f"agent {number}"}
        return told.headers["user-agent"]

    first = value_of(0)
    assert value_of(0) is first
    for number in range(1, envelope.MEMO_ENTRIES + 1):
        value_of(number)
    assert value_of(0) is not first
