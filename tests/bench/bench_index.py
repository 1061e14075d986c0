"""The prefix index against one set of blocks per endpoint; also `python tests/bench/bench_index.py`.

A fleet of 64 endpoints, prompts of 2,100 blocks whose head everybody shares; each endpoint holds a part.
Prints microseconds and ratios of the same run, so that a slow machine does not matter.
"""

import gc
import random
import tracemalloc
from statistics import median
from time import perf_counter

import pytest

from perilune_gateway import blocks
from perilune_gateway.feeds.kv_events import BlockRemoved, BlockStored
from perilune_gateway.model import Tier
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.prefix_index import PrefixIndex

ENDPOINTS = [f"10.0.0.{n}:8000" for n in range(64)]
BLOCKS = 2_100
BLOCK_SIZE = 16
ROUNDS = 30


def naive(sets: dict[str, set[int]], prompt: list[int]) -> dict[str, int]:
    """Leading blocks by endpoint, one endpoint after the other."""
    found = {}
    for endpoint, held in sets.items():
        n = 0
        for block in prompt:
            if block not in held:
                break
            n += 1
        if n:
            found[endpoint] = n
    return found


def us(work, rounds: int = ROUNDS) -> float:
    """Median microseconds of one call."""
    times = []
    for _ in range(rounds):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return median(times) * 1e6


def find(title: str, prompt: list[int], lengths: list[int]) -> None:
    index = PrefixIndex(1_000_000, 10.0)
    sets = {endpoint: set(prompt[:n]) for endpoint, n in zip(ENDPOINTS, lengths, strict=True)}
    for endpoint, n in zip(ENDPOINTS, lengths, strict=True):
        index.stored(endpoint, Tier.DEVICE, prompt[:n], 0.0)
    assert index.find_matches(prompt, 0.0).device == naive(sets, prompt)
    ours, theirs = us(lambda: index.find_matches(prompt, 0.0)), us(lambda: naive(sets, prompt), 3)
    print(f"find, {title}: {ours:.0f} µs, one set per endpoint {theirs:.0f} µs, ratio {theirs / ours:.0f}")


@pytest.mark.bench
def test_index() -> None:
    dice = random.Random(1)
    tokens = [dice.randrange(150_000) for _ in range(BLOCKS * BLOCK_SIZE)]
    prompt = blocks.chain(tokens, BLOCK_SIZE, 0)
    hashing = us(lambda: blocks.chain(tokens, BLOCK_SIZE, 0))
    print(f"hash {BLOCKS} blocks of {BLOCK_SIZE} tokens: {hashing:.0f} µs")

    find("everybody holds all", prompt, [BLOCKS] * 64)
    find("each holds another part", prompt, [BLOCKS * (n + 1) // 64 for n in range(64)])
    find("one holds all, the others a tenth", prompt, [BLOCKS] + [BLOCKS // 10] * 63)
    find("nobody holds anything", prompt, [0] * 64)

    index = PrefixIndex(1_000_000, 10.0)
    fresh = iter([blocks.chain([n, *tokens[16:]], BLOCK_SIZE, n) for n in range(ROUNDS)])
    print(f"speculate, {BLOCKS - 1} new blocks: {us(lambda: index.speculate('a', next(fresh), 0.0)):.0f} µs")
    index = PrefixIndex(1_000_000, 10.0)
    index.stored("a", Tier.DEVICE, prompt, 0.0)
    print(f"speculate, all cached: {us(lambda: index.speculate('a', prompt, 0.0)):.0f} µs")
    matches = index.find_matches(prompt, 0.0)
    print(f"record a match: {us(lambda: index.record_match(prompt, matches, 0.0)):.1f} µs")

    index = PrefixIndex(1_000_000, 10.0)
    names = EngineBlocks(index, BLOCK_SIZE, store=False)
    numbers = iter(range(10**9))

    def event() -> BlockStored:
        n = next(numbers)
        hashes = tuple(range(n * 10_000, n * 10_000 + 100))
        return BlockStored(hashes, None, (n, *tokens[:1_599]), BLOCK_SIZE, medium="GPU")

    stores = [event() for _ in range(200)]
    started = perf_counter()
    for e in stores:
        names.apply("a", e, 0.0)
    spent = perf_counter() - started
    print(f"apply stores of 100 blocks: {20_000 / spent:,.0f} blocks/s")
    started = perf_counter()
    for e in stores:
        names.apply("a", BlockRemoved(e.block_hashes, "GPU"), 0.0)
    print(f"apply removals of 100 blocks: {20_000 / (perf_counter() - started):,.0f} blocks/s")

    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(1_000_000, 10.0)
    held = 100_000
    for n in range(held // 100):
        chain = blocks.chain([n, *tokens[:1_599]], BLOCK_SIZE, n)
        for endpoint in ENDPOINTS[n % 64 : n % 64 + 2]:
            index.stored(endpoint, Tier.DEVICE, chain, float(n))
    print(f"memory: {tracemalloc.get_traced_memory()[0] / held:.0f} bytes a block held by two endpoints")


if __name__ == "__main__":
    test_index()
