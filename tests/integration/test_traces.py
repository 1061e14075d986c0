"""Traces through a real Envoy: client, gateway and engine are joined, and a collector gets the span.

The collector is a receiver of OTLP over HTTP that reads the requests with OpenTelemetry's own messages.
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from running_envoy import Envoy

from perilune_api.pool import EndpointSpec, Limits, Metadata, Model, Pool, Routing, Spec, dump
from perilune_lab.envoy import Mode, config

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
READY = r"ext_proc=(\S+) admin=(\S+)"


@dataclass
class Collector:
    """Receives OTLP over HTTP."""

    status: int = 200
    spans: asyncio.Queue[Span] = field(default_factory=asyncio.Queue)
    resources: list[dict[str, str]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    async def receive(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        self.headers.append(request.headers.get("x-key", ""))
        for resource in message.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put_nowait(span)
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(status=self.status, body=answer, content_type="application/x-protobuf")


@dataclass
class Engine:
    """Answers every prompt, and keeps the headers that came with it."""

    headers: list[dict[str, str]] = field(default_factory=list)

    async def complete(self, request: web.Request) -> web.Response:
        await request.read()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response({"choices": []})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0\n")


@dataclass
class Scene:
    url: str
    admin: str
    engine: Engine
    collector: Collector
    http: aiohttp.ClientSession

    async def ask(self, **headers: str) -> dict[str, str]:
        """A request; the headers that the engine got."""
        body = {"model": "m", "prompt": "secret-prompt"}
        async with self.http.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        return self.engine.headers[-1]

    async def counted(self, outcome: str) -> int:
        async with self.http.get(f"{self.admin}/metrics") as answer:
            found = re.search(rf'perilune_spans_total{{outcome="{outcome}"}} (\S+)', await answer.text())
        return int(float(found[1])) if found else -1


def attributes(of) -> dict[str, object]:  # type: ignore[no-untyped-def]  # a span or a resource
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in of.attributes}


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "{}:{}".format(*runner.addresses[0])
    await runner.cleanup()


@asynccontextmanager
async def scene(folder, mode: Mode, *arguments: str, status: int = 200) -> AsyncIterator[Scene]:
    """`arguments` of the gateway; COLLECTOR stands for the collector's URL."""
    engine, collector = Engine(), Collector(status)
    engine_app, collector_app = web.Application(), web.Application()
    engine_app.router.add_post("/v1/completions", engine.complete)
    engine_app.router.add_get("/metrics", engine.metrics)
    collector_app.router.add_post("/v1/traces", collector.receive)
    async with (
        served(engine_app) as address,
        served(collector_app) as receiver,
        aiohttp.ClientSession() as http,
    ):
        routing = Routing(limits=Limits(decision_seconds=30.0))
        spec = Spec(Model("m", tokenize="estimate"), routing=routing, endpoints=(EndpointSpec(address),))
        file = folder / "pool.yaml"
        file.write_bytes(dump(Pool(Metadata("p", "ns"), spec)))
        words = [word.replace("COLLECTOR", f"http://{receiver}") for word in arguments]
        gateway = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perilune_gateway.main", "--pool", str(file), *words),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
            stdout=asyncio.subprocess.PIPE,
            env={"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_HEADERS": "x-key=from-environment"},
        )
        try:
            assert gateway.stdout is not None
            async with asyncio.timeout(30):
                found = re.search(READY, (await gateway.stdout.readline()).decode())
                assert found
                admin = f"http://{found[2]}"
                while (await http.get(f"{admin}/readyz")).status != 200:  # noqa: ASYNC110 - by HTTP
                    await asyncio.sleep(0.02)
            async with Envoy(config([address], [found[1]], mode=mode)) as envoy:
                yield Scene(envoy.url, admin, engine, collector, http)
        finally:
            gateway.terminate()
            async with asyncio.timeout(20):
                assert await gateway.wait() == 0


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.FULL_DUPLEX])
async def test_client_gateway_and_engine_are_joined_in_one_trace(tmp_path, mode: Mode) -> None:
    async with scene(tmp_path, mode, "--traces", "COLLECTOR", "--traces-share", "1") as found:
        session = {"x-session-id": "secret-session", "authorization": "Bearer secret-key"}
        for turn in (1, 2):  # the second one is decided by its headers, in buffered mode
            got = await found.ask(traceparent=SAMPLED, tracestate="vendor=value", **session)
            async with asyncio.timeout(20):
                span = await found.collector.spans.get()
            assert got["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01", turn
            assert got["tracestate"] == "vendor=value"
            assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
            said = attributes(span)
            assert said["perilune.reason"]
            assert said["http.response.status_code"] == 200
            assert [event.name for event in span.events] == ["decided", "answered"]
            times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events)]
            assert times == sorted(times)
            assert b"secret" not in span.SerializeToString()

        got = await found.ask(traceparent=UNSAMPLED)
        assert got["traceparent"] == UNSAMPLED
        got = await found.ask()
        async with asyncio.timeout(20):
            root = await found.collector.spans.get()
        assert root.parent_span_id == b""
        assert got["traceparent"] == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-03"
        assert found.collector.spans.empty()
        assert found.collector.resources[0]["service.name"] == "perilune-gateway"
        assert found.collector.resources[0]["perilune.pool"] == "ns/p"
        assert set(found.collector.headers) == {"from-environment"}


async def test_without_tracing_the_clients_header_passes_untouched(tmp_path) -> None:
    async with scene(tmp_path, Mode.BUFFERED) as found:
        for header in (SAMPLED, UNSAMPLED, "malformed"):
            assert (await found.ask(traceparent=header))["traceparent"] == header
        assert "traceparent" not in await found.ask()
        assert await found.counted("exported") == -1


async def test_a_collector_that_refuses_keeps_no_request_waiting(tmp_path) -> None:
    arguments = ("--traces", "COLLECTOR", "--traces-share", "1")
    async with scene(tmp_path, Mode.BUFFERED, *arguments, status=400) as found:
        await found.ask()
        async with asyncio.timeout(20):
            while await found.counted("failed") < 1:  # noqa: ASYNC110 - by HTTP
                await asyncio.sleep(0.05)
        await found.ask()
        assert await found.counted("exported") == 0


async def test_a_gateway_without_a_collector_serves_and_stops_as_always(tmp_path, unused_address) -> None:
    arguments = ("--traces", f"http://{unused_address}", "--traces-share", "1")
    async with scene(tmp_path, Mode.BUFFERED, *arguments) as found:
        for _ in range(3):
            await found.ask()
        assert await found.counted("exported") == 0
