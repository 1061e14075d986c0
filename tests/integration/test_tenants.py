"""Tenants on one pool: real Envoy, real gateway, simulated engines, salts derived from tenants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from running_envoy import Envoy
from waiting import HANG

from perilune_api import pool as spec
from perilune_lab.processes.envoy import Mode, config
from perilune_lab.processes.stack import EngineOptions, Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = EngineOptions(time_scale=100.0)
ROUTING = spec.Routing(cache_salt="tenant", limits=spec.Limits(decision_seconds=30.0))
TEXT = "one system prompt that all tenants have in common, word by word, " * 40


@dataclass
class Pool:
    stack: Stack
    http: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"model": OPTIONS.model, **body}
        async with self.http.post(self.url + path, json=body, headers=named) as answer:
            assert answer.status == 200, await answer.text()
            said: dict[str, Any] = await answer.json()
            return said

    async def decision(self) -> dict[str, Any]:
        """Return the latest decision, with its ending."""
        async with asyncio.timeout(HANG):
            while True:
                async with self.http.get(self.stack.admin_url + "/api/decisions?n=1") as answer:
                    (newest,) = (await answer.json())["decisions"]
                if newest.get("ending"):
                    found: dict[str, Any] = newest
                    return found
                await asyncio.sleep(0.02)

    async def knows(self, blocks: int) -> None:
        """Wait until the gateway has heard of so many blocks."""
        async with asyncio.timeout(HANG):
            while True:
                async with self.http.get(self.stack.admin_url + "/api/nodes/stats") as answer:
                    nodes = (await answer.json())["nodes"]
                if sum(node["index"]["device"] for node in nodes) >= blocks:
                    return
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[Mode.BUFFERED, Mode.FULL_DUPLEX])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    stack = Stack(engines=1, options=OPTIONS, routing=ROUTING, with_envoy=False)
    async with (
        stack,
        aiohttp.ClientSession() as http,
        Envoy(config(stack.endpoints, [stack.ext_proc], mode=request.param)) as envoy,
    ):
        yield Pool(stack, http, envoy.url)


@dataclass(frozen=True)
class Api:
    """An API: its path, a body of TEXT, and where its answer has the number of cached tokens."""

    path: str
    body: dict[str, Any]
    cached: Callable[[dict[str, Any]], int]


MESSAGES = [{"role": "user", "content": TEXT}]
APIS = [
    Api(
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 1},
        lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
    ),
    Api(
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 1},
        lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
    ),
    Api(
        "/v1/responses",
        {"input": TEXT, "max_output_tokens": 1},
        lambda usage: usage["input_tokens_details"]["cached_tokens"],
    ),
    Api(
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 1},
        lambda usage: usage["cache_read_input_tokens"],
    ),
]


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_within_a_tenant_prompts_are_cached_and_across_tenants_never(pool: Pool, api: Api) -> None:
    async def cached(tenant: str, **more: str) -> int:
        said = await pool.post(api.path, {**api.body, **more}, x_api_key=f"{api.path} {tenant}")
        return api.cached(said["usage"])

    assert await cached("ann") == 0
    shared = await cached("ann")
    assert shared > 0
    for other in ("bob", "cid"):
        assert await cached(other) == 0
        assert await cached(other) == shared
    assert await cached("ann", cache_salt="mine") == 0
    assert await cached("bob", cache_salt="mine") == 0, "a salt of a client is its tenant's own"
    assert await cached("ann", cache_salt="mine") == shared


async def test_later_turns_of_a_known_session_are_salted_too(pool: Pool) -> None:
    """Their headers would suffice to route them."""
    words = " ".join(f"turn{i}" for i in range(200))
    seen = []
    for tenant in ("dee", "eve"):
        for times in (1, 2, 3):
            body = {"prompt": words * times, "max_tokens": 1}
            said = await pool.post("/v1/completions", body, authorization=tenant, x_session_id="s")
            seen.append(said["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert seen[:3] == seen[3:]
    assert seen[0] == 0 < seen[1] < seen[2]


async def test_the_gateway_knows_what_the_engine_has_under_the_salt(pool: Pool) -> None:
    """Its index hashes with the same salt: it predicts what the engine then counts."""
    body = {"prompt": " ".join(f"index{i}" for i in range(300)), "max_tokens": 1}
    first = await pool.post("/v1/completions", body, authorization="fay")
    await pool.knows(first["usage"]["prompt_tokens"] // OPTIONS.block_size)
    second = await pool.post("/v1/completions", body, authorization="fay")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert (await pool.decision())["cached_tokens"] == cached
    await pool.post("/v1/completions", body, authorization="gus")
    assert (await pool.decision())["cached_tokens"] == 0
