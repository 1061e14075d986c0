import asyncio
import contextlib
from collections import deque

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from perilune_api.pool import SpecError
from perilune_gateway.feeds import kv_events
from perilune_gateway.feeds.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Counters,
    Replayed,
    ResetCause,
    SequenceTracker,
    Step,
    decode,
    judge,
)
from perilune_gateway.messages import ProtocolError
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.prefix_index import PrefixIndex

ENGINE = "10.0.0.1:8000"
pack = msgspec.msgpack.encode

STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2**64 - 1],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "l",
    "extra_keys": [["salt"], None],
    "group_idx": 0,
}
FIELDS = list(STORED)


def as_array(event: dict) -> list:
    """The wire until 0.23: fields in order, trailing defaults left out."""
    if event["type"] == "BlockStored":
        return [event.get(name) for name in FIELDS]
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], event["medium"]]
    return ["AllBlocksCleared"]


def older(payload: bytes) -> bytes:
    ts, events, rank = msgspec.msgpack.decode(payload)
    return pack([ts, [as_array(event) for event in events], rank])


# -- decode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", [pytest.param(STORED, id="map"), pytest.param(as_array(STORED), id="array")]
)
def test_both_encodings(event):
    batch = decode(pack([1.5, [event], 3]))
    assert (batch.published_s, batch.rank, batch.unknown) == (1.5, 3, 0)
    assert batch.events == (
        BlockStored((1, 2**64 - 1), None, (5, 6, 7, 8), 2, None, "GPU", "l", (["salt"], None), 0),
    )


@pytest.mark.parametrize("name", ["main", "H", "T"])
def test_a_capture_says_the_same_in_the_older_encoding(captures, name):
    for frames in captures[name].messages:
        new, old = decode(frames[2]), decode(older(frames[2]))
        assert (new.published_s, new.rank) == (old.published_s, old.rank)
        for a, b in zip(new.events, old.events, strict=True):
            if isinstance(a, BlockStored):
                a = msgspec.structs.replace(a, session_id=None)
            if isinstance(a, BlockRemoved):
                b = msgspec.structs.replace(b, group_idx=a.group_idx)
            assert a == b


@pytest.mark.parametrize(
    ("event", "decoded"),
    [
        pytest.param({"type": "AllBlocksCleared"}, AllBlocksCleared(), id="cleared, map"),
        pytest.param(["AllBlocksCleared"], AllBlocksCleared(), id="cleared, array"),
        pytest.param(
            {"type": "BlockRemoved", "block_hashes": [b"x" * 32]}, BlockRemoved((b"x" * 32,)), id="bytes"
        ),
        pytest.param(
            {"type": "BlockRemoved", "block_hashes": [1], "locality": "REMOTE", "new": {"a": [1]}},
            BlockRemoved((1,)),
            id="unknown fields",
        ),
        pytest.param(
            ["BlockRemoved", [1], "CPU", 0, "more"], BlockRemoved((1,), "CPU", 0), id="longer array"
        ),
        pytest.param(["BlockRemoved", [1]], BlockRemoved((1,)), id="oldest array"),
    ],
)
def test_events(event, decoded):
    assert decode(pack([0.0, [event]])).events == (decoded,)


@pytest.mark.parametrize("event", [{"type": "BlockMoved", "from": 1}, ["BlockMoved", 1], {"type": "X" * 99}])
def test_unknown_types_are_counted(event):
    batch = decode(pack([0.0, [event, {"type": "AllBlocksCleared"}], 0]))
    assert (batch.events, batch.unknown) == ((AllBlocksCleared(),), 1)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(pack({}), id="a map"),
        pytest.param(pack(["late", []]), id="no time"),
        pytest.param(pack([0.0, [5]]), id="an event that is a number"),
        pytest.param(pack([0.0, [[]]]), id="an empty event"),
        pytest.param(pack([0.0, [{}]]), id="no type"),
        pytest.param(pack([0.0, [{"type": 5}]]), id="type is a number"),
        pytest.param(pack([0.0, [{"type": "BlockStored"}]]), id="no hashes"),
        pytest.param(pack([0.0, [{"type": "BlockRemoved", "block_hashes": ["a"]}]]), id="hash is a string"),
        pytest.param(pack([0.0, [["BlockStored", [1], None, ["a"], 1]]]), id="token is a string"),
        pytest.param(pack([0.0, [{"type": "AllBlocksCleared"}]]) + b"x", id="more behind"),
    ],
)
def test_garbage(payload):
    with pytest.raises(ProtocolError):
        decode(payload)


def test_truncated_messages_are_refused(captures):
    payload = captures["main"].messages[0][2]
    for size in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(payload[:size])


@given(st.binary(max_size=200))
def test_bytes_decode_or_raise_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        decode(data)


@given(st.data())
def test_a_changed_byte_decodes_or_raises_protocol_error(data):
    payload = bytearray(pack([1.5, [STORED, as_array(STORED), {"type": "AllBlocksCleared"}], 0]))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode(bytes(payload))


# -- sequence -------------------------------------------------------------------------------------------


def tracker(*seen: tuple[int, float]) -> SequenceTracker:
    it = SequenceTracker()
    for seq, published_s in seen:
        it.applied(seq, published_s)
    return it


@pytest.mark.parametrize(
    ("seen", "seq", "published_s", "step"),
    [
        pytest.param([], 0, 1.0, Step.APPLY, id="the first of all"),
        pytest.param([], 2, 1.0, Step.GAP, id="the first that we hear"),
        pytest.param([(4, 1.0)], 5, 2.0, Step.APPLY, id="the next"),
        pytest.param([(4, 1.0)], 7, 2.0, Step.GAP, id="one too late"),
        pytest.param([(4, 1.0)], 4, 1.0, Step.OLD, id="the last again"),
        pytest.param([(4, 1.0)], 0, 0.5, Step.OLD, id="the first again"),
        pytest.param([(4, 1.0)], 0, 2.0, Step.RESTART, id="a new process"),
        pytest.param([(4, 1.0)], 2, 2.0, Step.RESTART, id="a new process whose first we missed"),
    ],
)
def test_sequence(seen, seq, published_s, step):
    it = tracker(*seen)
    assert it.step(seq, published_s) is step
    assert it.step(seq, published_s) is step, "asking changes nothing"


@pytest.mark.parametrize(
    ("seen", "replayed", "verdict"),
    [
        pytest.param([], [], Replayed.CONTINUES, id="nothing yet"),
        pytest.param([], [(7, 1.0)], Replayed.CONTINUES, id="we just came"),
        pytest.param([(4, 1.0)], [(4, 1.0), (5, 2.0)], Replayed.CONTINUES, id="begins with our last"),
        pytest.param([(4, 1.0)], [(5, 2.0)], Replayed.CONTINUES, id="begins with the next"),
        pytest.param([(4, 1.0)], [(6, 2.0)], Replayed.LOST, id="begins too late"),
        pytest.param([(4, 1.0)], [(4, 9.0), (5, 9.1)], Replayed.RESTARTED, id="another message 4"),
        pytest.param([(4, 1.0)], [], Replayed.RESTARTED, id="has less than we have"),
    ],
)
def test_replays(seen, replayed, verdict):
    assert judge(tracker(*seen), replayed) is verdict


@pytest.mark.parametrize(
    ("frames", "parsed"),
    [
        pytest.param([b"", b"topic", bytes(7) + b"\5", b"p"], (5, b"p"), id="with topic"),
        pytest.param([b"", bytes(7) + b"\5", b"p"], (5, b"p"), id="without, until 0.25"),
        pytest.param([b"", b"", b"\xff" * 8, b""], (-1, None), id="end"),
        pytest.param([b"", b"\xff" * 8, b""], (-1, None), id="end, until 0.25"),
    ],
)
def test_replay_frames(frames, parsed):
    assert kv_events.replay_frames(frames) == parsed


@pytest.mark.parametrize("frames", [[], [b"p"], [b"x", b"", bytes(8), b""], [b"", bytes(7), b"p"]])
def test_no_replay_frames(frames):
    with pytest.raises(ProtocolError):
        kv_events.replay_frames(frames)


# -- feed -----------------------------------------------------------------------------------------------


class Engine:
    """A publisher and its replay address, as vLLM has them, on loopback."""

    def __init__(self, context, *, buffer=1000, topic=True, answers=True, ports=(0, 0)) -> None:
        self.topic = topic
        self.answers = answers
        self.buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer)
        self._context = context
        self._xpub = context.socket(zmq.XPUB)
        self._router = context.socket(zmq.ROUTER)
        self.ports = (bind(self._xpub, ports[0]), bind(self._router, ports[1]))
        self.replays: list[int] = []
        self._asked = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    @property
    def events_url(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay_url(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    async def subscribed(self) -> None:
        assert await asyncio.wait_for(self._xpub.recv(), 10) == b"\1"

    async def asked(self) -> None:
        """The feed has asked for a replay: it does so once before it listens."""
        await asyncio.wait_for(self._asked.wait(), 10)

    async def send(self, seq: int, payload: bytes, *, dropped: bool = False) -> None:
        frames = (seq.to_bytes(8, "big"), payload)
        self.buffer.append(frames)
        if not dropped:
            await self._xpub.send_multipart([b"kv@pod@m", *frames])

    async def send_raw(self, frames: list[bytes]) -> None:
        await self._xpub.send_multipart(frames)

    async def _serve(self) -> None:
        while True:
            who, empty, start = await self._router.recv_multipart()
            assert empty == b""
            self.replays.append(int.from_bytes(start, "big"))
            self._asked.set()
            if not self.answers:
                continue
            for seq, payload in list(self.buffer):
                if seq >= start:
                    await self._router.send_multipart([who, b"", *self._topic(b"kv"), seq, payload])
            await self._router.send_multipart([who, b"", *self._topic(b""), b"\xff" * 8, b""])

    def _topic(self, topic: bytes) -> list[bytes]:
        return [topic] if self.topic else []

    async def stop(self) -> None:
        """Its ports are free afterwards."""
        if self._task.cancelled():
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for socket, port in zip((self._xpub, self._router), self.ports, strict=True):
            monitor = socket.get_monitor_socket(zmq.EVENT_CLOSED)
            socket.unbind(f"tcp://127.0.0.1:{port}")
            await asyncio.wait_for(monitor.recv_multipart(), 10)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)


def bind(socket, port: int) -> int:
    """0: any free port."""
    if not port:
        return socket.bind_to_random_port("tcp://127.0.0.1")
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port


class Recorder:
    """A sink that feeds an index and lets tests wait for what they expect."""

    def __init__(self) -> None:
        self.index = PrefixIndex(100_000, 5.0)
        self.blocks = EngineBlocks(self.index, 32, store=True)
        self.batches: list[kv_events.Batch] = []
        self.lags: list[float] = []
        self.resets: list[ResetCause] = []
        self._changed = asyncio.Event()

    def batch(self, endpoint, rank, batch, lag_s) -> None:
        for event in batch.events:
            self.blocks.apply(endpoint, event, 0.0, rank)
        self.batches.append(batch)
        self.lags.append(lag_s)
        self._changed.set()

    def reset(self, endpoint, rank, cause) -> None:
        self.blocks.reset(endpoint, rank)
        self.resets.append(cause)
        self._changed.set()

    @property
    def times(self) -> list[float]:
        return [batch.published_s for batch in self.batches]

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def held(self) -> set[int]:
        return announced(self.index)


def announced(index: PrefixIndex) -> set[int]:
    return {block for block in index._where if index.announced(ENGINE, block)}


def at(ts: float) -> bytes:
    return pack([ts, [], 0])


@pytest.fixture
async def context():
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@contextlib.asynccontextmanager
async def feeding(context, engine, *, replay=True, counters=None, timeout_s=2.0):
    sink = Recorder()
    task = asyncio.create_task(
        kv_events.run(
            ENGINE,
            engine.events_url,
            engine.replay_url if replay else "",
            0,
            sink,
            lambda: 100.0,
            context,
            counters or Counters(),
            timeout_s,
        )
    )
    try:
        await engine.subscribed()
        yield sink
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.stop()


class EndlessReplay:
    """A context whose replay goes on and on, by `step` in its sequence numbers. After `patience` messages the
    feed, if it is known here, is cancelled."""

    def __init__(self, step: int = 1, patience: int = 0) -> None:
        self.step, self.patience, self.sent = step, patience, 0
        self.feed: asyncio.Task[object] | None = None

    def socket(self, kind: int) -> "EndlessReplay":
        return self

    def set(self, option: int, value: int) -> None: ...
    def connect(self, url: str) -> None: ...
    def close(self, linger: int) -> None: ...
    async def send_multipart(self, frames: list[bytes]) -> None: ...

    async def recv_multipart(self) -> list[bytes]:
        await asyncio.sleep(0)
        self.sent += 1
        if self.feed and self.sent == self.patience:
            self.feed.cancel()
        assert self.sent < 1_000, "nobody else ends it"
        return [b"", b"topic", (self.sent * self.step).to_bytes(8, "big"), at(1.0)]

    def catch_up(self, counters: Counters) -> asyncio.Task[bool]:
        feed = kv_events._Feed(ENGINE, "tcp://there", 0, Recorder(), lambda: 1.0, self, counters, 2.0)
        return asyncio.create_task(feed.catch_up())


async def test_a_feed_that_is_cancelled_amid_a_replay_ends():
    """Else a gateway that is stopped then would never end."""
    replay = EndlessReplay(patience=20)
    replay.feed = replay.catch_up(Counters())
    with pytest.raises(asyncio.CancelledError):
        await replay.feed
    assert replay.sent == 20


@pytest.mark.parametrize("step", [0, 1], ids=["the same message again and again", "ever new ones"])
async def test_a_replay_without_an_end_is_no_answer(monkeypatch, step):
    monkeypatch.setattr(kv_events, "REPLAYED_MESSAGES", 50)
    counters = Counters()
    assert not await EndlessReplay(step).catch_up(counters)
    assert (counters.malformed, counters.replayed) == (1, 0)


async def test_a_whole_capture(context, captures):
    engine, counters = Engine(context), Counters()
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        messages = captures["main"].messages
        for frames in messages:
            await engine.send(int.from_bytes(frames[1], "big"), frames[2])
        await sink.until(lambda: len(sink.batches) == len(messages))
        assert sink.held() == expected(messages)
        assert (counters.batches, counters.gaps, counters.replayed, counters.restarts) == (528, 0, 0, 0)
        assert counters.connected
        assert counters.lag_s == 100.0 - sink.times[-1]


def expected(messages) -> set[int]:
    index = PrefixIndex(100_000, 5.0)
    names = EngineBlocks(index, 32, store=True)
    for frames in messages:
        for event in decode(frames[-1]).events:
            names.apply(ENGINE, event, 0.0)
    return announced(index)


@pytest.mark.parametrize("topic", [True, False], ids=["with topic", "without topic, until 0.25"])
async def test_dropped_messages_are_replayed(context, captures, replay_frames, topic):
    """Live up to 239, then nothing, then the last: the replay brings what is between, from the very frames
    that a real engine answered."""
    engine, counters = Engine(context, topic=topic), Counters()
    messages = captures["main"].messages
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        for frames in messages[:240]:
            await engine.send(int.from_bytes(frames[1], "big"), frames[2])
        await sink.until(lambda: len(sink.batches) == 240)
        engine.buffer.clear()
        for _, _, seq, payload in replay_frames[:-1]:
            engine.buffer.append((seq, payload))
        await engine.send_raw(messages[-1])
        await sink.until(lambda: len(sink.batches) == 528)
        assert sink.held() == expected(messages)
        assert sink.resets == []
        assert engine.replays == [0, 239]
        assert (counters.gaps, counters.replayed, counters.rebuilds) == (1, 288, 0)


async def test_a_short_replay_buffer_means_to_begin_anew(context, captures, replay_frames):
    engine, counters = Engine(context), Counters()
    messages = captures["main"].messages
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        for frames in messages[:100]:
            await engine.send(int.from_bytes(frames[1], "big"), frames[2])
        await sink.until(lambda: len(sink.batches) == 100)
        engine.buffer.clear()
        for _, _, seq, payload in replay_frames[:-1]:
            engine.buffer.append((seq, payload))
        await engine.send_raw(messages[-1])
        await sink.until(lambda: len(sink.batches) == 388)
        assert sink.resets == [ResetCause.LOST]
        assert sink.held() <= expected(messages), "it may know less, never more"
        assert sink.held()
        assert (counters.gaps, counters.rebuilds) == (1, 1)


async def test_a_gap_without_replay_address_means_to_begin_anew(context):
    engine, counters = Engine(context), Counters()
    async with feeding(context, engine, replay=False, counters=counters) as sink:
        for seq in (3, 4, 6):
            await engine.send(seq, at(seq))
        await sink.until(lambda: len(sink.batches) == 3)
        assert sink.resets == [ResetCause.LOST]
        assert sink.times == [3.0, 4.0, 6.0]
        assert (counters.gaps, counters.rebuilds) == (1, 1), "the beginning is no gap: nothing was known"


async def test_a_silent_replay_address_is_no_answer(context):
    engine, counters = Engine(context, answers=False), Counters()
    async with feeding(context, engine, counters=counters, timeout_s=0.05) as sink:
        await engine.send(0, at(1))
        await sink.until(lambda: len(sink.batches) == 1)
        await engine.send(2, at(3))
        await sink.until(lambda: len(sink.batches) == 2)
        assert sink.resets == [ResetCause.LOST]


async def test_what_was_announced_before_we_came(context, captures):
    engine, counters = Engine(context), Counters()
    messages = captures["main"].messages[:50]
    for frames in messages[:30]:
        await engine.send(int.from_bytes(frames[1], "big"), frames[2])
    async with feeding(context, engine, counters=counters) as sink:
        await sink.until(lambda: len(sink.batches) == 30)
        for frames in messages[30:]:
            await engine.send(int.from_bytes(frames[1], "big"), frames[2])
        await sink.until(lambda: len(sink.batches) == 50)
        assert sink.held() == expected(messages)
        assert (counters.replayed, counters.gaps, sink.resets) == (30, 0, [])


async def test_an_engine_that_answers_late(context):
    """Nobody answers at first; what was announced before is asked for again at the handshake."""
    engine = Engine(context, answers=False)
    for seq in range(3):
        await engine.send(seq, at(seq), dropped=True)
    async with feeding(context, engine, timeout_s=0.2) as sink:
        await engine.asked()
        engine.answers = True
        await sink.until(lambda: len(sink.batches) == 3)
        assert engine.replays == [0, 0]


async def test_a_restarted_engine_holds_nothing(context, captures):
    engine, counters = Engine(context), Counters()
    messages = captures["main"].messages
    last_s = decode(messages[19][2]).published_s
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        for frames in messages[:20]:
            await engine.send(int.from_bytes(frames[1], "big"), frames[2])
        await sink.until(lambda: len(sink.batches) == 20)
        engine.buffer.clear()
        await engine.send(0, at(last_s + 1))
        await sink.until(lambda: len(sink.batches) == 21)
        assert sink.resets == [ResetCause.RESTARTED]
        assert sink.held() == set()
        assert (counters.restarts, counters.gaps) == (1, 0)


async def test_a_restarted_engine_that_is_already_further(context):
    """Its numbers exceed ours, but its message of our last number is another one."""
    engine, counters = Engine(context), Counters()
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        for seq in range(3):
            await engine.send(seq, at(seq))
        await sink.until(lambda: len(sink.batches) == 3)
        engine.buffer.clear()
        for seq in range(5):
            await engine.send(seq, at(100 + seq), dropped=True)
        await engine.send(5, at(105))
        await sink.until(lambda: len(sink.batches) == 9)
        assert sink.resets == [ResetCause.RESTARTED]
        assert sink.times[3:] == [100, 101, 102, 103, 104, 105]
        assert counters.restarts == 1


async def test_an_engine_that_restarts_and_idles_is_found_out(context):
    """Nothing is published after the restart: the question at reconnection shows it."""
    engine, counters = Engine(context), Counters()
    ports = engine.ports
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        await engine.send(0, at(1))
        await sink.until(lambda: len(sink.batches) == 1)
        await engine.stop()
        again = Engine(context, ports=ports)
        await again.subscribed()
        await sink.until(lambda: sink.resets == [ResetCause.RESTARTED])
        await again.send(0, at(9))
        await sink.until(lambda: sink.times == [1, 9])
        assert counters.connected
        await again.stop()


async def test_a_broken_connection_is_no_restart(context):
    engine, counters = Engine(context), Counters()
    ports = engine.ports
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        await engine.send(0, at(1))
        await sink.until(lambda: len(sink.batches) == 1)
        await engine.stop()
        same = Engine(context, ports=ports)
        same.buffer = engine.buffer
        await same.send(1, at(2), dropped=True)
        await sink.until(lambda: sink.times == [1, 2])
        assert (sink.resets, counters.restarts, counters.replayed) == ([], 0, 1)
        await same.stop()


async def test_repetitions_are_applied_once(context):
    engine, counters = Engine(context), Counters()
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        for seq in (0, 1, 0, 1, 2):
            await engine.send(seq, at(seq))
        await sink.until(lambda: len(sink.batches) == 3)
        assert sink.times == [0, 1, 2]
        assert counters.old == 2


async def test_a_message_that_cannot_be_read(context):
    engine, counters = Engine(context), Counters()
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        await engine.send(0, at(1))
        await engine.send_raw([b"only two", b"frames"])
        await engine.send(1, b"garbage")
        await engine.send(2, at(3))
        await sink.until(lambda: len(sink.batches) == 2)
        assert sink.resets == [ResetCause.MALFORMED]
        assert sink.times == [1, 3]
        assert counters.malformed == 2


async def test_unknown_events_are_counted(context):
    engine, counters = Engine(context), Counters()
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        await engine.send(0, pack([0.0, [{"type": "New"}], 0]))
        await sink.until(lambda: len(sink.batches) == 1)
        assert counters.unknown_events == 1


@pytest.mark.parametrize("url", ["tcp://", "nonsense", "tcp://127.0.0.1:none"])
async def test_no_zmq_address(context, url):
    with pytest.raises(SpecError, match="ZMQ address"):
        await kv_events.run(ENGINE, url, "", 0, Recorder(), lambda: 0.0, context)


async def test_feeds_share_a_turn_of_the_loop():
    """Ten feeds with a batch each, of which a turn takes two."""
    now, turn = 0.0, 0
    applied: list[int] = []
    slices = kv_events.Slices(budget_s=0.002, clock=lambda: now)

    async def feed() -> None:
        nonlocal now
        await slices.begin()
        now += 0.001
        applied.append(turn)
        slices.end()

    feeds = [asyncio.create_task(feed()) for _ in range(10)]
    while len(applied) < len(feeds):
        turn += 1
        await asyncio.sleep(0)
    assert [applied.count(n) for n in sorted(set(applied))] == [2] * 5
