"""Endpoints read each other's host memory in a whole stack: real Envoy, our gateway, simulated engines with a
fake of the tier `p2p` of vLLM's OffloadingConnector."""

import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from prefix_user import BLOCK, LONG, User
from routing_objects import chosen
from running_envoy import Envoy
from waiting import until_true

from perilune_api import pool as spec
from perilune_lab.processes import envoy
from perilune_lab.processes.stack import EngineOptions, Stack

OPTIONS = EngineOptions(host_tokens=700_000)
ROUTING = spec.Routing(policy=chosen("round_robin"), limits=spec.Limits(decision_seconds=30.0))


@asynccontextmanager
async def served(engines: int = 3) -> AsyncIterator[User]:
    stack = Stack(engines=engines, options=OPTIONS, routing=ROUTING)
    async with stack, aiohttp.ClientSession() as http:
        user = User(stack, http, stack.url)

        async def all_can() -> bool:
            return len((await user.moves())["peers"]) == engines

        await until_true(all_can)
        yield user


async def held_in_host_memory(user: User, address: str, prompts: int) -> None:
    """Wait until the gateway knows that an endpoint has so many prompts there."""
    name = f'perilune_index_blocks{{endpoint="{address}",tier="host"}}'

    async def held() -> bool:
        return await user.metric(name) >= prompts * (LONG // BLOCK)

    await until_true(held)


async def test_an_endpoint_reads_what_another_one_has_in_host_memory() -> None:
    """12 requests of 4 prompts. Round robin over three endpoints gives each prompt another one each time."""
    async with served() as user:
        found, prompts = [], Counter[str]()
        for prompt in range(4):
            first, _ = await user.ask(prompt)
            prompts[first] += 1
            await held_in_host_memory(user, first, prompts[first])
            for end in (1, 2):
                there, cached = await user.ask(prompt, end)
                assert there != first
                found.append(cached)
        assert user.failed == []
        outcomes = Counter(outcome for outcome, _ in await user.outcomes())
        reads = await user.metric('perilune_pulls_total{outcome="fetched"}')
        assert reads >= 1, "the first one in any case; later ones as far as links prove fast enough"
        assert outcomes == {"copied": reads}, "as the engines report in answers as a whole"
        assert sum(cached == LONG for cached in found) >= reads, (found, reads)
        decision = (await user.page("/api/decisions?limit=1"))["decisions"][0]
        assert decision["pulled_from"]


async def test_a_source_that_dies_or_hangs_costs_time_and_no_request() -> None:
    """The engine's own heartbeat ends the wait, after 10 s."""
    async with served(engines=2) as user:
        holder, _ = await user.ask(1)
        await held_in_host_memory(user, holder, 1)
        there, cached = await user.ask(1, 1)
        assert (there != holder, cached) == (True, LONG)
        assert await user.ask(2) == (holder, 0)
        await held_in_host_memory(user, holder, 2)
        user.child(holder).signal(signal.SIGSTOP)
        try:
            assert await user.ask(2, 1) == (there, 0)
        finally:
            user.child(holder).signal(signal.SIGCONT)
        late, worked = await user.outcomes()
        assert late in {("expired", "not_taken"), ("failed", "recomputed")}, "whichever is noticed first"
        assert worked == ("copied", None)
        user.child(holder).signal(signal.SIGKILL)
        assert (await user.ask(2, 2))[0] == there
        assert user.failed == []


async def test_what_the_engine_reports_says_whether_it_has_found_the_kv() -> None:
    """Where Envoy sends the gateway the answer's body."""
    async with served() as user:
        there = [user.stack.ext_proc]
        bootstrap = envoy.config(user.stack.endpoints, there, mode=envoy.Mode.FULL_DUPLEX)
        async with Envoy(bootstrap) as proxy:
            user.url = proxy.url
            first = {prompt: (await user.ask(prompt))[0] for prompt in (1, 2)}
            for holder in first.values():
                await held_in_host_memory(user, holder, 1)
            assert (await user.ask(1, 1))[1] == LONG
            async with user.http.post(f"http://{first[2]}/reset_prefix_cache") as answer:
                assert answer.status == 200, "its host memory has it all the same"
            assert (await user.ask(2, 1))[1] == LONG
            assert await user.outcomes() == [("copied", None), ("copied", None)]


async def test_a_client_names_no_source() -> None:
    async with served(engines=2) as user:
        body = {"remote_kv_source": {"kv_request_id": "x", "remote_host": "127.0.0.1", "remote_port": 1}}
        await user.ask(1, kv_transfer_params=body)
        (why,) = user.failed
        assert "400" in why
        assert "kv_transfer_params" in why
