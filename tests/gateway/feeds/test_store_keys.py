"""The gateway learns from the store's master what the store has."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from waiting import HANG, until

from perilune_gateway.feeds import store_keys

RECORDED = Path(__file__).parents[2] / "fixtures/mooncake-master"
PREFIX = "qwen@tp_rank:{}@pcp0@dcp0@pp_rank:0@group:{}"


def names(*lines, is_ours=lambda name: False):
    keys = store_keys.Keys()
    keys.add([line.encode() for line in lines])
    return set(keys.ours(is_ours)[1])


def key(name, rank=0, group=0, model="qwen"):
    return f"{PREFIX.format(rank, group).replace('qwen', model)}@{'ab' * 24}{name:016x}"


def test_the_genuine_masters_answers_are_read():
    lines = (RECORDED / "get_all_keys.txt").read_text().splitlines()
    assert names(*lines) == {int(line[-16:], 16) for line in lines}
    assert store_keys.counts((RECORDED / "metrics.txt").read_bytes()) == {
        "master_allocated_bytes": 311_296,
        "master_key_count": 38,
        "master_active_clients": 2,
        "master_evicted_key_count": 0,
    }


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([key(1), key(2)], {1, 2}),
        ([key(1, 0), key(1, 1), key(2, 1)], {1}),  # rank 0 lacks block 2
        ([key(1), key(2), key(3), key(3, group=1)], {1, 2, 3}),  # a sliding window keeps the last ones
        ([key(1), key(8, model="other"), key(9, model="other")], {1}),
        ([key(1, model="ns@qwen@store_pp:1")], {1}),
        ([key(1), "somebody's", "qwen@tp_rank:0@1", f"{PREFIX.format(0, 0)}@xyz", ""], {1}),
        ([], set()),
    ],
    ids=["keys", "ranks", "groups", "models", "namespace", "no blocks", "nothing"],
)
def test_a_block_is_there_if_every_rank_has_it(lines, expected):
    assert names(*lines, is_ours={1}.__contains__) == expected


@pytest.mark.parametrize("count", ["nan", "inf", "many"])
def test_a_count_that_is_no_number_is_refused(count):
    with pytest.raises(ValueError, match=count):
        store_keys.counts(f"master_key_count {count}\n".encode())


class Master:
    """Answers as `mooncake_master` 0.3.13 does."""

    def __init__(self):
        self.keys, self.clients, self.reads = [key(1), key(2)], 2, 0

    async def serve(self):
        async def metrics(request):
            return web.Response(
                text=f"# TYPE master_key_count gauge\nmaster_key_count {self.claimed or len(self.keys)}\n"
                f"master_active_clients {self.clients}\n"
            )

        async def listed(request):
            self.reads += 1
            return web.Response(text="".join(f"{line}\n" for line in self.keys))

        self.claimed = 0
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/get_all_keys", listed)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{self.runner.addresses[0][1]}"


class Clock:
    """Two readings are `step` seconds apart."""

    def __init__(self):
        self.now, self.step = 0.0, 1.0

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.fixture
async def followed():
    master, seen, clock, prefixes = Master(), asyncio.Queue(), Clock(), store_keys.Prefixes()

    def sink(names, since, now):
        assert since < now
        seen.put_nowait(set(names))
        yield

    address = await master.serve()
    feed = asyncio.create_task(
        store_keys.run(
            address, sink, lambda name: True, clock, prefixes, interval_s=0.001, max_keys=4, key_s=0.5
        )
    )
    yield master, seen, clock, prefixes
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    await master.runner.cleanup()


async def next_of(seen):
    return await asyncio.wait_for(seen.get(), HANG)


async def test_the_list_is_read_at_once_and_when_it_has_changed_within_its_share(followed):
    master, seen, clock, _ = followed
    assert await next_of(seen) == {1, 2}
    began = clock.now
    master.keys = [key(2)]
    assert await next_of(seen) == {2}
    assert clock.now - began > 1 / store_keys.SHARE - 2, (
        "two keys, so one second of the master's time in fifty"
    )
    assert master.reads == 2


async def test_the_list_is_read_at_once_when_an_engine_has_gone(followed):
    master, seen, clock, _ = followed
    await next_of(seen)
    began = clock.now
    master.keys, master.clients = [], 1
    assert await next_of(seen) == set()
    assert clock.now - began < 1 / store_keys.SHARE / 2


async def test_a_list_that_has_not_changed_is_read_seldom(followed):
    _, seen, clock, _ = followed
    await next_of(seen)
    began, clock.step = clock.now, 50.0
    assert await next_of(seen) == {1, 2}
    assert clock.now - began > store_keys.RENEW_S - 2


async def test_a_store_with_too_many_keys_is_not_read(followed):
    master, seen, _, _ = followed
    await next_of(seen)
    master.claimed = 5
    master.keys = [key(n) for n in range(5)]
    await asyncio.sleep(0)
    reads, answers = master.reads, 0
    async with asyncio.timeout(HANG):
        while master.claimed:  # then it shrinks, and is read again
            answers += 1
            if answers > 20:
                assert master.reads == reads
                master.claimed, master.keys, master.clients = 0, [key(7)], 1
            await asyncio.sleep(0.001)
    assert await next_of(seen) == {7}


async def test_of_a_store_with_too_many_keys_it_is_read_once_what_they_begin_with(followed):
    master, seen, _, prefixes = followed
    await next_of(seen)
    assert set(prefixes.known) == {PREFIX.format(0, 0).encode()}
    prefixes.known, reads = (), master.reads
    master.keys = [key(n, rank) for n in range(5) for rank in (0, 1)]
    await until(lambda: prefixes.known)
    assert set(prefixes.known) == {PREFIX.format(rank, 0).encode() for rank in (0, 1)}
    assert master.reads == reads + 1
    assert seen.empty()
