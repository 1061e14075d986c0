"""Coverage-guided fuzzing of everything that reads what others wrote. By hand, and not a test: needs atheris.

    python -m venv /tmp/fuzz && /tmp/fuzz/bin/pip install atheris
    echo "$PWD"/.venv/lib/python3*/site-packages > $(echo /tmp/fuzz/lib/python3*/site-packages)/ours.pth
    export PYTHONPATH=gateway:protos:tests/support
    /tmp/fuzz/bin/python tests/fuzz/readers.py bodies -max_total_time=60

A reader may raise what its docstring names. Anything else ends the run, and the input that did it is kept in
the working folder.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import atheris
import msgspec
from msgspec.structs import replace

with atheris.instrument_imports(include=["perilune_gateway", "perilune_api"]):
    from envoy_doubles import PHASE, ROUTE, ScriptedRouter

    from perilune_api import extproc_pb2 as pb
    from perilune_api.pool import Hashing, Limits, Model, SpecError
    from perilune_gateway.extproc import envelope, wire
    from perilune_gateway.extproc.h2.connection import Connection
    from perilune_gateway.extproc.h2.frames import (
        END_HEADERS,
        PREFACE,
        Type,
        frame,
        literal,
        number,
        settings,
    )
    from perilune_gateway.extproc.h2.hpack import Decoder
    from perilune_gateway.extproc.messages import BodyMode
    from perilune_gateway.extproc.service import Service
    from perilune_gateway.feeds import engine_metrics, kv_events
    from perilune_gateway.feeds.pool_events import EventSink
    from perilune_gateway.model import ProtocolError, Refusal
    from perilune_gateway.observe import decision_log
    from perilune_gateway.request.known_bodies import KnownBodies
    from perilune_gateway.request.openai import PATHS, ChatPrompt, ParsedRequest, parse
    from perilune_gateway.request.tokens import Tokenizer
    from perilune_gateway.state.block_tokens import BlockTokens
    from perilune_gateway.state.engine_blocks import EngineBlocks
    from perilune_gateway.state.parity import ParityCheck
    from perilune_gateway.state.prefix_index import PrefixIndex


class Nobody:
    """Listens to no events, gives no tokens."""

    def on_applied(self, applied: object) -> None:
        pass

    def on_learning(self, endpoint: str, learning: bool) -> None:
        pass

    async def encode(self, request: ParsedRequest) -> Refusal:
        raise AssertionError("nobody waits here")


TOKENIZER = Tokenizer(Model("m", tokenize="estimate"))
APIS = list(PATHS)


def bodies(data: bytes) -> None:
    """The first byte chooses the API."""
    request = parse(APIS[data[0] % len(APIS)] if data else APIS[0], data[1:])
    if isinstance(request, ParsedRequest):
        request.prefix_text()
        TOKENIZER.now(request)


def grown(data: bytes) -> None:
    """Bodies that begin alike, their parts between zeros: remembered or not, they are read the same."""
    known, parts = KnownBodies(chunk_bytes=8), data.split(b"\0")
    bodies = [parts[0] + part for part in parts[1:]]
    for path in APIS:
        for body in bodies + bodies:
            found, whole = known.parse(path, body), parse(path, body)
            if isinstance(whole, Refusal) or isinstance(found, Refusal):
                assert found == whole
                continue
            assert replace(found, prompt=None) == replace(whole, prompt=None)
            if isinstance(whole.prompt, ChatPrompt):
                assert bytes(found.prompt.messages) == bytes(whole.prompt.messages)


def messages(data: bytes) -> None:
    """What is read without protobuf is what protobuf reads."""
    try:
        told = wire.decode(data, BodyMode.BUFFERED)
    except ProtocolError:
        return
    if envelope.read(data) is not None:
        message = pb.ProcessingRequest.FromString(data)
        assert told.kind == message.WhichOneof("request")


def streams(data: bytes) -> None:
    """Messages of one stream, each after two bytes of its length, through exchange and service."""
    service = Service(ScriptedRouter(), Nobody(), limits=Limits(max_body_bytes=1000))
    stream = service.open()
    at = 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2], "big")
        stream.receive(data[at + 2 : at + 2 + size])
        at += 2 + size
    stream.closed()
    assert service.streams_open == 0
    assert service.failures == 0


def frames(data: bytes) -> None:
    """In pieces, as the first byte says, after a greeting."""
    connection = Connection()
    connection.receive(PREFACE + settings({}))
    step = 1 + (data[0] if data else 0)
    for at in range(1, len(data), step):
        for event in connection.receive(data[at : at + step]):
            if (size := len(getattr(event, "payload", b""))) and event.stream in connection.streams:
                connection.handled(event.stream, size)
        connection.take()
        if connection.ended:
            assert not connection.streams
            return
    assert connection.buffered_bytes >= 0


def headers(data: bytes) -> None:
    try:
        Decoder().decode(data)
    except ProtocolError:
        pass


def events(data: bytes) -> None:
    try:
        batch = kv_events.decode(data)
    except ProtocolError:
        return
    blocks = EngineBlocks(PrefixIndex(1_000, 30.0), 4, store=True, max_names=2_000)
    sink = EventSink(blocks, ParityCheck(Hashing(), 4), Nobody(), lambda: 1.0, BlockTokens(4, 10_000))
    sink.batch("a", batch.rank or 0, batch, 0.0)


def metrics(data: bytes) -> None:
    engine_metrics.parse(data)


def log(data: bytes) -> None:
    try:
        list(decision_log.read(data.splitlines(keepends=True), "x"))
    except SpecError:
        pass


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    f.__name__: f for f in (bodies, grown, messages, streams, frames, headers, events, metrics, log)
}

# What is read well, to begin with.

HEAD = pb.ProcessingRequest(
    request_headers=pb.HttpHeaders(
        headers=pb.HeaderMap(
            headers=[
                pb.HeaderValue(key=name, raw_value=value)
                for name, value in ((":method", b"POST"), (PHASE, b"body"), (ROUTE, b"10.0.0.1:1"))
            ]
        )
    ),
    protocol_config=pb.ProtocolConfiguration(request_body_mode=pb.ProcessingMode.BUFFERED),
).SerializeToString()
BODY = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"{}", end_of_stream=True)).SerializeToString()
STORED = {
    "type": "BlockStored", "block_hashes": [1, b"\x02" * 32], "parent_block_hash": None,
    "token_ids": list(range(8)), "block_size": 4, "lora_id": None, "medium": "GPU", "extra_keys": [["a"]],
}  # fmt: skip
OPENING = frame(Type.HEADERS, END_HEADERS, 1, b"\x83" + literal(b":path", b"/p"))
SAID = b'{"role":"user","content":[{"type":"text","text":"hi \\ud83d"}]}'
SEEDS: Mapping[str, tuple[bytes, ...]] = {
    "bodies": (
        b'\x00{"model":"m","messages":[' + SAID + b'],"tools":[{"function":{"name":"f"}}],"max_tokens":5}',
        b'\x01{"model":"m","prompt":[[1,2],[3]],"session_id":"s","priority":1}',
        b'\x02{"model":"m","input":[' + SAID + b'],"instructions":"i"}',
        b'\x03{"model":"m","system":"s","messages":['
        + SAID
        + b'],"max_tokens":5,"metadata":{"user_id":"u"}}',
    ),
    "grown": (
        b'{"model":"m","messages":['
        + SAID
        + b',0],"user":"u"}\0'
        + SAID
        + b",7]}\0"
        + SAID
        + b",1.5,"
        + SAID
        + b"]}",
        b'{"messages":[[[],"a\\u00e9"],{"a":[1]}\0],"model":"m"}\0,true,null],"model":"m","tools":[]}',
    ),
    "messages": (HEAD, BODY),
    "streams": (b"".join(len(raw).to_bytes(2, "big") + raw for raw in (HEAD, BODY)),),
    "frames": (
        b"\xff" + OPENING + frame(Type.DATA, 0, 1, b"\0\0\0\0\x02hi") + number(Type.RST_STREAM, 1, 8),
        b"\x05" + OPENING + number(Type.WINDOW_UPDATE, 0, 99) + frame(Type.PING, 0, 0, bytes(8)),
    ),
    "headers": (b"\x83\x86\x44\x02/p\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff",),
    "events": tuple(
        msgspec.msgpack.encode([1.5, [event], rank])
        for event, rank in (
            (STORED, 0),
            (list(STORED.values())[:7], None),
            ({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}, 1),
            (["AllBlocksCleared"], 0),
        )
    ),
    "metrics": (
        b'vllm:num_requests_running{engine="0",model_name="a\\"b"} 3.0\nvllm:kv_cache_usage_perc{} NaN\n'
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n',
    ),
    "log": (
        b'{"kind":"pool","schema":"perilune.decisions/v2","routing":{"policy":{"name":"ear"}},"columns":{}}\n'
        b'{"kind":"end","n":0,"outcome":"completed","duration_s":1,"served":"a","status":200}\n{"kin',
    ),
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(TARGETS)} [CORPUS] [-max_total_time=S]")
    name = sys.argv.pop(1)
    with tempfile.TemporaryDirectory() as seeds:
        for at, seed in enumerate(SEEDS[name]):
            TARGETS[name](seed)
            Path(seeds, str(at)).write_bytes(seed)
        atheris.Setup([*sys.argv, seeds], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
