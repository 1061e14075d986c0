"""New sessions wait while active ones fill the KV: gateway, real Envoy, a simulated engine together."""

import asyncio
import os
import re
import signal

import aiohttp
import pytest
from running_envoy import Envoy
from waiting import HANG, until_true

from perilune_api import names
from perilune_api import pool as spec
from perilune_lab.processes.child import start
from perilune_lab.processes.envoy import config
from perilune_lab.processes.stack import EngineOptions, Stack

OPTIONS = EngineOptions(kv_tokens=4_000, time_scale=4.0)


def stack_of(max_wait_s: float) -> Stack:
    rules = spec.SessionAdmission(enabled=True, max_wait_seconds=max_wait_s)
    return Stack(engines=1, options=OPTIONS, routing=spec.Routing(session_admission=rules))


class Client:
    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self._stack, self._http = stack, http

    async def ask(self, session: str, words: int, answer_tokens: int) -> tuple[int, dict[str, str], str]:
        """Its only turn; status, headers and body of the answer."""
        prompt = " ".join(f"{session}{i}" for i in range(words))
        body = {"model": OPTIONS.model, "prompt": prompt, "max_tokens": answer_tokens}
        headers = {
            "x-session-id": session,
            names.FINAL_TURN_HEADERS[0]: "true",
            names.DECISION_HEADER: "1",
        }
        url = f"{self._stack.url}/v1/completions"
        async with self._http.post(url, json=body, headers=headers) as answer:
            fields = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, fields, await answer.text()

    async def engine_waits(self, waits: bool) -> None:
        """Whether the engine begins with nothing, so that it ends nothing before a test has come so far."""
        url = f"http://{self._stack.endpoints[0]}/fault"
        async with self._http.post(url, json={"hang": True} if waits else {}) as answer:
            assert answer.status == 200

    async def metric(self, name: str) -> float:
        async with self._http.get(f"{self._stack.admin_url}/metrics") as page:
            (value,) = re.findall(rf"^{name} (\S+)$", await page.text(), re.MULTILINE)
            return float(value)

    async def until(self, name: str, value: float) -> None:
        async def reached() -> bool:
            return await self.metric(name) >= value

        await until_true(reached)


async def test_a_new_session_waits_for_one_that_fills_the_kv_and_a_client_that_leaves_holds_up_none() -> None:
    async with stack_of(60.0) as stack, aiohttp.ClientSession() as http:
        client = Client(stack, http)
        await client.engine_waits(True)
        first = asyncio.create_task(client.ask("first", 280, 400))
        await client.until("perilune_active_context_tokens", 1_000)
        gone = asyncio.create_task(client.ask("gone", 180, 1))
        await client.until("perilune_new_sessions_waiting", 1)
        waits = asyncio.create_task(client.ask("waits", 180, 1))
        await client.until("perilune_new_sessions_waiting", 2)
        assert not first.done()
        gone.cancel()
        await client.engine_waits(False)
        assert (await first)[0] == (await waits)[0] == 200
        await client.until("perilune_new_session_queued_seconds_count", 1)
        assert await client.metric("perilune_new_sessions_begun_total") == 2


async def test_a_new_session_that_waited_too_long_gets_429_and_when_to_come_back() -> None:
    async with stack_of(0.5) as stack, aiohttp.ClientSession() as http:
        client = Client(stack, http)
        await client.engine_waits(True)
        first = asyncio.create_task(client.ask("first", 280, 400))
        await client.until("perilune_active_context_tokens", 1_000)
        status, headers, text = await client.ask("late", 180, 1)
        assert status == 429
        assert "no_room" in text
        assert 1 <= int(headers["retry-after"]) <= 60
        await client.engine_waits(False)
        assert (await first)[0] == 200


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_gateway_that_stops_or_dies_lets_all_that_wait_begin(how: signal.Signals) -> None:
    async with stack_of(60.0) as stack, aiohttp.ClientSession() as http:
        client = Client(stack, http)
        await client.engine_waits(True)
        first = asyncio.create_task(client.ask("first", 280, 400))
        await client.until("perilune_active_context_tokens", 1_000)
        waits = asyncio.create_task(client.ask("waits", 180, 1))
        await client.until("perilune_new_sessions_waiting", 1)
        stack.vital = frozenset({"envoy"})
        os.kill(stack.children["gateway"].pid, how)
        await client.engine_waits(False)
        assert (await waits)[0] == (await first)[0] == 200


async def test_a_frozen_gateway_holds_up_its_requests_until_envoy_knows_then_they_pass_without_it() -> None:
    """Whether they would have waited or not. When the gateway goes on, none of them waits there any more."""
    async with stack_of(HANG) as stack, aiohttp.ClientSession() as http:
        client = Client(stack, http)
        gateway = stack.children["gateway"].pid
        await client.engine_waits(True)
        first = asyncio.create_task(client.ask("first", 280, 400))
        await client.until("perilune_active_context_tokens", 1_000)
        waits = asyncio.create_task(client.ask("waits", 180, 1))
        await client.until("perilune_new_sessions_waiting", 1)
        os.kill(gateway, signal.SIGSTOP)
        try:
            await client.engine_waits(False)
            async with asyncio.timeout(stack.routing.message_timeout_s):
                begins = await client.ask("begins", 20, 1)
                assert (begins[0], (await waits)[0]) == (200, 200)
            assert names.DECISION_HEADER not in begins[1], "the gateway has answered"
        finally:
            os.kill(gateway, signal.SIGCONT)
        assert (await first)[0] == 200
        async with asyncio.timeout(HANG):
            while await client.metric("perilune_new_sessions_waiting"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        async def is_asked_again() -> bool:
            status, headers, _ = await client.ask("later", 20, 1)
            assert status == 200
            return names.DECISION_HEADER in headers

        await until_true(is_asked_again)


async def test_a_frozen_gateway_costs_504_where_the_pool_does_not_fail_open() -> None:
    """Its requests are not given to another gateway, which serves its own all the while."""
    async with stack_of(1.0) as stack, aiohttp.ClientSession() as http:
        arguments = ("--pool", str(stack.pool_file), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
        other = await start("other", [*stack.programs.gateway, *arguments], {}, stack.folder)
        stack.children["other"] = other
        processors = [stack.ext_proc, (await other.until_ready(HANG))["ext_proc"]]
        timeout_s = stack.routing.message_timeout_s
        closed = config(stack.endpoints, processors, message_timeout_s=timeout_s, fail_open=False)
        async with Envoy(closed) as envoy:
            stack.url = envoy.url
            client = Client(stack, http)
            os.kill(other.pid, signal.SIGSTOP)
            try:
                asked = await asyncio.gather(*(client.ask(f"s{n}", 20, 1) for n in range(16)))
            finally:
                os.kill(other.pid, signal.SIGCONT)
            assert {status for status, _, _ in asked} == {200, 504}
