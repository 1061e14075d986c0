"""Traces through a real Envoy to a real OpenTelemetry collector: client, gateway and engine are joined.

The collector (`make collector`) writes what it got into a file, as OTLP's JSON.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, server_attributes
from running_envoy import Envoy
from waiting import HANG, until

from perilune_api.pool import EndpointSpec, Limits, Metadata, Model, Pool, Routing, Spec, dump
from perilune_lab.processes import child
from perilune_lab.processes.envoy import Mode, config
from testbed import programs

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
CLIENT, ERROR = 3, 2
"""OTLP's numbers of a kind of span and of a status."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = {
    COMPLETIONS: {"prompt": "secret-prompt"},
    CHAT: {"messages": [{"role": "user", "content": "secret-prompt"}]},
}
CONVENTIONAL = {
    value
    for module in (gen_ai_attributes, error_attributes, http_attributes, server_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
} - {"gen_ai.system", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"}
"""Attributes that OpenTelemetry's semantic conventions know, without those that they have replaced."""


@dataclass
class Collector:
    """A running collector of OpenTelemetry."""

    url: str
    file: Path

    def batches(self) -> list[dict[str, Any]]:
        """Spans of one resource each, as they came."""
        whole = self.file.read_text().split("\n")[:-1]
        return [batch for line in whole for batch in json.loads(line)["resourceSpans"]]

    def spans(self) -> list[dict[str, Any]]:
        return [span for batch in self.batches() for scope in batch["scopeSpans"] for span in scope["spans"]]

    async def new_spans(self, known: int, wanted: int = 1) -> list[dict[str, Any]]:
        """Those after the first `known`, when there are `wanted`."""
        await until(lambda: len(self.spans()) >= known + wanted)
        return self.spans()[known:]


@dataclass
class Refusing:
    """Takes no span, and keeps the header of each attempt."""

    keys: list[str] = field(default_factory=list)

    async def receive(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("x-key", ""))
        return web.Response(status=400)


@dataclass
class Engine:
    """Answers every prompt, and keeps the headers that came with it."""

    headers: list[dict[str, str]] = field(default_factory=list)

    async def complete(self, request: web.Request) -> web.Response:
        await request.read()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        usage = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
        return web.json_response({"choices": [], "usage": usage})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0\n")


@dataclass
class Scene:
    url: str
    admin: str
    engine: Engine
    http: aiohttp.ClientSession

    async def ask(
        self, model: str = "m", status: int = 200, path: str = COMPLETIONS, **headers: str
    ) -> dict[str, str]:
        """Send a request, and return the headers that the engine got with the latest one."""
        body = {"model": model, **PROMPTS[path]}
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == status, await answer.text()
        return self.engine.headers[-1]

    async def counted(self, outcome: str) -> int:
        async with self.http.get(f"{self.admin}/metrics") as answer:
            found = re.search(rf'perilune_spans_total{{outcome="{outcome}"}} (\S+)', await answer.text())
        return int(float(found[1])) if found else -1


def attributes(of: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span or a resource, by name. OTLP's JSON writes integers as strings."""
    said = {}
    for attribute in of["attributes"]:
        ((kind, value),) = attribute["value"].items()
        said[attribute["key"]] = int(value) if kind == "intValue" else value
    return said


@asynccontextmanager
async def collecting(folder: Path) -> AsyncIterator[Collector]:
    """Skip the test where no collector has been built."""
    program = programs.path("otel-collector")
    if programs.missing(("otel-collector",)):
        pytest.skip("no OpenTelemetry collector: `make collector` builds one (Go)")
    file, settings = folder / "spans.jsonl", folder / "collector.json"
    pipeline = {"receivers": ["otlp"], "exporters": ["file"]}
    settings.write_text(
        json.dumps(
            {
                "receivers": {"otlp": {"protocols": {"http": {"endpoint": "127.0.0.1:0"}}}},
                "exporters": {"file": {"path": str(file), "flush_interval": "20ms"}},
                "service": {"pipelines": {"traces": pipeline}},
            }
        )
    )
    running = await child.start("collector", (str(program), "--config", str(settings)), os.environ, folder)
    try:
        await until(lambda: "Everything is ready" in running.log.read_text() or not running.alive)
        address = re.search(r'"Starting HTTP server".*"endpoint":"([^"]+)"', running.log.read_text())
        assert address, running.tail()
        yield Collector(f"http://{address[1]}", file)
    finally:
        await running.stop(5)


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scene(folder: Path, mode: Mode, *arguments: str) -> AsyncIterator[Scene]:
    """`arguments` of the gateway."""
    engine, app = Engine(), web.Application()
    for path in PROMPTS:
        app.router.add_post(path, engine.complete)
    app.router.add_get("/metrics", engine.metrics)
    async with served(app) as address, aiohttp.ClientSession() as http:
        routing = Routing(limits=Limits(decision_seconds=30.0))
        spec = Spec(
            Model(name="m", tokenize="estimate"), routing=routing, endpoints=(EndpointSpec(address=address),)
        )
        file = folder / "pool.yaml"
        file.write_bytes(dump(Pool(Metadata("p", "ns"), spec)))
        command = (sys.executable, "-P", "-m", "perilune_gateway.main", "--pool", str(file), *arguments)
        env = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_HEADERS": "x-key=from-environment"}
        listening = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
        gateway = await child.start("gateway", (*command, *listening), env, folder)
        try:
            ready = await gateway.until_ready(HANG)
            admin = f"http://{ready['admin']}"
            async with asyncio.timeout(HANG):
                while (await http.get(f"{admin}/readyz")).status != 200:  # noqa: ASYNC110 - by HTTP
                    await asyncio.sleep(0.02)
            async with Envoy(config([address], [ready["ext_proc"]], mode=mode)) as envoy:
                yield Scene(envoy.url, admin, engine, http)
        finally:
            await gateway.stop(HANG)
            assert await gateway.ended == 0


def sampled_by(got: dict[str, str]) -> tuple[str, str]:
    """Trace and span that the engine was told to join."""
    _, trace, span, flags = got["traceparent"].split("-")
    assert int(flags, 16) & 1
    return trace, span


@pytest.mark.parametrize("mode", [Mode.BUFFERED, pytest.param(Mode.FULL_DUPLEX, marks=pytest.mark.heavy)])
async def test_client_gateway_and_engine_are_joined_in_one_trace(tmp_path, mode: Mode) -> None:
    async with (
        collecting(tmp_path) as collector,
        scene(tmp_path, mode, "--traces", collector.url, "--traces-share", "1") as found,
    ):
        session = {"x-session-id": "secret-session", "authorization": "Bearer secret-key"}
        for turn, phase, reason in ((1, "body", "cold"), (2, "headers", "host")):
            got = await found.ask(traceparent=SAMPLED, tracestate="vendor=value", **session)
            (span,) = await collector.new_spans(known=turn - 1)
            assert got["traceparent"] == f"00-{TRACE}-{span['spanId']}-01", turn
            assert got["tracestate"] == "vendor=value"
            assert (span["traceId"], span["parentSpanId"]) == (TRACE, SPAN)
            said = attributes(span)
            assert said["perilune.phase"] == phase
            assert said["perilune.reason"] == reason
            assert said["perilune.endpoint"]
            assert said["perilune.candidates"] == 1
            assert said["perilune.step.total_seconds"] > 0
            assert said["http.response.status_code"] == 200
            assert [event["name"] for event in span["events"]] == ["decided", "answered"]
            times = [int(span["startTimeUnixNano"]), *(int(e["timeUnixNano"]) for e in span["events"])]
            times.append(int(span["endTimeUnixNano"]))
            assert times == sorted(times)

        got = await found.ask(traceparent=UNSAMPLED)
        assert got["traceparent"] == UNSAMPLED
        got = await found.ask()
        (root,) = await collector.new_spans(known=2)
        assert root.get("parentSpanId", "") == ""
        assert got["traceparent"] == f"00-{root['traceId']}-{root['spanId']}-03"
        resource = attributes(collector.batches()[0]["resource"])
        assert resource["service.name"] == "perilune-gateway"
        assert resource["perilune.pool"] == "ns/p"
        assert "secret" not in collector.file.read_text()


@pytest.mark.parametrize(("path", "operation"), [(COMPLETIONS, "text_completion"), (CHAT, "chat")])
async def test_a_span_is_what_the_conventions_for_genai_want(tmp_path, path: str, operation: str) -> None:
    async with (
        collecting(tmp_path) as collector,
        scene(tmp_path, Mode.FULL_DUPLEX, "--traces", collector.url, "--traces-share", "1") as found,
    ):
        await found.ask(path=path)
        (answered,) = await collector.new_spans(known=0)
        await found.ask(model="unknown", status=404, path=path)
        (refused,) = await collector.new_spans(known=1)
        assert "secret" not in collector.file.read_text()
    for span, name in ((answered, f"{operation} m"), (refused, operation)):
        said = attributes(span)
        assert (span["name"], span["kind"]) == (name, CLIENT)
        assert said["gen_ai.operation.name"] == operation
        assert said["gen_ai.provider.name"] == "vllm"
        assert {name for name in said if not name.startswith("perilune.")} <= CONVENTIONAL
    said = attributes(answered)
    assert said["gen_ai.request.model"] == "m"
    assert (said["gen_ai.usage.cache_read.input_tokens"], said["gen_ai.usage.output_tokens"]) == (4, 7)
    assert f"{said['server.address']}:{said['server.port']}" == said["perilune.served"]
    assert "error.type" not in said
    assert answered["status"].get("code", 0) == 0
    assert (attributes(refused)["error.type"], refused["status"]["code"]) == ("unknown_model", ERROR)


async def test_each_sampled_request_has_one_span_at_the_collector_and_no_other_has(tmp_path) -> None:
    parents = [f"{number:016x}" for number in range(1, 41)]
    async with collecting(tmp_path) as collector:
        arguments = ("--traces", collector.url, "--traces-share", "0")
        async with scene(tmp_path, Mode.BUFFERED, *arguments) as found:
            asked = [found.ask(traceparent=f"00-{TRACE}-{p}-0{n % 2}") for n, p in enumerate(parents)]
            await asyncio.gather(*asked, *(found.ask() for _ in range(10)))
            told = {sampled_by(got) for got in found.engine.headers if got.get("traceparent", "")[-1:] == "1"}
            await collector.new_spans(known=0, wanted=20)
        # The gateway has stopped, so nothing more comes.
        spans = collector.spans()
        assert sorted(span["parentSpanId"] for span in spans) == parents[1::2]
        assert {(span["traceId"], span["spanId"]) for span in spans} == told
        assert len(told) == 20


async def test_without_tracing_the_clients_header_passes_untouched(tmp_path) -> None:
    async with scene(tmp_path, Mode.BUFFERED) as found:
        for header in (SAMPLED, UNSAMPLED, "malformed"):
            assert (await found.ask(traceparent=header))["traceparent"] == header
        assert "traceparent" not in await found.ask()
        assert await found.counted("exported") == -1


async def test_a_collector_that_refuses_keeps_no_request_waiting(tmp_path) -> None:
    collector, app = Refusing(), web.Application()
    app.router.add_post("/v1/traces", collector.receive)
    async with served(app) as address:
        arguments = ("--traces", f"http://{address}", "--traces-share", "1")
        async with scene(tmp_path, Mode.BUFFERED, *arguments) as found:
            await found.ask()
            async with asyncio.timeout(HANG):
                while await found.counted("failed") < 1:  # noqa: ASYNC110 - by HTTP
                    await asyncio.sleep(0.05)
            await found.ask()
            assert await found.counted("exported") == 0
    assert set(collector.keys) == {"from-environment"}


async def test_a_gateway_without_a_collector_serves_and_stops_as_always(tmp_path, unused_address) -> None:
    arguments = ("--traces", f"http://{unused_address}", "--traces-share", "1")
    async with scene(tmp_path, Mode.BUFFERED, *arguments) as found:
        for _ in range(3):
            await found.ask()
        assert await found.counted("exported") == 0
