"""One event loop for the folder, one Envoy per configuration; see perilune_lab.doubles for the stand-ins."""

import asyncio
import itertools
import json
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from perilune_api.pool import Limits
from perilune_gateway.model import Tokens
from perilune_gateway.openai import ParsedRequest
from perilune_gateway.server import Server
from perilune_lab import doubles
from perilune_lab.doubles import ScriptedRouter, StubEndpoint, StubProcessor
from perilune_lab.envoy import Envoy, Mode, config


class SlowTokenizer:
    """Never answers."""

    async def encode(self, request: ParsedRequest) -> Tokens:
        await asyncio.Event().wait()
        raise AssertionError


class Rig:
    """Three endpoints, a gateway with a scripted router, and Envoys in front, started when asked for."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.endpoints = [StubEndpoint(name) for name in "abc"]
        self.router = ScriptedRouter()
        self.server = self.new_server(self.router, decision_seconds=0.2)
        self.processor = StubProcessor({})
        self.gateway = ""
        self.http: aiohttp.ClientSession
        self._stack = stack
        self._folder = folder
        self._envoys: dict[str, Envoy] = {}
        self._logs: dict[Envoy, Path] = {}
        self._ids = itertools.count()

    @staticmethod
    def new_server(router: ScriptedRouter, decision_seconds: float) -> Server:
        limits = Limits(max_body_bytes=16 * 1024 * 1024, decision_seconds=decision_seconds)
        return Server(router, SlowTokenizer(), limits=limits, conformance=True)

    async def start(self) -> None:
        for endpoint in self.endpoints:
            await self._stack.enter_async_context(endpoint)
        self.gateway = f"127.0.0.1:{await self.server.start('127.0.0.1:0')}"
        self._stack.push_async_callback(self.server.stop, 0)
        await self._stack.enter_async_context(self.processor)
        connector = aiohttp.TCPConnector(limit=0)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    @property
    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self.endpoints]

    def new_id(self) -> str:
        return f"test-{next(self._ids)}"

    async def envoy(self, processor: str, **options: Any) -> Envoy:
        """`options` of envoy.config."""
        key = repr((processor, sorted(options.items(), key=lambda item: item[0])))
        if key not in self._envoys:
            log = self._folder / f"access-{len(self._envoys)}.json"
            endpoints = options.pop("endpoints", self.addresses)
            bootstrap = config(endpoints, [processor], access_log=log, **options)
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def rig(tmp_path_factory: pytest.TempPathFactory):
    async with AsyncExitStack() as stack:
        rig = Rig(stack, tmp_path_factory.mktemp("envoy"))
        await rig.start()
        yield rig
    assert rig.router.tickets == {}, "tickets that were never given back"
    assert all(len(outcomes) == 1 for test_id, outcomes in rig.router.outcomes.items() if test_id)
    assert rig.server.failures == 0


@pytest.fixture
def unused_address():
    """Nobody listens there: connections are refused at once."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
