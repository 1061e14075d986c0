"""Data-parallel ranks: one server, and a cache, a scheduler and a publisher for each rank, as vLLM's."""

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from perilune_lab.engine.events import offset

PROMPT = list(range(300, 400))


async def ask(url: str, rank: str | None = None, **more) -> tuple[int, dict]:
    headers = {} if rank is None else {"x-data-parallel-rank": rank}
    body = {"model": "sim-30b", "prompt": PROMPT, "max_tokens": 1, **more}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


def cached(answer: tuple[int, dict]) -> int:
    return answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def two(start):
    return start("--time-scale", "50", "--data-parallel-size", "2")


async def test_each_rank_has_a_cache_of_its_own_and_the_header_names_it(two):
    assert cached(await ask(two.url, "1")) == 0
    assert cached(await ask(two.url, "0")) == 0
    assert cached(await ask(two.url, "1")) == 96
    status, error = await ask(two.url, "2")
    assert status == 400
    assert error["error"]["message"] == "data_parallel_rank 2 is out of range [0, 2)."
    status, _ = await ask(two.url, "first")
    assert status == 200


async def test_without_the_header_equally_idle_ranks_take_turns(two):
    assert [cached(await ask(two.url)) for _ in range(4)] == [0, 0, 96, 96]


async def test_rank_r_publishes_r_ports_further(two):
    events, replay = (two.facts[name].split(",") for name in ("events", "replay"))
    assert events == [events[0], offset(events[0], 1)]
    assert replay == [replay[0], offset(replay[0], 1)]
    await ask(two.url, "1")
    context = zmq.asyncio.Context()
    try:
        batches = [await replayed(context, address) for address in replay]
    finally:
        context.destroy(linger=0)
    assert batches[0] == []
    ((_, stored, rank),) = batches[1]
    assert rank == 1
    assert len(stored[0]["block_hashes"]) == 100 // 16
    async with aiohttp.ClientSession() as session, session.get(f"{two.url}/kv_event_sources") as answer:
        sources = await answer.json()
    assert [(rank, s["endpoint"], s["replay_endpoint"]) for rank, s in sources.items()] == [
        ("0", events[0], replay[0]),
        ("1", events[1], replay[1]),
    ]


async def replayed(context: zmq.asyncio.Context, address: str) -> list:
    batches = []
    with context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        await socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while (frames := await socket.recv_multipart())[2] != b"\xff" * 8:
            batches.append(msgspec.msgpack.decode(frames[3]))
    return batches


async def test_the_metrics_page_has_one_series_for_each_rank(two):
    await ask(two.url, "1")
    async with aiohttp.ClientSession() as session, session.get(f"{two.url}/metrics") as answer:
        families = {f.name: f for f in text_string_to_metric_families(await answer.text())}
    prompts = {s.labels["engine"]: s.value for s in families["vllm:prompt_tokens"].samples}
    assert prompts == {"0": 0.0, "1": 100.0}
    assert {s.labels["engine"] for s in families["vllm:cache_config_info"].samples} == {"0", "1"}


def test_ranks_need_addresses_with_ports(start):
    with pytest.raises(AssertionError, match="need addresses tcp://IP:PORT"):
        start("--data-parallel-size", "2", "--events", "ipc:///tmp/x", "--replay", "ipc:///tmp/y")
