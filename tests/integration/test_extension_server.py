"""Envoy as Envoy Gateway configures it with our extension server: a route to a standard InferencePool, whose
picker is swapped under load for another one and back.

The pickers are two of our gateways, one without TLS and one with a certificate that nobody verifies; the
engines are simulated.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import certificates
import envoy_gateway_calls as calls
import grpc
import grpc.aio
import ports
import pytest
import pytest_asyncio
from envoy_gateway_calls import EnvoyGateway, inference_pool
from waiting import HANG, until, until_true

from perilune_api import extproc_pb2 as pb
from perilune_api import pool as spec
from perilune_api.names import DESTINATION_SERVED, EXT_PROC_SERVICE
from perilune_lab.processes import envoy, envoy_process
from perilune_lab.processes.child import start
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_operator.extension_server.main import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = EngineOptions(time_scale=50.0, kv_tokens=100_000)
ONE_ADDRESS = spec.Routing(fallbacks=0, limits=spec.Limits(decision_seconds=30.0))
"""Envoy reads one address in a picker's answer, here."""
DECISION = "x-perilune-decision"


@dataclass
class Rig:
    stack: Stack
    http: aiohttp.ClientSession
    gateway: EnvoyGateway
    folder: Path
    port: int
    tls_picker: str
    """Addresses of the second picker: ext_proc and admin."""
    tls_admin: str
    envoy_admin: str = ""
    """Empty until Envoy runs."""

    async def configure(self, picker: str, *, tls: bool) -> None:
        """Let the InferencePool name this picker."""
        annotations = {} if tls else {"perilune.dev/picker-protocol": "h2c"}
        _, _, port = picker.rpartition(":")
        made = await self.gateway.translated(inference_pool(port=int(port), annotations=annotations))
        for cluster in made.clusters:
            for found in cluster.load_assignment.endpoints:
                if cluster.name.startswith("perilune-picker/"):  # no DNS here
                    found.lb_endpoints[0].endpoint.address.socket_address.address = "127.0.0.1"
        calls.write_clusters(made, self.folder)
        if self.envoy_admin:
            host = "tls" if tls else "h2c"
            await until_true(lambda: self._has(f"perilune-picker/default/qwen-epp/{port}/{host}"))
        calls.write_routes(made, self.folder, self.port)

    async def _has(self, cluster: str) -> bool:
        """Return whether Envoy has a cluster."""
        async with self.http.get(f"{self.envoy_admin}/clusters") as answer:
            return f"{cluster}::" in await answer.text()

    async def complete(self, prompt: str, **headers: str) -> tuple[int, str, str]:
        """Return status, the engine that was decided for, and the body."""
        body = {"model": OPTIONS.model, "prompt": prompt, "max_tokens": 8}
        url, named = f"http://127.0.0.1:{self.port}/v1/completions", {"host": "llm.test", DECISION: "1"}
        async with self.http.post(url, json=body, headers={**named, **headers}) as answer:
            return answer.status, answer.headers.get(DECISION, "").partition(";")[0], await answer.text()

    async def decisions(self, admin: str) -> int:
        async with self.http.get(f"{admin}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return int(
            sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith("perilune_decisions_total")
            )
        )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("extension")
    server = Server()
    port = await server.start("127.0.0.1:0")
    stack = Stack(engines=3, options=OPTIONS, routing=ONE_ADDRESS, with_envoy=False)
    async with (
        stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        aiohttp.ClientSession() as http,
    ):
        cert, key = certificates.make(folder)
        second = await start(
            "second",
            [
                *stack.programs.gateway,
                *("--pool", str(stack.pool_file), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
                *("--tls-cert", str(cert), "--tls-key", str(key)),
            ],
            os.environ,
            folder,
        )
        facts = await second.until_ready(HANG)
        made = Rig(
            stack,
            http,
            EnvoyGateway(channel),
            folder,
            ports.free_port(),
            facts["ext_proc"],
            f"http://{facts['admin']}",
        )
        await made.configure(stack.ext_proc, tls=False)
        bootstrap = folder / "bootstrap.pb"
        bootstrap.write_bytes(calls.dynamic(folder))
        command = [
            *(str(envoy.binary()), "--config-path", str(bootstrap), "--use-dynamic-base-id"),
            *("--admin-address-path", str(folder / "envoy-admin"), "--concurrency", "1"),
            *("--log-level", "warning"),
        ]
        proxy = await start("envoy", command, os.environ, folder)
        try:
            made.envoy_admin, _ = await envoy_process.serving(proxy, folder, HANG)
            await until_true(lambda: answers(made))
            yield made
        finally:
            await proxy.stop(5.0)
            await second.stop(5.0)
    await server.stop(0.0)


async def answers(rig: Rig) -> bool:
    status, _, _ = await rig.complete("first")
    return status == 200


async def test_each_request_goes_where_the_picker_says(rig: Rig) -> None:
    found = [await rig.complete(f"new {i}", **{"x-session-id": f"s-{i}"}) for i in range(24)]
    assert {status for status, _, _ in found} == {200}
    assert {decided for _, decided, _ in found} == set(rig.stack.endpoints)
    long = "word " * 400
    turns = [await rig.complete(long, **{"x-session-id": "stays"}) for _ in range(3)]
    assert len({decided for _, decided, _ in turns}) == 1


async def test_a_client_cannot_name_its_engine(rig: Rig) -> None:
    """Not even the gateway's own admin page."""
    target = rig.stack.admin_url.removeprefix("http://")
    status, decided, _ = await rig.complete("mine", **{"x-gateway-destination-endpoint": target})
    assert status == 200
    assert decided in rig.stack.endpoints


@asynccontextmanager
async def overheard(ext_proc: str) -> AsyncIterator[tuple[str, list[pb.ProcessingRequest]]]:
    """Yield the address of a server that passes everything on to this picker, and what Envoy tells it."""
    told: list[pb.ProcessingRequest] = []

    async def process(asked: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async def passed_on() -> AsyncIterator[bytes]:
            async for message in asked:
                told.append(pb.ProcessingRequest.FromString(message))
                yield message

        method: Any = channel.stream_stream(f"/{EXT_PROC_SERVICE}/Process")
        async for answer in method(passed_on()):
            yield answer

    handlers = {"Process": grpc.stream_stream_rpc_method_handler(process)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    async with grpc.aio.insecure_channel(ext_proc) as channel:
        await server.start()
        try:
            yield f"127.0.0.1:{port}", told
        finally:
            await server.stop(1.0)


async def test_a_picker_is_told_which_endpoint_has_served_and_no_client_is(rig: Rig) -> None:
    """In the metadata where the extension's protocol has it."""
    async with overheard(rig.stack.ext_proc) as (picker, told):
        await rig.configure(picker, tls=False)
        body = {"model": OPTIONS.model, "prompt": "who has served", "max_tokens": 8}
        url, headers = f"http://127.0.0.1:{rig.port}/v1/completions", {"host": "llm.test", DECISION: "1"}

        async def served() -> bool:
            async with rig.http.post(url, json=body, headers=headers) as answer:
                if answer.status != 200:  # Envoy does not know the picker yet
                    return False
                assert DESTINATION_SERVED not in answer.headers
                decided = answer.headers[DECISION].partition(";")[0]
            of_responses = [each for each in told if each.HasField("response_headers")]
            if not of_responses:  # Envoy has asked the picker of before
                return False
            lb = of_responses[-1].metadata_context.filter_metadata["envoy.lb"].fields
            assert lb[DESTINATION_SERVED].string_value == decided
            return True

        try:
            await until_true(served)
        finally:
            await rig.configure(rig.stack.ext_proc, tls=False)
            await until_true(lambda: asks_another(rig, told))


async def asks_another(rig: Rig, told: list[pb.ProcessingRequest]) -> bool:
    """Return whether a request no longer comes to the picker that is overheard."""
    before = len(told)
    return await answers(rig) and len(told) == before


async def test_the_picker_is_swapped_under_load_and_back(rig: Rig) -> None:
    statuses: Counter[int] = Counter()
    stopped = asyncio.Event()

    async def client(name: int) -> None:
        turn = 0
        while not stopped.is_set():
            turn += 1
            status, _, _ = await rig.complete(f"{name} {turn} " * 50, **{"x-session-id": f"load-{name}"})
            statuses[status] += 1

    clients = [asyncio.create_task(client(i)) for i in range(4)]
    try:
        await until(lambda: statuses[200] >= 20)
        await rig.configure(rig.tls_picker, tls=True)
        await until_true(lambda: asked(rig, rig.tls_admin, 20))
        await rig.configure(rig.stack.ext_proc, tls=False)
        before = await rig.decisions(rig.stack.admin_url)
        await until_true(lambda: asked(rig, rig.stack.admin_url, before + 20))
    finally:
        stopped.set()
        await asyncio.gather(*clients)
    assert set(statuses) == {200}


async def asked(rig: Rig, admin: str, decisions: int) -> bool:
    await asyncio.sleep(0.05)
    return await rig.decisions(admin) >= decisions


async def test_while_no_picker_answers_requests_fail_and_no_header_of_a_client_counts(rig: Rig) -> None:
    """A header that names an engine, or anything else that listens, is not obeyed."""
    nobody = f"127.0.0.1:{ports.free_port()}"
    await rig.configure(nobody, tls=False)
    target = rig.stack.endpoints[0]

    async def refused() -> bool:
        status, _, _ = await rig.complete("lost", **{"x-gateway-destination-endpoint": target})
        return status == 503

    try:
        await until_true(refused)
    finally:
        await rig.configure(rig.stack.ext_proc, tls=False)
        await until_true(lambda: answers(rig))
