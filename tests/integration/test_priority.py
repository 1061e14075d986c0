"""Shortest-uncached-first by the engine's priority: gateway, real Envoy, simulated engines together.

The engine begins with nothing (`POST /fault`) until every request waits there, and its own log says in which
order they ended. Priorities are arrival times plus work, so what sets two requests apart is more work than
any machine needs to send them. A step of the engine is shorter than any prompt, so no two prompts end in one
step.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from waiting import HANG

from perilune_api import pool as spec
from perilune_lab.processes.stack import EngineOptions, Stack


@dataclass
class Queue:
    """Requests to one engine that has not begun with any of them."""

    stack: Stack
    http: aiohttp.ClientSession
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def add(self, name: str, words: int, *, tenant: str = "") -> None:
        """Add a request, and wait until the engine has it."""
        prompt = " ".join(f"{name}and{i}" for i in range(words))
        self.tasks.append(asyncio.create_task(self._ask(name, prompt, tenant)))
        async with asyncio.timeout(HANG):
            while await self._hanging() < len(self.tasks):  # noqa: ASYNC110 - the page has no event
                await asyncio.sleep(0.02)

    async def served(self) -> list[str]:
        """Let the engine begin, and return the names in the order in which they ended."""
        await self.fault()
        await asyncio.gather(*self.tasks)
        log = (self.stack.folder / "engine-0.requests.jsonl").read_text()
        return [json.loads(line)["request_id"] for line in log.splitlines()]

    async def fault(self, **fault: object) -> None:
        url = f"http://{self.stack.endpoints[0]}/fault"
        async with self.http.post(url, json=fault) as answer:
            assert answer.status == 200

    async def _ask(self, name: str, prompt: str, tenant: str) -> None:
        body = {"model": self.stack.options.model, "prompt": prompt, "max_tokens": 1}
        headers = {"x-request-id": name} | ({"authorization": tenant} if tenant else {})
        async with self.http.post(f"{self.stack.url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()

    async def _hanging(self) -> int:
        async with self.http.get(f"http://{self.stack.endpoints[0]}/fault") as answer:
            return int((await answer.json())["hanging"])


@asynccontextmanager
async def queue(
    scheduling: str, priority: spec.EnginePriority, *, time_scale: float, step_tokens: int
) -> AsyncIterator[Queue]:
    arguments = ("--scheduling", scheduling, "--tokens-per-step", str(step_tokens))
    options = EngineOptions(time_scale=time_scale, arguments=arguments, request_log=True)
    routing = spec.Routing(engine_priority=priority, limits=spec.Limits(decision_seconds=30.0))
    async with Stack(engines=1, options=options, routing=routing) as stack, aiohttp.ClientSession() as http:
        made = Queue(stack, http)
        await made.fault(hang=True)
        yield made


async def test_a_short_prompt_waits_for_no_long_one() -> None:
    priority = spec.EnginePriority(ageing_weight=100.0)
    async with queue("priority", priority, time_scale=4.0, step_tokens=32) as waiting:
        for name, words in (("first", 2_000), ("long", 2_000), ("short", 50)):
            await waiting.add(name, words)
        ended = await waiting.served()
    assert ended.index("short") < ended.index("long"), ended


@pytest.mark.heavy
async def test_a_short_prompt_waits_where_engines_serve_first_come_first() -> None:
    """The engine reads a prompt before it queues it, which takes 1 ms more of its time for the long one. A
    longer one, or an engine whose time passes more slowly, would let the short one be queued first."""
    async with queue("fcfs", spec.EnginePriority(0.0), time_scale=16.0, step_tokens=32) as waiting:
        for name, words in (("first", 2_000), ("long", 150), ("short", 50)):
            await waiting.add(name, words)
        ended = await waiting.served()
    assert ended.index("long") < ended.index("short"), ended


@pytest.mark.parametrize(
    "fair_share",
    [
        pytest.param(True, id="fair"),
        pytest.param(False, id="first come, first served", marks=pytest.mark.heavy),
    ],
)
async def test_a_tenant_with_a_long_queue_keeps_no_other_waiting(fair_share: bool) -> None:
    """With fair shares the other tenant's request overtakes most of the queue."""
    scheduling = "priority" if fair_share else "fcfs"
    priority = spec.EnginePriority(fair_share=fair_share)
    async with queue(scheduling, priority, time_scale=1.5, step_tokens=250) as waiting:
        for number in range(8):
            await waiting.add(f"many{number}", 1_000, tenant="many")
        await waiting.add("few", 1_000, tenant="few")
        ended = await waiting.served()
    assert ("few" in ended[:-3]) is fair_share, ended
