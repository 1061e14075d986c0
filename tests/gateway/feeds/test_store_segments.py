"""The gateway follows which segments the store's master names."""

import asyncio

import pytest
from aiohttp import web
from waiting import HANG

from perilune_gateway.feeds import store_segments


class Master:
    """Answers /get_segments_detail as `mooncake_master` 0.3.13 does."""

    def __init__(self):
        self.answered = asyncio.Event()
        self.segments, self.status = {"10.246.0.11:12741": 5000, "10.246.0.10:12605": 0}, 200
        self.page = b""
        """Answered instead of the segments, if not empty."""

    async def serve(self, port=0):
        async def answer(request):
            self.answered.set()
            if self.page:
                return web.Response(body=self.page)
            segments = [
                {"segment_name": name, "te_endpoint": "10.246.0.11:15055", "allocator_used_bytes": used}
                for name, used in self.segments.items()
            ]
            page = {"total_segments": len(segments), "segments": segments}
            return web.json_response(page, status=self.status)

        app = web.Application()
        app.router.add_get("/get_segments_detail", answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        return self.runner.addresses[0][1]


@pytest.fixture
async def followed():
    master, seen = Master(), asyncio.Queue()
    port = await master.serve()
    feed = asyncio.create_task(store_segments.run(f"127.0.0.1:{port}", seen.put_nowait, interval_s=0.01))
    yield master, seen
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    await master.runner.cleanup()


async def until(seen, wanted):
    async with asyncio.timeout(HANG):
        while await seen.get() != wanted:
            pass


async def test_segments_come_and_go(followed):
    master, seen = followed
    await until(seen, {"10.246.0.11:12741": 5000, "10.246.0.10:12605": 0})
    master.segments = {"10.246.0.11:12741": 6000}
    await until(seen, {"10.246.0.11:12741": 6000})


async def test_a_master_that_has_ended_has_no_segments(followed):
    master, seen = followed
    await until(seen, master.segments)
    await master.runner.cleanup()
    await until(seen, {})


@pytest.mark.parametrize("status", [503, 302])
async def test_a_master_that_answers_with_errors_or_names_another_host_says_nothing(followed, status):
    master, seen = followed
    await until(seen, master.segments)
    master.status = status
    async with asyncio.timeout(HANG):
        for _ in range(3):
            await master.answered.wait()
            master.answered.clear()
    while not seen.empty():
        assert seen.get_nowait() == master.segments


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(b"<html>", id="another page"),
        pytest.param(b'{"segments": [{"segment_name": "\xff"}]}', id="no UTF-8"),
        pytest.param(b'{"x": ' + b"[" * 5_000 + b"]" * 5_000 + b', "segments": []}', id="nested deeply"),
        pytest.param(b" " * (store_segments.MAX_BYTES + 1), id="without end"),
    ],
)
async def test_a_page_that_cannot_be_read_costs_that_page(followed, page):
    master, seen = followed
    await until(seen, master.segments)
    master.page = page
    master.answered.clear()
    async with asyncio.timeout(HANG):
        await master.answered.wait()
    master.page, master.segments = b"", {"10.246.0.11:12741": 7000}
    await until(seen, master.segments)
