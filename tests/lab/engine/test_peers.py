"""A fake engine reads the host memory of another one, by the messages of vLLM's tier for peers."""

import asyncio
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from waiting import HANG

from perilune_lab.engine.main import main

pytestmark = pytest.mark.processes

BLOCK = 32
SCALE = 50.0
ARGUMENTS = ("--time-scale", str(SCALE), "--block-size", str(BLOCK), "--context-tokens", "8192")


def ids(key: int, n: int) -> list[int]:
    return [300 + (key * 7919 + i * 31) % 3000 for i in range(n)]


def source(engine: Any, **more: object) -> dict[str, Any]:
    host, _, port = engine.facts["peer"].rpartition(":")
    known = {"kv_request_id": str(uuid.uuid4()), "remote_host": host, "remote_port": int(port)}
    return {"remote_kv_source": {**known, **more}}


async def ask(
    http: aiohttp.ClientSession, engine: Any, prompt: list[int], params: Any = None, **headers: str
):
    """Send a request, and return (cached tokens, ids of the answer)."""
    body = {"model": "sim-30b", "prompt": prompt, "max_tokens": 8, "return_token_ids": True}
    if params:
        body["kv_transfer_params"] = params
    async with http.post(f"{engine.url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        found = await answer.json()
        usage = found["usage"]["prompt_tokens_details"]
        return usage["cached_tokens"], found["choices"][0]["token_ids"]


async def cached_by_source(http: aiohttp.ClientSession, engine: Any) -> dict[str, float]:
    async with http.get(f"{engine.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = "vllm:prompt_tokens_cached_by_source_total{"
    return {x.split('source="')[1].split('"')[0]: float(x.split()[-1]) for x in lines if x.startswith(name)}


@dataclass
class Pair:
    """Two engines: T reads what H has."""

    h: Any
    t: Any


@pytest.fixture
def pair(start) -> Pair:
    both = [start(*ARGUMENTS, "--host-tokens", "65536", "--peer", "127.0.0.1:0") for _ in range(2)]
    return Pair(*both)


async def test_the_leading_blocks_that_the_other_has_are_read_and_the_rest_is_computed(pair: Pair):
    async with aiohttp.ClientSession() as http:
        await ask(http, pair.h, ids(1, 3000))
        prompt = ids(1, 3000) + ids(2, 500)
        before = await cached_by_source(http, pair.h)
        found, answer = await ask(http, pair.t, prompt, source(pair.h))
        assert found == 3000 // BLOCK * BLOCK
        assert (await cached_by_source(http, pair.t))["p2p"] == found
        assert await cached_by_source(http, pair.h) == before, "the source needs no request"
        again, same = await ask(http, pair.h, prompt)
        assert answer == same
        assert again == found, "and has kept its own"


async def test_what_was_read_is_in_the_own_host_memory_from_then_on(pair: Pair):
    async with aiohttp.ClientSession() as http:
        await ask(http, pair.h, ids(1, 3000))
        await ask(http, pair.t, ids(1, 3000), source(pair.h))
        async with http.post(f"{pair.t.url}/reset_prefix_cache") as answer:
            assert answer.status == 200
        found, _ = await ask(http, pair.t, ids(1, 3000))
        assert found == (3000 - 1) // BLOCK * BLOCK
        assert (await cached_by_source(http, pair.t))["host"] == found


@pytest.mark.parametrize("wrong", ["nothing held", "nobody there", "another engine's request", "no id"])
async def test_what_cannot_be_read_is_computed(pair: Pair, wrong: str):
    headers = (
        {"x-perilune-transfer-target": pair.h.facts["http"]} if wrong == "another engine's request" else {}
    )
    more = {"nobody there": {"remote_port": 1}, "no id": {"kv_request_id": ""}}.get(wrong, {})
    async with aiohttp.ClientSession() as http:
        if wrong != "nothing held":
            await ask(http, pair.h, ids(1, 3000))
        found, _ = await ask(http, pair.t, ids(1, 3000), source(pair.h, **more), **headers)
        assert found == 0


async def test_the_same_request_twice_is_served_twice(pair: Pair):
    """As when a proxy tries again."""
    async with aiohttp.ClientSession() as http:
        await ask(http, pair.h, ids(1, 3000))
        params = source(pair.h)
        both = await asyncio.gather(*(ask(http, pair.t, ids(1, 3000), params) for _ in range(2)))
        assert both[0][1] == both[1][1]


async def test_a_source_that_dies_or_hangs_delays_a_request_and_no_more(pair: Pair):
    async with aiohttp.ClientSession() as http:
        await ask(http, pair.h, ids(1, 3000))
        pair.h.popen.send_signal(signal.SIGSTOP)
        found, _ = await ask(http, pair.t, ids(1, 3000), source(pair.h))
        assert found == 0
        pair.h.popen.kill()
        found, _ = await ask(http, pair.t, ids(3, 3000), source(pair.h))
        assert found == 0


async def test_an_engine_of_another_model_refuses_the_handshake(start):
    other = start(*ARGUMENTS, "--host-tokens", "65536", "--peer", "127.0.0.1:0", "--hash-seed", "7")
    here = start(*ARGUMENTS, "--host-tokens", "65536", "--peer", "127.0.0.1:0")
    async with aiohttp.ClientSession() as http:
        await ask(http, other, ids(1, 3000))
        found, _ = await ask(http, here, ids(1, 3000), source(other))
        assert found == 0


async def test_host_memory_is_announced_and_what_leaves_it_too(start):
    engine = start(
        *ARGUMENTS, "--host-tokens", str(BLOCK * 100), "--kv-tokens", "16384", "--events", "tcp://127.0.0.1:*"
    )
    context = zmq.asyncio.Context()
    try:
        with context.socket(zmq.DEALER) as replay:
            replay.connect(engine.facts["replay"])
            async with aiohttp.ClientSession() as http:
                await ask(http, engine, ids(1, BLOCK * 60))
                await ask(http, engine, ids(2, BLOCK * 60))
            await replay.send_multipart((b"", (0).to_bytes(8, "big")))
            events = []
            async with asyncio.timeout(HANG):
                while (frames := await replay.recv_multipart())[-1]:
                    events += msgspec.msgpack.decode(frames[-1])[1]
        there = [e for e in events if e["medium"] == "CPU"]
        kinds = [e["type"] for e in there]
        assert kinds.count("BlockStored") >= 120
        assert kinds.count("BlockRemoved") == kinds.count("BlockStored") - 100
        first = there[0]
        assert len(first["token_ids"]) == BLOCK, "they describe themselves"
        assert first["parent_block_hash"] is None
        assert there[1]["parent_block_hash"] == first["block_hashes"][0]
    finally:
        context.term()


def test_a_taken_port_for_peers_is_one_clear_line(pair: Pair):
    taken = pair.h.facts["peer"]
    command = [sys.executable, "-P", "-m", "perilune_lab.engine.main", "--host-tokens", "64", "--peer", taken]
    second = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert second.returncode == 1
    assert second.stderr.startswith(f"perilune engine: cannot listen on {taken}: ")
    assert second.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--peer", "127.0.0.1:5710"), "--peer needs --host-tokens"),
        (("--peer", "here", "--host-tokens", "64"), "--peer wants IP:PORT"),
        (("--host-tokens", "64", "--kv-groups", "0,128"), "--host-tokens goes neither"),
        (
            ("--host-tokens", "64", "--peer", "127.0.0.1:0", "--data-parallel-size", "2"),
            "--peer needs a port",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str, ...], words: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert words in capsys.readouterr().err
