"""Completions whose answers tell what an engine had of the prompt, and the two legs of a hand-off."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Any
from uuid import uuid4

from aiohttp import ClientResponse

from enginebed.rig import Engine, Rig
from perilune_api import names

Answer = dict[str, Any]
SAME = 1e-4
"""Log probabilities of one prompt on two engines differ by less."""


async def ask(
    rig: Rig, url: str, ids: Sequence[int], session: str = "", policy: str = "", **fields: Any
) -> tuple[str, Answer]:
    """Ask, and return the address that the gateway chose (if a session is named) and the answer. `policy`:
    another one than the pool's."""
    body = {
        "model": "tiny",
        "prompt": ids,
        "temperature": 0,
        "return_token_ids": True,
        "logprobs": 1,
        **fields,
    }
    headers = _named(session)
    if policy:
        headers[names.POLICY_HEADER] = policy
    if "kv_transfer_params" in fields:
        headers[names.ENGINE_SECRET_HEADER] = rig.secret
    async with rig.http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return _address(answer), await answer.json()


@asynccontextmanager
async def answering(rig: Rig, ids: Sequence[int], session: str) -> AsyncIterator[str]:
    """While an engine gives a long answer to the prompt, whose first tokens have come. Yields its address."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": 4_000, "ignore_eos": True, "stream": True}
    async with rig.http.post(f"{rig.url}/v1/completions", json=body, headers=_named(session)) as answer:
        assert answer.status == 200, await answer.text()
        for _ in range(8):
            await answer.content.readline()
        yield _address(answer)


def _named(session: str) -> dict[str, str]:
    return {"x-session-id": session, names.DECISION_HEADER: "1"} if session else {}


def _address(answer: ClientResponse) -> str:
    return answer.headers.get(names.DECISION_HEADER, "").partition(";")[0]


def cached(answer: Answer) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def furthest(one: Answer, other: Answer) -> float:
    """Return the greatest difference between the log probabilities of two answers at temperature 0, up to and
    including the first token that differs. At that place each answer has the log probability of its own most
    likely token, so answers that part where two tokens are equally likely are as close as equal ones.
    Infinite if one answer ends where the other goes on."""
    a, b = (answer["choices"][0] for answer in (one, other))
    pairs = zip(a["token_ids"], b["token_ids"], strict=False)
    same = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if same is None and len(a["token_ids"]) != len(b["token_ids"]):
        return inf
    upto = None if same is None else same + 1
    left, right = (choice["logprobs"]["token_logprobs"][:upto] for choice in (a, b))
    return max((abs(x - y) for x, y in zip(left, right, strict=True)), default=0.0)


async def fetched(rig: Rig, address: str) -> float:
    """Return the number of prompt tokens that an engine has had from another one."""
    async with rig.http.get(f"http://{address}/metrics") as page:
        lines = (await page.text()).splitlines()
    name = "vllm:external_prefix_cache_hits_total"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def until(check: Callable[[], Awaitable[bool]], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def legs(
    rig: Rig,
    giver: Engine,
    taker: Engine,
    given: Sequence[int],
    taken: Sequence[int],
    *,
    may_give: Awaitable[Any] | None = None,
) -> Answer:
    """Both legs of a hand-off with these prompts, at once, or the giver's after `may_give`. Returns the
    taker's answer."""
    async with rig.http.get(f"http://{giver.pod.address}:8998/query") as page:
        engine_id = (await page.json())["0"]["engine_id"]
    transfer_id = uuid4().hex
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}

    async def give() -> None:
        if may_give:
            await may_give
        await ask(rig, giver.url, given, max_tokens=1, kv_transfer_params=params)

    _, (_, answer) = await asyncio.gather(
        give(), take(rig, taker, taken, f"http://{giver.pod.address}:8998", engine_id, transfer_id)
    )
    return answer


async def take(
    rig: Rig, taker: Engine, ids: Sequence[int], bootstrap: str, engine_id: str, transfer_id: str
) -> tuple[str, Answer]:
    """Send the take leg alone."""
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }
    return await ask(rig, taker.url, ids, max_tokens=8, kv_transfer_params=params)
