"""One engine's feed, against a publisher and a replay address on loopback that behave as vLLM's, or badly."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

import msgspec
import pytest
import replaying_engine
import zmq
import zmq.asyncio
from waiting import HANG, until

from perilune_api.pool import SpecError
from perilune_gateway.feeds import kv_feed, kv_replay, zmq_sockets
from perilune_gateway.feeds.kv_events import Batch, decode
from perilune_gateway.feeds.kv_rank import Counters, Publisher, ResetCause, Shared
from perilune_gateway.model.kv_events import Lost
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
        assert await asyncio.wait_for(self._xpub.recv(), HANG) == b"\1"

    async def asked(self) -> None:
        """Wait until the feed has asked for a replay, which it does once before it listens."""
        await asyncio.wait_for(self._asked.wait(), HANG)

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
            if self.answers:
                await self.replay(who, start)

    async def replay(self, who: bytes, start: bytes) -> None:
        for seq, payload in list(self.buffer):
            if seq >= start:
                await self._router.send_multipart([who, b"", *self._topic(b"kv"), seq, payload])
        await self._router.send_multipart([who, b"", *self._topic(b""), b"\xff" * 8, b""])

    def _topic(self, topic: bytes) -> list[bytes]:
        return [topic] if self.topic else []

    async def stop(self) -> None:
        """Stop it; its ports are free afterwards."""
        if self._task.cancelled():
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for socket, port in zip((self._xpub, self._router), self.ports, strict=True):
            monitor = socket.get_monitor_socket(zmq.EVENT_CLOSED)
            socket.unbind(f"tcp://127.0.0.1:{port}")
            await asyncio.wait_for(monitor.recv_multipart(), HANG)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)


def bind(socket, port: int) -> int:
    """Bind to a port; 0 takes any free one."""
    if not port:
        return socket.bind_to_random_port("tcp://127.0.0.1")
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port


class NotingIndex(PrefixIndex):
    """Knows which blocks it ever heard of."""

    def __init__(self) -> None:
        super().__init__(100_000, 5.0)
        self.heard: set[int] = set()

    def stored(self, endpoint, tier, blocks, *arguments, **options) -> None:
        self.heard.update(blocks)
        super().stored(endpoint, tier, blocks, *arguments, **options)

    @property
    def held(self) -> set[int]:
        return {block for block in self.heard if self.announced(ENGINE, block)}


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
            self.blocks.apply(endpoint, event, 0.0)
        self.batches.append(batch)
        self.lags.append(lag_s)
        self._changed.set()

    def reset(self, endpoint, rank, cause) -> None:
        self.blocks.reset(endpoint, 0.0)
        self.resets.append(cause)
        self._changed.set()

    @property
    def times(self) -> list[float]:
        return [batch.published_s for batch in self.batches]

    async def until(self, condition) -> None:
        async with asyncio.timeout(HANG):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def held(self) -> set[int]:
        return self.index.held


def at(ts: float) -> bytes:
    return pack([ts, [], 0])


@pytest.fixture
async def context():
    """Yield the engine's context."""
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def ours():
    """Yield the feed's context."""
    context = zmq_sockets.new_context()
    yield context
    context.destroy(linger=0)


@contextlib.asynccontextmanager
async def feeding(engine, ours, *, replay=True, counters=None, timeout_s=30.0):
    sink = Recorder()
    shared = Shared(
        context=ours,
        clock=lambda: 100.0,
        rng=Random(1),
        replay_timeout_s=timeout_s,
        answer_timeout_s=timeout_s,
        spread_s=0.0,
        pause_s=0.001,
    )
    publisher = Publisher(ENGINE, 0, engine.events_url, engine.replay_url if replay else "")
    task = asyncio.create_task(kv_feed.run(publisher, sink, shared, counters or Counters()))
    try:
        await engine.subscribed()
        yield sink
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.stop()


class Endless(Engine):
    """Its replay goes on and on, by `step` in the sequence numbers, until it is sound."""

    step = 1
    sound = False

    async def replay(self, who: bytes, start: bytes) -> None:
        if self.sound:
            return await super().replay(who, start)
        seq = 0
        while not self.sound:
            await self._router.send_multipart([who, b"", b"kv", seq.to_bytes(8, "big"), at(1.0)])
            await asyncio.sleep(0)
            seq += self.step


async def test_a_feed_that_is_cancelled_amid_a_replay_ends(context, ours):
    """Else a gateway that is stopped then would never end."""
    engine = Endless(context)
    async with feeding(engine, ours) as sink:
        await sink.until(lambda: len(sink.batches) >= 20)


@pytest.mark.parametrize("step", [0, 1], ids=["the same message again and again", "ever new ones"])
async def test_a_replay_without_an_end_is_broken_off(context, ours, monkeypatch, step):
    monkeypatch.setattr(kv_replay, "REPLAYED_MESSAGES", 50)
    engine, counters = Endless(context), Counters()
    engine.step = step
    async with feeding(engine, ours, counters=counters) as sink:
        await until(lambda: counters.malformed and not counters.catching_up)
        assert (counters.replayed, counters.malformed) == ((1, 50)[step], 1)
        engine.sound = True
        await engine.send(1000, at(5.0))
        await sink.until(lambda: sink.times[-1:] == [5.0])
        assert counters.malformed == 1


class Lossy(Engine):
    """Drops of a replay from a number on the messages that `drops` names for it, or for the last number
    before it; -1 is the end."""

    drops: Mapping[int, set[int]] = MappingProxyType({})

    async def replay(self, who: bytes, start: bytes) -> None:
        asked = int.from_bytes(start, "big")
        drops = self.drops.get(max((n for n in self.drops if n <= asked), default=-1), set())
        for seq, payload in [*self.buffer, (b"\xff" * 8, b"")]:
            number = -1 if seq == b"\xff" * 8 else int.from_bytes(seq, "big")
            if seq >= start and number not in drops:
                await self._router.send_multipart([who, b"", b"kv", seq, payload])


@pytest.mark.parametrize(
    ("drops", "more"),
    [
        pytest.param({0: {4}, 3: set()}, {}, id="one in the middle"),
        pytest.param({0: {4, 7}, 3: {7}, 6: set()}, {}, id="several holes"),
        pytest.param({0: {-1}, 9: set()}, {"timeout_s": 1.0}, id="the end"),
        pytest.param(
            {0: {7, 8, 9, -1}, 6: {9, -1}, 8: {-1}, 9: set()}, {"timeout_s": 1.0}, id="the last and the end"
        ),
    ],
)
async def test_what_a_replay_drops_is_asked_for_again_from_the_next_number(
    context, ours, monkeypatch, drops, more
):
    """A ROUTER drops without a word what its reader's queue has no room for. The message before the next one
    shows that it is the same engine. What a busy machine seems to have dropped is asked for again, too."""
    monkeypatch.setattr(kv_replay, "TRIES", 1000)
    engine, counters = Lossy(context), Counters()
    engine.drops = drops
    for seq in range(10):
        await engine.send(seq, at(seq), dropped=True)
    async with feeding(engine, ours, counters=counters, **more) as sink:
        await sink.until(lambda: len(sink.batches) == 10)
        await until(lambda: not counters.catching_up)
        assert sink.times == [*range(10)]
        assert set(drops) <= set(engine.replays) <= set(range(10))
        assert engine.replays == sorted(engine.replays)
        assert (counters.replayed, counters.gaps, sink.resets) == (10, 0, [])


async def test_a_replay_that_brings_nothing_new_is_given_up(context, ours, caplog):
    engine, counters = Lossy(context), Counters()
    async with feeding(engine, ours, counters=counters, timeout_s=0.3) as sink:
        for seq in range(3):
            await engine.send(seq, at(seq))
        await sink.until(lambda: len(sink.batches) == 3)
        engine.drops = {0: {3, 10, -1}}
        await engine.send(3, at(3), dropped=True)
        await engine.send(10, at(10))
        await sink.until(lambda: sink.times[-1:] == [10.0])
        assert sink.resets == [ResetCause.LOST]
        assert sink.times == [0, 1, 2, 10]
        assert "KV event replay not answered endpoint=10.0.0.1:8000 rank=0" in caplog.messages


class Process:
    """tests/support/replaying_engine.py"""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, replaying_engine.__file__, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.events_url, self.replay_url = self._process.stdout.readline().split()

    def end(self) -> int:
        """End the process, and return the number of messages that it put into replies."""
        said, _ = self._process.communicate("end", timeout=HANG)
        return int(said)


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Counting:
    """A sink that keeps nothing."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.most_bytes = 0
        self.resets: list[ResetCause] = []

    def batch(self, endpoint, rank, batch, lag_s) -> None:
        self.blocks.extend(event.block_hashes[-1] for event in batch.events)
        if len(self.blocks) % 500 == 0:
            self.most_bytes = max(self.most_bytes, resident_bytes())

    def reset(self, endpoint, rank, cause) -> None:
        self.resets.append(cause)


def names(kept: int, blocks: int) -> list[int]:
    """Return the last block of each of its messages."""
    dice = Random(1)
    return [replaying_engine.message(dice, blocks, None)[0] for _ in range(kept)]


async def test_a_long_replay_is_applied_while_it_is_read(ours):
    """10,000 messages of 3.3 kB, of which the engine drops what this reader is too slow for."""
    kept, blocks = 10_000, 40
    expected, engine = names(kept, blocks), Process(kept, blocks)
    sink, counters = Counting(), Counters()
    shared = Shared(context=ours, clock=time.time, rng=Random(1))
    publisher = Publisher(ENGINE, 0, engine.events_url, engine.replay_url)
    before = resident_bytes()
    feed = asyncio.create_task(kv_feed.run(publisher, sink, shared, counters))
    try:
        await until(lambda: len(sink.blocks) >= kept and not counters.catching_up)
    finally:
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
        sent = engine.end()
    assert sink.blocks == expected
    assert sink.resets == []
    assert sink.most_bytes - before < 80e6, "33 MB of messages; decoded they take 350 MB"
    assert sent < 5 * kept, "else it asks too often"


@pytest.mark.heavy
async def test_ten_gateways_that_start_together_ask_an_engine_little_more_than_once_each(ours):
    """Its one thread publishes nothing while it answers. It goes on publishing, and every gateway has all."""
    kept, gateways = 2_000, 10
    expected, engine = names(kept, 8), Process(kept, 8, 50)
    sinks, counters = [Counting() for _ in range(gateways)], [Counters() for _ in range(gateways)]
    publisher = Publisher(ENGINE, 0, engine.events_url, engine.replay_url)
    feeds = [
        asyncio.create_task(
            kv_feed.run(
                publisher, sinks[n], Shared(context=ours, clock=time.time, rng=Random(n)), counters[n]
            )
        )
        for n in range(gateways)
    ]
    try:
        await until(lambda: all(c.batches > c.replayed + 20 and not c.catching_up for c in counters))
    finally:
        for feed in feeds:
            feed.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)
        sent = engine.end()
    for sink in sinks:
        assert sink.blocks[:kept] == expected
        assert sink.resets == []
    assert sent < 2 * gateways * kept


async def test_a_whole_capture(context, ours, captures):
    engine, counters = Engine(context), Counters()
    async with feeding(engine, ours, counters=counters) as sink:
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
    """Deliver the first messages, then only the last; the engine keeps `replay_frames` for a replay."""
    await engine.asked()
    for frames in messages[:arrive]:
        await engine.send(int.from_bytes(frames[1], "big"), frames[2])
    await sink.until(lambda: len(sink.batches) == arrive)
    engine.buffer.clear()
    for _, _, seq, payload in replay_frames[:-1]:
        engine.buffer.append((seq, payload))
    await engine.send_raw(messages[-1])


@pytest.mark.parametrize("topic", [True, False], ids=["with topic", "without topic, until 0.25"])
async def test_dropped_messages_are_replayed(context, ours, captures, replay_frames, topic):
    """Live up to 239, then nothing, then the last: the replay brings what is between, from the very frames
    that a real engine answered."""
    engine, counters = Engine(context, topic=topic), Counters()
    messages = captures["main"].messages
    async with feeding(engine, ours, counters=counters) as sink:
        await lose(engine, sink, messages, 240, replay_frames)
        await sink.until(lambda: len(sink.batches) == 528)
        assert sink.held() == expected(messages)
        assert sink.resets == []
        assert engine.replays == [0, 239]
        assert (counters.gaps, counters.replayed, counters.rebuilds) == (1, 288, 0)


async def test_a_short_replay_buffer_means_to_begin_anew(context, ours, captures, replay_frames):
    engine, counters = Engine(context), Counters()
    messages = captures["main"].messages
    async with feeding(engine, ours, counters=counters) as sink:
        await lose(engine, sink, messages, 100, replay_frames)
        await sink.until(lambda: len(sink.batches) == 388)
        assert sink.resets == [ResetCause.LOST]
        assert sink.held() <= expected(messages), "it may know less, never more"
        assert sink.held()
        assert (counters.gaps, counters.rebuilds, counters.lost) == (1, 1, Lost.TOO_OLD)


async def test_a_gap_without_replay_address_means_to_begin_anew(context, ours):
    engine, counters = Engine(context), Counters()
    async with feeding(engine, ours, replay=False, counters=counters) as sink:
        for seq in (3, 4, 6):
            await engine.send(seq, at(seq))
        await sink.until(lambda: len(sink.batches) == 3)
        assert sink.resets == [ResetCause.LOST]
        assert sink.times == [3.0, 4.0, 6.0]
        assert (counters.gaps, counters.rebuilds) == (1, 1), "the beginning is no gap: nothing was known"
        assert counters.lost is Lost.NO_REPLAY


async def test_a_silent_replay_address_is_no_answer(context, ours):
    engine, counters = Engine(context, answers=False), Counters()
    async with feeding(engine, ours, counters=counters, timeout_s=0.05) as sink:
        await engine.send(0, at(1))
        await sink.until(lambda: len(sink.batches) == 1)
        await engine.send(2, at(3))
        await sink.until(lambda: len(sink.batches) == 2)
        assert sink.resets == [ResetCause.LOST]
        assert counters.lost is Lost.UNANSWERED


async def test_what_was_announced_before_we_came(context, ours, captures):
    engine, counters = Engine(context), Counters()
    messages = captures["main"].messages[:50]
    for frames in messages[:30]:
        await engine.send(int.from_bytes(frames[1], "big"), frames[2])
    async with feeding(engine, ours, counters=counters) as sink:
        await sink.until(lambda: len(sink.batches) == 30)
        for frames in messages[30:]:
            await engine.send(int.from_bytes(frames[1], "big"), frames[2])
        await sink.until(lambda: len(sink.batches) == 50)
        assert sink.held() == expected(messages)
        assert (counters.replayed, counters.gaps, sink.resets) == (30, 0, [])


async def test_an_engine_that_answers_late(context, ours, monkeypatch):
    """Nobody answers at first; what was announced before is asked for again at the handshake."""
    monkeypatch.setattr(kv_replay, "TRIES", 1000)
    engine = Engine(context, answers=False)
    for seq in range(3):
        await engine.send(seq, at(seq), dropped=True)
    async with feeding(engine, ours, timeout_s=1.0) as sink:
        await engine.asked()
        engine.answers = True
        await sink.until(lambda: len(sink.batches) == 3)
        assert len(engine.replays) >= 2


async def test_a_restarted_engine_holds_nothing(context, ours, captures):
    engine, counters = Engine(context), Counters()
    messages = captures["main"].messages
    last_s = decode(messages[19][2]).published_s
    async with feeding(engine, ours, counters=counters) as sink:
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


async def test_a_restarted_engine_that_is_already_further(context, ours):
    """Its numbers exceed ours, but its message of our last number is another one."""
    engine, counters = Engine(context), Counters()
    async with feeding(engine, ours, counters=counters) as sink:
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


async def test_what_a_dead_engine_had_sent_is_no_gap_of_the_next_one(context, ours):
    """Both are read side by side, as ZMQ keeps a queue for each connection."""
    engine, counters = Engine(context), Counters()
    async with feeding(engine, ours, counters=counters) as sink:
        await engine.asked()
        for seq in range(3):
            await engine.send(seq, at(seq))
        await sink.until(lambda: len(sink.batches) == 3)
        engine.buffer.clear()
        await engine.send(0, at(100))
        await engine.send_raw([b"kv@pod@m", (7).to_bytes(8, "big"), at(7)])
        await engine.send(1, at(101))
        await sink.until(lambda: len(sink.batches) == 5)
        assert sink.times == [0, 1, 2, 100, 101]
        assert sink.resets == [ResetCause.RESTARTED]
        assert (counters.old, counters.gaps, len(engine.replays)) == (1, 0, 1)


async def test_an_engine_that_restarts_and_idles_is_found_out(context, ours):
    """Nothing is published after the restart: the question at reconnection shows it."""
    engine, counters = Engine(context), Counters()
    ports = engine.ports
    async with feeding(engine, ours, counters=counters) as sink:
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


async def test_a_broken_connection_is_no_restart(context, ours):
    engine, counters = Engine(context), Counters()
    ports = engine.ports
    async with feeding(engine, ours, counters=counters) as sink:
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


async def test_repetitions_are_applied_once(context, ours):
    engine, counters = Engine(context), Counters()
    async with feeding(engine, ours, counters=counters) as sink:
        await engine.asked()
        for seq in (0, 1, 0, 1, 2):
            await engine.send(seq, at(seq))
        await sink.until(lambda: len(sink.batches) == 3)
        assert sink.times == [0, 1, 2]
        assert counters.old == 2


async def test_a_message_that_cannot_be_read(context, ours):
    engine, counters = Engine(context), Counters()
    async with feeding(engine, ours, counters=counters) as sink:
        await engine.asked()
        await engine.send(0, at(1))
        await engine.send_raw([b"only two", b"frames"])
        await engine.send(1, b"garbage")
        await engine.send(2, at(3))
        await sink.until(lambda: len(sink.batches) == 2)
        assert sink.resets == [ResetCause.MALFORMED]
        assert sink.times == [1, 3]
        assert counters.malformed == 2


async def test_a_damaged_event_is_counted_and_resets_nothing(context, ours, caplog):
    engine, counters = Engine(context), Counters()
    sound = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    damaged = {"type": "BlockStored", "block_hashes": [2], "parent_block_hash": None, "token_ids": None}
    async with feeding(engine, ours, counters=counters) as sink:
        for seq in range(2):
            await engine.send(seq, pack([float(seq + 1), [sound, damaged, sound], 0]))
        await sink.until(lambda: len(sink.batches) == 2)
        assert (counters.malformed, sink.resets) == (2, [])
        (said,) = caplog.messages
        assert said.startswith("KV events left out, they cannot be read endpoint=10.0.0.1:8000")


async def test_an_engine_of_which_nothing_can_be_read_is_told_once(context, ours, caplog):
    """It speaks with every step."""
    caplog.set_level("INFO", "perilune_gateway.feeds.kv_feed")
    engine, counters = Engine(context), Counters()
    async with feeding(engine, ours, counters=counters) as sink:
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


async def test_unknown_events_are_counted(context, ours):
    engine, counters = Engine(context), Counters()
    async with feeding(engine, ours, counters=counters) as sink:
        await engine.asked()
        await engine.send(0, pack([0.0, [{"type": "New"}], 0]))
        await sink.until(lambda: len(sink.batches) == 1)
        assert counters.unknown == 1


@pytest.mark.parametrize("url", ["tcp://", "nonsense", "tcp://127.0.0.1:none"])
async def test_no_zmq_address(ours, url):
    shared = Shared(context=ours, clock=lambda: 0.0, rng=Random(1))
    with pytest.raises(SpecError, match="ZMQ address"):
        await kv_feed.run(Publisher(ENGINE, 0, url), Recorder(), shared, Counters())
