"""An engine whose answers fail, hang or are far too slow, while its /metrics is fine, is left alone; it comes
back when it is well. A real Envoy, our gateway, simulated engines that are made bad by POST /fault."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from itertools import count
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from perilune_api import pool as spec
from perilune_lab.processes.stack import EngineOptions, Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTING = spec.Routing(limits=spec.Limits(decision_seconds=30.0))
PROMPT = "one two three four five six seven " * 120
SLOW = EngineOptions(arguments=("--slowdown", "1.8"))
"""A prompt takes 0.4 s alone, so that ten times as long is more than the least patience."""
PAUSE_S = ROUTING.ejection.pause_seconds
AT_ONCE = 16
HANGS_S = 2.5
"""A request that runs for longer counts as one that hangs, and another takes its place."""
BOUND = 600
"""Requests after which a state that was waited for counts as never reached."""
NOTICED_S, BACK_S = 3.0, 10.0
"""Seconds until a bad engine is left alone, and until one that is well again gets requests."""
BUSY = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
TRIALS = 2
"""The most trials from then on to the end of four pauses, as the next pause is twice as long."""
FAULTS = [
    pytest.param({"status": 507}, "failures", id="answers 507"),
    pytest.param({"hang": True}, "late", id="hangs", marks=pytest.mark.heavy),
    pytest.param({"slowdown": 10.0}, "late", id="ten times slower", marks=pytest.mark.heavy),
]


class Clients:
    """Clients that each begin one new session after the other."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.http = http
        self.numbers = count()
        self.asking: dict[asyncio.Task[tuple[str, int]], float] = {}
        """Requests that run → when they began."""

    async def ask(self, session: str = "") -> tuple[str, int]:
        """(endpoint that was chosen, status)."""
        name = session or f"session-{next(self.numbers)}"
        body = {"model": "sim-30b", "prompt": f"{name} {PROMPT}", "max_tokens": 2}
        headers = {"x-perilune-decision": "1", "x-session-id": name}
        async with self.http.post(self.stack.url + "/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
            return answer.headers["x-perilune-decision"].partition(";")[0], answer.status

    async def some(self, requests: int) -> list[tuple[str, int]]:
        """Return the next answers, while AT_ONCE requests run; one that hangs does not hold up others."""
        answers: list[tuple[str, int]] = []
        while len(answers) < requests:
            now = time.monotonic()
            fresh = sum(now - began < HANGS_S for began in self.asking.values())
            self.asking |= {asyncio.create_task(self.ask()): now for _ in range(AT_ONCE - fresh)}
            done, _ = await asyncio.wait(self.asking, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
            answers += [task.result() for task in done]
            self.asking = {task: began for task, began in self.asking.items() if task not in done}
        return answers

    async def ejected(self) -> dict[str, str]:
        """Address → message of every ejected endpoint."""
        async with self.http.get(self.stack.admin_url + "/api/health") as answer:
            problems = (await answer.json())["problems"]
        return {p["endpoint"]: p["message"] for p in problems if p["kind"] == "ejected"}

    async def until_ejected(self, *addresses: str) -> None:
        for _ in range(0, BOUND, AT_ONCE):
            if set(await self.ejected()) == set(addresses):
                return
            await self.some(AT_ONCE)
        raise AssertionError(f"ejected: {await self.ejected()}, expected: {addresses}")

    async def until_idle(self, address: str) -> None:
        """Wait until the engine has answered all that it was asked, the requests that hang aside."""
        while True:
            async with self.http.get(f"http://{address}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            if not sum(float(line.split()[-1]) for line in lines if line.startswith(BUSY)):
                return
            await asyncio.sleep(0.1)

    @asynccontextmanager
    async def fault(self, address: str, fault: dict[str, Any]) -> AsyncIterator[None]:
        await self._put(address, fault)
        try:
            yield
        finally:
            await self._put(address, {})

    async def _put(self, address: str, fault: dict[str, Any]) -> None:
        async with self.http.post(f"http://{address}/fault", json=fault) as answer:
            assert answer.status == 200


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def clients() -> AsyncIterator[Clients]:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        Stack(engines=4, options=SLOW, routing=ROUTING) as stack,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        made = Clients(stack, http)
        await made.some(80)  # so that the pool's usual time is known
        yield made
        await asyncio.gather(*made.asking)


@pytest.mark.parametrize(("fault", "cause"), FAULTS)
async def test_a_bad_engine_is_left_alone_until_it_is_well(
    clients: Clients, fault: dict[str, Any], cause: str
) -> None:
    bad = clients.stack.endpoints[0]
    async with clients.fault(bad, fault):
        await clients.until_ejected(bad)
        before, began = len(await decisions(clients, bad)), time.monotonic()
        await clients.some(100)
        trials = len(await decisions(clients, bad)) - before
        assert trials <= 1 + (time.monotonic() - began) / PAUSE_S, "one after each pause"
        assert cause in await excluded(clients, bad)
    await clients.until_ejected()
    assert bad in {endpoint for endpoint, _ in await clients.some(40)}


@pytest.mark.heavy
@pytest.mark.parametrize(("fault", "cause"), FAULTS)
async def test_three_seconds_after_it_went_bad_only_trials_reach_it_and_it_is_back_within_ten(
    clients: Clients, fault: dict[str, Any], cause: str
) -> None:
    bad = clients.stack.endpoints[1]
    async with clients.fault(bad, fault):
        noticed = time.time() + NOTICED_S
        while time.time() < noticed + 4 * PAUSE_S:
            await clients.some(1)
        there, of = await reached(clients, bad, noticed)
        assert cause in await excluded(clients, bad)
    await clients.until_idle(bad)  # a step that has begun takes as long as it would have
    well = time.time()
    while not (await reached(clients, bad, well))[0] or await clients.ejected():
        assert time.time() < well + BACK_S
        await clients.some(1)
    back_s = time.time() - well
    print(f"{there} of {of} requests reached it after {NOTICED_S:.0f} s; it was back after {back_s:.1f} s")
    assert there <= max(0.01 * of, TRIALS)
    assert back_s <= BACK_S


async def test_a_session_leaves_after_three_failures_even_without_an_ejection(clients: Clients) -> None:
    bad, status = await clients.ask("unlucky")
    assert status == 200
    async with clients.fault(bad, {"status": 507}):
        statuses = [(await clients.ask("unlucky"))[1] for _ in range(5)]
    assert statuses == [507, 507, 507, 200, 200]


async def test_what_an_engine_that_has_lost_its_core_has_not_begun_to_answer_goes_to_another(
    clients: Clients,
) -> None:
    """vLLM's HTTP server outlives the core for some moments, and answers 500."""
    bad = clients.stack.endpoints[1]
    async with clients.fault(bad, {"status": 500}):
        answers = await clients.some(60)
        assert bad in {endpoint for endpoint, _ in answers}, "some were sent there"
        assert {status for _, status in answers} == {200}
    await clients.until_ejected()


async def decisions(clients: Clients, address: str) -> list[dict[str, Any]]:
    async with clients.http.get(clients.stack.admin_url + "/api/decisions?n=1000") as answer:
        return [d for d in (await answer.json())["decisions"] if d["target"] == address]


async def reached(clients: Clients, address: str, since: float) -> tuple[int, int]:
    """(decisions for the endpoint, all decisions) since a Unix time."""
    async with clients.http.get(clients.stack.admin_url + "/api/decisions?n=1000") as answer:
        found = (await answer.json())["decisions"]
    targets = [d["target"] for d in found if datetime.fromisoformat(d["time"]).timestamp() >= since]
    return targets.count(address), len(targets)


async def excluded(clients: Clients, address: str) -> set[str]:
    """Return the checks by which recent decisions left the endpoint out."""
    async with clients.http.get(clients.stack.admin_url + "/api/decisions?n=20") as answer:
        ids = [d["request_id"] for d in (await answer.json())["decisions"]]
    found = set()
    for request_id in ids:
        async with clients.http.get(clients.stack.admin_url + f"/api/decisions/{request_id}") as answer:
            found.add((await answer.json())["excluded"].get(address, ""))
    return found


async def test_a_prompt_that_breaks_engines_breaks_two_at_most() -> None:
    async with (
        Stack(engines=3, options=EngineOptions(), routing=spec.Routing()) as stack,
        aiohttp.ClientSession() as http,
    ):
        clients = Clients(stack, http)

        async def ask(prompt: str) -> tuple[int, str]:
            body = {"model": "sim-30b", "prompt": prompt, "max_tokens": 2}
            async with http.post(stack.url + "/v1/completions", json=body) as answer:
                await answer.read()
                return answer.status, answer.headers.get("x-perilune-refused", "")

        async with AsyncExitStack() as faults:
            for address in stack.endpoints:
                await faults.enter_async_context(clients.fault(address, {"reset": True}))
            assert await ask("a poisoned prompt") == (503, "")
            assert await ask("a poisoned prompt") == (400, "resets_engines")
        assert await ask("a poisoned prompt") == (400, "resets_engines")
        assert await ask("another prompt") == (200, "")
