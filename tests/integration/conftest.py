"""One event loop for the folder, one Envoy per configuration; the stand-ins around it are in `envoy_doubles`.

Tests of the exchange take `rig` and run over the default transport. Tests of what differs between transports
take `each_rig` and run over both. Tests of Envoy alone take `stub_rig`.
"""

import asyncio
import itertools
import json
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import envoy_doubles as doubles
import forked
import list_of_one
import pytest
import pytest_asyncio
from envoy_doubles import ScriptedRouter, StubEndpoint, StubProcessor
from running_envoy import Envoy

from perilune_api.pool import Limits
from perilune_gateway.extproc import Server, Transport, new_server
from perilune_gateway.extproc.service import Service
from perilune_gateway.model import Tokens
from perilune_gateway.request.parsed import ParsedRequest
from perilune_lab.processes import child
from perilune_lab.processes.envoy import Mode, config

PATIENT_S = 60.0
"""Envoy's message timeout where no test says another."""


class SlowTokenizer:
    """Never answers."""

    async def encode(self, request: ParsedRequest) -> Tokens:
        await asyncio.Event().wait()
        raise AssertionError


class Rig:
    """Three endpoints, a gateway with a scripted router, and Envoys in front, started when asked for."""

    def __init__(
        self,
        stack: AsyncExitStack,
        folder: Path,
        transport: Transport,
        endpoints: list[StubEndpoint],
        processor: StubProcessor,
        http: aiohttp.ClientSession,
    ) -> None:
        self.transport = transport
        self.endpoints = endpoints
        self.processor = processor
        self.http = http
        self.router = ScriptedRouter()
        self.service, self.server = self.new_server(self.router, decision_seconds=0.2)
        self.gateway = ""
        self._stack = stack
        self._folder = folder
        self._envoys: dict[str, Envoy] = {}
        self._logs: dict[Envoy, Path] = {}
        self._ids = itertools.count()

    def new_server(self, router: ScriptedRouter, decision_seconds: float) -> tuple[Service, Server]:
        limits = Limits(max_body_bytes=16 * 1024 * 1024, decision_seconds=decision_seconds)
        service = list_of_one.service(router, SlowTokenizer(), limits=limits, conformance=True)
        return service, new_server(self.transport, service)

    async def start(self) -> None:
        self.gateway = f"127.0.0.1:{await self.server.start('127.0.0.1:0')}"
        self._stack.push_async_callback(self.server.stop, 0)

    @property
    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self.endpoints]

    def new_id(self) -> str:
        return f"{self.transport}-{next(self._ids)}"

    async def envoy(self, processor: str, **options: Any) -> Envoy:
        """`processor`: addresses, comma-separated. `options` of envoy.config. A test about a time that is up
        says which; in all others the gateway may take its time, since the machine may be busy."""
        options = {"message_timeout_s": PATIENT_S, "keepalive_s": 0.0, "health_check_s": 0.0, **options}
        key = repr((processor, sorted(options.items(), key=lambda item: item[0])))
        if key not in self._envoys:
            log = self._folder / f"access-{self.transport}-{len(self._envoys)}.json"
            endpoints = options.pop("endpoints", self.addresses)
            allowed = options.pop("allowed", ())  # these tests use paths of their own
            bootstrap = config(endpoints, processor.split(","), access_log=log, allowed=allowed, **options)
            self._envoys[key] = await self._stack.enter_async_context(Envoy(bootstrap))
            self._logs[self._envoys[key]] = log
        return self._envoys[key]

    async def buffered(self, **options: Any) -> Envoy:
        return await self.envoy(self.gateway, mode=Mode.BUFFERED, **options)

    async def duplex(self, **options: Any) -> Envoy:
        return await self.envoy(self.gateway, mode=Mode.FULL_DUPLEX, **options)

    def headers(self, test_id: str, *, to: str = "", phase: str = "headers", **more: str) -> dict[str, str]:
        """Of a request that ScriptedRouter sends `to`."""
        route = {doubles.ROUTE: to or self.addresses[0], doubles.PHASE: phase}
        return {
            doubles.ID: test_id,
            **route,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }

    def access_log(self, envoy: Envoy, path: str) -> list[dict[str, Any]]:
        lines = self._logs[envoy].read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["path"] == path]


@pytest.fixture(scope="session", autouse=True)
def _forks() -> Iterator[None]:
    """Gateways and engines of all stacks are forks, for most of what a start costs is imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "spawn", forked.spawn)
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def rigs(tmp_path_factory: pytest.TempPathFactory):
    """One rig per transport; they share endpoints, StubProcessor and client."""
    async with AsyncExitStack() as stack:
        folder = tmp_path_factory.mktemp("envoy")
        endpoints = [await stack.enter_async_context(StubEndpoint(name)) for name in "abc"]
        processor = await stack.enter_async_context(StubProcessor({}))
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        rigs = {kind: Rig(stack, folder, kind, endpoints, processor, http) for kind in Transport}
        for rig in rigs.values():
            await rig.start()
        yield rigs
    for rig in rigs.values():
        assert rig.router.tickets == {}, "tickets that were never given back"
        assert all(len(outcomes) == 1 for test_id, outcomes in rig.router.outcomes.items() if test_id)
        assert (rig.service.failures, rig.service.streams_open) == (0, 0)


@pytest.fixture
def rig(rigs: dict[Transport, Rig], request: pytest.FixtureRequest) -> Rig:
    """Return the rig of the default transport, or of the one that a test names (`indirect=["rig"]`)."""
    return rigs[getattr(request, "param", Transport.H2)]


@pytest.fixture(params=list(Transport), ids=str)
def each_rig(rigs: dict[Transport, Rig], request: pytest.FixtureRequest) -> Rig:
    return rigs[request.param]


@pytest.fixture
def stub_rig(rigs: dict[Transport, Rig]) -> Rig:
    return rigs[Transport.H2]


@pytest.fixture
def unused_address():
    """Nobody listens there: connections are refused at once."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
