"""One engine prefills for two that decode, in a whole stack: real Envoy, our gateway, and simulated engines
that speak the connector's protocol."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from stack_user import StackUser
from waiting import HANG, until_true

from perilune_api import pool as spec
from perilune_gateway.main import ENGINE_API_KEY
from perilune_gateway.model import Unsplit
from perilune_gateway.model.handoff import HandoffOutcome
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_lab.vocabulary import Vocabulary

OPTIONS = EngineOptions(handoff=True, prefill=1, request_log=True)
ROUTING = spec.Routing(
    limits=spec.Limits(decision_seconds=30.0),
    disaggregation=spec.Disaggregation(
        queue=1_000, max_seconds=200.0, accept_seconds=1.0, coming_requests=1_000
    ),
)
WORDS = Vocabulary()
LONG, SHORT = 3_000, 200
LONG_ANSWER = 20_000
"""Output tokens that take longer than what a test does meanwhile."""


@dataclass
class User(StackUser):
    failed: list[str] = field(default_factory=list)
    hosts: dict[str, list[str]] = field(default_factory=dict)

    async def ask(
        self,
        session: str,
        tokens: int,
        turn: int = 1,
        *,
        path: str = "/v1/completions",
        answer_tokens: int = 4,
    ) -> Any:
        """One turn; every turn of a session begins with the turn before."""
        ids = WORDS.ids_for(hash((session, 1)) & 0xFFFF, tokens)
        for later in range(2, turn + 1):
            ids += WORDS.ids_for(hash((session, later)) & 0xFFFF, SHORT)
        body = {"model": OPTIONS.model, "prompt": ids, "max_tokens": answer_tokens, "return_token_ids": True}
        async with self.http.post(
            self.stack.url + path, json=body, headers={"x-session-id": session}
        ) as answer:
            if answer.status != 200:
                self.failed.append(f"{session}: {answer.status} {await answer.text()}")
                return None
            values = await answer.json()
            self.hosts.setdefault(session, []).append(answer.headers["x-perilune-endpoint"])
            return values

    async def decisions(self) -> list[dict[str, Any]]:
        """Return the newest decisions, the last one first."""
        found: list[dict[str, Any]] = (await self.page("/api/decisions?n=100"))["decisions"]
        return found

    async def remote_prefills(self, *outcomes: HandoffOutcome) -> float:
        """Return how many prompts were prefilled apart, and ended so."""
        series = (f'perilune_handoffs_total{{outcome="{one}",reason="prefill"}}' for one in outcomes)
        return sum([await self.metric(name) for name in series])

    async def slows_down(self) -> None:
        """Make the engine that prefills 20 times slower."""
        url = f"http://{self.stack.endpoints[0]}/fault"
        async with self.http.post(url, json={"slowdown": 20.0}) as answer:
            assert answer.status == 200

    def served(self, engine: int) -> list[dict[str, Any]]:
        """Return the requests that ended on an engine, by its own log."""
        path = self.stack.folder / f"engine-{engine}.requests.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@asynccontextmanager
async def served(
    *arguments: str, time_scale: float = 10.0, routing: spec.Routing = ROUTING, **of: Any
) -> AsyncIterator[User]:
    options = replace(OPTIONS, arguments=arguments, time_scale=time_scale)
    stack = Stack(engines=3, options=options, routing=routing, **of)
    async with stack, aiohttp.ClientSession() as http:
        user = User(stack, http)
        await user.all_hand_over()
        yield user


async def test_long_prompts_are_prefilled_apart_and_short_ones_where_they_are_decoded() -> None:
    """80 requests. What an engine does not accept within a second is prefilled where it is decoded, and a
    session that its host serves late may move, so a busy machine has other numbers."""
    async with served() as user:
        _, *decode = user.stack.endpoints
        for begin in range(0, 20, 10):
            names = [f"s{i}" for i in range(begin, begin + 10)]
            for turn in (1, 2):
                await asyncio.gather(*(user.ask(name, LONG, turn) for name in names))
            await asyncio.gather(*(user.ask(f"{name}-short", SHORT) for name in names))
            await asyncio.gather(*(user.ask(f"{name}-long", LONG) for name in names))
        assert user.failed == []
        hosts = Counter(host for turns in user.hosts.values() for host in turns)
        assert set(hosts) == set(decode)
        rows = await user.decisions()
        for row in rows:
            is_long = row["prompt_tokens"] - row["cached_tokens"] > ROUTING.disaggregation.local_tokens
            assert bool(row["prefill"]) is is_long, row["sentence"]
            assert is_long or row["unsplit"] == Unsplit.SHORT, row["sentence"]
        left = {session for session, turns in user.hosts.items() if len(set(turns)) > 1}
        assert left <= {row["session_id"] for row in rows if row["moved_from"]}
        remote = sum(bool(row["prefill"]) for row in rows)
        assert remote >= 40, "all first prompts that are long"

        async def each_has_one_end() -> bool:
            return await user.remote_prefills(*HandoffOutcome) == remote

        await until_true(each_has_one_end)

        async def one_is_copied() -> bool:
            await user.ask(f"one more than {len(user.hosts)}", LONG)
            return await user.remote_prefills(HandoffOutcome.COPIED) >= 1

        await until_true(one_is_copied)
        again = await user.ask("s0", LONG, 2)
        assert user.failed == []
        found = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        (last, *_) = await user.decisions()
        assert found >= last["cached_tokens"]
        assert last["moved_from"] or found >= 0.95 * (LONG + SHORT)


async def test_with_defaults_an_idle_engine_prefills_itself_and_one_that_answers_does_not() -> None:
    async with served(routing=spec.Routing()) as user:
        prefill, *decode = user.stack.endpoints
        await user.ask("finds idle engines", LONG)
        (idle, *_) = await user.decisions()
        assert (idle["prefill"], idle["unsplit"]) == ("", Unsplit.CHEAPER)
        answers: list[asyncio.Task[Any]] = []

        async def both_answer_several() -> bool:
            answers.append(
                asyncio.create_task(user.ask(f"a{len(answers)}", SHORT, answer_tokens=LONG_ANSWER))
            )
            rows = [row for row in await user.decisions() if row["session_id"].startswith("a")]
            chosen = Counter(row["target"] for row in rows)
            return all(chosen[address] >= 4 for address in decode)

        await until_true(both_answer_several)
        await user.ask("finds engines that answer", LONG)
        (busy, *_) = await user.decisions()
        assert (busy["prefill"], busy["unsplit"]) == (prefill, None)
        assert await user.metric('perilune_prefills_total{where="remote"}') == 1
        for each in answers:
            each.cancel()
        assert user.failed == []


async def test_a_killed_prefill_engine_costs_recomputations_and_no_turn() -> None:
    """It has 14 seconds of prefill to do when it is killed, so none of the last ones has ended."""
    async with served("--abort-timeout", "5", time_scale=1.0) as user:
        running = [asyncio.create_task(user.ask(f"s{i}", 20_000)) for i in range(6)]

        async def has_accepted() -> bool:
            page = f"http://{user.stack.endpoints[0]}/metrics"
            async with user.http.get(page) as answer:
                lines = [line.split() for line in (await answer.text()).splitlines()]
            counts = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            return sum(float(line[-1]) for line in lines if line and line[0].startswith(counts)) >= 2

        await until_true(has_accepted)
        user.stack.children["engine-0"].signal(signal.SIGKILL)
        await asyncio.gather(*running)
        for i in range(10):
            await user.ask(f"t{i}", LONG)
        assert user.failed == []
        assert await user.metric('perilune_handoffs_given_up_total{cause="broke_off"}') >= 1
        assert await user.metric('perilune_prefills_total{where="no_giver"}') >= 1


async def test_a_gateway_killed_in_the_middle_costs_recomputations_and_no_turn() -> None:
    async with served("--abort-timeout", "5", vital=frozenset({"envoy"})) as user:
        await user.slows_down()
        running = [asyncio.create_task(user.ask(f"s{i}", 20_000)) for i in range(6)]

        async def is_prefilling() -> bool:
            return (await user.moves())["prefills"]["open"] >= 6

        await until_true(is_prefilling)
        user.stack.children["gateway"].signal(signal.SIGKILL)
        await asyncio.gather(*running)
        assert user.failed == []


async def test_engines_that_demand_a_key_prefill_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients do not have it."""
    monkeypatch.setenv(ENGINE_API_KEY, "key-of-engines")
    async with served("--api-key", "key-of-engines") as user:
        await user.ask("s", LONG)
        assert user.failed == []
        assert await user.metric('perilune_prefills_total{where="remote"}') == 1


async def test_without_a_gateway_clients_requests_reach_engines_that_decode() -> None:
    async with served(vital=frozenset({"envoy"})) as user:
        gateway = user.stack.children["gateway"]
        gateway.signal(signal.SIGKILL)
        await gateway.ended
        for i in range(6):
            await user.ask(f"s{i}", SHORT)
        assert user.failed == []
        assert {host for turns in user.hosts.values() for host in turns} <= set(user.stack.endpoints[1:])


async def test_a_request_that_is_sent_again_elsewhere_waits_for_no_spent_transfer() -> None:
    """The engines would wait for hours."""
    async with served("--abort-timeout", "100000") as user:
        await user.slows_down()  # so that all of them are open for longer than this test needs to see it
        running = [asyncio.create_task(user.ask(f"s{i}", 20_000)) for i in range(4)]

        async def is_prefilling() -> bool:
            return (await user.moves())["prefills"]["open"] >= 4

        await until_true(is_prefilling)
        user.stack.children["engine-1"].signal(signal.SIGKILL)
        async with asyncio.timeout(HANG):
            await asyncio.gather(*running)
        assert user.failed == []
        assert {host for turns in user.hosts.values() for host in turns} == {user.stack.endpoints[2]}
        assert await user.metric('perilune_handoffs_given_up_total{cause="elsewhere"}') >= 1
        assert await user.metric("perilune_handoffs_total") == 4, "each has one end"
