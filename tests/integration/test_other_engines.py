"""Engines that speak OpenAI's API and nothing more: no /metrics, no /tokenize, no KV events."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from running_envoy import Envoy
from waiting import HANG

from perilune_api import pool as spec
from perilune_lab.processes.child import start
from perilune_lab.processes.envoy import config
from perilune_lab.processes.stack import Programs

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "any-model"
PROMPT = "a long story that goes on and on. " * 200


async def engine(stack: AsyncExitStack) -> str:
    """Start one; return its address, by which it also answers."""
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        choice = {"index": 0, "message": {"role": "assistant", "content": address}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
        return web.json_response({"model": body["model"], "choices": [choice], "usage": usage})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    app.add_routes([web.post("/v1/chat/completions", answer), web.get("/v1/models", models)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    return address


class User:
    def __init__(self, url: str, admin: str, http: aiohttp.ClientSession) -> None:
        self._url, self._admin, self._http = url, admin, http

    async def chat(self, text: str, session: str) -> tuple[int, str, str]:
        """Return status, the engine that answered, and the decision."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
        headers = {"x-session-id": session, "x-perilune-decision": "1"}
        async with self._http.post(
            f"{self._url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            said = await response.json()
            served = said["choices"][0]["message"]["content"]
            return response.status, served, response.headers.get("x-perilune-decision", "")

    async def page(self, path: str) -> Any:
        async with self._http.get(f"{self._admin}{path}") as response:
            return await response.json()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def user(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[User]:
    folder: Path = tmp_path_factory.mktemp("other-engines")
    async with AsyncExitStack() as stack:
        engines = [await engine(stack) for _ in range(2)]
        document = spec.Pool(
            spec.Metadata("other"),
            spec.Spec(
                spec.Model(name=MODEL),
                routing=spec.Routing(decision_header="address"),
                endpoints=tuple(spec.EndpointSpec(address=address) for address in engines),
            ),
        )
        (folder / "pool.yaml").write_bytes(spec.dump(document))
        command = [
            *Programs().gateway,
            *("--pool", str(folder / "pool.yaml"), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
        ]
        gateway = await start("gateway", command, os.environ, folder)
        stack.push_async_callback(gateway.stop, 5.0)
        facts = await gateway.until_ready(HANG)
        envoy = await stack.enter_async_context(Envoy(config(engines, [facts["ext_proc"]])))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield User(envoy.url, f"http://{facts['admin']}", http)


async def test_a_session_stays_and_what_was_sent_counts_as_cached(user: User) -> None:
    first = await user.chat(PROMPT, "a")
    second = await user.chat(PROMPT + "And then?", "a")
    assert (first[0], second[0]) == (200, 200)
    assert first[1] == second[1]
    assert [decision.split("; ")[1] for _, _, decision in (first, second)] == ["cold", "host"]
    (newest, *_) = (await user.page("/api/decisions"))["decisions"]
    assert newest["cached_tokens"] > newest["prompt_tokens"] / 2


async def test_new_sessions_go_to_all_engines(user: User) -> None:
    served = {(await user.chat(f"new {i}", f"new-{i}"))[1] for i in range(12)}
    assert len(served) == 2
