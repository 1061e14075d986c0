"""New sessions wait while active ones fill the KV: gateway, real Envoy, a simulated engine together."""

import asyncio
import os
import re
import signal

import aiohttp

from perilune_api import names
from perilune_api import pool as spec
from perilune_lab.stack import EngineOptions, Stack

OPTIONS = EngineOptions(kv_tokens=4_000)


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
        headers = {"x-session-id": session, names.FINAL_TURN_HEADERS[0]: "true"}
        url = f"{self._stack.url}/v1/completions"
        async with self._http.post(url, json=body, headers=headers) as answer:
            fields = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, fields, await answer.text()

    async def metric(self, name: str) -> float:
        async with self._http.get(f"{self._stack.admin_url}/metrics") as page:
            (value,) = re.findall(rf"^{name} (\S+)$", await page.text(), re.MULTILINE)
            return float(value)

    async def until(self, name: str, value: float) -> None:
        async with asyncio.timeout(10.0):
            while await self.metric(name) < value:  # noqa: ASYNC110  # another process tells no event
                await asyncio.sleep(0.02)


async def test_a_new_session_waits_for_one_that_fills_the_kv_and_a_client_that_leaves_holds_up_none() -> None:
    async with stack_of(60.0) as stack, aiohttp.ClientSession() as http:
        client = Client(stack, http)
        first = asyncio.create_task(client.ask("first", 280, 400))
        await client.until("perilune_active_context_tokens", 1_000)
        gone = asyncio.create_task(client.ask("gone", 180, 1))
        await client.until("perilune_new_sessions_waiting", 1)
        waits = asyncio.create_task(client.ask("waits", 180, 1))
        await client.until("perilune_new_sessions_waiting", 2)
        assert not first.done()
        gone.cancel()
        assert (await first)[0] == (await waits)[0] == 200
        await client.until("perilune_new_session_queued_seconds_count", 1)
        assert await client.metric("perilune_new_sessions_begun_total") == 2


async def test_a_new_session_that_waited_too_long_gets_429_and_when_to_come_back() -> None:
    async with stack_of(0.5) as stack, aiohttp.ClientSession() as http:
        client = Client(stack, http)
        first = asyncio.create_task(client.ask("first", 280, 400))
        await client.until("perilune_active_context_tokens", 1_000)
        status, headers, text = await client.ask("late", 180, 1)
        assert status == 429
        assert "no_room" in text
        assert 1 <= int(headers["retry-after"]) <= 60
        assert (await first)[0] == 200


async def test_a_gateway_that_stops_lets_all_that_wait_begin() -> None:
    async with stack_of(60.0) as stack, aiohttp.ClientSession() as http:
        client = Client(stack, http)
        first = asyncio.create_task(client.ask("first", 280, 400))
        await client.until("perilune_active_context_tokens", 1_000)
        waits = asyncio.create_task(client.ask("waits", 180, 1))
        await client.until("perilune_new_sessions_waiting", 1)
        stack.vital = frozenset({"envoy"})
        os.kill(stack.children["gateway"].pid, signal.SIGTERM)
        assert (await waits)[0] == (await first)[0] == 200
