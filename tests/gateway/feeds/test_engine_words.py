"""What engines that others run tell of themselves, asked over real HTTP."""

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import certificates
import pytest
from aiohttp import web

from perilune_api.pool import EndpointSpec
from perilune_gateway.feeds.engine_words import EngineWords, ask, directly, read_sources
from perilune_gateway.model.engine_facts import EngineFacts, ServedModel

NO_LIST = "/v1/models answers something else than a list of models"
METRICS = """\
# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="False",engine="0",num_gpu_blocks="10",\
prefix_caching_hash_algo="sha256_cbor"} 1.0
vllm:nixl_xfer_time_seconds_count{engine="0"} 0.0
"""


class Engine:
    """A server of which a test says what each page answers; other pages are not there."""

    def __init__(self) -> None:
        self.pages: dict[str, object] = {"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}
        self.asked: list[str] = []
        self.key = ""
        self.address = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        page = self.pages.get(request.path)
        if page is None:
            return web.Response(status=404)
        return web.Response(text=page) if isinstance(page, str) else web.json_response(page)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    app = web.Application()
    app.router.add_get("/{page:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.address = f"127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_an_engine_tells_everything(engine: Engine, http: aiohttp.ClientSession) -> None:
    source = {
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "hwm": 100000,
    }
    engine.pages |= {
        "/version": {"version": "0.32.0"},
        "/metrics": METRICS,
        "/kv_event_sources": {"0": source},
    }
    assert await ask(directly(http, engine.address)) == EngineFacts(
        models=(ServedModel("m", context_tokens=4096),),
        version="0.32.0",
        has_metrics=True,
        block_size=32,
        kv_tokens=320,
        prefix_caching=False,
        hash_algorithm="sha256_cbor",
        connector="NIXL",
        events=("tcp://*:5557",),
        replay=("tcp://*:5558",),
    )


async def test_what_an_engine_does_not_tell_is_unknown(engine: Engine, http: aiohttp.ClientSession) -> None:
    assert await ask(directly(http, engine.address)) == EngineFacts(
        models=(ServedModel("m", context_tokens=4096),)
    )


@pytest.mark.parametrize(
    ("page", "trouble"),
    [
        pytest.param(None, "/v1/models answers 404", id="no page"),
        pytest.param({"data": []}, "/v1/models names no model", id="no model"),
        pytest.param("[" * 10_000, NO_LIST, id="nested"),
        pytest.param("x" * 2_000_000, "/v1/models: TooLongError more than 1048576 bytes", id="endless"),
    ],
)
async def test_an_engine_that_names_no_model_has_a_trouble(
    engine: Engine, http: aiohttp.ClientSession, page: object, trouble: str
) -> None:
    engine.pages["/v1/models"] = page
    assert (await ask(directly(http, engine.address))).trouble == trouble


async def test_a_key_is_needed_where_an_engine_demands_one(engine: Engine) -> None:
    engine.key = "k"
    async with aiohttp.ClientSession() as http:
        assert (
            await ask(directly(http, engine.address))
        ).trouble == "/v1/models answers 401: it demands a key"
    async with aiohttp.ClientSession(headers={"authorization": "Bearer k"}) as http:
        assert (await ask(directly(http, engine.address))).trouble == ""


def test_a_replay_counts_only_if_every_rank_has_one() -> None:
    sources = b'{"0":{"endpoint":"tcp://*:1","replay_endpoint":"tcp://*:3"},"1":{"endpoint":"tcp://*:2"}}'
    assert read_sources(sources) == (("tcp://*:1", "tcp://*:2"), (), 0)


def test_ranks_are_in_their_order_whatever_the_page_says_first() -> None:
    ranks = ",".join(f'"{n}":{{"endpoint":"tcp://*:{n}"}}' for n in (10, 2, 0))
    assert read_sources(f'{{{ranks},"x":null,"3":{{}},"007":null}}'.encode()) == (
        ("tcp://*:0", "tcp://*:2", "tcp://*:10"),
        (),
        0,
    )


def test_a_server_with_a_part_of_the_ranks_says_which() -> None:
    ranks = ",".join(f'"{n}":{{"endpoint":"tcp://*:{5557 + n}"}}' for n in (5, 4))
    assert read_sources(f"{{{ranks}}}".encode()) == (("tcp://*:5561", "tcp://*:5562"), (), 4)


async def test_engines_are_asked_again_when_they_are_others_or_after_a_while(
    engine: Engine, http: aiohttp.ClientSession
) -> None:
    now = 0.0
    words = EngineWords(lambda: now)

    def at(instance: str) -> list[EndpointSpec]:
        return [EndpointSpec(address=engine.address, instance=instance)]

    async def asks(instance: str) -> bool:
        engine.asked.clear()
        await words.look(at(instance), http)
        return bool(engine.asked)

    assert [await asks("1"), await asks("1"), await asks("2")] == [True, False, True]
    now = 30.0
    assert await asks("2")
    assert words.known[engine.address].models
    await words.look([], http)
    assert not words.known


async def test_an_engine_in_trouble_is_asked_until_it_answers(
    engine: Engine, http: aiohttp.ClientSession
) -> None:
    words, there = EngineWords(lambda: 0.0), [EndpointSpec(address=engine.address)]
    pages, engine.pages = engine.pages, {}
    await words.look(there, http)
    assert words.known[engine.address].trouble
    engine.pages = pages
    await words.look(there, http)
    assert not words.known[engine.address].trouble


async def test_where_events_are_is_kept_while_an_engine_does_not_say_it_again(
    engine: Engine, http: aiohttp.ClientSession
) -> None:
    """It is another engine's word that does not count for a new one at the same address."""
    now = 0.0
    words = EngineWords(lambda: now)
    engine.pages["/kv_event_sources"] = {"0": {"endpoint": "tcp://*:5557"}}

    async def events(instance: str) -> tuple[str, ...] | None:
        await words.look([EndpointSpec(address=engine.address, instance=instance)], http)
        return words.known[engine.address].events

    assert await events("1") == ("tcp://*:5557",)
    del engine.pages["/kv_event_sources"]
    now = 30.0
    assert await events("1") == ("tcp://*:5557",)
    assert await events("2") is None


async def test_an_engine_that_speaks_https_is_named_as_such(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificates.make(tmp_path))
    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        told = await ask(directly(http, f"127.0.0.1:{runner.addresses[0][1]}"))
    finally:
        await runner.cleanup()
    assert "it speaks HTTPS" in told.trouble
    assert "--ssl-keyfile" in told.trouble
