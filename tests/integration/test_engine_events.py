"""A simulated engine's events over real sockets: hashes agree, and the index predicts its cache hits."""

import asyncio
import os
import random
import sys
import time

import aiohttp
import pytest
from waiting import HANG

from perilune_api.pool import HashAlgorithm, Hashing
from perilune_gateway.feeds import kv_feed, zmq_sockets
from perilune_gateway.feeds.kv_rank import Counters, Publisher, ResetCause, Shared
from perilune_gateway.model.kv_events import BlockStored
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.parity import Parity, ParityCheck
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_lab.processes import child

ENGINE = "engine"
SIZE = 16


class Sink:
    """What a gateway does with events, and a way to wait for them."""

    def __init__(self, hashing: Hashing) -> None:
        self.index = PrefixIndex(100_000, 5.0)
        self.blocks = EngineBlocks(self.index, SIZE, store=False)
        self.parity = ParityCheck(hashing, SIZE, lora_paths={"adapter": "/models/adapter"}, first=10_000)
        self.removed = 0
        self.resets: list[ResetCause] = []
        self._changed = asyncio.Event()

    def batch(self, endpoint, rank, batch, lag_s) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.parity.observe(endpoint, event)
            self.removed += self.blocks.apply(endpoint, event, 0.0).removed
        self._changed.set()

    def reset(self, endpoint, rank, cause) -> None:
        self.resets.append(cause)

    async def announced(self, block: int) -> None:
        async with asyncio.timeout(HANG):
            while not self.index.announced(ENGINE, block):
                self._changed.clear()
                await self._changed.wait()


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(a, marks=[pytest.mark.heavy] * (a is not Hashing().algorithm)) for a in HashAlgorithm],
)
async def test_predicted_hits_equal_the_engines(algorithm, tmp_path):
    """Conversations that outgrow its cache, plain, salted and with an adapter, one after the other."""
    hashing = Hashing(algorithm, "7")
    command = (
        *(sys.executable, "-P", "-m", "perilune_lab.engine.main", "--listen", "127.0.0.1:0"),
        *("--time-scale", "200", "--kv-tokens", "3200", "--block-size", str(SIZE)),
        *("--lora", "adapter=/models/adapter", "--hash-algorithm", algorithm, "--hash-seed", "7"),
    )
    engine = await child.start("engine", command, os.environ, tmp_path)
    context = zmq_sockets.new_context()
    sink, counters = Sink(hashing), Counters()
    feed = None
    try:
        said = await engine.until_ready(HANG)
        publisher = Publisher(ENGINE, 0, said["events"], said["replay"])
        shared = Shared(context=context, clock=time.time, rng=random.Random(1), replay_timeout_s=10.0)
        feed = asyncio.create_task(kv_feed.run(publisher, sink, shared, counters))
        dice = random.Random(1)
        kinds = [("sim-30b", ""), ("sim-30b", "salt"), ("adapter", ""), ("adapter", "salt")]
        talks = [(kinds[n % 4], [dice.randrange(300) for _ in range(200)]) for n in range(12)]
        predicted, cached = [], []
        async with aiohttp.ClientSession(f"http://{said['http']}") as http:
            for _ in range(60):
                (model, salt), talk = dice.choice(talks)
                talk += [dice.randrange(300) for _ in range(100)]
                root = blocks.prefix_root("adapter" if model == "adapter" else "", salt)
                chain = blocks.chain(talk, SIZE, root)
                held = sink.index.find_matches(chain, 0.0).device.get(ENGINE, 0)
                predicted.append(min(held, (len(talk) - 1) // SIZE) * SIZE)
                body = {"model": model, "prompt": talk, "max_tokens": 1, "cache_salt": salt or None}
                async with http.post("/v1/completions", json=body) as answer:
                    usage = (await answer.json())["usage"]
                cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
                await sink.announced(chain[-1])
        assert predicted == cached
        assert any(cached)
        assert sink.removed > 0, "nothing was evicted: the case is too easy"
        assert sink.parity.report(ENGINE).parity is Parity.OK
        assert not sink.blocks.unused
        assert (counters.gaps, sink.resets) == (0, [])
    finally:
        if feed:
            feed.cancel()
            await asyncio.gather(feed, return_exceptions=True)
        context.destroy(linger=0)
        await engine.stop(HANG)
