"""Nothing scripted: a real Envoy, our gateway, simulated engines, as a user runs them."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from msgspec import structs
from stack_user import StackUser
from waiting import until_true

from perilune_api import pool as spec
from perilune_gateway.extproc import Transport
from perilune_lab.doctor.cli import main as doctor
from perilune_lab.processes.stack import EngineOptions, Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = EngineOptions(time_scale=50.0, kv_tokens=100_000)
PATIENT = spec.Routing(limits=spec.Limits(decision_seconds=30.0))
"""A busy test machine does not turn exact tokens into estimates."""
DECISION = "x-perilune-decision"
BODY_BYTES = "perilune_body_received_bytes_total"


@dataclass
class User(StackUser):
    """A client of a stack, and an operator who looks at its admin pages."""

    async def chat(self, messages: list[dict[str, Any]], **headers: str) -> tuple[int, dict[str, Any], str]:
        """(status, answer, decision header)."""
        body = {"model": OPTIONS.model, "messages": messages, "max_tokens": 24}
        return await self.post("/v1/chat/completions", body, **headers)

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any], str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(
            self.stack.url + path, json=body, headers={DECISION: "1", **named}
        ) as answer:
            return answer.status, await answer.json(), answer.headers.get(DECISION, "")

    async def blocks(self) -> int:
        """Of all endpoints on their devices, as announced."""
        nodes = (await self.page("/api/nodes/stats"))["nodes"]
        return sum(n["index"]["device"] for n in nodes)

    async def knows(self, blocks: int) -> bool:
        return await self.blocks() >= blocks

    async def pending(self) -> list[tuple[int, int]]:
        """(pending prefill tokens, requests in flight) of each endpoint."""
        nodes = (await self.page("/api/nodes/stats"))["nodes"]
        return [(n["load"]["pending_prefill_tokens"], n["load"]["in_flight"]) for n in nodes]


def turns(count: int, name: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{name} " + f"turn {i} says something " * 150} for i in range(count)]


over_either_transport = pytest.mark.parametrize(
    "user",
    [pytest.param(t, id=t, marks=[pytest.mark.heavy] * (t is not Transport.H2)) for t in Transport],
    indirect=True,
)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[Transport.H2], ids=str)
async def user(request: pytest.FixtureRequest) -> AsyncIterator[User]:
    by = ("--transport", request.param)
    stack = Stack(engines=3, options=OPTIONS, routing=PATIENT, gateway_arguments=by)
    async with stack, aiohttp.ClientSession() as http:
        yield User(stack, http)


async def conversation(
    user: User, name: str, count: int = 3, *, patient: bool = False, **headers: str
) -> list[tuple[str, int, int]]:
    """Each turn's (decision, prompt tokens, cached tokens). `patient`: a turn waits until the gateway has
    heard of every block of the turn before."""
    messages: list[dict[str, Any]] = []
    seen = []
    for turn in turns(count, name):
        messages.append(turn)
        known = await user.blocks()
        status, answer, decision = await user.chat(messages, **headers)
        assert status == 200, answer
        messages.append(answer["choices"][0]["message"])
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        seen.append((decision, usage["prompt_tokens"], cached))
        if patient:  # the last token's own KV is never computed
            new = (usage["total_tokens"] - 1) // OPTIONS.block_size - cached // OPTIONS.block_size
            await until_true(partial(user.knows, known + new))
    return seen


@over_either_transport
async def test_a_sessions_turns_find_their_cache_and_later_bodies_never_reach_the_gateway(user: User) -> None:
    (first, _, nothing), *_ = await conversation(user, "alpha", 1, x_session_id="alpha")
    assert (first.split("; ")[1], nothing) == ("cold", 0)
    before = await user.metric(BODY_BYTES)
    _, (second, tokens, _), (third, _, cached) = await conversation(user, "alpha", 3, x_session_id="alpha")
    assert {d.split("; ")[0] for d in (second, third)} == {first.split("; ")[0]}
    assert {d.split("; ")[1] for d in (second, third)} == {"host"}
    assert cached >= tokens - OPTIONS.block_size
    assert await user.metric(BODY_BYTES) == before


async def test_without_a_session_id_the_prompt_tells(user: User) -> None:
    seen = await conversation(user, "beta")
    assert [decision.split("; ")[1] for decision, _, _ in seen] == ["cold", "host", "host"]
    assert seen[2][2] >= seen[1][1] - OPTIONS.block_size


async def test_predicted_equals_served_from_cache(user: User) -> None:
    seen = await conversation(user, "gamma", patient=True)
    for decision, tokens, cached in seen:
        record = await user.page("/api/decisions/" + decision.rpartition("=")[2])
        assert (record["prompt_tokens"], record["token_source"]) == (tokens, "local")
        assert record["cached_tokens"] == cached
        assert {c["address"] for c in record["candidates"]} == set(user.stack.endpoints)
        assert set(record["counterfactual"]) >= {"round_robin", "sticky", "least_loaded"}
        assert await ended(user, record["request_id"]) == record["target"]


async def ended(user: User, request_id: str) -> str:
    """Return who served it, once its stream has ended."""
    found: list[str] = []

    async def known() -> bool:
        ending = (await user.page("/api/decisions/" + request_id))["ending"]
        found.extend([ending["served"]] if ending else [])
        return bool(found)

    await until_true(known)
    return found[0]


async def test_block_hashes_are_the_engines(user: User) -> None:
    await conversation(user, "delta", 1)
    nodes = (await user.page("/api/nodes/stats"))["nodes"]
    assert {n["parity"]["state"] for n in nodes if n["events"]["batches"]} == {"ok"}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        pytest.param({"model": "nobody", "messages": []}, 404, "unknown_model", id="unknown model"),
        pytest.param({"model": "sim-30b", "messages": 3}, 400, "bad_request", id="wrong type"),
    ],
)
async def test_errors_in_openais_form(user: User, body: object, status: int, code: str) -> None:
    found, answer, _ = await user.post("/v1/chat/completions", body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one two three " * 200, "max_tokens": 4}),
        ("/v1/responses", {"input": "one two three " * 200, "max_output_tokens": 4}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "one two three " * 200}], "max_tokens": 4},
        ),
    ],
)
async def test_every_api_is_routed_with_exact_tokens(user: User, path: str, body: dict[str, Any]) -> None:
    status, answer, decision = await user.post(path, {"model": OPTIONS.model, **body})
    assert status == 200, answer
    record = await user.page("/api/decisions/" + decision.rpartition("=")[2])
    usage = answer["usage"]
    said = usage.get("prompt_tokens", usage.get("input_tokens"))
    said += usage.get("cache_read_input_tokens", 0)  # which /v1/messages does not count as input
    assert (record["prompt_tokens"], record["token_source"]) == (said, "local")


async def test_other_paths_go_to_any_endpoint(user: User) -> None:
    async with user.http.get(user.stack.url + "/v1/models", headers={DECISION: "1"}) as answer:
        assert answer.status == 200
        assert "pass_through" in answer.headers[DECISION]


async def test_many_at_once_leave_no_load_behind(user: User) -> None:
    many = [conversation(user, f"many-{i}", 2, x_session_id=f"many-{i % 8}") for i in range(24)]
    await asyncio.gather(*many)

    async def idle() -> bool:
        return await user.pending() == [(0, 0)] * 3

    await until_true(idle)


@over_either_transport
async def test_clients_that_vanish_leave_no_load_behind(user: User) -> None:
    async def vanish(i: int) -> None:
        body = {"model": OPTIONS.model, "messages": turns(1, f"gone-{i}"), "max_tokens": 4000, "stream": True}
        async with user.http.post(user.stack.url + "/v1/chat/completions", json=body) as answer:
            await answer.content.readany()

    await asyncio.gather(*(vanish(i) for i in range(9)))

    async def idle() -> bool:
        return await user.pending() == [(0, 0)] * 3

    await until_true(idle)


async def test_the_pool_file_is_read_again(user: User) -> None:
    pool = user.stack.pool
    stays = user.stack.endpoints[1]
    drained = tuple(structs.replace(e, draining=e.address != stays) for e in pool.spec.endpoints)
    edited = structs.replace(pool, spec=structs.replace(pool.spec, endpoints=drained))
    user.stack.pool_file.write_bytes(spec.dump(edited))

    async def applied() -> bool:
        nodes = (await user.page("/api/nodes/stats"))["nodes"]
        return [n["draining"] for n in nodes] == [True, False, True]

    await until_true(applied)
    for i in range(4):
        (decision, _, _), *_ = await conversation(user, f"drain-{i}", 1)
        assert decision.split("; ")[0] == stays
    user.stack.pool_file.write_bytes(b"spec: {model: {name: x}}")

    async def complained() -> bool:
        problems = (await user.page("/api/health"))["problems"]
        return any(p["kind"] == "pool_file" and "metadata" in p["message"] for p in problems)

    await until_true(complained)
    user.stack.pool_file.write_bytes(spec.dump(pool))

    async def back() -> bool:
        nodes = (await user.page("/api/nodes/stats"))["nodes"]
        return not any(n["draining"] for n in nodes)

    await until_true(back)


@pytest.mark.asyncio(loop_scope="function")
async def test_a_killed_engine_is_routed_around() -> None:
    async with Stack(engines=3, options=OPTIONS, routing=PATIENT) as stack, aiohttp.ClientSession() as http:
        user = User(stack, http)
        (first, _, _), *_ = await conversation(user, "victim", 1, x_session_id="victim")
        host = first.split("; ")[0]
        os.kill(stack.children[f"engine-{stack.endpoints.index(host)}"].pid, signal.SIGKILL)
        seen = await conversation(user, "victim", 6, x_session_id="victim")
        assert all(cached > 0 for _, _, cached in seen[2:])
        hosts = {decision.split("; ")[0] for decision, _, _ in seen[1:]}
        assert len(hosts) == 1
        assert host not in hosts

        async def noticed() -> bool:
            problems = (await user.page("/api/health"))["problems"]
            return [p["endpoint"] for p in problems if p["kind"] == "not_ready"] == [host]

        await until_true(noticed)


@pytest.mark.asyncio(loop_scope="function")
async def test_engines_with_another_hash_seed_are_found_out() -> None:
    odd = replace(OPTIONS, arguments=("--hash-seed", "7"))
    async with Stack(engines=1, options=odd, routing=PATIENT) as stack, aiohttp.ClientSession() as http:
        user = User(stack, http)
        seen = await conversation(user, "odd", 2)
        assert seen[1][2] > 0

        async def told() -> bool:
            problems = (await user.page("/api/health"))["problems"]
            return any("PYTHONHASHSEED" in p["cause"] + p["cure"] for p in problems if p["kind"] == "parity")

        await until_true(told)
        assert await user.metric(f'perilune_parity{{endpoint="{stack.endpoints[0]}",state="ok"}}') == 0.0


@pytest.mark.asyncio(loop_scope="function")
async def test_engines_without_events_are_known_by_what_was_sent_there() -> None:
    silent = replace(OPTIONS, arguments=("--events", "none"))
    async with Stack(engines=2, options=silent, routing=PATIENT) as stack, aiohttp.ClientSession() as http:
        user = User(stack, http)
        seen = await conversation(user, "silent")
        record = await user.page("/api/decisions/" + seen[2][0].rpartition("=")[2])
        assert 0 < record["cached_tokens"] <= seen[2][2]


async def test_twelve_turns_that_name_the_response_before_stay_on_one_engine() -> None:
    """Only that engine has the conversation; three of them run at once."""
    options = replace(OPTIONS, arguments=("--responses-store",))
    async with Stack(engines=3, options=options, routing=PATIENT) as stack, aiohttp.ClientSession() as http:

        async def converse(name: str, stream: bool) -> set[str]:
            engines, previous = set(), None
            for turn in range(12):
                body = {
                    "model": options.model,
                    "input": f"{name} says something in turn {turn}",
                    "previous_response_id": previous,
                    "max_output_tokens": 4,
                    "stream": stream,
                }
                url = f"{stack.url}/v1/responses"
                async with http.post(url, json=body, headers={DECISION: "1"}) as answer:
                    assert answer.status == 200, await answer.text()
                    previous = re.findall(r'"(resp_[0-9a-f]+)"', await answer.text())[0]
                    engines.add(answer.headers[DECISION].partition(";")[0])
            return engines

        seen = await asyncio.gather(*(converse(f"user{i}", stream=i % 2 == 0) for i in range(6)))
    assert [len(engines) for engines in seen] == [1] * 6
    assert len(set().union(*seen)) == 3


@pytest.mark.asyncio(loop_scope="function")
async def test_health_metric_and_doctor_say_the_same_of_engines_in_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silent = replace(OPTIONS, arguments=("--events", "none"))
    async with Stack(engines=2, options=silent, with_envoy=False) as stack, aiohttp.ClientSession() as http:
        user = User(stack, http)
        assert await asyncio.to_thread(doctor, ["--pool", str(stack.pool_file), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)["findings"]
        assert [finding["finding"] for finding in found] == ["no_events", "no_transfer"]

        async def told() -> bool:
            return (await user.page("/api/health"))["lacks"] == [
                {"endpoints" if key == "engines" else key: value for key, value in finding.items()}
                for finding in found
            ]

        await until_true(told)
        assert await user.metric('perilune_engine_findings{finding="no_events"}') == 2.0
        assert await user.metric('perilune_engine_findings{finding="unreachable"}') == 0.0
