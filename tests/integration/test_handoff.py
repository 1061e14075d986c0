"""Sessions move with their KV in a whole stack: real Envoy, our gateway, simulated engines that hand KV over
to each other by the connector's protocol."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from msgspec import structs
from stack_user import StackUser
from waiting import HANG, until_true

from perilune_api import pool as spec
from perilune_lab.processes.child import start
from perilune_lab.processes.stack import EngineOptions, Stack, engine_arguments
from perilune_lab.vocabulary import Vocabulary

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSIONS, BLOCK = 12, 16
OPTIONS = EngineOptions(handoff=True, time_scale=4.0)
ROUTING = spec.Routing(
    migration=spec.Migration(triggers=(spec.MoveTrigger.DRAIN,), interval_seconds=0.1, moves_per_minute=1000),
    limits=spec.Limits(decision_seconds=30.0),
)
DECISION = "x-perilune-decision"
WORDS = Vocabulary()


@dataclass
class Session:
    """A conversation: every turn repeats the answer before it and adds to it."""

    name: str
    ids: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    found: list[tuple[int, int]] = field(default_factory=list)
    """(tokens found in the cache, tokens that the last host held) of each turn but the first."""

    @property
    def moved(self) -> bool:
        return len(set(self.hosts)) > 1


@dataclass
class User(StackUser):
    failed: list[str] = field(default_factory=list)

    async def turn(self, session: Session, new_tokens: int = 200, output_tokens: int = 8) -> None:
        held = (len(session.ids) - 1) // BLOCK * BLOCK  # the last token's KV was never needed
        session.ids += WORDS.ids_for(hash((session.name, len(session.ids))) & 0xFFFF, new_tokens)
        body = {
            "model": OPTIONS.model,
            "prompt": session.ids,
            "max_tokens": output_tokens,
            "return_token_ids": True,
        }
        url, headers = self.stack.url + "/v1/completions", {DECISION: "1", "x-session-id": session.name}
        async with self.http.post(url, json=body, headers=headers) as answer:
            if answer.status != 200:
                self.failed.append(f"{session.name}: {answer.status} {await answer.text()}")
                return
            values = await answer.json()
            session.hosts.append(answer.headers["x-perilune-endpoint"])
        session.ids += values["choices"][0]["token_ids"]
        if len(session.hosts) > 1:
            session.found.append((values["usage"]["prompt_tokens_details"]["cached_tokens"], held))

    async def talk(self, session: Session, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.turn(session)
            await asyncio.sleep(0.05)


@asynccontextmanager
async def served(*arguments: str, engines: int = 3, routing: spec.Routing = ROUTING) -> AsyncIterator[User]:
    """Yield a stack whose engines have all said that they hand KV over."""
    stack = Stack(engines=engines, options=replace(OPTIONS, arguments=arguments), routing=routing)
    async with stack, aiohttp.ClientSession() as http:
        user = User(stack, http)
        await user.all_hand_over()
        yield user


@pytest_asyncio.fixture(loop_scope="module")
async def user() -> AsyncIterator[User]:
    async with served() as user:
        yield user


async def test_a_drained_engines_sessions_leave_with_their_kv_under_load(user: User) -> None:
    sessions = [Session(f"s{i}") for i in range(SESSIONS)]
    for session in sessions:
        await user.turn(session, 1000)
    leaving = Counter(s.hosts[0] for s in sessions).most_common(1)[0][0]
    theirs = [s for s in sessions if s.hosts[0] == leaving]
    stop = asyncio.Event()
    talks = [asyncio.create_task(user.talk(session, stop)) for session in sessions]
    user.drain(leaving)

    async def all_left() -> bool:
        return all(session.hosts[-1] != leaving for session in theirs)

    await until_true(all_left)
    stop.set()
    await asyncio.gather(*talks)
    assert user.failed == []
    assert [s.name for s in sessions if s.hosts[0] != leaving and s.moved] == [], "nobody else moves"
    rows = [row for row in (await user.moves())["ended"] if row["handoff"]]
    copied_tokens = {
        row["session_id"]: row["handoff"]["tokens"] for row in rows if row["handoff"]["outcome"] == "switched"
    }
    for session in theirs:
        first = next(i for i, host in enumerate(session.hosts) if host != leaving)
        found, _ = session.found[first - 1]
        copied = copied_tokens[session.name]
        assert copied >= 1000 // BLOCK * BLOCK, "no less than the first turn's prompt"
        assert found >= copied, "all that the host held when the copy began"


SLOW = ("--send-bytes-per-s", "10e6", "--abort-timeout", "60")
"""Engines that need some ten seconds for a session's KV, so that a busy machine is in time to kill one."""


async def copying(user: User) -> dict[str, Any]:
    """Wait for a hand-off whose KV is on its way."""
    found: list[dict[str, Any]] = []

    async def is_copying() -> bool:
        found[:] = [one for one in (await user.moves())["handoffs"] if one["stage"] == "copying"]
        return bool(found)

    await until_true(is_copying)
    return found[0]


async def with_sessions(user: User, count: int) -> tuple[list[Session], str]:
    """Sessions after their first turn, and the host of most of them."""
    sessions = [Session(f"s{i}") for i in range(count)]
    for session in sessions:
        await user.turn(session, 1000)
    return sessions, Counter(s.hosts[0] for s in sessions).most_common(1)[0][0]


async def session_on(user: User, address: str) -> Session:
    """Return a new session whose first turn went to that endpoint. The gateway may learn late that the
    endpoint is back."""
    for i in range(100):
        session = Session(f"fresh-{i}")
        await user.turn(session, 1000)
        if session.hosts == [address]:
            return session
    raise AssertionError(f"no session was placed on {address}")


def kill(user: User, address: str) -> None:
    name = f"engine-{user.stack.endpoints.index(address)}"
    user.stack.children[name].signal(signal.SIGKILL)


async def test_a_giver_killed_in_the_middle_costs_a_recomputation_and_no_turn() -> None:
    async with served(*SLOW) as user:
        sessions, leaving = await with_sessions(user, 9)
        user.drain(leaving)
        await copying(user)
        kill(user, leaving)
        for session in sessions:
            await user.turn(session)
        assert user.failed == []
        assert all(session.hosts[-1] != leaving for session in sessions)

        async def none_is_open() -> bool:
            return not (await user.moves())["handoffs"]

        await until_true(none_is_open)
        assert await user.metric("perilune_handoffs_given_up_total") >= 1


async def test_a_taker_killed_in_the_middle_leaves_the_session_on_its_host() -> None:
    async with served(*SLOW) as user:
        sessions, leaving = await with_sessions(user, 9)
        user.drain(leaving)
        first = await copying(user)
        kill(user, first["target"])
        mine = next(s for s in sessions if s.name == first["session_id"])
        await user.turn(mine)
        assert mine.hosts == [leaving, leaving]
        for session in sessions:
            await user.turn(session)
        assert user.failed == []
        assert await user.metric("perilune_handoffs_given_up_total") >= 1


async def test_a_giver_restarted_in_place_gives_again() -> None:
    """Under another engine id, so that nobody waits for the process that is gone."""
    async with served("--abort-timeout", "100000") as user:
        stack = user.stack
        _, leaving = await with_sessions(user, 6)
        user.drain(leaving)

        async def all_left() -> bool:
            return await user.metric(f'perilune_endpoint_sessions{{endpoint="{leaving}"}}') == 0

        await until_true(all_left)  # so that the takers know the first process
        user.drain()
        kill(user, leaving)
        i = stack.endpoints.index(leaving)
        await stack.children[f"engine-{i}"].ended
        known = stack.pool.spec.endpoints[i]
        again = await start(
            "engine-again",
            [
                *(*stack.programs.engine, *engine_arguments(stack.options, i, stack.folder)),
                *("--listen", known.address, "--bootstrap", known.bootstrap),
                *("--events", known.events[0], "--replay", known.replay[0]),
            ],
            dict(os.environ),
            stack.folder,
        )
        try:
            await again.until_ready(HANG)

            async def is_back() -> bool:
                return await user.metric(f'perilune_endpoint_ready{{endpoint="{leaving}"}}') == 1

            await until_true(is_back)
            mine = await session_on(user, leaving)
            before = await user.metric('perilune_handoffs_total{outcome="switched"')
            user.drain(leaving)

            async def switched() -> bool:
                return await user.metric('perilune_handoffs_total{outcome="switched"') > before

            await until_true(switched)
            await user.turn(mine)
            assert mine.hosts[1] != leaving
            assert mine.found[0][0] >= 0.95 * mine.found[0][1]
            assert user.failed == []
        finally:
            await again.stop(5.0)


async def test_idle_sessions_of_a_hot_host_leave_it_with_their_kv() -> None:
    routing = structs.replace(
        ROUTING,
        migration=structs.replace(
            ROUTING.migration, triggers=(spec.MoveTrigger.HOT_HOST,), hot_pending_seconds=0.3
        ),
    )
    async with served(engines=2, routing=routing) as user:
        calm = Session("calm")
        await user.turn(calm, 1000)
        heavy = Session("heavy0")
        while not heavy.hosts or heavy.hosts[0] != calm.hosts[0]:
            heavy = Session(heavy.name + "0")
            await user.turn(heavy, 100)
        blocker = asyncio.create_task(user.turn(heavy, 30_000))  # seconds of prefill

        async def has_switched() -> bool:
            nonlocal blocker
            if blocker.done():  # on a busy machine they may pass unseen
                blocker = asyncio.create_task(user.turn(heavy, 30_000))
            ended = (await user.moves())["ended"]
            return any(one["state"] == "completed" and one["session_id"] == "calm" for one in ended)

        await until_true(has_switched)
        await user.turn(calm)
        await blocker
        assert calm.hosts[1] != calm.hosts[0]
        ((found, held),) = calm.found
        assert found >= 0.95 * held
        assert user.failed == []


async def test_a_prefix_that_many_sessions_begin_with_is_copied_ahead_of_them() -> None:
    triggers = (spec.MoveTrigger.REPLICATE,)
    migration = structs.replace(ROUTING.migration, triggers=triggers)
    routing = structs.replace(ROUTING, migration=migration)
    async with served(engines=2, routing=routing) as user:
        system = WORDS.ids_for(7, 8_000)

        async def begin(i: int) -> Session:
            session = Session(f"s{i}", list(system))
            await user.turn(session)
            return session

        begun = 0

        async def is_copied() -> bool:
            nonlocal begun
            begun += 1
            await begin(begun)
            return await user.metric('perilune_handoffs_total{outcome="copied",reason="replicate"}') >= 1

        await until_true(is_copied)
        (ended,) = [one for one in (await user.moves())["ended"] if one["handoff"]]
        assert ended["handoff"]["outcome"] == "copied"
        assert ended["handoff"]["pulled_tokens"] == ended["handoff"]["tokens"] >= 7_900
        assert user.failed == []
