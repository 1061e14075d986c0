"""The migration planner in a whole stack: real Envoy, our gateway, simulated engines, default policy."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from stack_user import StackUser
from waiting import until_true

from perilune_api import pool as spec
from perilune_lab.processes.stack import EngineOptions, Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = EngineOptions(time_scale=2.0, kv_tokens=200_000)
ROUTING = spec.Routing(
    migration=spec.Migration(triggers=tuple(spec.MoveTrigger), interval_seconds=0.1, hot_pending_seconds=0.5),
    limits=spec.Limits(decision_seconds=30.0),
)
DECISION = "x-perilune-decision"


@dataclass
class User(StackUser):
    async def turn(self, session: str, words: int = 100, output_tokens: int = 2) -> tuple[str, str]:
        """(endpoint, reason) of one request; a longer one continues a shorter one."""
        body = {
            "model": OPTIONS.model,
            "prompt": " ".join(f"{session}{i}" for i in range(words)),
            "max_tokens": output_tokens,
        }
        url, headers = self.stack.url + "/v1/completions", {DECISION: "1", "x-session-id": session}
        async with self.http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            endpoint, reason, _ = answer.headers[DECISION].split("; ")
            return endpoint, reason

    async def offered(self, session: str) -> dict[str, Any] | None:
        page = await self.moves()
        return next((offer for offer in page["offers"] if offer.get("session_id") == session), None)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def user() -> AsyncIterator[User]:
    async with Stack(engines=3, options=OPTIONS, routing=ROUTING) as stack, aiohttp.ClientSession() as http:
        yield User(stack, http)


async def test_a_session_leaves_a_hot_host_and_stays_away(user: User) -> None:
    host, _ = await user.turn("calm")
    heavy = "heavy0"
    while (await user.turn(heavy))[0] != host:
        heavy += "0"
    await user.fault(host, hang=True)
    blocker = asyncio.create_task(user.turn(heavy, 3_000))  # seconds of prefill, which do not begin

    async def is_hot() -> bool:
        return await user.metric(f'perilune_endpoint_pending_prefill_seconds{{endpoint="{host}"}}') > 0.5

    await until_true(is_hot)
    endpoint, reason = await user.turn("calm", 150)
    assert (endpoint != host, reason) == (True, "moved"), "the policy judges hot hosts itself"
    await user.fault(host)
    await blocker
    assert (await user.turn("calm", 200))[0] == endpoint
    page = await user.moves()
    planned = [one["state"] for one in page["ended"] if one.get("session_id") == "calm"]
    assert set(planned) <= {"lapsed"}, "no planned move was carried out"


async def test_sessions_of_a_draining_endpoint_leave_it_with_their_next_requests(user: User) -> None:
    hosts = {name: (await user.turn(name))[0] for name in (f"d{i}" for i in range(6))}
    leaving = hosts["d0"]
    user.drain(leaving)
    theirs = [name for name, host in hosts.items() if host == leaving]
    for name in theirs:

        async def is_offered(name: str = name) -> bool:
            return await user.offered(name) is not None

        await until_true(is_offered)
        endpoint, reason = await user.turn(name, 150)
        assert endpoint != leaving
        assert reason in ("moved", "planned"), "by the policy or by the planner, whichever comes first"
    for name, host in hosts.items():
        if host != leaving:
            assert (await user.turn(name, 150))[0] == host, "nobody else moves"
    user.drain()
