"""One engine's feed, against a publisher and a replay address on loopback that behave as vLLM's, or badly."""

import asyncio
import contextlib
from collections import deque

import msgspec
import pytest
import zmq
import zmq.asyncio

from perilune_api.pool import SpecError
from perilune_gateway.feeds import kv_feed
from perilune_gateway.feeds.kv_events import Batch, decode
from perilune_gateway.feeds.kv_feed import Counters, Publisher, ResetCause
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.prefix_index import PrefixIndex

ENGINE = "10.0.0.1:8000"
pack = msgspec.msgpack.encode


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


class NotingIndex(PrefixIndex):
    """Knows which blocks it was ever told of."""

    def __init__(self) -> None:
        super().__init__(100_000, 5.0)
        self.named: set[int] = set()

    def stored(self, endpoint, tier, blocks, *arguments, **options) -> None:
        self.named.update(blocks)
        super().stored(endpoint, tier, blocks, *arguments, **options)

    @property
    def held(self) -> set[int]:
        return {block for block in self.named if self.announced(ENGINE, block)}


class Recorder:
    """A sink that feeds an index and lets tests wait for what they expect."""

    def __init__(self) -> None:
        self.index = NotingIndex()
        self.blocks = EngineBlocks(self.index, 32, store=True)
        self.batches: list[Batch] = []
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
        return self.index.held


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
        kv_feed.run(
            Publisher(ENGINE, 0, engine.events_url, engine.replay_url if replay else ""),
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
        feed = kv_feed._Feed(
            Publisher(ENGINE, 0, "", "tcp://there"), Recorder(), lambda: 1.0, self, counters, 2.0
        )
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
    monkeypatch.setattr(kv_feed, "REPLAYED_MESSAGES", 50)
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
    index = NotingIndex()
    names = EngineBlocks(index, 32, store=True)
    for frames in messages:
        for event in decode(frames[-1]).events:
            names.apply(ENGINE, event, 0.0)
    return index.held


async def lose(engine: Engine, sink: Recorder, messages, arrive: int, replay_frames) -> None:
    """The first messages arrive, then only the last; the engine keeps `replay_frames` for a replay."""
    await engine.asked()
    for frames in messages[:arrive]:
        await engine.send(int.from_bytes(frames[1], "big"), frames[2])
    await sink.until(lambda: len(sink.batches) == arrive)
    engine.buffer.clear()
    for _, _, seq, payload in replay_frames[:-1]:
        engine.buffer.append((seq, payload))
    await engine.send_raw(messages[-1])


@pytest.mark.parametrize("topic", [True, False], ids=["with topic", "without topic, until 0.25"])
async def test_dropped_messages_are_replayed(context, captures, replay_frames, topic):
    """Live up to 239, then nothing, then the last: the replay brings what is between, from the very frames
    that a real engine answered."""
    engine, counters = Engine(context, topic=topic), Counters()
    messages = captures["main"].messages
    async with feeding(context, engine, counters=counters) as sink:
        await lose(engine, sink, messages, 240, replay_frames)
        await sink.until(lambda: len(sink.batches) == 528)
        assert sink.held() == expected(messages)
        assert sink.resets == []
        assert engine.replays == [0, 239]
        assert (counters.gaps, counters.replayed, counters.rebuilds) == (1, 288, 0)


async def test_a_short_replay_buffer_means_to_begin_anew(context, captures, replay_frames):
    engine, counters = Engine(context), Counters()
    messages = captures["main"].messages
    async with feeding(context, engine, counters=counters) as sink:
        await lose(engine, sink, messages, 100, replay_frames)
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


async def test_an_engine_of_which_nothing_can_be_read_is_told_once(context, caplog):
    """It speaks with every step."""
    caplog.set_level("INFO", "perilune_gateway.feeds.kv_feed")
    engine, counters = Engine(context), Counters()
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        await engine.send(0, at(1))
        for seq in range(1, 20):
            await engine.send(seq, b"garbage")
            await engine.send_raw([b"no", b"number"])
        await engine.send(20, at(2))
        await sink.until(lambda: len(sink.batches) == 2)
        assert sink.resets == [ResetCause.MALFORMED]
        assert (counters.malformed, counters.gaps) == (38, 0)
        (said,) = caplog.messages
        assert said.startswith("KV events cannot be read endpoint=10.0.0.1:8000 rank=0 error=not a batch")
        await engine.send(21, b"garbage")
        await engine.send(22, at(3))
        await sink.until(lambda: len(sink.batches) == 3)
        assert sink.resets == [ResetCause.MALFORMED] * 2
        assert len(caplog.messages) == 2, "since it could be read in between"


async def test_unknown_events_are_counted(context):
    engine, counters = Engine(context), Counters()
    async with feeding(context, engine, counters=counters) as sink:
        await engine.asked()
        await engine.send(0, pack([0.0, [{"type": "New"}], 0]))
        await sink.until(lambda: len(sink.batches) == 1)
        assert counters.unknown == 1


@pytest.mark.parametrize("url", ["tcp://", "nonsense", "tcp://127.0.0.1:none"])
async def test_no_zmq_address(context, url):
    with pytest.raises(SpecError, match="ZMQ address"):
        await kv_feed.run(Publisher(ENGINE, 0, url), Recorder(), lambda: 0.0, context)
