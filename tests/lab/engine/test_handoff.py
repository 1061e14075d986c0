"""KV handed from one engine process to another, by the connector's protocol and with its faults."""

import asyncio
import json
import signal
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from waiting import HANG

BLOCK = 32
FOREVER = "1000000"
"""An abort timeout that no test waits for."""


def ids(key: int, n: int) -> list[int]:
    return [300 + (key * 7919 + i * 31) % 3000 for i in range(n)]


def give(transfer: str, **more):
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer, **more}


def take(transfer: str, bootstrap: str, engine: str):
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://{bootstrap}",
        "remote_engine_id": engine,
        "transfer_id": transfer,
    }


@dataclass
class Pair:
    """Two engines: what the giver computed, the taker fetches."""

    giver: Any
    taker: Any

    async def engine_id(self, http: aiohttp.ClientSession) -> str:
        async with http.get(f"http://{self.giver.facts['bootstrap']}/query") as answer:
            return (await answer.json())["0"]["engine_id"]

    async def take(self, http: aiohttp.ClientSession, prompt: list[int], transfer: str, **more):
        params = take(transfer, self.giver.facts["bootstrap"], await self.engine_id(http))
        return await ask(http, self.taker, prompt, params, **more)

    async def hand_over(self, http: aiohttp.ClientSession, prompt: list[int], transfer: str = ""):
        """Both legs at once. Returns their two answers."""
        transfer = transfer or uuid.uuid4().hex
        return await asyncio.gather(
            ask(http, self.giver, prompt, give(transfer)), self.take(http, prompt, transfer)
        )


async def ask(http, engine, prompt, params=None, **more):
    """(status, body) of one request for one token."""
    body = {"model": "sim-30b", "prompt": prompt, "max_tokens": 1, "return_token_ids": True, **more}
    if params:
        body["kv_transfer_params"] = params
    async with http.post(f"{engine.url}/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


def cached(answer) -> int:
    return answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"]


def output(answer) -> list[int]:
    return answer[1]["choices"][0]["token_ids"]


async def usage(http, engine) -> float:
    """Share of the engine's blocks that are in use."""
    async with http.get(f"{engine.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith("vllm:kv_cache_usage_perc{"))


async def until_free(http, engine) -> None:
    async with asyncio.timeout(HANG):
        while await usage(http, engine):  # noqa: ASYNC110 - the engine is another process
            await asyncio.sleep(0.01)


ARGUMENTS = ("--time-scale", "50", "--block-size", str(BLOCK), "--context-tokens", "8192")


def start_pair(start, abort: str, *more: str) -> Pair:
    both = [
        start(*ARGUMENTS, "--bootstrap", "127.0.0.1:0", "--abort-timeout", abort, *more) for _ in range(2)
    ]
    return Pair(*both)


@pytest.fixture(scope="module")
def pair(start_for_module) -> Pair:
    """For tests in which nobody waits for an abort timeout."""
    return start_pair(start_for_module, FOREVER)


@pytest.mark.parametrize("n", [700, 1500, 3000])
async def test_the_next_turn_finds_on_the_taker_what_it_finds_on_the_giver(pair: Pair, n: int):
    async with aiohttp.ClientSession() as http:
        first = await ask(http, pair.giver, ids(n, n), max_tokens=16)
        context = ids(n, n) + output(first)[:-1]
        whole_blocks = len(context) // BLOCK * BLOCK
        gave, took = await pair.hand_over(http, context)
        assert (gave[0], took[0]) == (200, 200)
        assert cached(gave) == whole_blocks
        assert cached(took) == len(context), "nothing is computed but the last token"
        following = context + ids(n + 1, 64)
        here, there = [await ask(http, e, following, max_tokens=8) for e in (pair.giver, pair.taker)]
        assert cached(here) == cached(there) == whole_blocks
        assert output(here) == output(there)


async def test_the_taker_announces_what_it_fetched_as_blocks_on_its_gpu(pair: Pair):
    prompt = ids(5, 10 * BLOCK)
    async with aiohttp.ClientSession() as http:
        await pair.hand_over(http, prompt)
    stored = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.connect(pair.taker.facts["replay"])
        await replay.send_multipart((b"", bytes(8)))
        while (frames := await replay.recv_multipart())[1]:
            stored += msgspec.msgpack.decode(frames[-1])[1]
    mine = [e for e in stored if e["type"] == "BlockStored" and set(e["token_ids"]) <= set(prompt)]
    assert {event["medium"] for event in mine} == {"GPU"}
    assert [token for event in mine for token in event["token_ids"]][-10 * BLOCK :] == prompt


async def test_twenty_at_once(pair: Pair):
    prompts = [ids(100 + i, 200 + 15 * i) for i in range(20)]
    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(ask(http, pair.giver, prompt) for prompt in prompts))
        legs = await asyncio.gather(*(pair.hand_over(http, prompt) for prompt in prompts))
        assert {leg[0] for both in legs for leg in both} == {200}
        found = [cached(await ask(http, pair.taker, prompt + ids(9, 40))) for prompt in prompts]
    assert found == [len(prompt) // BLOCK * BLOCK for prompt in prompts]


async def test_a_streamed_give_leg_is_accepted_before_its_prefill_ends(pair: Pair):
    prompt, body = ids(6, 6000), {"model": "sim-30b", "prompt": ids(6, 6000), "max_tokens": 1, "stream": True}
    body["kv_transfer_params"] = give("streamed")
    url = f"{pair.giver.url}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as head:
        assert head.status == 200
        took = await pair.take(http, prompt, "streamed")
        assert b"data: " in await head.read()
    assert cached(took) == 6000


async def test_given_blocks_stay_until_they_are_fetched(pair: Pair):
    prompt = ids(7, 1000)
    async with aiohttp.ClientSession() as http:
        await until_free(http, pair.giver)
        await ask(http, pair.giver, prompt, give("kept"))
        assert await usage(http, pair.giver) > 0
        assert cached(await pair.take(http, prompt, "kept")) == 1000
        await until_free(http, pair.giver)
        await until_free(http, pair.taker)


async def test_what_cannot_be_fetched_is_computed_at_once(pair: Pair, start):
    """The giver's page is dead, the page names another engine, the taker wants more than was given."""
    async with aiohttp.ClientSession() as http:
        dead = start("--bootstrap", "127.0.0.1:0")
        dead.popen.kill()
        dead.popen.wait()
        nobody = take("x", dead.facts["bootstrap"], "gone")
        assert cached(await ask(http, pair.taker, ids(8, 500), nobody)) == 0
        other = take("x", pair.giver.facts["bootstrap"], "another engine")
        assert cached(await ask(http, pair.taker, ids(9, 500), other)) == 0
        gave, took = await asyncio.gather(
            ask(http, pair.giver, ids(10, 500), give("short")), pair.take(http, ids(10, 900), "short")
        )
        assert (gave[0], took[0], cached(took)) == (200, 200, 0)


async def test_a_give_leg_that_is_too_long_is_refused_and_leaves_nothing(pair: Pair):
    async with aiohttp.ClientSession() as http:
        before = await usage(http, pair.giver)
        status, _ = await ask(http, pair.giver, ids(11, 9000), give("long"), stream=True)
        assert (status, await usage(http, pair.giver)) == (400, before)


async def test_every_process_has_an_engine_id_of_its_own(pair: Pair):
    async with aiohttp.ClientSession() as http:
        assert await pair.engine_id(http) != await Pair(pair.taker, pair.giver).engine_id(http)


class TestAfterTheAbortTimeout:
    """What nobody sends is computed when the timeout is over: engine seconds, from the engine's own log."""

    ABORT_S = 20.0

    async def waited_s(self, tmp_path: Path, start, legs, *more: str) -> float:
        """Engine seconds from the take leg's admission to its first token; it found nothing."""
        log = tmp_path / "requests.jsonl"
        pair = start_pair(start, str(self.ABORT_S), *more)
        pair.taker = start(
            *ARGUMENTS,
            *("--bootstrap", "127.0.0.1:0", "--abort-timeout", str(self.ABORT_S), "--request-log", str(log)),
        )
        async with aiohttp.ClientSession() as http:
            took = await legs(http, pair)
            assert (took[0], cached(took)) == (200, 0)
            await until_free(http, pair.taker)
        entry = json.loads(log.read_text().splitlines()[-1])
        return entry["first_token_s"] - entry["admitted_s"]

    async def test_nothing_was_given(self, tmp_path, start):
        async def legs(http, pair):
            return await pair.take(http, ids(1, 900), "never")

        assert await self.waited_s(tmp_path, start, legs) >= self.ABORT_S

    async def test_the_give_legs_client_left(self, tmp_path, start):
        async def legs(http, pair):
            gave = asyncio.create_task(ask(http, pair.giver, ids(2, 8000), give("left")))
            while not await usage(http, pair.giver):  # noqa: ASYNC110
                await asyncio.sleep(0)
            gave.cancel()
            await until_free(http, pair.giver)
            return await pair.take(http, ids(2, 8000), "left")

        assert await self.waited_s(tmp_path, start, legs, "--slowdown", "100") >= self.ABORT_S

    async def test_the_give_leg_ended_by_itself(self, tmp_path, start):
        async def legs(http, pair):
            body = {
                "model": "sim-30b",
                "messages": [{"role": "user", "content": "ba be"}],
                "kv_transfer_params": give("stopped"),
            }
            async with http.post(f"{pair.giver.url}/v1/chat/completions", json=body) as answer:
                gave = await answer.json()
            assert gave["choices"][0]["finish_reason"] == "stop"
            return await pair.take(http, ids(3, 900), "stopped")

        assert await self.waited_s(tmp_path, start, legs) >= self.ABORT_S

    async def test_the_giver_came_back_in_place_under_its_old_id(self, tmp_path, start):
        """The taker never forgets where the first process was, and waits a minute longer."""

        async def legs(http, pair):
            pair.giver.popen.kill()
            pair.giver = start(*ARGUMENTS, "--bootstrap", "127.0.0.1:0", "--engine-id", "fixed")
            await pair.hand_over(http, ids(4, 500))
            page = pair.giver.facts["bootstrap"]
            pair.giver.popen.send_signal(signal.SIGKILL)
            pair.giver.popen.wait()
            pair.giver = start(*ARGUMENTS, "--bootstrap", page, "--engine-id", "fixed")
            _, took = await pair.hand_over(http, ids(5, 900))
            return took

        assert await self.waited_s(tmp_path, start, legs) >= self.ABORT_S + 60.0

    async def test_blocks_that_nobody_fetches_are_free_again(self, start):
        pair = start_pair(start, str(self.ABORT_S))
        async with aiohttp.ClientSession() as http:
            await ask(http, pair.giver, ids(6, 900), give("unwanted"))
            assert await usage(http, pair.giver) > 0
            await until_free(http, pair.giver)
