"""Several models behind one URL: a real Envoy with one route, one gateway, simulated engines of three
pools."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from msgspec import structs
from running_envoy import Envoy

from perilune_api import pool as spec
from perilune_gateway.routing.pools import by_weight
from perilune_lab.processes.envoy import Mode, config
from perilune_lab.processes.stack import EngineOptions, Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE, SMALL, NEW = "local", "small", "canary"
"""The pools, by name. Two of them serve the model `sim-large`, and the third `sim-small`."""
MODELS = {LARGE: "sim-large", SMALL: "sim-small", NEW: "sim-large"}
WEIGHTS = {LARGE: 70, SMALL: 100, NEW: 30}
ROUTING = spec.Routing(limits=spec.Limits(decision_seconds=30.0))
BODY_BYTES = "perilune_body_received_bytes_total"
DECISION = "x-perilune-decision"


@dataclass
class User:
    """A client of the URL, and an operator who looks at the gateway's pages."""

    http: aiohttp.ClientSession
    url: str
    admin_url: str
    pools: dict[str, str]
    """The pool of each endpoint."""

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any], str]:
        """(status, answer, the pool of the endpoint that was chosen)."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {DECISION: "1", **named}
        async with self.http.post(self.url + path, json=body, headers=sent) as answer:
            chosen = answer.headers.get(DECISION, "").partition(";")[0]
            return answer.status, await answer.json(), self.pools.get(chosen, "")

    async def complete(self, model: str, prompt: str = "some words", **headers: str) -> tuple[int, str]:
        """(status, pool) of a short completion."""
        body = {"model": model, "prompt": prompt, "max_tokens": 2}
        status, _, pool = await self.post("/v1/completions", body, **headers)
        return status, pool

    async def page(self, path: str) -> Any:
        async with self.http.get(self.admin_url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def metrics(self, name: str) -> list[str]:
        async with self.http.get(self.admin_url + "/metrics") as answer:
            return [line for line in (await answer.text()).splitlines() if line.startswith(name)]

    async def body_bytes(self) -> float:
        (line,) = await self.metrics(BODY_BYTES)
        return float(line.rpartition(" ")[2])


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[Mode.BUFFERED, pytest.param(Mode.FULL_DUPLEX, marks=pytest.mark.heavy)],
)
async def user(request: pytest.FixtureRequest) -> AsyncIterator[User]:
    async with AsyncExitStack() as running:
        stacks: dict[str, Stack] = {}
        for name in (SMALL, NEW):
            stack = stacks[name] = _stack(name, with_gateway=False)
            await running.enter_async_context(stack)
            stack.pool_file.write_bytes(spec.dump(structs.replace(stack.pool, metadata=spec.Metadata(name))))
        others = [word for stack in stacks.values() for word in ("--pool", str(stack.pool_file))]
        front = stacks[LARGE] = _stack(LARGE, with_envoy=False, gateway_arguments=tuple(others))
        await running.enter_async_context(front)
        endpoints = {stack.endpoints[0]: name for name, stack in stacks.items()}
        envoy = Envoy(config(list(endpoints), [front.ext_proc], mode=request.param))
        await running.enter_async_context(envoy)
        http = await running.enter_async_context(aiohttp.ClientSession())
        yield User(http, envoy.url, front.admin_url, endpoints)


def _stack(pool: str, **options: Any) -> Stack:
    """Return the stack of a pool, which has one engine."""
    routing = structs.replace(ROUTING, weight=WEIGHTS[pool])
    return Stack(
        engines=1, options=EngineOptions(model=MODELS[pool], time_scale=100.0), routing=routing, **options
    )


@pytest.mark.parametrize("session", ["", "named"])
async def test_the_bodys_model_chooses_the_pool(user: User, session: str) -> None:
    named = {"x_session_id": "a session"} if session else {}
    status, pool = await user.complete("sim-small", **named)
    assert (status, MODELS[pool]) == (200, "sim-small")
    body = {"model": "sim-large", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    status, answer, pool = await user.post("/v1/chat/completions", body, **named)
    assert (status, answer["model"], MODELS[pool]) == (200, "sim-large", "sim-large")


async def test_the_list_of_models_has_those_of_all_pools(user: User) -> None:
    async with user.http.get(user.url + "/v1/models") as answer:
        assert answer.status == 200
        assert answer.content_type == "application/json"
        listed = await answer.json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["sim-large", "sim-small"]
    assert {type(model["created"]) for model in listed["data"]} == {int}
    async with user.http.get(user.url + "/v1/models/sim-small") as answer:
        assert (await answer.json())["id"] == "sim-small"
    async with user.http.get(user.url + "/v1/models/sim-none") as answer:
        assert answer.status == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_an_unknown_model_is_refused_with_the_names_of_the_known_ones(user: User, path: str) -> None:
    status, answer, _ = await user.post(path, {"model": "sim-none", "messages": []})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (404, "unknown_model", "model")
    assert "sim-large, sim-small" in error["message"]
    counted = await user.metrics('perilune_refusals_total{reason="unknown_model"}')
    assert [float(line.rpartition(" ")[2]) > 0 for line in counted] == [True]


async def test_other_pages_follow_the_model_too(user: User) -> None:
    status, answer, pool = await user.post("/tokenize", {"model": "sim-small", "prompt": "a b"})
    assert (status, pool) == (200, SMALL), answer
    status, answer, _ = await user.post("/tokenize", {"prompt": "a b"})
    assert (status, answer["error"]["code"]) == (400, "no_model")


async def test_later_turns_of_a_session_go_to_its_pool_by_their_headers(user: User) -> None:
    prompt = "first words " * 50
    for turn, phase in enumerate(("body", "headers", "headers")):
        prompt += f"and more of turn {turn} " * 50
        assert await user.complete("sim-small", prompt, x_session_id="by headers") == (200, SMALL)
        newest = (await user.page(f"/pools/{SMALL}/api/decisions?session=by%20headers&n=1"))["decisions"][0]
        assert newest["phase"] == phase


async def test_a_session_that_asks_for_a_second_model_is_read_from_then_on(user: User) -> None:
    """Its headers name the first model's pool, where the engine answers 404; one such turn is possible."""
    named = {"x_session_id": "two models"}
    assert await user.complete("sim-small", "words " * 50, **named) == (200, SMALL)
    status, _ = await user.complete("sim-large", "longer words " * 50, **named)
    assert status == 404
    for model in ("sim-large", "sim-small", "sim-large"):
        status, pool = await user.complete(model, "ever longer words " * 90, **named)
        assert (status, MODELS[pool]) == (200, model)


async def test_sessions_are_shared_out_by_weight_and_stay_with_their_pool(user: User) -> None:
    weights = {f"default/{pool}": WEIGHTS[pool] for pool in (LARGE, NEW)}
    chosen = {}
    for number in range(12):
        session = f"session {number}"
        turns = {(await user.complete("sim-large", "w " * n, x_session_id=session)) for n in (9, 99, 50)}
        ((status, chosen[session]),) = turns
        assert status == 200
    expected = {name: by_weight(weights, b"\0" + name.encode()) for name in chosen}
    assert {name: f"default/{pool}" for name, pool in chosen.items()} == expected
    assert set(chosen.values()) == {LARGE, NEW}


async def test_a_conversation_without_a_name_stays_with_its_pool(user: User) -> None:
    seen = set()
    for number in range(8):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "The same for all. " * 300}]
        pools = set()
        for turn in range(3):
            messages.append({"role": "user", "content": f"conversation {number}, turn {turn}"})
            body = {"model": "sim-large", "messages": messages, "max_tokens": 4}
            status, answer, pool = await user.post("/v1/chat/completions", body)
            assert status == 200
            messages.append(answer["choices"][0]["message"])
            pools.add(pool)
        assert len(pools) == 1
        seen |= pools
    assert seen == {LARGE, NEW}


async def test_health_metrics_and_pages_show_the_pools(user: User) -> None:
    await user.complete("sim-small", x_session_id="seen")
    health = await user.page("/api/health")
    assert [pool["pool"] for pool in health["pools"]] == [f"default/{n}" for n in (LARGE, SMALL, NEW)]
    for endpoint, pool in user.pools.items():
        nodes = (await user.page(f"/pools/{pool}/api/nodes/stats"))["nodes"]
        assert [node["address"] for node in nodes] == [endpoint]
        (line,) = await user.metrics(f'perilune_endpoint_ready{{endpoint="{endpoint}"')
        assert f'perilune_dev_pool="{pool}"' in line
    heads = await user.metrics("# TYPE")
    assert len(heads) == len(set(heads))
    async with user.http.get(f"{user.admin_url}/pools/{SMALL}/console") as answer:
        assert answer.status == 200
