"""What engines' bootstrap pages say, asked from real servers."""

import asyncio
import contextlib
import json

import aiohttp
import msgspec
import pytest
from aiohttp import web
from waiting import until

from perilune_gateway.feeds import bootstrap_pages
from perilune_gateway.feeds.bootstrap_pages import parse
from perilune_gateway.model import Endpoint
from perilune_gateway.state.connectors import Connector, Connectors

WORKER = {"0": {"0": "tcp://10.0.0.1:40001"}}


def page(*engines: str, workers=WORKER) -> bytes:
    ranks = {str(rank): {"engine_id": one, "worker_addr": workers} for rank, one in enumerate(engines)}
    return json.dumps(ranks).encode()


def test_ranks_are_in_the_order_of_their_numbers() -> None:
    assert parse(page(*(f"e{rank}" for rank in range(12)))).engine_ids == [f"e{rank}" for rank in range(12)]
    assert parse(page(*(f"e{rank}" for rank in range(12))), 2).engine_ids == ["e2"]


@pytest.mark.parametrize("missing", ["rank", "worker"])
def test_what_has_registered_in_part_says_nothing_yet_except_of_ranks_that_are_whole(missing: str) -> None:
    two = {"0": {"0": "x"}, "1": {"0": "y"}}
    ranks = {str(rank): {"engine_id": f"e{rank}", "worker_addr": dict(two)} for rank in (0, 1, 2)}
    if missing == "rank":
        del ranks["1"]
    else:
        del ranks["1"]["worker_addr"]["1"]
    text = json.dumps(ranks).encode()
    for rank in (None, 1):
        with pytest.raises(ValueError, match="registered"):
            parse(text, rank)
    assert parse(text, 2) == Connector(["e2"], 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(page("a"), Connector(["a"], 1), id="one rank"),
        pytest.param(page("a", "b"), Connector(["a", "b"], 1), id="two ranks"),
        pytest.param(
            page("a", workers={"0": {"0": "x"}, "1": {"0": "y"}}), Connector(["a"], 2), id="two GPUs"
        ),
    ],
)
def test_a_page(text: bytes, said: Connector) -> None:
    assert parse(text) == said


@pytest.mark.parametrize("text", [b"", b"[]", b'{"0": {}}', b"{}", page("a", workers={}), b"\xff"])
def test_a_page_that_says_nothing_of_use(text: bytes) -> None:
    with pytest.raises((ValueError, msgspec.DecodeError)):
        parse(text)


@contextlib.asynccontextmanager
async def served(handler):
    app = web.Application()
    app.router.add_get("/query", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def test_an_endpoint_can_for_as_long_as_its_page_answers(monkeypatch) -> None:
    monkeypatch.setattr(bootstrap_pages, "ASK_S", 0.01)
    answers = [page("first")]

    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=answers[-1]) if answers[-1] else web.Response(status=500)

    connectors = Connectors()

    async with served(handler) as address, aiohttp.ClientSession() as http:
        endpoints = [Endpoint(address="e:1", bootstrap=address), Endpoint(address="plain:1")]
        run = asyncio.create_task(bootstrap_pages.run(lambda: endpoints, connectors, http))
        await until(lambda: connectors.known == {"e:1": Connector(["first"], 1)})
        answers.append(page("second"))  # the engine has started again
        await until(lambda: connectors.known == {"e:1": Connector(["second"], 1)})
        answers.append(b"")
        await until(lambda: connectors.known == {})
        run.cancel()


@pytest.mark.parametrize("body", [b"x" * (bootstrap_pages.MAX_BYTES + 1), b"not json"])
async def test_a_hostile_page_is_no_page(body: bytes) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=body)

    async with served(handler) as address, aiohttp.ClientSession() as http:
        assert await bootstrap_pages.ask(http, address) is None


async def test_nobody_there() -> None:
    async with aiohttp.ClientSession() as http:
        assert await bootstrap_pages.ask(http, "127.0.0.1:1") is None
