"""Where batches go: parity is told once per change, what was applied reaches the router."""

import asyncio
from math import isnan

import pytest

from perilune_api.pool import Hashing, SpecError
from perilune_gateway.feeds import kv_feed
from perilune_gateway.feeds.kv_events import Batch
from perilune_gateway.feeds.kv_feed import ResetCause
from perilune_gateway.feeds.pool_events import EventFeeds, EventSink
from perilune_gateway.model import Endpoint
from perilune_gateway.model.kv_events import BlockStored, EventStats
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import Applied, EngineBlocks
from perilune_gateway.state.parity import Parity, ParityCheck
from perilune_gateway.state.prefix_index import PrefixIndex

OURS, OTHERS = Hashing(), Hashing(seed="7")


class Router:
    def __init__(self) -> None:
        self.applied: list[Applied] = []

    def on_applied(self, applied: Applied) -> None:
        self.applied.append(applied)


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def sink(router: Router) -> EventSink:
    index = PrefixIndex(100, 30.0)
    return EventSink(EngineBlocks(index, 4, store=False), ParityCheck(OURS, 4), router, lambda: 0.0)


def stored(first: int, hashing: Hashing) -> Batch:
    """One block at a prompt's beginning, as an engine with these settings names it."""
    ids = tuple(range(first, first + 4))
    names = tuple(blocks.low64(digest) for digest in blocks.vllm_hashes(ids, 4, hashing))
    return Batch(0.0, (BlockStored(names, None, ids, 4, medium="GPU"),))


def test_what_was_applied_reaches_the_router(sink: EventSink, router: Router) -> None:
    sink.batch("e", 0, stored(0, OURS), 0.0)
    sink.reset("e", 0, ResetCause.LOST)
    assert [(a.stored, a.cleared) for a in router.applied] == [
        (tuple(blocks.chain(range(4), 4, 0)), False),
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
    sink = EventSink(EngineBlocks(PrefixIndex(100, 30.0), 4, store=False), parity, router, lambda: 0.0)
    sink.batch("e", 0, stored(0, OURS), lag_s)
    for _ in range(20):
        parity.request_blocks_seen("e", False)
    assert parity.report("e").parity is said


class Feeds:
    """Stands in for `kv_feed.run`: notes whom it is to follow, and ends as told."""

    def __init__(self) -> None:
        self.running: set[kv_feed.Publisher] = set()
        self.counters: dict[kv_feed.Publisher, kv_feed.Counters] = {}
        self.fail: Exception | None = None

    async def run(self, publisher, sink, clock, context, counters, budget) -> None:
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
    found = EventFeeds(sink, lambda: 0.0)
    yield found
    await found.close()


def of(*, ranks: int, replay: bool = True) -> Endpoint:
    urls = tuple(f"tcp://e:{rank}" for rank in range(ranks))
    return Endpoint("e", events=urls, replay=tuple(f"{url}0" for url in urls) if replay else ())


async def test_a_feed_for_each_rank_as_long_as_the_pool_names_it(feeds: EventFeeds, fake: Feeds) -> None:
    feeds.follow([of(ranks=2), Endpoint("silent")])
    await asyncio.sleep(0)
    first, second = (kv_feed.Publisher("e", rank, f"tcp://e:{rank}", f"tcp://e:{rank}0") for rank in (0, 1))
    assert fake.running == {first, second}
    before = fake.counters[first]
    feeds.follow([of(ranks=1)])
    await asyncio.sleep(0)
    assert fake.running == {first}
    assert fake.counters[first] is before, "it goes on"
    feeds.follow([of(ranks=1, replay=False)])
    await asyncio.sleep(0)
    assert fake.running == {kv_feed.Publisher("e", 0, "tcp://e:0")}
    feeds.follow([])
    await asyncio.sleep(0)
    assert (fake.running, feeds.stats("e")) == (set(), None)


async def test_what_a_feed_said_is_forgotten_with_it(feeds: EventFeeds, fake: Feeds, router: Router) -> None:
    feeds.follow([of(ranks=2)])
    await asyncio.sleep(0)
    assert router.applied == []
    feeds.follow([of(ranks=1)])
    assert [(a.endpoint, a.rank, a.cleared) for a in router.applied] == [("e", 1, True)]
    feeds.follow([of(ranks=1, replay=False)])
    feeds.follow([Endpoint("e")])
    assert [a.rank for a in router.applied] == [1, 0, 0]
    feeds.follow([of(ranks=1)])
    feeds.follow([])
    assert len(router.applied) == 3, "the endpoint is gone, and all that was known of it"


async def test_ranks_are_summed_and_the_slowest_tells_the_lag(feeds: EventFeeds, fake: Feeds) -> None:
    feeds.follow([of(ranks=2)])
    await asyncio.sleep(0)
    one, other = fake.counters.values()
    stats = feeds.stats("e")
    assert stats
    assert isnan(stats.lag_s)
    one.batches, one.gaps, one.lag_s = 3, 1, 0.2
    other.batches, other.unknown, other.lag_s = 4, 5, 0.1
    assert feeds.stats("e") == EventStats(True, 0.2, batches=7, gaps=1, unknown=5)
    other.connected = False
    assert feeds.stats("e") == EventStats(False, 0.2, batches=7, gaps=1, unknown=5)


@pytest.mark.parametrize(
    ("error", "said", "forgotten"),
    [
        (SpecError("'x' of e is no ZMQ address"), "kv events off endpoint=e rank=0 cause='x' of e is no", 0),
        (OSError(24, "Too many open files"), "kv events off endpoint=e rank=0", 1),
    ],
)
async def test_a_feed_that_fails_says_so(
    feeds, fake: Feeds, router: Router, caplog, error: Exception, said: str, forgotten: int
) -> None:
    fake.fail = error
    feeds.follow([of(ranks=1)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert caplog.messages[0].startswith(said)
    assert len(router.applied) == forgotten
    stats = feeds.stats("e")
    assert stats
    assert not stats.connected
