"""The truth: what the index predicts is what vLLM did."""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest

from perilune_gateway.model import Tier
from perilune_gateway.model.kv_events import BlockRemoved, BlockStored
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import EngineBlocks, salt_of
from perilune_gateway.state.prefix_index import PrefixIndex

BLOCK_SIZE = 32
ENGINE = "10.0.0.1:8000"


def engine_blocks(store: bool = True) -> tuple[EngineBlocks, PrefixIndex]:
    index = PrefixIndex(100_000, 5.0)
    return EngineBlocks(index, BLOCK_SIZE, store=store), index


@pytest.mark.parametrize("name", ["main", "H", "T"])
def test_recomputed_hashes_equal_the_announced_ones(captures, name):
    """vLLM's digests from token ids, chained over our own digests, for every block on the GPU; then each
    `cpu` block is one of them."""
    capture = captures[name]
    digests: dict[int, bytes] = {}
    on_gpu = in_store = 0
    for event in capture.events:
        if not isinstance(event, BlockStored):
            continue
        if event.medium == "cpu":
            in_store += sum(block in digests for block in event.block_hashes)
            assert set(event.block_hashes) <= digests.keys()
            continue
        parent = None if event.parent_block_hash is None else digests[event.parent_block_hash]
        ours = list(
            blocks.vllm_chain(
                event.token_ids, event.block_size, capture.hashing, salt=salt_of(event), parent=parent
            )
        )
        assert tuple(map(blocks.low64, ours)) == event.block_hashes
        digests.update(zip(event.block_hashes, ours, strict=True))
        on_gpu += len(ours)
    assert (on_gpu, in_store) == {"main": (950, 0), "H": (474, 407), "T": (467, 0)}[name]


@pytest.mark.parametrize("name", ["main", "H", "T"])
def test_every_event_is_understood(captures, name):
    engine, _ = engine_blocks()
    for event in captures[name].events:
        applied = engine.apply(ENGINE, event, 0.0)
        if isinstance(event, BlockStored):
            assert len(applied.stored) == len(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert applied.removed == len(event.block_hashes)
        else:
            assert applied.cleared
    assert not engine.unused


@dataclass
class Prediction:
    request: dict[str, Any]
    tokens: int
    burst: bool


def predictions(capture) -> list[Prediction]:
    """Each request's cached tokens, predicted from the events before its first own GPU store.

    A request's own blocks are those of its prompt and its output but the last token (never computed).
    Requests outside bursts come one after the other, and so do their stores; one whose blocks are all cached
    stores nothing. Within a burst the order is unknown; its stores end where the first foreign one begins.
    """
    events = capture.events
    surveyor, _ = engine_blocks()
    surveyed = [surveyor.apply(ENGINE, event, 0.0) for event in events]
    stored = [set(a.stored) if a.tier is Tier.DEVICE else set() for a in surveyed]
    engine, index = engine_blocks()
    applied = at = 0
    found: list[Prediction] = []
    singles = iter(range(len(capture.requests)))
    for _, group in groupby(
        capture.requests, lambda r: r["tag"] if r["tag"].startswith("burst") else next(singles)
    ):
        requests = list(group)
        chains = [chain_of(request) for request in requests]
        end = at
        while end < len(events) and (not stored[end] or any(stored[end] <= set(c) for c in chains)):
            end += 1
        starts = []
        last = at
        for request, own in zip(requests, chains, strict=True):
            mine = [i for i in range(at, end) if stored[i] and stored[i] <= set(own)]
            starts.append((mine[0] if mine else at, request, own))
            done = [i for i in mine if surveyed[i].stored[-1] == own[-1]]
            last = max(last, done[0] + 1 if done else end if mine else at)
        for start, request, own in sorted(starts, key=lambda s: s[0]):
            while applied < start:
                engine.apply(ENGINE, events[applied], 0.0)
                applied += 1
            held = index.find_matches(own, 0.0).device.get(ENGINE, 0)
            whole = (len(request["prompt_token_ids"]) - 1) // BLOCK_SIZE
            found.append(Prediction(request, min(held, whole) * BLOCK_SIZE, len(requests) > 1))
        at = last
    return found


def chain_of(request) -> list[int]:
    tokens = (request["prompt_token_ids"] + request["output_token_ids"])[:-1]
    return blocks.chain(tokens, BLOCK_SIZE, blocks.prefix_root("", request["cache_salt"] or ""))


def verdicts(found: list[Prediction]) -> Counter:
    words = {True: "above", False: "below"}
    return Counter(
        "equal" if p.tokens == p.request["cached_tokens"] else words[p.tokens > p.request["cached_tokens"]]
        for p in found
    )


def test_the_index_predicts_what_vllm_had_cached(captures):
    found = predictions(captures["main"])
    assert len(found) == 170
    assert verdicts([p for p in found if not p.burst]) == {"equal": 122}
    assert verdicts([p for p in found if p.burst])["below"] == 0


@pytest.mark.parametrize("name", ["H", "T"])
def test_with_a_store_pool_the_index_never_promises_too_much(captures, name):
    """Below is right: blocks that came from the pool are not announced before the request."""
    outside = [p for p in predictions(captures[name]) if not p.burst]
    assert len(outside) == 67
    assert verdicts(outside)["above"] == 0


def test_the_store_holds_what_h_put_there(captures):
    """A third endpoint that has nothing reaches what the pool holds."""
    engine, index = engine_blocks()
    for event in captures["H"].events:
        engine.apply(ENGINE, event, 0.0)
    longest = max((chain_of(r) for r in captures["H"].requests), key=len)
    matches = index.find_matches(longest, 0.0)
    assert matches.store > 10
    assert matches.of("10.0.0.3:8000") == (0, 0, matches.store)


def test_a_pool_without_store_does_not_believe_in_one(captures):
    engine, index = engine_blocks(store=False)
    for event in captures["H"].events:
        engine.apply(ENGINE, event, 0.0)
    assert sum(engine.unused.values()) == 407
    assert index.stats(0.0).store == 0
