"""`perilune doctor` against HTTP servers that answer as vLLM does, and as it does not."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from perilune_api.findings import EVENTS_PORT, REPLAY_PORT
from perilune_api.pool import SpecError
from perilune_lab.doctor.cli import main

METRICS = """\
vllm:num_requests_running{{engine="0"}} 0.0
vllm:cache_config_info{{block_size="{block}",enable_prefix_caching="{caching}",engine="0",num_gpu_blocks="10",\
prefix_caching_hash_algo="sha256"}} 1.0
"""


class Engine:
    """One server, whose publisher is a socket that greets as ZMQ does."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.block, self.caching, self.version, self.template = 16, "True", "0.32.0", 0
        self.publishes, self.tells_sources = True, True
        self.url = ""
        self.events_port = 0

    async def page(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        at = f"tcp://*:{self.events_port}"
        source = {"publisher": "zmq", "endpoint": at, "replay_endpoint": at}
        pages: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
            "/version": {"version": self.version},
            "/kv_event_sources": {"0": source} if self.publishes else {},
        }
        if request.path == "/metrics":
            return web.Response(text=METRICS.format(block=self.block, caching=self.caching))
        if request.path == "/tokenize":
            asked = await request.json()
            text = json.dumps(asked.get("messages") or asked["prompt"])
            return web.json_response({"tokens": [*text.encode(), self.template]})
        if not self.tells_sources:
            del pages["/kv_event_sources"]
        return web.json_response(pages[request.path]) if request.path in pages else web.Response(status=404)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\xff" + bytes(8) + b"\x7f")
    await writer.drain()
    writer.close()


@asynccontextmanager
async def served(engine: Engine, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve an engine, and yield its URL."""
    app = web.Application()
    app.router.add_route("*", "/{page:.*}", engine.page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    try:
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    """Two of them."""
    made = [Engine(), Engine()]
    async with AsyncExitStack() as stack:
        for engine in made:
            engine.url = await stack.enter_async_context(served(engine))
            publisher = await stack.enter_async_context(await asyncio.start_server(greet, "127.0.0.1", 0))
            engine.events_port = publisher.sockets[0].getsockname()[1]
        yield made


class Doctor:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def ask(self, *args: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, args)
        return status, self._capsys.readouterr().out

    async def report(self, engines: list[Engine]) -> tuple[int, dict[str, Any]]:
        status, text = await self.ask("--json", *(engine.url for engine in engines))
        return status, json.loads(text)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(capsys)


async def test_engines_that_lack_nothing_of_it_are_routed_exactly(
    doctor: Doctor, engines: list[Engine]
) -> None:
    status, report = await doctor.report(engines)
    assert (status, report["exact"]) == (0, True)
    assert [finding["finding"] for finding in report["findings"]] == ["no_transfer"]
    row = report["engines"][0]
    assert (row["version"], row["model"], row["contextTokens"], row["blockSize"]) == ("0.32.0", "m", 4096, 16)
    assert (row["prefixCaching"], row["eventsAnswer"], row["hashAlgorithm"]) == (True, True, "sha256")
    assert {told["api"] for told in row["tokens"]} == {"completions", "chat", "responses", "messages"}
    assert {told["outcome"] for told in row["tokens"]} == {"equal"}


async def test_each_lack_has_its_engine_and_its_cure_worst_first(
    doctor: Doctor, engines: list[Engine]
) -> None:
    good, bad = engines
    bad.caching, bad.publishes, bad.version = "False", False, "0.23.0"
    status, report = await doctor.report([good, bad])
    found = {finding["finding"]: finding for finding in report["findings"]}
    assert [*found] == ["no_prefix_caching", "no_events", "no_transfer"]
    assert (status, report["exact"]) == (1, False)
    assert found["no_events"]["engines"] == [bad.url]
    assert "--enable-prefix-caching" in found["no_prefix_caching"]["cure"]
    assert '"enable_kv_cache_events":true' in found["no_events"]["cure"]


async def test_an_engine_with_other_tokens_or_blocks_than_the_rest_is_found(
    doctor: Doctor, engines: list[Engine]
) -> None:
    good, bad = engines
    bad.template, bad.block = 1, 24
    _, report = await doctor.report([good, good, bad])
    found = {finding["finding"]: finding["engines"] for finding in report["findings"]}
    assert found["tokens"] == found["block_size"] == [bad.url]
    told = report["engines"][2]["tokens"][0]
    assert (told["api"], told["tools"], told["outcome"]) == ("completions", False, "different")
    assert (told["part"], told["ours"], told["theirs"]) == ("tokenizer", 0, 1)


async def test_a_publisher_that_is_not_there_is_told_as_silent(doctor: Doctor, engines: list[Engine]) -> None:
    engines[0].events_port = 1
    _, report = await doctor.report(engines[:1])
    assert [finding["finding"] for finding in report["findings"]][:1] == ["events_silent"]


async def test_an_engine_without_a_page_of_its_events_is_looked_at_where_they_usually_are(
    doctor: Doctor, engines: list[Engine]
) -> None:
    """Older vLLM has no such page."""
    engines[0].tells_sources = False
    _, report = await doctor.report(engines[:1])
    assert [finding["finding"] for finding in report["findings"]][:1] == ["no_events"]
    host = str(IPv4Address("127.64.0.0") + random.randrange(2**22))
    async with AsyncExitStack() as stack:
        for port in (EVENTS_PORT, REPLAY_PORT):
            await stack.enter_async_context(await asyncio.start_server(greet, host, port))
        url = await stack.enter_async_context(served(engines[0], host))
        _, text = await doctor.ask("--json", url)
    row = json.loads(text)["engines"][0]
    assert (row["events"], row["replay"]) == ([f"tcp://{host}:5557"], [f"tcp://{host}:5558"])


async def test_the_table_says_what_to_do(doctor: Doctor, engines: list[Engine]) -> None:
    engines[0].publishes = False
    status, text = await doctor.ask(engines[0].url, "http://127.0.0.1:1")
    assert status == 1
    assert "1. unreachable: http://127.0.0.1:1" in text
    assert f"2. no_events: {engines[0].url}" in text
    assert "cure   start it with --kv-events-config" in text
    assert "Routing works, and is not exact" in text


async def test_nothing_is_said_of_routing_where_no_engine_answers(doctor: Doctor) -> None:
    status, text = await doctor.ask("http://127.0.0.1:1")
    assert status == 1
    assert "Routing" not in text
    assert text.splitlines()[-1] == "No engine answered: nothing can be said of routing."


async def test_engines_are_read_and_nothing_is_generated(doctor: Doctor, engines: list[Engine]) -> None:
    await doctor.report(engines[:1])
    asked = {page for page in engines[0].asked if page.startswith("POST")}
    assert asked == {
        "POST /tokenize",
        "POST /v1/chat/completions/render",
        "POST /v1/messages/count_tokens",
    }


async def test_a_token_is_generated_only_where_that_is_asked_for(
    doctor: Doctor, engines: list[Engine]
) -> None:
    await doctor.ask("--generate", engines[0].url)
    assert engines[0].asked.count("POST /v1/responses") == 6, "with and without tools, and each thinking"
    assert "POST /v1/chat/completions" not in engines[0].asked


async def test_the_endpoints_of_a_pool_document_are_examined(
    doctor: Doctor, engines: list[Engine], tmp_path: Any
) -> None:
    address = engines[0].url.removeprefix("http://")
    events = f"tcp://127.0.0.1:{engines[0].events_port}"
    endpoint = f"{{address: '{address}', events: ['{events}'], replay: ['{events}']}}"
    file = tmp_path / "pool.yaml"
    file.write_text(
        "apiVersion: perilune.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: p}\n"
        f"spec: {{model: {{name: other}}, engine: {{blockSize: 12}}, endpoints: [{endpoint}]}}\n"
    )
    status, text = await doctor.ask("--pool", str(file), "--json")
    report = json.loads(text)
    assert status == 1
    assert [row["engine"] for row in report["engines"]] == [address]
    assert [finding["finding"] for finding in report["findings"]] == [
        "other_model",
        "block_size",
        "no_transfer",
    ]


async def test_events_that_a_pool_document_does_not_name_are_not_followed(
    doctor: Doctor, engines: list[Engine], tmp_path: Path
) -> None:
    """Although the engine publishes them."""
    file = tmp_path / "pool.yaml"
    file.write_text(
        "apiVersion: perilune.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: p}\n"
        f"spec: {{model: {{name: m}}, endpoints: [{{address: '{engines[0].url.removeprefix('http://')}'}}]}}\n"
    )
    status, text = await doctor.ask("--pool", str(file), "--json")
    report = json.loads(text)
    assert (status, report["engines"][0]["events"]) == (1, [])
    worst = report["findings"][0]
    assert worst["finding"] == "no_events"
    assert "give its endpoint in the pool document these addresses" in worst["cure"]


@pytest.mark.parametrize(
    "args",
    [
        pytest.param([], id="nothing"),
        pytest.param(["-n", "ns"], id="a namespace without a pool"),
        pytest.param(["-n", "ns", "p", "q"], id="two pools"),
        pytest.param(["http://a", "--pool", "f"], id="both"),
        pytest.param(["http://127.0.0.1:99999"], id="no port"),
        pytest.param(["qwen"], id="a pool without its namespace"),
        pytest.param(["--pool", "/missing/pool.yaml"], id="no such document"),
        pytest.param(
            ["--ca", "/missing/ca.crt", "--hostname", "e", "https://127.0.0.1:1"], id="no such certificates"
        ),
    ],
)
def test_a_wrong_call_ends_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    assert "perilune doctor: error:" in capsys.readouterr().err


def test_what_is_wrong_with_a_pool_document_names_its_file(tmp_path: Path) -> None:
    document = tmp_path / "pool.yaml"
    document.write_text("spec: {")
    with pytest.raises(SpecError, match=r"pool\.yaml: Not YAML"):
        main(["--pool", str(document)])


def test_a_document_that_selects_pods_is_for_a_pool_in_kubernetes(tmp_path: Path) -> None:
    document = tmp_path / "pool.yaml"
    document.write_text(
        "apiVersion: perilune.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: p}\n"
        "spec: {engine: {selector: {labels: {app: vllm}}}}\n"
    )
    with pytest.raises(SpecError, match=r"pool\.yaml: It lists no engines.* say -n NAMESPACE POOL"):
        main(["--pool", str(document)])
