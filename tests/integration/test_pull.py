"""KV goes with requests in a whole stack: real Envoy, our gateway, simulated engines that hand KV over to
each other by the connector's protocol."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
from prefix_user import BLOCK, LONG, User
from routing_objects import chosen
from waiting import HANG, until_true

from perilune_api import pool as spec
from perilune_lab.processes.stack import EngineOptions, Stack

OPTIONS = EngineOptions(handoff=True)
ROUTING = spec.Routing(
    policy=chosen("round_robin"),
    limits=spec.Limits(decision_seconds=30.0),
    pull=spec.Pull(max_seconds=1.0),
)


@asynccontextmanager
async def served(*arguments: str, engines: int = 3) -> AsyncIterator[User]:
    stack = Stack(engines=engines, options=replace(OPTIONS, arguments=arguments), routing=ROUTING)
    async with stack, aiohttp.ClientSession() as http:
        user = User(stack, http, stack.url)
        await user.all_hand_over()
        yield user


async def test_a_request_finds_on_its_endpoint_what_another_one_held() -> None:
    """12 requests of 4 prompts. Round robin over three endpoints gives each prompt another one each time."""
    async with served() as user:
        found = []
        for prompt in range(4):
            first, _ = await user.ask(prompt)
            for end in (1, 2):
                there, cached = await user.ask(prompt, end)
                assert there != first
                found.append(cached)
        assert user.failed == []
        outcomes = Counter(outcome for outcome, _ in await user.outcomes())
        whole = [cached for cached in found if LONG - BLOCK <= cached <= LONG]
        assert outcomes["copied"] >= 1, outcomes
        assert len(whole) >= outcomes["copied"], (outcomes, found)
        assert set(found) - set(whole) <= {0}, "what is not fetched is computed"
        ended = await user.metric('perilune_handoffs_total{outcome="copied",reason="pull"}')
        assert ended == outcomes["copied"]
        chosen_to_be = await user.metric('perilune_pulls_total{outcome="fetched"}')
        assert outcomes.total() == chosen_to_be, "every one has its end"


async def test_givers_that_are_killed_cost_recomputations_and_no_request() -> None:
    """They die while KV is on its way: it takes a second or more for each request."""
    async with served("--send-bytes-per-s", "600e6", "--abort-timeout", "100000") as user:
        first = {prompt: (await user.ask(prompt))[0] for prompt in range(5)}
        running = [asyncio.create_task(user.ask(prompt, end)) for end in (1, 2) for prompt in first]

        async def has_fetched() -> bool:
            pulls = (await user.moves())["pulls"]
            return bool(pulls["open"] or pulls["ended"])

        await until_true(has_fetched)
        user.stack.children["engine-0"].signal(signal.SIGKILL)
        async with asyncio.timeout(HANG):
            await asyncio.gather(*running)
        assert user.failed == []
        assert (await user.moves())["pulls"]["open"] == 0
        causes = {cause for _, cause in await user.outcomes()}
        assert causes - {None}, "no pull failed"


async def test_a_giver_that_hangs_holds_a_request_for_the_bound_at_most() -> None:
    async with served(engines=2) as user:
        holder, _ = await user.ask(1)
        number = user.stack.endpoints.index(holder)
        user.stack.children[f"engine-{number}"].signal(signal.SIGSTOP)
        try:
            there, cached = await user.ask(1, 1)
        finally:
            user.stack.children[f"engine-{number}"].signal(signal.SIGCONT)
        assert user.failed == []
        assert (there != holder, cached) == (True, 0)

        async def has_ended() -> bool:
            return bool((await user.moves())["pulls"]["ended"])

        await until_true(has_ended)
        assert await user.outcomes() == [("expired", "not_taken")]
