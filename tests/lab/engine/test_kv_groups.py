"""Hybrid models: the simulated engine's cache does what vLLM's KVCacheManager did, operation by operation."""

import gzip
from pathlib import Path

import msgspec
import pytest

from perilune_lab.engine.events import to_event
from perilune_lab.engine.hashing import Algorithm, BlockHasher
from perilune_lab.engine.kv_cache import Group, KvCache, Table

RECORDED = Path(__file__).parents[2] / "fixtures" / "vllm-kv-groups" / "groups.json.gz"
DOCUMENT = msgspec.json.decode(gzip.decompress(RECORDED.read_bytes()))


def events_of(cache: KvCache) -> list[dict[str, object]]:
    """Return what the cache announces, in JSON's types."""
    events = [to_event(change, cache.block_size) for change in cache.take_changes()]
    return msgspec.json.decode(msgspec.json.encode(events))


@pytest.mark.parametrize("name", DOCUMENT["layouts"])
def test_hits_and_events_equal_vllms(name: str):
    layout, size = DOCUMENT["layouts"][name], DOCUMENT["block_size"]
    groups = [Group(window) for window in layout["windows"]]
    hasher = BlockHasher(Algorithm.SHA256_CBOR, size)
    cache = KvCache(hasher, layout["blocks"], groups, reach=DOCUMENT["chunk"])
    running: dict[str, Table] = {}
    for i, operation in enumerate(layout["operations"]):
        request = operation["request"]
        match operation["do"]:
            case "admit" | "refuse" as done:
                table = cache.open(operation["prompt"])
                hits = cache.match(table)
                fits = cache.fits(table, hits, len(table.tokens))
                assert fits == (done == "admit"), f"operation {i}"
                if fits:
                    assert len(hits[0]) * size == operation["cached"], f"operation {i}"
                    cache.attach(table, hits)
                    assert cache.grow(table, operation["upto"])
                    running[request] = table
            case "grow":
                running[request].tokens.extend(operation["new"])
                assert cache.grow(running[request], operation["upto"])
            case "free":
                cache.release(running.pop(request))
        assert events_of(cache) == operation["events"], f"operation {i}"


def test_the_recording_has_hits_evictions_and_refusals_in_every_layout():
    for layout in DOCUMENT["layouts"].values():
        operations = layout["operations"]
        kinds = [event["type"] for operation in operations for event in operation["events"]]
        assert kinds.count("BlockStored") > 50
        assert kinds.count("BlockRemoved") > 50
        assert sum(operation.get("cached", 0) > 0 for operation in operations) > 10
