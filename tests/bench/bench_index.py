"""The prefix index: finding prompts, taking events, memory; also against one set of blocks per endpoint.

A fleet of 64 endpoints, prompts of 2,100 blocks. *Find* is compared with a set per endpoint in the same run,
so that a slow machine does not matter. *Events* are whole batches as engines send them: decoded, named,
hashed, indexed. *Memory* counts everything that a known block needs: the index (dict, runs, hashes) and the
engines' names of it; each block is held by two endpoints.
"""

import gc
import random
import tracemalloc
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time

import bars
import msgspec
import pytest
from bars import Bar

from perilune_gateway.feeds.kv_events import decode
from perilune_gateway.model import Tier
from perilune_gateway.model.kv_events import BlockRemoved, BlockStored
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.prefix_index import PrefixIndex

ENDPOINTS = [f"10.0.0.{n}:8000" for n in range(64)]
BLOCKS = 2_100
BLOCK_SIZE = 16
PER_EVENT = 100
HELD, WORST = 500_000, 156_000
"""Blocks of the measurements of memory; the second just after the last of the index's dicts has grown."""


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


def us(work: Callable[[], object], rounds: int = 30) -> float:
    """Median microseconds of one call."""
    times = []
    for _ in range(rounds):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return median(times) * 1e6


def find(title: str, prompt: list[int], lengths: list[int]) -> str:
    index = PrefixIndex(1_000_000, 10.0)
    sets = {endpoint: set(prompt[:n]) for endpoint, n in zip(ENDPOINTS, lengths, strict=True)}
    for endpoint, n in zip(ENDPOINTS, lengths, strict=True):
        index.stored(endpoint, Tier.DEVICE, prompt[:n], 0.0)
    assert index.find_matches(prompt, 0.0).device == naive(sets, prompt)
    ours, theirs = us(lambda: index.find_matches(prompt, 0.0)), us(lambda: naive(sets, prompt), 3)
    return f"| {title} | {ours:.0f} | {theirs:,.0f} | {theirs / ours:.0f} |"


def batches(dice: random.Random, count: int) -> list[bytes]:
    """Payloads of one event each: prompts of 20 events of PER_EVENT blocks."""
    payloads, parent = [], None
    for n in range(count):
        hashes = [dice.getrandbits(64) for _ in range(PER_EVENT)]
        event = {
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent if n % 20 else None,
            "token_ids": [dice.randrange(150_000) for _ in range(PER_EVENT * BLOCK_SIZE)],
            "block_size": BLOCK_SIZE, "medium": "GPU", "group_idx": 0,
        }  # fmt: skip
        parent = hashes[-1]
        payloads.append(msgspec.msgpack.encode([0.0, [event], 0]))
    return payloads


def per_s(payloads: list[bytes]) -> tuple[float, float]:
    """Return the blocks per second of one core: (stored, removed). It is the best of enough rounds to meet a
    moment in which nobody else needs the CPU's caches and memory."""
    stores, removals = [], []
    for _ in range(20):
        names = EngineBlocks(PrefixIndex(1_000_000, 10.0), BLOCK_SIZE, store=False)
        kept, spent = [], 0.0
        for payload in payloads:
            started = process_time()
            batch = decode(payload)
            for event in batch.events:
                names.apply("a", event, 0.0)
            spent += process_time() - started
            kept += [e.block_hashes for e in batch.events if isinstance(e, BlockStored)]
        stores.append(len(payloads) * PER_EVENT / spent)
        gone = [
            msgspec.msgpack.encode(
                [0.0, [{"type": "BlockRemoved", "block_hashes": h[::-1], "medium": "GPU"}], 0]
            )
            for h in reversed(kept)
        ]
        started = process_time()
        for payload in gone:
            for event in decode(payload).events:
                assert isinstance(event, BlockRemoved)
                names.apply("a", event, 0.0)
        removals.append(len(payloads) * PER_EVENT / (process_time() - started))
    return max(stores), max(removals)


def bytes_per_block(dice: random.Random, held: int) -> float:
    """Blocks held by two endpoints each, as tracemalloc counts; their names are those of one."""
    gc.collect()
    tracemalloc.start()
    names = EngineBlocks(PrefixIndex(10_000_000, 10.0), BLOCK_SIZE, store=False, max_names=20_000_000)
    for n in range(held // (20 * PER_EVENT)):
        for payload in batches(dice, 20):
            for event in decode(payload).events:
                for endpoint in (ENDPOINTS[n % 64], ENDPOINTS[(n + 1) % 64]):
                    names.apply(endpoint, event, 0.0)
        del payload, event
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / held


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_index(request: pytest.FixtureRequest) -> None:
    dice = random.Random(1)
    tokens = [dice.randrange(150_000) for _ in range(BLOCKS * BLOCK_SIZE)]
    prompt = blocks.chain(tokens, BLOCK_SIZE, 0)
    rows = [
        find("all endpoints hold all of it", prompt, [BLOCKS] * 64),
        find(
            "each endpoint holds a part of another length",
            prompt,
            [BLOCKS * (n + 1) // 64 for n in range(64)],
        ),
        find("one endpoint holds all, the others a tenth", prompt, [BLOCKS] + [BLOCKS // 10] * 63),
        find("no endpoint holds any of it", prompt, [0] * 64),
    ]
    index = PrefixIndex(1_000_000, 10.0)
    fresh = iter([blocks.chain([n, *tokens[16:]], BLOCK_SIZE, n) for n in range(30)])
    new = us(lambda: index.speculate("a", next(fresh), 0.0))
    index.stored("a", Tier.DEVICE, prompt, 0.0)
    cached = us(lambda: index.speculate("a", prompt, 0.0))
    stored, removed = per_s(batches(dice, 1_000))
    found = [
        Bar("stored blocks/s/core, decode to index", stored, 500_000, "", least=True),
        Bar(f"bytes per block, index and names, {HELD:,} blocks", bytes_per_block(dice, HELD), 120, "B"),
        Bar(f"the same at worst, {WORST:,} blocks", bytes_per_block(dice, WORST), 120, "B"),
    ]
    table = "\n".join(rows)
    bars.publish(
        request,
        "index",
        f"""## Prefix index

{bars.machine()}. 64 endpoints, prompts of {BLOCKS:,} blocks, {PER_EVENT} blocks of {BLOCK_SIZE} tokens an
event.

{bars.table(found)}

Bytes include block hashes and the engines' names for them; two endpoints hold each block. Removed blocks:
{removed:,.0f}/s. Claiming a new prompt costs {new:.0f} µs, a cached one {cached:.0f} µs.

| lookup of a prompt | µs | one set per endpoint, µs | ratio |
|---|---:|---:|---:|
{table}
""",
    )
