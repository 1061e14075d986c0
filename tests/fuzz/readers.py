"""Every reader of bytes that others write, each as a function of bytes, and inputs that it reads well.

A reader may raise what its docstring names. Anything else is a fault. `fuzz.py` searches for one with
coverage (`make fuzz`), `test_readers.py` tries a few thousand mutations (`make test`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite

import list_of_one
import msgspec
from envoy_doubles import PHASE, ROUTE, ScriptedRouter
from msgspec import structs
from msgspec.structs import replace
from router_rig import A, B, Rig, pool
from routing_objects import head

from perilune_api import extproc_pb2 as pb
from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.pool import (
    Hashing,
    Limits,
    Metadata,
    Model,
    Routing,
    SessionAdmission,
    SessionKeys,
    SpecError,
    dump,
    parse_known,
)
from perilune_api.pool import parse as parse_document
from perilune_api.trial import Sums
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
from perilune_gateway.feeds import bootstrap_pages, engine_metrics, kv_events, store_segments
from perilune_gateway.feeds.pool_events import EventSink
from perilune_gateway.model import (
    Identity,
    MoveReason,
    NeedBody,
    Outcome,
    ProtocolError,
    Refusal,
    RequestHead,
    Routed,
    TokenSource,
)
from perilune_gateway.model.shared import (
    Alive,
    Batch,
    Bound,
    Claimed,
    Counted,
    Ejected,
    InLine,
    Learned,
    Loaded,
    Measure,
    Measured,
    Names,
    Offered,
    OfferStage,
    PlaceInLine,
    QueuedOf,
    Queueing,
    TenantInLine,
    decode,
    encode,
)
from perilune_gateway.observe import decision_log
from perilune_gateway.request.known_bodies import KnownBodies
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ChatPrompt, ParsedRequest, opening
from perilune_gateway.request.paths import PATHS
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.causes import CannotTellError
from perilune_gateway.request.tokens.engine import question
from perilune_gateway.request.tokens.proof import kind_of
from perilune_gateway.routing.context import Prompt, RequestContext, StepTimer
from perilune_gateway.routing.new_sessions import NewSessions, Queued
from perilune_gateway.routing.pools import Chosen, Pools
from perilune_gateway.state.block_tokens import BlockTokens
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.parity import ParityCheck
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.replicas import Replicas
from perilune_gateway.state.sharing import Sharing
from perilune_operator.observe.gateway_pages import canary_sums


class Deaf:
    """Listens to no events, gives no tokens."""

    def on_applied(self, applied: object) -> None:
        pass

    def on_learning(self, endpoint: str, learning: bool) -> None:
        pass

    async def encode(self, request: ParsedRequest) -> Refusal:
        raise AssertionError("no request waits here")


TOKENIZER = Tokenizer(Model(name="m", tokenize="estimate"))
APIS = list(PATHS)
ROUTING = Routing(allow_policy_header=True, session=SessionKeys(cookie="c", body_user=True))
WEIGHED = structs.replace(ROUTING, weight=3)
SHARED = pool(routing=Routing(session_admission=SessionAdmission(enabled=True)))
NEW_REQUEST = parse(APIS[0], b'{"model":"m","messages":[]}')
assert isinstance(NEW_REQUEST, ParsedRequest)
NEW_SESSION = RequestContext(
    head=head("/v1/completions", x_session_id="s"),
    now=1000.0,
    timer=StepTimer(lambda: 0.0),
    identity=Identity(session_id="s"),
    session=None,
    prompt=Prompt(tokens=20, source=TokenSource.ESTIMATE),
)


def bodies(data: bytes) -> None:
    """Parse a body; the first byte chooses the API."""
    request = parse(APIS[data[0] % len(APIS)] if data else APIS[0], data[1:])
    if isinstance(request, ParsedRequest):
        request.prefix_text()
        TOKENIZER.now(request)
        kind_of(request)
        with suppress(*UNREADABLE):
            opening(request)
        with suppress(CannotTellError):
            question(request, 4.0)


def grown(data: bytes) -> None:
    """Read bodies that begin alike, their parts between zeros: remembered or not, they are read the same."""
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
    """Compare what is read without protobuf with what protobuf reads."""
    try:
        told = wire.decode(data)
    except ProtocolError:
        return
    if envelope.read(data) is not None:
        message = pb.ProcessingRequest.FromString(data)
        assert told.kind == message.WhichOneof("request")


def streams(data: bytes) -> None:
    """Play messages of one stream, each after two bytes of its length, through exchange and service."""
    service = list_of_one.service(ScriptedRouter(), Deaf(), limits=Limits(max_body_bytes=1000))
    stream = service.open()
    for message in parts(data):
        stream.receive(message)
    stream.closed()
    assert service.streams_open == 0
    assert service.failures == 0


def frames(data: bytes) -> None:
    """Feed the frames in pieces, as the first byte says, after a greeting."""
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


def hpack(data: bytes) -> None:
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
    sink = EventSink(blocks, ParityCheck(Hashing(), 4), Deaf(), lambda: 1.0, BlockTokens(4, 10_000))
    sink.batch("a", batch.rank or 0, batch, 0.0)


def metrics(data: bytes) -> None:
    engine_metrics.parse(data)


def requests(data: bytes) -> None:
    """Play a request through the router to its end: lines of `name: value`, an empty line, then the body."""
    rig = Rig(pool(routing=ROUTING))
    for asked, body in asked_twice(data):
        said = rig.router.on_headers(asked)
        if isinstance(said, NeedBody):
            said = rig.router.on_body(asked, body)
        if isinstance(said, Routed):
            rig.finish(said)
    assert not any(view.load.in_flight for view in rig.state.fleet.view(rig.now))


def pools(data: bytes) -> None:
    """Play a request as `requests` does, to two pools that serve the same model by their weights."""
    rigs = [Rig(structs.replace(pool(routing=WEIGHED), metadata=Metadata(name))) for name in "pq"]
    front = Pools([rig.router for rig in rigs], lambda refusal: None, stopwatch=lambda: 0.0)
    for asked, body in asked_twice(data):
        said = front.on_headers(asked)
        if isinstance(said, NeedBody):
            said = front.on_body(asked, body)
        if isinstance(said, Chosen) and isinstance(said.verdict, Routed):
            said.router.finished(said.verdict.ticket, Outcome.COMPLETED)
    for rig in rigs:
        assert not any(view.load.in_flight for view in rig.state.fleet.view(rig.now))


def asked_twice(data: bytes) -> list[tuple[RequestHead, bytes]]:
    """Return two equal requests: lines of `name: value`, an empty line, then the body."""
    written, _, body = data.partition(b"\n\n")
    lines = [line.partition(b":") for line in written.split(b"\n")]
    headers = {n.decode("latin-1").lower(): v.strip().decode("utf-8", "replace") for n, _, v in lines}
    path = headers.get(":path", "/v1/completions")
    return [
        (RequestHead(method="POST", path=path, headers=headers, has_body=bool(body)), body) for _ in range(2)
    ]


def documents(data: bytes) -> None:
    """Write and read again every pool that can be read; nothing may change."""
    for read in (parse_document, lambda text: parse_known(text)[0]):
        try:
            document = read(data)
        except SpecError:
            continue
        assert parse_document(dump(document)) == document


class Clock:
    """Seconds that pass when a reader says so; both clocks."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


def batches(data: bytes) -> list[Batch]:
    """Return those batches in `data` that can be read, each after two bytes of its length."""
    found = []
    for message in parts(data):
        with suppress(*UNREADABLE):
            found.append(decode(message))
    return found


class NoMoves:
    """Nothing moves here."""

    def offers(self) -> Sequence[Offered]:
        return ()


def merged(data: bytes) -> None:
    """Merge batches of another replica into a pool's state, with session admission, and tell what is known.
    This makes no router, which would take most of the time."""
    found, clock = batches(data), Clock()
    if not found:
        return
    state = PoolState.of(SHARED, sharing=Sharing("here", Names(b"key"), clock, clock.wall))
    admission = NewSessions(state)
    admission.configure(SHARED.spec.routing.session_admission)
    replicas = Replicas(state, admission, NoMoves())
    for batch in found:
        replicas.apply(batch)
        replicas.reconcile([batch])
    asked = admission.arrive(NEW_SESSION, NEW_REQUEST)
    for _ in range(3):
        admission.due(clock.now)
        told = encode(Batch("here", replicas.take(alive=True).changes, 1))
        assert not decode(told).unknown
        assert isfinite(admission.stats(clock.now).active_tokens)
        clock.now += 65.0
        state.pass_time(clock.now)
        replicas.lapse()
    if isinstance(asked, Queued):
        admission.over(asked.ticket)
    assert not replicas.peers
    assert admission.stats(clock.now).waiting == 0
    for view in state.fleet.view(clock.now):
        assert view.load.in_flight == 0
        assert isfinite(view.load.pending_prefill_s)
        assert isfinite(state.calibration.prefill_ratio(view.endpoint.address, clock.now))


def shared(data: bytes) -> None:
    """Merge batches of another replica, and route requests after them."""
    found, clock = batches(data), Clock()
    if not found:
        return
    rig = Rig(SHARED, sharing=Sharing("here", Names(b"key"), lambda: rig.now, clock.wall))
    replicas = Replicas(rig.state, rig.router.new_sessions, rig.router.moves.handing_over)
    for batch in found:
        replicas.apply(batch)
        replicas.reconcile([batch])
    asked = rig.ask(range(20), head("/v1/completions", x_session_id="s"))
    if isinstance(asked, Queued):
        rig.router.due()
        rig.now += 70.0
        (refusal,) = [refusal for ticket, refusal in rig.router.due() if ticket == asked.ticket] or [None]
        asked = rig.router.on_begun(asked, refusal)
    if isinstance(asked, Routed):
        rig.finish(asked)
    told = encode(Batch("here", replicas.take(alive=True).changes, 1))
    assert not decode(told).unknown
    for address in (A, B):
        assert isfinite(rig.load(address).pending_prefill_s)
        assert isfinite(rig.state.calibration.prefill_ratio(address, rig.now))
    assert isfinite(rig.router.new_sessions.stats(rig.now).active_tokens)
    rig.now += 10.0
    replicas.lapse()
    assert not replicas.peers
    assert rig.load(A).in_flight == 0
    rig.now += 120.0
    assert isinstance(rig.ask(range(4_000, 4_020), head("/v1/completions", x_session_id="t")), Routed)


def bootstrap(data: bytes) -> None:
    with suppress(ValueError, *UNREADABLE):
        bootstrap_pages.parse(data)


def segments(data: bytes) -> None:
    with suppress(*UNREADABLE):
        store_segments.parse(data)


def canary(data: bytes) -> None:
    canary_sums(data.decode(errors="replace"), "p")


def parts(data: bytes) -> list[bytes]:
    """Return the messages in `data`, each of which follows two bytes of its length."""
    found, at = [], 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2], "big")
        found.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return found


def framed(*messages: bytes) -> bytes:
    """Opposite of `parts`."""
    return b"".join(len(message).to_bytes(2, "big") + message for message in messages)


def log(data: bytes) -> None:
    try:
        list(decision_log.read(data.splitlines(keepends=True), "x"))
    except SpecError:
        pass


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    f.__name__: f
    for f in (
        bodies,
        requests,
        pools,
        grown,
        documents,
        messages,
        streams,
        frames,
        hpack,
        events,
        metrics,
        bootstrap,
        segments,
        canary,
        merged,
        shared,
        log,
    )
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
SAID = b'{"role":"user","content":[{"type":"text","text":"hi \\ud83d\\ude00"}]}'
REQUESTS = (
    b":path: /v1/completions\nx-session-id: s\nauthorization: Bearer k\ncookie: c=1\n"
    b'x-perilune-policy: sticky\n\n{"model":"m","prompt":[1,2,3,4,5,6,7,8,9],"max_tokens":3}',
    b":path: /v1/chat/completions?x=%73\nx-claude-code-agent-id: a\nx-claude-code-session-id: b\n"
    b'x-perilune-objective: x\n\n{"model":"m","messages":[' + SAID + b'],"user":"u"}',
    b":path: /v1/responses\nx-session-final: true\nx-request-id: 7\n\n"
    b'{"model":"m","input":"hi","previous_response_id":"resp_1","prompt_cache_key":"k"}',
    b':path: /v1/chat/completions\n\n{"model":"m","messages":[{"role":"system"},' + SAID + b"]}",
)
NOW_US = 1_700_001_000_000_000
"""When the readers begin, by the clock that all gateways share."""
BATCHES = (
    framed(
        encode(
            Batch(
                "there",
                (
                    Bound(
                        at_us=NOW_US,
                        session=b"n" * 16,
                        host=A,
                        turns=2,
                        context_tokens=90,
                        body_bytes=300,
                        bytes_per_token=3.0,
                        blocks=2,
                        tail=7,
                        prompt_blocks=1,
                        prompt_tail=7,
                        prompt_tokens=20,
                        inferred="inferred-1",
                        tenant=b"t",
                    ),
                ),
                1,
            )
        ),
        encode(
            Batch(
                "there",
                (
                    Loaded(
                        at_us=NOW_US,
                        endpoint=A,
                        in_flight=1,
                        prefilling=1,
                        pending_tokens=10,
                        pending_s=0.5,
                        context_tokens=10,
                    ),
                    Ejected(NOW_US, A, "failures"),
                ),
                2,
            )
        ),
        encode(Batch("there", (Claimed(A, bytes(16), 3.0), Alive(), Alive(True)), 3)),
    ),
    framed(
        encode(
            Batch(
                "there",
                (
                    Counted(NOW_US, 7_000.0, 2),
                    Measured(
                        of=Measure.DECODE,
                        endpoint=A,
                        observed_s=1.0,
                        predicted_s=0.0,
                        source="",
                        at_us=NOW_US,
                    ),
                ),
                1,
            )
        ),
        encode(
            Batch(
                "there",
                (
                    Queueing(10, (QueuedOf(b"t" * 16, 2.5),)),
                    Learned(
                        of=Measure.TRANSFER,
                        endpoint=A,
                        source=A,
                        learned=1.5,
                        weight=0.9,
                        told=3.0,
                        count=4,
                        seconds=5.0,
                        at_us=NOW_US,
                    ),
                    InLine(
                        NOW_US,
                        (
                            PlaceInLine(
                                session=b"p" * 16,
                                tenant=b"t" * 16,
                                tokens=900,
                                arrived_us=NOW_US - 8_000_000,
                                rank_us=NOW_US,
                                number=1,
                            ),
                            PlaceInLine(
                                session=b"q" * 16,
                                tenant=b"t" * 16,
                                tokens=90,
                                arrived_us=NOW_US - 8_000_000,
                                rank_us=NOW_US,
                                number=2,
                                back_s=3.0,
                            ),
                        ),
                        (TenantInLine(b"t" * 16, 500.0, 2.0),),
                        50.0,
                    ),
                    Offered(
                        at_us=NOW_US,
                        subject=b"n" * 16,
                        reason=MoveReason.DRAIN,
                        source=A,
                        target=B,
                        stage=OfferStage.COPYING,
                        seconds=9.0,
                        begun_s=1.0,
                        transfer_bytes=99,
                        tokens=20,
                        tail=7,
                        cost_s=0.1,
                        benefit_s=0.2,
                        turns=3.0,
                    ),
                    Measured(
                        of=Measure.TRANSFER,
                        endpoint=A,
                        observed_s=2.0,
                        predicted_s=1.0,
                        source=B,
                        at_us=NOW_US + 1,
                    ),
                ),
                2,
            )
        ),
    ),
)
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
    "streams": (framed(HEAD, BODY),),
    "frames": (
        b"\xff" + OPENING + frame(Type.DATA, 0, 1, b"\0\0\0\0\x02hi") + number(Type.RST_STREAM, 1, 8),
        b"\x05" + OPENING + number(Type.WINDOW_UPDATE, 0, 99) + frame(Type.PING, 0, 0, bytes(8)),
    ),
    "hpack": (b"\x83\x86\x44\x02/p\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff",),
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
    "requests": REQUESTS,
    "pools": REQUESTS,
    "documents": (
        dump(pool(routing=ROUTING)),
        b"apiVersion: perilune.io/v1alpha1\nkind: InferencePool\nmetadata: {name: p}\nspec:\n"
        b"  model: {name: m}\n  engine: {blockSize: 16, hashing: {seed: '0'}}\n"
        b"  topology: {nodes: {a: &a {rack: r}, b: *a}}\n"
        b"  endpoints:\n  - {address: '10.0.0.1:1', node: a, events: ['tcp://10.0.0.1:2']}\n",
    ),
    "segments": (b'{"segments":[{"segment_name":"10.0.0.1:1","allocator_used_bytes":5}]}',),
    "canary": (msgspec.json.encode({"p": Sums.begin("t"), "q": Sums.begin("u")}),),
    "bootstrap": (b'{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://10.0.0.1:1"}}}}',),
    "merged": BATCHES,
    "shared": BATCHES,
    "log": (
        b'{"kind":"pool","schema":"perilune.decisions/v2","routing":{"policy":{"name":"ear"}},"columns":{}}\n'
        b'{"kind":"end","n":0,"outcome":"completed","duration_s":1,"served":"a","status":200}\n{"kin',
    ),
}
