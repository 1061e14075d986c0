"""HTTP/2 without sockets: frames in, events and frames out."""

import itertools
import random
import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.extproc.h2 import frames, limits, replies
from perilune_gateway.extproc.h2.connection import Connection
from perilune_gateway.extproc.h2.events import Ended, Message, Opened, Reset
from perilune_gateway.extproc.h2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEADER,
    PADDED,
    PREFACE,
    PRIORITY,
    Code,
    Setting,
    Type,
    frame,
    literal,
    number,
)
from perilune_gateway.extproc.h2.replies import Status
from perilune_gateway.extproc.service import Closed

BLOCK = b"\x83" + literal(b":path", b"/p")
GREETING = PREFACE + frames.settings({})
OPEN_WINDOW = frames.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30}) + number(Type.WINDOW_UPDATE, 0, 1 << 30)


def opened(stream: int, flags: int = END_HEADERS) -> bytes:
    return frame(Type.HEADERS, flags, stream, BLOCK)


def grpc(payload: bytes, compressed: int = 0) -> bytes:
    return struct.pack(">BI", compressed, len(payload)) + payload


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return frame(Type.DATA, flags, stream, payload)


@dataclass(frozen=True)
class Frame:
    type: int
    flags: int
    stream: int
    payload: bytes

    @property
    def number(self) -> int:
        return int.from_bytes(self.payload, "big")


def parsed(raw: bytes) -> list[Frame]:
    found, at = [], 0
    while at < len(raw):
        high, low, kind, flags, stream = HEADER.unpack_from(raw, at)
        length = high << 8 | low
        found.append(Frame(kind, flags, stream, raw[at + 9 : at + 9 + length]))
        at += 9 + length
    assert at == len(raw)
    return found


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def connected(*more: bytes, clock: Clock | None = None) -> Connection:
    """Return a connection that has been greeted and whose own greeting has been taken."""
    connection = Connection(clock or Clock())
    assert connection.receive(GREETING + b"".join(more)) == []
    connection.take()
    return connection


def sent(connection: Connection) -> list[Frame]:
    return parsed(connection.take())


def test_a_connection_begins_with_the_servers_settings():
    connection = Connection()
    first, window = sent(connection)
    values = dict(struct.iter_unpack(">HI", first.payload))
    assert (first.type, first.flags) == (Type.SETTINGS, 0)
    assert values[Setting.HEADER_TABLE_SIZE] == 0
    assert values[Setting.INITIAL_WINDOW_SIZE] == limits.STREAM_WINDOW
    assert (window.type, window.number) == (Type.WINDOW_UPDATE, limits.CONNECTION_WINDOW - 65_535)
    connection.receive(GREETING)
    assert sent(connection) == [Frame(Type.SETTINGS, ACK, 0, b"")]


def test_a_stream_is_answered_message_by_message():
    connection = connected(OPEN_WINDOW)
    events = connection.receive(opened(1) + data(1, grpc(b"hello") + grpc(b"")))
    assert events == [Opened(1, "/p"), Message(1, b"hello"), Message(1, b"")]
    connection.send(1, b"answer")
    headers, *answer = sent(connection)
    assert (headers.type, headers.flags, headers.payload) == (
        Type.HEADERS,
        END_HEADERS,
        replies.RESPONSE_HEADERS,
    )
    assert answer == [Frame(Type.DATA, 0, 1, grpc(b"answer"))]
    assert connection.receive(data(1, b"", END_STREAM)) == [Ended(1)]
    connection.finish(1)
    assert sent(connection) == [Frame(Type.HEADERS, END_HEADERS | END_STREAM, 1, replies.TRAILERS_OK)]
    assert connection.streams == {}
    assert connection.buffered_bytes == 0


def test_stream_that_we_end_first_is_told_to_stop():
    connection = connected()
    connection.receive(opened(1))
    connection.finish(1, Status.INTERNAL, "50 % bad")
    trailers, reset = sent(connection)
    assert literal(b"grpc-status", b"13") + literal(b"grpc-message", b"50 %25 bad") in trailers.payload
    assert trailers.payload.startswith(replies.RESPONSE_HEADERS)
    assert (reset.type, reset.number) == (Type.RST_STREAM, Code.NO_ERROR)
    assert connection.receive(data(1, b"late") + number(Type.WINDOW_UPDATE, 1, 5)) == []
    assert connection.receive(number(Type.RST_STREAM, 1, Code.CANCEL)) == []
    assert not connection.ended
    connection.send(1, b"nobody listens")
    assert sent(connection) == []


def test_padding_priorities_and_continuations_are_tolerated():
    connection = connected()
    padded = bytes((3,)) + b"\0\0\0\0\x10" + BLOCK[:2] + b"\0" * 3
    block = frame(Type.HEADERS, PADDED | PRIORITY, 1, padded)
    block += frame(Type.CONTINUATION, 0, 1, BLOCK[2:4]) + frame(Type.CONTINUATION, END_HEADERS, 1, BLOCK[4:])
    body = frame(Type.DATA, PADDED | END_STREAM, 1, bytes((4,)) + grpc(b"x") + b"\0" * 4)
    other = frame(Type.PRIORITY, 0, 1, bytes(5)) + frame(0xFA, 0xFF, 1, b"extension")
    assert connection.receive(block + other + body) == [Opened(1, "/p"), Message(1, b"x"), Ended(1)]


def test_trailers_of_a_request_end_it():
    connection = connected()
    trailers = frame(Type.HEADERS, END_HEADERS | END_STREAM, 1, literal(b"a", b"b"))
    assert connection.receive(opened(1) + trailers) == [Opened(1, "/p"), Ended(1)]


def test_pings_and_settings_are_acknowledged():
    connection = connected()
    connection.receive(
        frame(Type.PING, 0, 0, b"12345678") + frames.settings({Setting.MAX_FRAME_SIZE: 20_000})
    )
    assert sent(connection) == [
        Frame(Type.PING, ACK, 0, b"12345678"),
        Frame(Type.SETTINGS, ACK, 0, b""),
    ]


def test_dynamic_table_of_a_peer_that_has_not_read_our_settings():
    connection = connected()
    remembered = b"\x83\x44\x02/p"
    assert connection.receive(frame(Type.HEADERS, END_HEADERS, 1, remembered)) == [Opened(1, "/p")]
    assert connection.receive(frame(Type.HEADERS, END_HEADERS, 3, b"\x83\xbe")) == [Opened(3, "/p")]
    assert connection.receive(frame(Type.HEADERS, END_HEADERS, 5, b"\x20\x83" + BLOCK[1:])) == [
        Opened(5, "/p")
    ]
    assert connection.receive(frame(Type.HEADERS, END_HEADERS, 7, b"\x83\xbe")) == []
    assert connection.error.code is Code.COMPRESSION_ERROR


# What breaks HTTP/2 ends the connection.

BREACHES = {
    "another protocol": (b"GET / HTTP/1.1\r\n", Code.PROTOCOL_ERROR),
    "no SETTINGS first": (PREFACE + frame(Type.PING, 0, 0, bytes(8)), Code.PROTOCOL_ERROR),
    "HEADERS on stream 0": (GREETING + opened(0), Code.PROTOCOL_ERROR),
    "HEADERS on an even stream": (GREETING + opened(2), Code.PROTOCOL_ERROR),
    "DATA on a stream that was never opened": (GREETING + data(1, b"x"), Code.PROTOCOL_ERROR),
    "RST_STREAM of one": (GREETING + number(Type.RST_STREAM, 1, 0), Code.PROTOCOL_ERROR),
    "headers twice": (GREETING + opened(1) + opened(1), Code.PROTOCOL_ERROR),
    "DATA after the end": (
        GREETING + opened(1, END_HEADERS | END_STREAM) + data(1, b"x"),
        Code.STREAM_CLOSED,
    ),
    "PING on a stream": (GREETING + frame(Type.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "PING of 7 bytes": (GREETING + frame(Type.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "SETTINGS cut short": (GREETING + frame(Type.SETTINGS, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "SETTINGS acknowledged with payload": (
        GREETING + frame(Type.SETTINGS, ACK, 0, bytes(6)),
        Code.FRAME_SIZE_ERROR,
    ),
    "window too large": (
        GREETING + frames.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
        Code.FLOW_CONTROL_ERROR,
    ),
    "frame size too small": (GREETING + frames.settings({Setting.MAX_FRAME_SIZE: 5}), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of nothing": (GREETING + number(Type.WINDOW_UPDATE, 0, 0), Code.PROTOCOL_ERROR),
    "window that overflows": (
        GREETING + number(Type.WINDOW_UPDATE, 0, (1 << 31) - 1),
        Code.FLOW_CONTROL_ERROR,
    ),
    "PUSH_PROMISE": (GREETING + frame(Type.PUSH_PROMISE, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "CONTINUATION without HEADERS": (GREETING + frame(Type.CONTINUATION, 0, 1, b""), Code.PROTOCOL_ERROR),
    "a header block interrupted": (
        GREETING + frame(Type.HEADERS, 0, 1, BLOCK) + frame(Type.PING, 0, 0, bytes(8)),
        Code.PROTOCOL_ERROR,
    ),
    "a header block that is no HPACK": (
        GREETING + frame(Type.HEADERS, END_HEADERS, 1, b"\x80"),
        Code.COMPRESSION_ERROR,
    ),
    "padding beyond the frame": (
        GREETING + opened(1) + frame(Type.DATA, PADDED, 1, b"\x05abc"),
        Code.PROTOCOL_ERROR,
    ),
    "a frame too long": (
        GREETING + opened(1) + frames.header(limits.FRAME_BYTES + 1, Type.DATA, 0, 1),
        Code.FRAME_SIZE_ERROR,
    ),
}


@pytest.mark.parametrize(("raw", "code"), BREACHES.values(), ids=BREACHES)
def test_breach_ends_the_connection(raw, code):
    connection = Connection()
    connection.receive(raw)
    assert connection.ended
    assert connection.error.code is code
    goaway = sent(connection)[-1]
    assert (goaway.type, goaway.payload[4:8]) == (Type.GOAWAY, struct.pack(">I", code))
    assert (connection.streams, connection.buffered_bytes, connection.pending_bytes) == ({}, 0, 0)
    assert connection.receive(GREETING) == []
    assert connection.take() == b""


# What breaks gRPC ends the stream.


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        pytest.param(data(1, grpc(b"x", compressed=1)), Status.UNIMPLEMENTED, id="compressed"),
        pytest.param(data(1, b"\0\xff\xff\xff\xff"), Status.RESOURCE_EXHAUSTED, id="too long"),
        pytest.param(data(1, b"\0\0", END_STREAM), Status.INTERNAL, id="ends within a prefix"),
        pytest.param(data(1, b"\0\0\0\0\x05", END_STREAM), Status.INTERNAL, id="ends before a message"),
        pytest.param(data(1, b"\0\0\0\0\x05abc", END_STREAM), Status.INTERNAL, id="ends within a message"),
    ],
)
def test_broken_message_ends_its_stream_and_no_other(raw, status):
    connection = connected(OPEN_WINDOW)
    assert connection.receive(opened(1) + opened(3)) == [Opened(1, "/p"), Opened(3, "/p")]
    assert connection.receive(raw)[-1] == Reset(1)
    assert literal(b"grpc-status", b"%d" % status) in sent(connection)[0].payload
    assert connection.receive(data(1, b"more") + data(3, grpc(b"x"))) == [Message(3, b"x")]
    assert list(connection.streams) == [3]
    connection.handled(3, 1)
    assert connection.buffered_bytes == 0


# Limits.


def test_one_stream_more_than_allowed_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "MAX_STREAMS", 2)
    connection = connected()
    assert len(connection.receive(opened(1) + opened(3) + opened(5))) == 2
    assert [(f.type, f.stream, f.number) for f in sent(connection)] == [
        (Type.RST_STREAM, 5, Code.REFUSED_STREAM)
    ]
    connection.receive(number(Type.RST_STREAM, 1, Code.CANCEL))
    assert connection.receive(opened(7)) == [Opened(7, "/p")]


def test_any_number_of_streams_may_be_reset_after_an_answer():
    connection = connected(OPEN_WINDOW)
    for stream in range(1, 20_001, 2):
        assert len(connection.receive(opened(stream) + data(stream, grpc(b"x")))) == 2
        connection.send(stream, b"y")
        connection.take()
        assert connection.receive(number(Type.RST_STREAM, stream, Code.CANCEL)) == [Reset(stream)]
    assert (connection.ended, connection.streams, connection.buffered_bytes) == (False, {}, 0)


def unanswered(first: int, count: int) -> bytes:
    """Streams that are opened and reset before anything is answered."""
    return b"".join(
        opened(stream) + number(Type.RST_STREAM, stream, Code.CANCEL)
        for stream in range(first, first + 2 * count, 2)
    )


EMPTY = "frames without effect"
FLOODS = {
    "SETTINGS": (lambda first, count: frames.settings({}) * count, 100 - 1, 10, "SETTINGS frames"),
    "SETTINGS acknowledged": (
        lambda first, count: frame(Type.SETTINGS, ACK, 0) * count,
        100 - 1,
        10,
        "SETTINGS frames",
    ),
    "PING": (lambda first, count: frame(Type.PING, 0, 0, bytes(8)) * count, 1_000, 100, "PING frames"),
    "streams reset before an answer": (unanswered, 5_000, 500, "streams that are reset before an answer"),
    "PRIORITY": (lambda first, count: frame(Type.PRIORITY, 0, 1, bytes(5)) * count, 1_000, 100, EMPTY),
    "frames of an unknown type": (lambda first, count: frame(0xFA, 0, 0) * count, 1_000, 100, EMPTY),
    "GOAWAY": (lambda first, count: frames.goaway(0, Code.NO_ERROR) * count, 1_000, 100, EMPTY),
}
"""Frames by (first stream, count); how many may come at once, how many a second; what the error says."""


@pytest.mark.parametrize(("made", "at_once", "per_second", "says"), FLOODS.values(), ids=FLOODS)
def test_a_peer_may_send_so_many_at_once_and_so_many_a_second_and_no_more(made, at_once, per_second, says):
    clock = Clock()
    connection = connected(clock=clock)
    connection.receive(made(1, at_once))
    assert not connection.ended
    clock.now_s += 2.0
    connection.receive(made(20_001, 2 * per_second))
    assert not connection.ended
    connection.receive(made(40_001, 1))
    assert connection.ended
    assert (connection.cause, connection.error.code) == (Closed.FLOOD, Code.ENHANCE_YOUR_CALM)
    assert says in str(connection.error)
    assert connection.streams == {}


def test_data_frames_without_a_byte_are_limited():
    connection = connected()
    connection.receive(opened(1) + data(1, b"") * 1_000)
    assert not connection.ended
    connection.receive(data(1, b""))
    assert connection.cause is Closed.FLOOD


def test_streams_beyond_the_limit_are_refused_only_so_often(monkeypatch):
    monkeypatch.setattr(limits, "MAX_STREAMS", 0)
    connection = connected()
    connection.receive(b"".join(opened(stream) for stream in range(1, 10_001, 2)))
    assert not connection.ended
    connection.receive(opened(10_001))
    assert connection.cause is Closed.FLOOD
    assert "streams that are refused" in str(connection.error)


TABLE_ENTRY = b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4_000
"""A field of 4,001 bytes that is put into the dynamic table, where later fields refer to it with one byte."""


def wordy(fields: int, value: bytes = b"") -> bytes:
    return BLOCK + literal(b"x", value) * fields


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(
            frame(Type.HEADERS, 0, 1, BLOCK) + frame(Type.CONTINUATION, 0, 1, b"") * 9,
            "more than 8 CONTINUATION frames",
            id="many CONTINUATION frames",
        ),
        pytest.param(
            frame(Type.HEADERS, 0, 1, bytes(16_000)) + frame(Type.CONTINUATION, 0, 1, bytes(16_000)) * 4,
            "a header block of more than 65536 bytes",
            id="a long header block",
        ),
        pytest.param(
            frame(Type.HEADERS, END_HEADERS, 1, wordy(255)), "more than 256 header fields", id="many fields"
        ),
        pytest.param(
            frame(Type.HEADERS, END_HEADERS, 1, TABLE_ENTRY + b"\xbe" * 16),
            "a header list of more than 65536 bytes",
            id="a short block that decompresses to a long list",
        ),
    ],
)
def test_header_blocks_and_lists_are_limited(raw, says):
    connection = connected()
    assert connection.receive(raw) == []
    assert (connection.cause, connection.error.code) == (Closed.FLOOD, Code.ENHANCE_YOUR_CALM)
    assert says in str(connection.error)


def test_header_blocks_and_lists_at_their_limits_are_taken():
    connection = connected()
    raw = frame(Type.HEADERS, 0, 1, BLOCK) + frame(Type.CONTINUATION, 0, 1, b"") * 7
    raw += frame(Type.CONTINUATION, END_HEADERS, 1, b"")
    raw += frame(Type.HEADERS, END_HEADERS, 3, wordy(254))
    raw += frame(Type.HEADERS, END_HEADERS, 5, TABLE_ENTRY + b"\xbe" * 15)
    assert [event.stream for event in connection.receive(raw)] == [1, 3, 5]


# Time.


@pytest.mark.parametrize(
    "said", [b"", PREFACE[:10], PREFACE, GREETING[:-1]], ids=["nothing", "a part", "the preface", "half"]
)
def test_a_peer_that_does_not_greet_in_time_is_closed(said):
    clock = Clock()
    connection = Connection(clock)
    connection.receive(said)
    clock.now_s += limits.HANDSHAKE_S - 0.1
    connection.check_time()
    assert not connection.ended
    clock.now_s += 0.1
    connection.check_time()
    assert (connection.ended, connection.cause) == (True, Closed.HANDSHAKE_TIMEOUT)


def test_an_idle_connection_is_drained_and_then_closed():
    clock = Clock()
    connection = connected(clock=clock)
    connection.receive(opened(1))
    clock.now_s += 10 * limits.IDLE_S
    connection.check_time()  # a stream is open, so it is not idle
    connection.receive(number(Type.RST_STREAM, 1, Code.CANCEL))
    clock.now_s += limits.IDLE_S - 1
    connection.check_time()
    assert sent(connection) == []
    clock.now_s += 1
    connection.check_time()
    goaway, ping = sent(connection)
    assert (goaway.type, ping.type) == (Type.GOAWAY, Type.PING)
    connection.check_time()
    assert not connection.ended
    connection.receive(frame(Type.PING, ACK, 0, ping.payload))
    connection.check_time()
    assert (connection.ended, connection.cause, connection.error) == (True, Closed.IDLE, None)


def test_a_stream_that_is_opened_while_an_idle_connection_drains_is_served_to_its_end():
    clock = Clock()
    connection = connected(clock=clock)
    clock.now_s += limits.IDLE_S
    connection.check_time()
    assert connection.receive(opened(1)) == [Opened(1, "/p")]
    clock.now_s += 10 * limits.IDLE_S
    connection.check_time()
    assert not connection.ended


def test_an_idle_peer_that_does_not_answer_is_closed_all_the_same():
    clock = Clock()
    connection = connected(clock=clock)
    clock.now_s += limits.IDLE_S
    connection.check_time()
    clock.now_s += limits.DRAIN_ANSWER_S
    connection.check_time()
    assert connection.cause is Closed.IDLE


def test_short_streams_between_two_checks_keep_a_connection_from_being_idle():
    clock = Clock()
    connection = connected(clock=clock)
    for stream in range(1, 21, 2):
        clock.now_s += limits.IDLE_S - 1
        connection.receive(opened(stream) + number(Type.RST_STREAM, stream, Code.CANCEL))
        connection.check_time()
    assert sent(connection) == []


def test_what_all_streams_hold_is_limited(monkeypatch):
    monkeypatch.setattr(limits, "BUFFERED_BYTES", 1000)
    connection = connected()
    half = struct.pack(">BI", 0, 5000) + bytes(600)
    events = connection.receive(opened(1) + data(1, half) + opened(3) + data(3, half) + data(1, bytes(100)))
    assert events == [Opened(1, "/p"), Opened(3, "/p"), Reset(3)]
    assert literal(b"grpc-status", b"8") in sent(connection)[0].payload
    assert connection.buffered_bytes == 705


def test_answers_that_are_not_taken_are_limited(monkeypatch):
    monkeypatch.setattr(limits, "PENDING_BYTES", 100_000)
    connection = connected()
    connection.receive(opened(1))
    connection.send(1, bytes(150_000))
    assert not connection.ended
    connection.send(1, bytes(50_000))
    assert (connection.ended, connection.cause) == (True, Closed.NOT_READING)
    assert sent(connection)[-1].type == Type.GOAWAY


def test_single_bytes_are_kept_together():
    connection = connected()
    connection.receive(opened(1) + data(1, b"\0\0\1\0\0"))
    for _ in range(20_000):
        connection.receive(data(1, b"x"))
    assert connection.streams[1].inbox.pieces <= 5


# Flow control.


def test_credit_is_given_when_messages_are_handled(monkeypatch):
    monkeypatch.setattr(limits, "STREAM_WINDOW", 1000)
    connection = connected()
    connection.receive(opened(1) + data(1, grpc(bytes(300))) + data(1, grpc(bytes(300))))
    assert sent(connection) == []
    connection.handled(1, 300)
    assert sent(connection) == []  # less than half a window
    connection.handled(1, 300)
    assert [(f.type, f.stream, f.number) for f in sent(connection)] == [(Type.WINDOW_UPDATE, 1, 610)]


def test_credit_always_suffices_for_the_message_that_arrives(monkeypatch):
    monkeypatch.setattr(limits, "STREAM_WINDOW", 1000)
    connection = connected()
    connection.receive(opened(1) + data(1, grpc(bytes(200))))
    connection.handled(1, 200)
    assert sent(connection) == []
    connection.receive(data(1, struct.pack(">BI", 0, 900)))
    assert [(f.type, f.number) for f in sent(connection)] == [(Type.WINDOW_UPDATE, 205)]


def test_peer_that_ignores_a_window_breaks_the_protocol(monkeypatch):
    monkeypatch.setattr(limits, "STREAM_WINDOW", 1000)
    connection = connected()
    connection.receive(opened(1) + data(1, bytes(1001)))
    assert connection.error.code is Code.FLOW_CONTROL_ERROR


def test_window_of_the_connection_is_given_back_at_once(monkeypatch):
    monkeypatch.setattr(limits, "CONNECTION_WINDOW", 1000)
    connection = connected()
    connection.receive(opened(1) + data(1, struct.pack(">BI", 0, 5000) + bytes(400)))
    assert sent(connection) == []
    connection.receive(data(1, bytes(200)))
    assert [(f.type, f.stream, f.number) for f in sent(connection)] == [(Type.WINDOW_UPDATE, 0, 605)]


def test_answers_wait_for_both_windows():
    connection = connected(frames.settings({Setting.INITIAL_WINDOW_SIZE: 10}))
    connection.receive(opened(1) + opened(3))
    connection.send(1, b"0123456789")
    connection.send(3, b"ab")
    connection.finish(1)
    assert [(f.type, f.stream, f.payload) for f in sent(connection) if f.type == Type.DATA] == [
        (Type.DATA, 1, grpc(b"0123456789")[:10]),
        (Type.DATA, 3, grpc(b"ab")),
    ]
    connection.receive(number(Type.WINDOW_UPDATE, 1, 2))
    assert [f.payload for f in sent(connection)] == [b"56"]
    connection.receive(frames.settings({Setting.INITIAL_WINDOW_SIZE: 20}))
    _, rest, trailers, _ = sent(connection)
    assert (rest.payload, trailers.flags) == (b"789", END_HEADERS | END_STREAM)
    assert connection.pending_bytes == 0


@given(st.data())
def test_no_window_is_ever_exceeded_and_everything_arrives(draw):
    """A peer with small windows that it opens at random; three streams answer at random."""
    window = draw.draw(st.integers(0, 50))
    connection = connected(frames.settings({Setting.INITIAL_WINDOW_SIZE: window}))
    streams = (1, 3, 5)
    for stream in streams:
        connection.receive(opened(stream))
    budget = {0: 65_535} | dict.fromkeys(streams, window)
    wanted = dict.fromkeys(streams, b"")
    got = dict.fromkeys(streams, b"")
    ended = set()

    def take() -> None:
        for f in sent(connection):
            if f.type == Type.DATA:
                got[f.stream] += f.payload
                budget[0] -= len(f.payload)
                budget[f.stream] -= len(f.payload)
                assert min(budget[0], budget[f.stream]) >= 0
            elif f.type == Type.HEADERS and f.flags & END_STREAM:
                ended.add(f.stream)

    for stream, size, more in draw.draw(
        st.lists(
            st.tuples(st.sampled_from(streams), st.integers(0, 30_000), st.integers(1, 40_000)), max_size=12
        )
    ):
        payload = random.Random(size).randbytes(size)
        connection.send(stream, payload)
        wanted[stream] += grpc(payload)
        take()
        other = streams[more % 3]
        budget[other] += more
        budget[0] += more
        connection.receive(number(Type.WINDOW_UPDATE, other, more) + number(Type.WINDOW_UPDATE, 0, more))
        take()
    for stream in streams:
        connection.finish(stream)
        budget[stream] += 1 << 20
        connection.receive(number(Type.WINDOW_UPDATE, stream, 1 << 20))
        take()
    budget[0] += 1 << 20
    connection.receive(number(Type.WINDOW_UPDATE, 0, 1 << 20))
    take()
    assert got == wanted
    assert ended == set(streams)
    assert (connection.streams, connection.pending_bytes) == ({}, 0)


# Drain.


def test_drain_is_quiet_when_the_peer_knows_and_no_stream_is_left():
    connection = connected()
    connection.receive(opened(1))
    connection.drain()
    goaway, ping = sent(connection)
    assert struct.unpack_from(">II", goaway.payload) == (frames.MAX_STREAM, Code.NO_ERROR)
    assert connection.receive(opened(3)) == [Opened(3, "/p")]  # was on its way
    connection.receive(frame(Type.PING, ACK, 0, ping.payload))
    assert not connection.quiet
    connection.receive(number(Type.RST_STREAM, 1, Code.CANCEL) + number(Type.RST_STREAM, 3, Code.CANCEL))
    assert connection.quiet
    connection.close()
    (last,) = sent(connection)
    assert struct.unpack_from(">II", last.payload) == (3, Code.NO_ERROR)


def test_close_resets_what_still_runs():
    connection = connected()
    connection.receive(opened(1))
    connection.close()
    assert [(f.type, f.stream) for f in sent(connection)] == [(Type.RST_STREAM, 1), (Type.GOAWAY, 0)]


# Fuzz.


def talk(connection: Connection, pieces: list[bytes]) -> tuple[list[object], bytes]:
    """All events and all bytes; every message is answered by itself, reversed."""
    events: list[object] = []
    for piece in pieces:
        for event in connection.receive(piece):
            events.append(event)
            if isinstance(event, Message):
                connection.send(event.stream, event.payload[::-1])
                connection.handled(event.stream, len(event.payload))
            if isinstance(event, Ended):
                connection.finish(event.stream)
    return events, connection.take()


def check_sound(connection: Connection) -> None:
    held = sum(stream.unhandled_bytes for stream in connection.streams.values())
    waiting = sum(len(stream.pending or b"") for stream in connection.streams.values())
    assert (connection.buffered_bytes, connection.pending_bytes) == (held, waiting)
    if connection.ended:
        assert connection.streams == {}


def cut(raw: bytes, at: list[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(raw) + 1) for place in at), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(places)]


any_frame = st.builds(
    frame,
    st.integers(0, 11),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 32, 36, 45, 255]),
    st.integers(0, 9),
    st.binary(max_size=40)
    | st.just(BLOCK)
    | st.binary(max_size=20).map(grpc)
    | st.integers(0, 2**32 - 1).map(lambda n: n.to_bytes(4, "big")),
)


@given(st.binary(max_size=200), st.booleans(), st.lists(st.integers(0, 300), max_size=5))
def test_any_bytes_end_the_connection_and_nothing_else(raw, greeted, at):
    connection = Connection()
    talk(connection, cut(GREETING + raw if greeted else raw, at))
    check_sound(connection)


@given(st.lists(any_frame, max_size=30), st.lists(st.integers(0, 1000), max_size=8))
def test_any_frames_end_the_connection_and_nothing_else(found, at):
    connection = Connection()
    events, out = talk(connection, cut(GREETING + b"".join(found), at))
    check_sound(connection)
    whole = Connection()
    assert (events, connection.error is None) == (
        talk(whole, [GREETING + b"".join(found)])[0],
        whole.error is None,
    )
    kinds = [f.type for f in parsed(out)]
    assert kinds.count(Type.GOAWAY) == connection.ended


@given(st.data())
def test_valid_streams_in_any_interleaving_and_splits_get_the_same_answers(draw):
    count = draw.draw(st.integers(1, 5))
    queues, expected = [], {}
    for stream in range(1, 2 * count, 2):
        bodies = draw.draw(st.lists(st.binary(max_size=300), max_size=4))
        raw = b"".join(map(grpc, bodies))
        pieces = cut(raw, draw.draw(st.lists(st.integers(0, 1500), max_size=6)))
        steps = [opened(stream), *(data(stream, piece) for piece in pieces)]
        ending = draw.draw(st.sampled_from(["end", "reset", "open"]))
        if ending == "end":
            steps.append(data(stream, b"", END_STREAM))
        elif ending == "reset":
            steps.append(number(Type.RST_STREAM, stream, Code.CANCEL))
        queues.append(steps)
        last = {"end": [Ended(stream)], "reset": [Reset(stream)], "open": []}[ending]
        expected[stream] = [Opened(stream, "/p"), *(Message(stream, body) for body in bodies), *last]
    raw, left = b"", [queue for queue in queues if queue]
    raw, rest = left[0].pop(0), left[1:]  # streams are opened in order
    for queue in rest:
        raw += queue.pop(0)
    noise = [
        frame(Type.PING, 0, 0, bytes(8)),
        number(Type.WINDOW_UPDATE, 0, 1),
        frame(Type.PRIORITY, 0, 1, bytes(5)),
    ]
    while left := [queue for queue in left if queue]:
        if draw.draw(st.integers(0, 4)) == 0:
            raw += draw.draw(st.sampled_from(noise))
        raw += left[draw.draw(st.integers(0, len(left) - 1))].pop(0)
    connection = Connection()
    pieces = cut(GREETING + OPEN_WINDOW + raw, draw.draw(st.lists(st.integers(0, 5000), max_size=20)))
    events, out = talk(connection, pieces)
    check_sound(connection)
    assert not connection.ended
    for stream, wanted in expected.items():
        assert [event for event in events if event.stream == stream] == wanted
        answered = b"".join(f.payload for f in parsed(out) if (f.type, f.stream) == (Type.DATA, stream))
        answers = b"".join(grpc(e.payload[::-1]) for e in wanted if isinstance(e, Message))
        if wanted[-1] == Reset(stream):  # what it has not read is dropped
            assert answers.startswith(answered)
        else:
            assert answered == answers
    assert connection.buffered_bytes == 0
