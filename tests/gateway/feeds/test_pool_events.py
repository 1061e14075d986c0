"""Where batches go: parity is told once per change, what was applied reaches the router."""

import asyncio
import contextlib
from dataclasses import replace
from math import isnan
from random import Random

import msgspec
import pytest
import zmq
import zmq.asyncio
from waiting import HANG, until

from perilune_api.pool import Hashing, SpecError
from perilune_gateway.feeds import kv_feed, kv_rank, pool_events, zmq_sockets
from perilune_gateway.feeds.kv_events import Batch
from perilune_gateway.feeds.kv_rank import ResetCause
from perilune_gateway.feeds.pool_events import EventFeeds, EventSink
from perilune_gateway.model import Endpoint, ProtocolError
from perilune_gateway.model.applied import Applied
from perilune_gateway.model.kv_events import BlockStored, EventStats
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.block_tokens import BlockTokens
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.parity import Parity, ParityCheck
from perilune_gateway.state.prefix_index import PrefixIndex

OURS, OTHERS = Hashing(), Hashing(seed="7")


class Router:
    def __init__(self) -> None:
        self.applied: list[Applied] = []

    def on_applied(self, applied: Applied) -> None:
        self.applied.append(applied)

    def on_learning(self, endpoint: str, learning: bool) -> None:
        self.learning = endpoint, learning


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def sink(router: Router) -> EventSink:
    index = PrefixIndex(100, 30.0)
    return EventSink(
        EngineBlocks(index, 4, store=False), ParityCheck(OURS, 4), router, lambda: 0.0, BlockTokens(4)
    )


def stored(first: int, hashing: Hashing) -> Batch:
    """One block at a prompt's beginning, as an engine with these settings names it."""
    ids = tuple(range(first, first + 4))
    names = tuple(blocks.low64(digest) for digest in blocks.vllm_chain(ids, 4, hashing))
    return Batch(
        0.0,
        (BlockStored(block_hashes=names, parent_block_hash=None, token_ids=ids, block_size=4, medium="GPU"),),
    )


def test_what_was_applied_reaches_the_router(sink: EventSink, router: Router) -> None:
    sink.batch("e", 0, stored(0, OURS), 0.0)
    sink.reset("e", 0, ResetCause.LOST)
    assert [(a.stored, a.cleared) for a in router.applied] == [
        (blocks.chain(range(4), 4, 0), False),
        ((), True),
    ]


def test_parity_is_logged_when_it_changes(sink: EventSink, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for first in range(0, 40, 4):
        sink.batch("e", 0, stored(first, OTHERS), 0.0)
    (line,) = caplog.messages
    assert "differ" in line
    assert "endpoint=e" in line
    caplog.clear()
    sink.batch("f", 0, stored(0, OURS), 0.0)
    sink.batch("f", 0, stored(4, OURS), 0.0)
    assert caplog.messages == ["block hashes equal the engine's endpoint=f"]


@pytest.mark.parametrize(("lag_s", "said"), [(0.1, Parity.TEMPLATE), (5.0, Parity.OK)])
def test_parity_is_told_how_late_events_come(router: Router, lag_s: float, said: Parity) -> None:
    parity = ParityCheck(OURS, 4)
    sink = EventSink(
        EngineBlocks(PrefixIndex(100, 30.0), 4, store=False), parity, router, lambda: 0.0, BlockTokens(4)
    )
    sink.batch("e", 0, stored(0, OURS), lag_s)
    for _ in range(20):
        parity.request_blocks_seen("e", False, 0.0)
    assert parity.report("e").parity is said


def test_a_gateway_that_is_still_learning_does_not_blame_the_template(router: Router) -> None:
    """Its prompts' blocks are announced, but their parents were before it listened. Prompts that began after
    the last such block can be judged, even while old blocks wait."""
    parity, index = ParityCheck(OURS, 4), PrefixIndex(100, 30.0)
    blocks_ = EngineBlocks(index, 4, store=False)
    sink = EventSink(blocks_, parity, router, lambda: 0.0, BlockTokens(4))
    sink.batch("e", 0, stored(0, OURS), 0.0)
    late = Batch(
        0.0,
        (
            BlockStored(
                block_hashes=(77,), parent_block_hash=66, token_ids=(1, 2, 3, 4), block_size=4, medium="GPU"
            ),
        ),
    )
    sink.batch("e", 0, late, 0.0)
    for _ in range(20):
        parity.request_blocks_seen("e", False, since=-1.0)
    assert parity.report("e").parity is Parity.OK
    for _ in range(20):
        parity.request_blocks_seen("e", False, since=1.0)
    assert parity.report("e").parity is Parity.TEMPLATE
    assert blocks_.waiting == {"e": 1}
    assert router.learning == ("e", True)


class Feeds:
    """Stands in for `kv_feed.run`: notes whom it is to follow, and ends as told."""

    def __init__(self) -> None:
        self.running: set[kv_rank.Publisher] = set()
        self.counters: dict[kv_rank.Publisher, kv_rank.Counters] = {}
        self.fail: Exception | None = None

    async def run(self, publisher, sink, shared, counters) -> None:
        self.running.add(publisher)
        self.counters[publisher] = counters
        counters.connected = True
        try:
            if self.fail:
                raise self.fail
            await asyncio.Event().wait()
        finally:
            self.running.remove(publisher)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Feeds:
    found = Feeds()
    monkeypatch.setattr(kv_feed, "run", found.run)
    return found


@pytest.fixture
async def feeds(sink: EventSink):
    found = EventFeeds(sink, lambda: 0.0, Random(1))
    yield found
    await found.close()


def of(*, ranks: int, replay: bool = True) -> Endpoint:
    urls = tuple(f"tcp://e:{rank}" for rank in range(ranks))
    return Endpoint(address="e", events=urls, replay=tuple(f"{url}0" for url in urls) if replay else ())


async def test_a_feed_for_each_rank_as_long_as_the_pool_names_it(feeds: EventFeeds, fake: Feeds) -> None:
    feeds.follow([of(ranks=2), Endpoint(address="silent")])
    await asyncio.sleep(0)
    first, second = (kv_rank.Publisher("e", rank, f"tcp://e:{rank}", f"tcp://e:{rank}0") for rank in (0, 1))
    assert fake.running == {first, second}
    before = fake.counters[first]
    feeds.follow([of(ranks=1)])
    await asyncio.sleep(0)
    assert fake.running == {first}
    assert fake.counters[first] is before, "it goes on"
    feeds.follow([of(ranks=1, replay=False)])
    await asyncio.sleep(0)
    assert fake.running == {kv_rank.Publisher("e", 0, "tcp://e:0")}
    feeds.follow([])
    await asyncio.sleep(0)
    assert (fake.running, feeds.stats("e")) == (set(), None)


async def test_another_engine_at_the_address_is_followed_anew(feeds: EventFeeds, fake: Feeds) -> None:
    """Messages of the one before may still wait."""
    feeds.follow([replace(of(ranks=1), instance="first")])
    await asyncio.sleep(0)
    (before,) = fake.counters.values()
    feeds.follow([replace(of(ranks=1), instance="second")])
    await asyncio.sleep(0)
    assert len(fake.running) == 1
    assert before not in [fake.counters[publisher] for publisher in fake.running]


async def test_what_a_feed_said_is_forgotten_with_it(feeds: EventFeeds, fake: Feeds, router: Router) -> None:
    feeds.follow([of(ranks=2)])
    await asyncio.sleep(0)
    assert router.applied == []
    feeds.follow([of(ranks=1)])
    assert [(a.endpoint, a.cleared) for a in router.applied] == [("e", True)]
    feeds.follow([of(ranks=1, replay=False)])
    feeds.follow([Endpoint(address="e")])
    assert len(router.applied) == 3
    feeds.follow([of(ranks=1)])
    feeds.follow([])
    assert len(router.applied) == 3, "the endpoint is gone, and all that was known of it"


async def test_an_endpoint_is_heard_unless_a_rank_is_behind_or_replayed(
    feeds: EventFeeds, fake: Feeds
) -> None:
    feeds.follow([of(ranks=2)])
    await asyncio.sleep(0)
    _, other = fake.counters.values()
    assert feeds.hears("e")
    other.behind_s = 1.5
    assert not feeds.hears("e")
    other.behind_s, other.catching_up = 0.5, 1
    assert not feeds.hears("e")
    assert feeds.hears("silent")


async def test_ranks_are_summed_and_the_slowest_tells_the_lag(feeds: EventFeeds, fake: Feeds) -> None:
    feeds.follow([of(ranks=2)])
    await asyncio.sleep(0)
    one, other = fake.counters.values()
    stats = feeds.stats("e")
    assert stats
    assert isnan(stats.lag_s)
    one.batches, one.gaps, one.lag_s = 3, 1, 0.2
    other.batches, other.unknown, other.lag_s = 4, 5, 0.1
    assert feeds.stats("e") == EventStats(connected=True, lag_s=0.2, batches=7, gaps=1, unknown=5)
    other.connected = False
    assert feeds.stats("e") == EventStats(connected=False, lag_s=0.2, batches=7, gaps=1, unknown=5)


async def test_a_feed_without_a_valid_address_ends_and_says_so(feeds, fake: Feeds, caplog) -> None:
    fake.fail = SpecError("'x' is not a ZMQ address")
    feeds.follow([of(ranks=1)])
    await asyncio.sleep(0)
    assert caplog.messages == ["kv events off endpoint=e rank=0 cause='x' is not a ZMQ address"]
    assert feeds.stats("e").failure == "'x' is not a ZMQ address"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (zmq.ZMQError(24), "Too many open files"),
        (ProtocolError("a message that is too long"), "a message that is too long"),
        (KeyError("of an index"), "KeyError: 'of an index'"),
    ],
)
async def test_a_feed_that_fails_forgets_says_so_and_comes_back(
    feeds, fake: Feeds, router: Router, monkeypatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr(pool_events, "FIRST_PAUSE_S", 0.05)
    fake.fail = error
    feeds.follow([of(ranks=1)])
    await asyncio.sleep(0)
    assert [(a.endpoint, a.cleared) for a in router.applied] == [("e", True)]
    assert (feeds.stats("e").failure, feeds.stats("e").connected) == (said, False)
    fake.fail = None
    await until(lambda: fake.running)
    assert feeds.stats("e").connected


class Publishers:
    """A socket that all feeds subscribe to."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self._xpub = self.context.socket(zmq.XPUB)
        self._xpub.set(zmq.XPUB_VERBOSE, 1)
        self.url = f"tcp://127.0.0.1:{self._xpub.bind_to_random_port('tcp://127.0.0.1')}"

    def endpoints(self, count: int) -> list[Endpoint]:
        return [Endpoint(address=f"e{n}", events=(self.url,)) for n in range(count)]

    async def subscribed(self, count: int) -> None:
        async with asyncio.timeout(HANG):
            for _ in range(count):
                assert await self.heard() == b"\1"

    async def heard(self) -> bytes:
        return await asyncio.wait_for(self._xpub.recv(), HANG)

    async def publish(self, *frames: bytes) -> None:
        await self._xpub.send_multipart(frames)

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def live(sink: EventSink, **options: float):
    """Yield publishers, and feeds to follow them."""
    publishers, feeds = Publishers(), EventFeeds(sink, lambda: 1.0, Random(1), **options)

    try:
        yield publishers, feeds
    finally:
        await feeds.close()
        publishers.close()


def encoded(batch: Batch) -> bytes:
    return msgspec.msgpack.encode([batch.published_s, batch.events, 0])


FEEDS = 400
"""They take 1,200 sockets; ZMQ has 1,023 unless it is told."""


@pytest.mark.skipif(zmq_sockets.files_allowed() < 4096, reason="needs 4,096 open files")
async def test_more_feeds_than_zmq_has_sockets_by_default(sink: EventSink) -> None:
    async with live(sink) as (publishers, feeds):
        endpoints = publishers.endpoints(FEEDS)
        feeds.follow(endpoints)
        await publishers.subscribed(FEEDS)
        await publishers.publish(b"", bytes(8), encoded(stored(0, OURS)))
        await until(lambda: all(feeds.stats(e.address).batches == 1 for e in endpoints))
        assert [feeds.stats(e.address).failure for e in endpoints] == [""] * FEEDS


async def test_feeds_beyond_the_limit_of_open_files_are_left_out_and_say_why(
    feeds, fake: Feeds, monkeypatch, caplog
) -> None:
    """libzmq ends the process that cannot open another file."""
    allowed = zmq_sockets.RESERVED_FILES + 10 * (pool_events.FILES + 1)
    monkeypatch.setattr(zmq_sockets, "files_allowed", lambda: allowed)
    pool = [Endpoint(address=f"e{n}", events=(f"tcp://e{n}:1",)) for n in range(13)]
    feeds.follow(pool)
    await asyncio.sleep(0)
    left_out = [e for e in pool if feeds.stats(e.address).failure]
    assert len(fake.running) == 13 - len(left_out) == 9
    assert (
        f"needs 577 open files and the process may open {allowed}" in feeds.stats(left_out[0].address).failure
    )
    assert "kv events off for 4 of 13 publishers" in caplog.text
    feeds.follow(pool[:6] + left_out[:2])
    await asyncio.sleep(0)
    assert {p.endpoint for p in fake.running} == {e.address for e in pool[:6] + left_out[:2]}


async def test_a_message_that_is_too_long_ends_its_feed_which_comes_back(
    sink: EventSink, router: Router, monkeypatch
) -> None:
    """ZMQ never connects again to a peer that sent one."""
    monkeypatch.setattr(zmq_sockets, "MAX_MESSAGE_BYTES", 1_000)
    monkeypatch.setattr(kv_feed, "GONE_S", 0.1)
    async with live(sink) as (publishers, feeds):
        feeds.follow(publishers.endpoints(1))
        await publishers.subscribed(1)
        await publishers.publish(b"", bytes(8), encoded(stored(0, OURS)))
        await until(lambda: router.applied)
        await publishers.publish(b"", (1).to_bytes(8, "big"), b"x" * 2_000)
        await until(lambda: feeds.stats("e0").failure)
        assert "more than 1000 bytes" in feeds.stats("e0").failure
        assert router.applied[-1].cleared
        assert await publishers.heard() == b"\0"
        await publishers.subscribed(1)
        await until(lambda: not feeds.stats("e0").failure)  # though the engine says nothing
        await publishers.publish(b"", (2).to_bytes(8, "big"), encoded(stored(4, OURS)))
        await until(lambda: router.applied[-1].stored)


class Replays:
    """Replay addresses that answer when they are told to."""

    def __init__(self, context: zmq.asyncio.Context, count: int) -> None:
        self._routers = [context.socket(zmq.ROUTER) for _ in range(count)]
        self.urls = [
            f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}" for router in self._routers
        ]
        self.open: dict[int, bytes] = {}
        """Number of the address → who asks it."""
        self.asked = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen(n)) for n in range(count)]

    async def _listen(self, number: int) -> None:
        while True:
            who, *_ = await self._routers[number].recv_multipart()
            self.open[number] = who
            self.asked.set()

    async def answer(self, number: int) -> None:
        await self._routers[number].send_multipart([self.open.pop(number), b"", b"", b"\xff" * 8, b""])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_gateway_reads_eight_replays_at_once(sink: EventSink) -> None:
    async with live(sink, replay_timeout_s=30.0) as (publishers, feeds):
        replays = Replays(publishers.context, 20)
        feeds.follow(
            [
                Endpoint(address=f"e{n}", events=(publishers.url,), replay=(u,))
                for n, u in enumerate(replays.urls)
            ]
        )
        await until(lambda: feeds.ingest().catching_up == 20)
        order = []
        while len(order) < 20:
            await until(lambda: len(replays.open) == min(8, 20 - len(order)))
            number = next(iter(replays.open))
            order.append(number)
            await replays.answer(number)
        await until(lambda: feeds.ingest().catching_up == 0)
        assert sorted(order) == [*range(20)]
        assert order != sorted(order), "gateways that start together begin with different engines"
        await replays.close()
