"""Peers that break off, vanish, dawdle or talk nonsense, against both servers over real sockets."""

import asyncio
import random
import struct

import list_of_one
import pytest
from envoy_doubles import ID, PHASE, REFUSE, ROUTE, ScriptedRouter
from waiting import HANG, until

from perilune_api import extproc_pb2 as pb
from perilune_api.names import EXT_PROC_SERVICE
from perilune_api.pool import Limits
from perilune_gateway.extproc import Transport, new_server
from perilune_gateway.extproc.h2 import limits
from perilune_gateway.extproc.h2 import server as h2_server
from perilune_gateway.extproc.h2.connection import DRAIN_PING
from perilune_gateway.extproc.h2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEADER,
    PREFACE,
    Code,
    Setting,
    Type,
    frame,
    literal,
    number,
    settings,
)
from perilune_gateway.extproc.service import Closed, Service
from perilune_gateway.model import Outcome

BLOCK = b"\x83\x86" + b"".join(
    literal(name, value)
    for name, value in (
        (b":path", f"/{EXT_PROC_SERVICE}/Process".encode()),
        (b":authority", b"test"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
GREETING = (
    PREFACE
    + settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30, Setting.HEADER_TABLE_SIZE: 0})
    + number(Type.WINDOW_UPDATE, 0, 1 << 30)
)
REQUESTS = {Transport.H2: 5_000, Transport.GRPC: 1_000}
"""Fewer for gRPC's own server, which others test too."""
PER_CONNECTION = 100


class StuckTokenizer:
    async def encode(self, request):
        await asyncio.Event().wait()


def message(raw: bytes) -> bytes:
    return struct.pack(">BI", 0, len(raw)) + raw


def request_headers(phase: str, mode: str = "BUFFERED", **more: str) -> bytes:
    fields = {":method": "POST", ":path": "/v1/x", ROUTE: "10.0.0.1:1", PHASE: phase} | more
    values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in fields.items()]
    told = pb.ProtocolConfiguration(request_body_mode=pb.ProcessingMode.BodySendMode.Value(mode))
    headers = pb.HttpHeaders(headers=pb.HeaderMap(headers=values))
    return message(pb.ProcessingRequest(request_headers=headers, protocol_config=told).SerializeToString())


def request_body(size: int) -> bytes:
    body = pb.HttpBody(body=bytes(size), end_of_stream=True)
    return message(pb.ProcessingRequest(request_body=body).SerializeToString())


def response_headers() -> bytes:
    values = [pb.HeaderValue(key=":status", raw_value=b"200")]
    headers = pb.HttpHeaders(headers=pb.HeaderMap(headers=values))
    return message(pb.ProcessingRequest(response_headers=headers).SerializeToString())


class Peer:
    """A client by hand: writes frames, and notes of which (type, stream) some have come."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.came: set[tuple[int, int]] = set()

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.reading = asyncio.create_task(self._read())
        self.write(GREETING)
        return self

    async def __aexit__(self, *error) -> None:
        self.writer.transport.abort()
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)

    def write(self, raw: bytes) -> None:
        self.writer.write(raw)

    def open(self, stream: int, *messages: bytes) -> None:
        parts = [m[i : i + 16_384] for m in messages for i in range(0, len(m), 16_384)]
        raw = b"".join(frame(Type.DATA, 0, stream, part) for part in parts)
        self.write(frame(Type.HEADERS, END_HEADERS, stream, BLOCK) + raw)

    def reset(self, stream: int) -> None:
        self.write(number(Type.RST_STREAM, stream, Code.CANCEL))

    async def answer(self, *streams: int) -> None:
        """Wait for a message on each; a trailer will do."""
        for stream in streams:
            await until(lambda s=stream: {(Type.DATA, s), (Type.RST_STREAM, s)} & self.came)

    async def _read(self) -> None:
        try:
            while True:
                high, low, kind, _, stream = HEADER.unpack(await self.reader.readexactly(9))
                await self.reader.readexactly(high << 8 | low)
                self.came.add((kind, stream))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass


class Rig:
    def __init__(self, transport: Transport, service: Service, router: ScriptedRouter, port: int) -> None:
        self.transport, self.service, self.router, self.port = transport, service, router, port

    async def still_serves(self, test_id: str = "last") -> None:
        async with Peer(self.port) as peer:
            peer.open(1, request_headers("headers", **{ID: test_id}))
            await peer.answer(1)
            peer.reset(1)
            assert await self.router.outcome(test_id) is Outcome.CANCELLED


@pytest.fixture(params=list(Transport), ids=str)
async def rig(request):
    router = ScriptedRouter()
    service = list_of_one.service(router, StuckTokenizer(), limits=Limits(max_body_bytes=50_000))
    server = new_server(request.param, service)
    rig = Rig(request.param, service, router, await server.start("127.0.0.1:0"))
    try:
        yield rig
        await rig.still_serves()
        await until(lambda: service.streams_open == 0)
    finally:
        await server.stop(0)
    assert router.tickets == {}
    assert service.failures == 0


ACTS = ("whole", "body", "tokens", "refused", "too large", "nonsense", "cut", "empty", "half")
ANSWERED = ACTS[:6]


def act(peer: Peer, kind: str, stream: int, dice: random.Random) -> None:
    match kind:
        case "whole":
            peer.open(stream, request_headers("headers"), response_headers())
        case "body":
            peer.open(stream, request_headers("body"), request_body(dice.choice((0, 10, 30_000))))
        case "tokens":
            peer.open(stream, request_headers("tokens"), request_body(100), response_headers())
        case "refused":
            peer.open(stream, request_headers("headers", **{REFUSE: "overloaded"}))
        case "too large":
            peer.open(stream, request_headers("body"), request_body(60_000))
        case "nonsense":
            peer.open(stream, message(b"\xff" + dice.randbytes(30)))
        case "cut":
            peer.open(stream, request_headers("headers")[: dice.randrange(40)])
        case "empty":
            peer.open(stream)
        case "half":
            peer.open(stream, request_headers("headers"))
            peer.write(frame(Type.DATA, END_STREAM, stream))


async def test_mixed_requests_with_disconnects_leave_nothing_behind(rig, caplog):
    """A third is reset at once, a third after an answer, a third left open when the peer vanishes."""
    caplog.set_level("ERROR")

    async def connection(dice: random.Random) -> None:
        async with Peer(rig.port) as peer:
            for first in range(0, PER_CONNECTION, 10):
                answered = []
                for stream in range(2 * first + 1, 2 * first + 21, 2):
                    kind, end = dice.choice(ACTS), dice.choice(("at once", "after", "never"))
                    act(peer, kind, stream, dice)
                    if end == "at once":
                        peer.reset(stream)
                    elif kind in ANSWERED:
                        answered.append((stream, end))
                await peer.answer(*(stream for stream, _ in answered))
                for stream, end in answered:
                    if end == "after":
                        peer.reset(stream)
            if dice.random() < 0.3:
                peer.write(dice.randbytes(100))

    requests = REQUESTS[rig.transport]
    seeds = iter(range(requests // PER_CONNECTION))

    async def client() -> None:
        for seed in seeds:
            await connection(random.Random(seed))

    await asyncio.gather(*(client() for _ in range(8)))
    await until(lambda: rig.service.streams_open == 0)
    assert rig.service.streams_total > requests / 2  # gRPC leaves out what is reset at once
    assert rig.router.tickets == {}


async def test_malformed_frames_end_their_connection_and_no_other(rig):
    async with Peer(rig.port) as good, Peer(rig.port) as bad:
        good.open(1, request_headers("headers", **{ID: "good"}))
        bad.open(1, request_headers("headers", **{ID: "bad"}))
        await until(lambda: len(rig.router.tickets) == 2)
        bad.write(frame(Type.PING, 0, 1, bytes(7)))
        assert await rig.router.outcome("bad") is Outcome.CANCELLED
        await asyncio.wait_for(bad.reading, HANG)
        good.write(frame(Type.DATA, 0, 1, response_headers()))
        await until(lambda: "good" in rig.router.responses)


async def test_stream_that_waits_holds_up_no_other(rig):
    async with Peer(rig.port) as peer:
        peer.open(1, request_headers("tokens", **{ID: "slow"}), request_body(10))
        await until(lambda: "slow" in rig.router.bodies)
        peer.open(3, request_headers("headers", **{ID: "fast"}))
        await peer.answer(3)
        assert rig.service.streams_open == 2
        peer.reset(1)
        await until(lambda: rig.service.streams_open == 1)


async def test_bytes_one_by_one(rig):
    async with Peer(rig.port) as peer:
        raw = frame(Type.HEADERS, END_HEADERS, 1, BLOCK)
        raw += frame(Type.DATA, 0, 1, request_headers("headers", **{ID: "slow"}))
        for i in range(len(raw)):
            peer.write(raw[i : i + 1])
            await asyncio.sleep(0)
        await peer.answer(1)


@pytest.mark.parametrize(
    "raw", [b"", b"GET / HTTP/1.1\r\n\r\n", PREFACE[:10]], ids=["nothing", "HTTP/1", "a part"]
)
async def test_who_does_not_speak_http2_disturbs_nobody(rig, raw):
    _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(raw)
    await rig.still_serves("meanwhile")
    writer.transport.abort()


# What only the h2 server decides. test_connection.py has every limit; here one of each kind goes through a
# socket.


@pytest.fixture
async def h2(monkeypatch, caplog):
    """(service, port); time limits are checked often."""
    caplog.set_level("INFO")
    monkeypatch.setattr(h2_server, "CHECK_S", 0.02)
    service = list_of_one.service(ScriptedRouter(), StuckTokenizer())
    server = new_server(Transport.H2, service)
    yield service, await server.start("127.0.0.1:0")
    await server.stop(0)
    assert service.streams_open == 0


async def closed(service: Service, cause: Closed, caplog) -> None:
    """Wait until a connection was closed for this cause and no other; the log tells cause and peer."""
    await until(lambda: sum(service.connections_closed.values()) == 1)
    assert service.connections_closed[cause] == 1
    (line,) = [text for r in caplog.records if "connection_closed" in (text := r.getMessage())]
    assert line.startswith(f"connection_closed cause={cause} peer=127.0.0.1:")


async def test_a_flood_closes_its_connection_and_no_other(h2, caplog):
    service, port = h2
    async with Peer(port) as good, Peer(port) as bad:
        good.open(1, request_headers("headers"))
        await good.answer(1)
        bad.open(1, request_headers("headers"))
        await bad.answer(1)
        bad.write(frame(Type.PING, 0, 0, bytes(8)) * 2_000)
        await asyncio.wait_for(bad.reading, HANG)
        await closed(service, Closed.FLOOD, caplog)
        good.write(frame(Type.DATA, 0, 1, response_headers()))
        assert service.streams_open == 1
    assert "more than 1000 PING frames at once" in caplog.text


async def test_a_peer_that_says_nothing_is_closed(h2, caplog, monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_S", 0.1)
    service, port = h2
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.wait_for(reader.read(), HANG)
    writer.close()
    await closed(service, Closed.HANDSHAKE_TIMEOUT, caplog)


async def test_an_idle_connection_is_closed(h2, caplog, monkeypatch):
    monkeypatch.setattr(limits, "IDLE_S", 0.1)
    service, port = h2
    async with Peer(port) as peer:
        await until(lambda: (Type.GOAWAY, 0) in peer.came)
        peer.write(frame(Type.PING, ACK, 0, DRAIN_PING))
        await asyncio.wait_for(peer.reading, HANG)
    await closed(service, Closed.IDLE, caplog)


async def test_a_peer_that_does_not_read_its_answers_is_closed(h2, caplog, monkeypatch):
    """A body in full duplex comes back as it went, here to a peer that leaves it in the socket."""
    monkeypatch.setattr(limits, "UNTAKEN_BYTES", 1_000_000)
    service, port = h2
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
    writer.write(GREETING + frame(Type.HEADERS, END_HEADERS, 1, BLOCK))
    head = request_headers("headers", mode="FULL_DUPLEX_STREAMED")
    body = pb.ProcessingRequest(request_body=pb.HttpBody(body=bytes(1_000_000))).SerializeToString()
    writer.write(frame(Type.DATA, 0, 1, head))
    raw = message(body)
    frames = b"".join(frame(Type.DATA, 0, 1, raw[at : at + 16_384]) for at in range(0, len(raw), 16_384))
    with pytest.raises(ConnectionError):  # noqa: PT012
        while True:
            writer.write(frames)
            await writer.drain()
    await closed(service, Closed.NOT_READING, caplog)
