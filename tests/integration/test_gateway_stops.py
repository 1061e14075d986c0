"""A gateway that is killed and comes back, or is stopped and hands over to another, while it serves."""

import asyncio
import io
import signal
from typing import Self

import aiohttp
import forked
import list_of_one
import pytest
from waiting import HANG, until

from perilune_gateway.extproc import Transport, new_server
from perilune_gateway.extproc.h2 import limits
from perilune_gateway.extproc.h2 import server as h2_server
from perilune_gateway.extproc.service import Closed
from perilune_lab.processes import envoy_process
from perilune_lab.processes.envoy import Mode

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLIENTS = 8


class Gateway:
    """The server as a process of its own, which can be killed."""

    def __init__(self, transport: Transport, drains: bool = False) -> None:
        self._transport = transport
        self._drains = drains
        """It goes on serving after `begin_stop`, though it says that it is not ready."""
        self._process: forked.Popen | None = None

    async def __aenter__(self) -> Self:
        return self

    async def serve(self, port: int) -> int:
        how = "drains" if self._drains else "goes"
        self._process = forked.Popen("scripted_gateway", [self._transport, how, str(port)])
        return int(await asyncio.to_thread(self._process.stdout.readline))

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    def begin_stop(self) -> None:
        self._process.terminate()

    async def stopped(self) -> int:
        if self._drains:
            self._process.send_signal(signal.SIGUSR1)
        return await asyncio.to_thread(self._process.wait)

    async def __aexit__(self, *error: object) -> None:
        if self._process:
            await self.kill()
            self._process.communicate()


async def ask(rig, envoy, body: bytes = b"x" * 1_400) -> int:
    """Status of a request that is decided when its body is there."""
    headers = rig.headers("", phase="body")
    async with rig.http.post(f"{envoy.url}/v1/x", data=io.BytesIO(body), headers=headers) as reply:
        await reply.read()
        return reply.status


async def test_no_request_fails_while_idle_connections_are_closed(rig, monkeypatch):
    """Requests come about when the h2 server drains a connection for being idle; none is retried."""
    monkeypatch.setattr(limits, "IDLE_S", 0.05)
    monkeypatch.setattr(h2_server, "CHECK_S", 0.005)
    service = list_of_one.service(rig.router)
    server = new_server(Transport.H2, service)
    port = await server.start("127.0.0.1:0")
    try:
        envoy = await rig.envoy(f"127.0.0.1:{port}", fail_open=False, grpc_retries=0)
        for pause_ms in range(40, 80):
            assert await ask(rig, envoy) == 200
            await asyncio.sleep(pause_ms / 1000)
    finally:
        await server.stop(0)
    assert service.connections_closed[Closed.IDLE] > 5
    assert sum(service.connections_closed.values()) == service.connections_closed[Closed.IDLE]


@pytest.mark.parametrize(
    ("rig", "mode", "grpc_retries"),
    [
        # The default's 8 retries take a second; so many, as long as a busy machine's gateway does.
        pytest.param(Transport.H2, Mode.BUFFERED, 100, id="h2, buffered"),
        pytest.param(Transport.H2, Mode.BUFFERED, 8, id="h2, buffered, 8 retries", marks=pytest.mark.heavy),
        pytest.param(Transport.H2, Mode.FULL_DUPLEX, 8, id="h2, full_duplex", marks=pytest.mark.heavy),
        pytest.param(
            Transport.H2, Mode.BUFFERED, 0, id="h2, buffered, without retries", marks=pytest.mark.heavy
        ),
        pytest.param(Transport.GRPC, Mode.FULL_DUPLEX, 8, id="grpc, full_duplex", marks=pytest.mark.heavy),
    ],
    indirect=["rig"],
)
async def test_gateway_killed_under_load_and_back_after_300_ms(rig, mode, grpc_retries):
    """With retries nothing that begins after the kill fails; a stream that was half answered is not retried,
    so each client may lose the request that it had running."""
    statuses, stopping = [], asyncio.Event()

    async def client(envoy) -> None:
        while not stopping.is_set():
            try:
                statuses.append(await ask(rig, envoy))
            except aiohttp.ClientPayloadError:  # an answer that was on its way
                statuses.append(0)

    async with Gateway(rig.transport) as first, Gateway(rig.transport) as second:
        port = await first.serve(0)
        options = {"fail_open": False, "grpc_retries": grpc_retries}
        envoy = await rig.envoy(f"127.0.0.1:{port}", mode=mode, **options)
        clients = [asyncio.create_task(client(envoy)) for _ in range(CLIENTS)]
        await until(lambda: len(statuses) > 50)
        await first.kill()
        await asyncio.sleep(0.3)  # the gap that Envoy has to bridge
        assert await second.serve(port) == port
        came_back = len(statuses)
        await until(lambda: len(statuses) > came_back + 50)
        stopping.set()
        await asyncio.gather(*clients)
    failed = sum(status != 200 for status in statuses)
    if grpc_retries:
        assert failed <= CLIENTS
    else:
        assert failed > CLIENTS


async def until_ready(rig, envoy, gateways: int) -> None:
    """Wait until Envoy holds so many for ready."""
    name = "cluster.processors.membership_healthy"
    async with asyncio.timeout(HANG):
        while True:
            if await envoy_process.counter(rig.http, envoy.admin_url, name) == gateways:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("rig", "mode", "size", "check_s"),
    [
        pytest.param(
            Transport.H2, Mode.BUFFERED, 130_000, 0.0, id="h2, buffered, 130 KB", marks=pytest.mark.heavy
        ),
        pytest.param(
            Transport.H2, Mode.FULL_DUPLEX, 1_400, 0.0, id="h2, full_duplex", marks=pytest.mark.heavy
        ),
        # Envoy keeps 64 KiB of a body for another try, so it has to know in time.
        pytest.param(Transport.H2, Mode.FULL_DUPLEX, 130_000, 0.1, id="h2, full_duplex, 130 KB, checked"),
        pytest.param(
            Transport.GRPC,
            Mode.FULL_DUPLEX,
            130_000,
            0.1,
            id="grpc, full_duplex, 130 KB, checked",
            marks=pytest.mark.heavy,
        ),
    ],
    indirect=["rig"],
)
async def test_gateway_that_is_stopped_under_load_fails_no_request(rig, mode, size, check_s):
    """Two gateways; first one is stopped, then, when it is back, the other."""
    statuses, stopping = [], asyncio.Event()
    body, drains = bytes(size), check_s > 0

    async def client(envoy) -> None:
        while not stopping.is_set():
            statuses.append(await ask(rig, envoy, body))

    async with (
        Gateway(rig.transport, drains) as first,
        Gateway(rig.transport, drains) as again,
        Gateway(rig.transport, drains) as other,
    ):
        ports = [await first.serve(0), await other.serve(0)]
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        checks = {"health_check_s": check_s, "health_check_timeout_s": HANG}
        envoy = await rig.envoy(addresses, mode=mode, fail_open=False, **checks)
        clients = [asyncio.create_task(client(envoy)) for _ in range(CLIENTS)]
        for stopped in (first, other):
            seen = len(statuses)
            await until(lambda seen=seen: len(statuses) > seen + 80)
            stopped.begin_stop()
            if drains:
                await until_ready(rig, envoy, 1)
            assert await stopped.stopped() == 0
            if stopped is first:
                await again.serve(ports[0])
                await until_ready(rig, envoy, 2)
        seen = len(statuses)
        await until(lambda seen=seen: len(statuses) > seen + 80)
        stopping.set()
        await asyncio.gather(*clients)
    assert [s for s in statuses if s != 200] == []
