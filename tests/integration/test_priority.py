"""Shortest-uncached-first by the engine's priority: gateway, real Envoy, simulated engines together."""

import asyncio

import aiohttp
import pytest

from perilune_api import pool as spec
from perilune_lab.stack import EngineOptions, Stack

OPTIONS = EngineOptions(time_scale=4.0)


@pytest.mark.parametrize(
    ("scheduling", "ageing_weight", "order"),
    [
        pytest.param("priority", 3.0, ["first", "short", "long"], id="the short one overtakes"),
        pytest.param("fcfs", 0.0, ["first", "long", "short"], id="first come, first served"),
    ],
)
async def test_a_short_prompt_waits_for_no_long_one(scheduling, ageing_weight, order) -> None:
    options = EngineOptions(time_scale=OPTIONS.time_scale, arguments=("--scheduling", scheduling))
    routing = spec.Routing(
        engine_priority=spec.EnginePriority(ageing_weight), limits=spec.Limits(decision_seconds=30.0)
    )
    ended: list[str] = []
    async with Stack(engines=1, options=options, routing=routing) as stack, aiohttp.ClientSession() as http:

        async def ask(name: str, words: int) -> None:
            prompt = " ".join(f"{name}{i}" for i in range(words))
            body = {"model": options.model, "prompt": prompt, "max_tokens": 1}
            async with http.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
            ended.append(name)

        async def pending(requests: int) -> None:
            async with asyncio.timeout(30.0):
                while True:
                    async with http.get(f"{stack.admin_url}/api/nodes/stats") as answer:
                        (node,) = (await answer.json())["nodes"]
                    if node["load"]["in_flight"] >= requests:
                        return
                    await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            for i, (name, words) in enumerate((("first", 2_000), ("long", 2_000), ("short", 50)), 1):
                tasks.create_task(ask(name, words))
                await pending(i)
    assert ended == order


@pytest.mark.parametrize("fair_share", [True, False], ids=["fair", "first come, first served"])
async def test_a_tenant_with_a_long_queue_keeps_no_other_waiting(fair_share: bool) -> None:
    """With fair shares the other tenant's request overtakes most of the queue."""
    scheduling = ("--scheduling", "priority" if fair_share else "fcfs")
    options = EngineOptions(time_scale=OPTIONS.time_scale, arguments=scheduling)
    routing = spec.Routing(
        engine_priority=spec.EnginePriority(fair_share=fair_share), limits=spec.Limits(decision_seconds=30.0)
    )
    ended: list[str] = []
    async with Stack(engines=1, options=options, routing=routing) as stack, aiohttp.ClientSession() as http:

        async def ask(tenant: str, number: int) -> None:
            prompt = " ".join(f"{tenant}{number}and{i}" for i in range(1_000))
            body = {"model": options.model, "prompt": prompt, "max_tokens": 1}
            headers = {"authorization": tenant}
            async with http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
            ended.append(tenant)

        async def in_flight(requests: int) -> None:
            async with asyncio.timeout(30.0):
                while True:
                    async with http.get(f"{stack.admin_url}/api/nodes/stats") as answer:
                        (node,) = (await answer.json())["nodes"]
                    if node["load"]["in_flight"] >= requests:
                        return
                    await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(ask("many", number))
            await in_flight(8)
            tasks.create_task(ask("few", 0))
    assert sorted(ended) == ["few"] + ["many"] * 8
    assert ("few" in ended[:-3]) is fair_share, ended
