"""Engines that demand a key: real Envoy, real gateway, simulated engines with vLLM's `--api-key`."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from msgspec import structs
from running_envoy import Envoy

from perilune_api import pool as spec
from perilune_gateway.main import ENGINE_API_KEY
from perilune_lab.processes.envoy import Mode, config
from perilune_lab.processes.stack import EngineOptions, Stack

KEY = "key-of-engines"
OPTIONS = EngineOptions(time_scale=100.0, arguments=("--api-key", KEY))
LIMITS = spec.Limits(decision_seconds=30.0)
CLIENTS = [{}, {"authorization": "Bearer of-a-client"}, {"x-api-key": "of-a-client"}]
WORDS = "one prompt that all clients have in common, word by word, " * 40


@dataclass
class Pool:
    stack: Stack
    http: aiohttp.ClientSession
    url: str

    async def complete(self, prompt: str = WORDS, url: str = "", **headers: str) -> tuple[int, int]:
        """(status, cached tokens)."""
        body = {"model": OPTIONS.model, "prompt": prompt, "max_tokens": 1}
        async with self.http.post(
            (url or self.url) + "/v1/completions", json=body, headers=headers
        ) as answer:
            usage = (await answer.json()).get("usage", {})
            return answer.status, usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)

    async def status(self, path: str, **headers: str) -> int:
        async with self.http.get(self.url + path, headers=headers) as answer:
            return answer.status

    async def decisions(self) -> list[dict[str, Any]]:
        """Return the decisions, the latest first."""
        async with self.http.get(self.stack.admin_url + "/api/decisions?n=100") as answer:
            found: list[dict[str, Any]] = (await answer.json())["decisions"]
            return found


@pytest.fixture(autouse=True)
def _gateways_have_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINE_API_KEY, KEY)


@asynccontextmanager
async def serving(mode: Mode, routing: spec.Routing, **of: Any) -> AsyncIterator[Pool]:
    stack = Stack(engines=1, options=OPTIONS, routing=routing, with_envoy=False, **of)
    async with (
        stack,
        aiohttp.ClientSession() as http,
        Envoy(config(stack.endpoints, [stack.ext_proc], mode=mode)) as envoy,
    ):
        yield Pool(stack, http, envoy.url)


@pytest.mark.parametrize("mode", [Mode.BUFFERED, pytest.param(Mode.FULL_DUPLEX, marks=pytest.mark.heavy)])
async def test_clients_do_not_need_the_key(mode: Mode) -> None:
    """Whether the decision takes the body, or the headers of a known session suffice."""
    async with serving(mode, spec.Routing(limits=LIMITS)) as pool:
        for i, client in enumerate(CLIENTS):
            for turn in (1, 2, 3):
                status, _ = await pool.complete(WORDS * turn, **client, **{"x-session-id": f"s{i}"})
                assert status == 200
            assert await pool.status("/v1/models", **client) == 200
        assert {decision["phase"] for decision in await pool.decisions()} == {"body", "headers"}
        engine = f"http://{pool.stack.endpoints[0]}"
        for client in CLIENTS:
            assert (await pool.complete(url=engine, **client))[0] == 401
        assert (await pool.complete(url=engine, authorization=f"Bearer {KEY}"))[0] == 200


@pytest.mark.parametrize("mode", [pytest.param(Mode.BUFFERED, marks=pytest.mark.heavy), Mode.FULL_DUPLEX])
async def test_clients_are_told_apart_by_their_own_credentials(mode: Mode) -> None:
    async with serving(mode, spec.Routing(cache_salt="tenant", limits=LIMITS)) as pool:
        for client in CLIENTS[:2]:
            assert await pool.complete(**client) == (200, 0)
            status, cached = await pool.complete(**client)
            assert status == 200
            assert cached > 0


async def test_without_a_gateway_only_clients_with_the_key_are_served() -> None:
    async with serving(Mode.BUFFERED, spec.Routing(limits=LIMITS), vital=frozenset()) as pool:
        assert (await pool.complete())[0] == 200
        gateway = pool.stack.children["gateway"]
        gateway.signal(signal.SIGKILL)
        await gateway.ended
        assert (await pool.complete(authorization="Bearer of-a-client"))[0] == 401
        assert (await pool.complete(authorization=f"Bearer {KEY}"))[0] == 200


async def test_a_gateway_of_several_pools_sends_the_key_to_all_engines() -> None:
    other = Stack(
        engines=1,
        options=replace(OPTIONS, model="sim-other"),
        routing=spec.Routing(limits=LIMITS),
        with_gateway=False,
    )
    async with other:
        named = structs.replace(other.pool, metadata=spec.Metadata("other"))
        other.pool_file.write_bytes(spec.dump(named))
        more = ("--pool", str(other.pool_file))
        routing = spec.Routing(limits=LIMITS)
        stack = Stack(engines=1, options=OPTIONS, routing=routing, with_envoy=False, gateway_arguments=more)
        async with (
            stack,
            aiohttp.ClientSession() as http,
            Envoy(config([*stack.endpoints, *other.endpoints], [stack.ext_proc])) as envoy,
        ):
            for model in (OPTIONS.model, "sim-other"):
                body = {"model": model, "prompt": "words", "max_tokens": 1}
                async with http.post(envoy.url + "/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
