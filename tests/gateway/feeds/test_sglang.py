"""Engines of SGLang: KV events, in payloads that its own classes made, metrics, arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from perilune_api.pool import Hashing, Selector
from perilune_gateway.feeds import engine_metrics, kv_events
from perilune_gateway.feeds.engine_words import read_config
from perilune_gateway.feeds.selected_pods import Published, published
from perilune_gateway.model.kv_events import BlockStored, Event
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.parity import Parity, ParityCheck
from perilune_gateway.state.prefix_index import PrefixIndex

FILE = Path(__file__).parents[2] / "fixtures" / "sglang-kv-events" / "batches.jsonl"
PAGE = 16
E = "10.0.0.1:30000"
METRICS = b"""\
sglang:num_running_reqs{model_name="m",dp_rank="0"} 3.0
sglang:num_running_reqs{model_name="m",dp_rank="1"} 1.0
sglang:num_queue_reqs{model_name="m",dp_rank="0"} 2.0
sglang:token_usage{model_name="m",dp_rank="0"} 0.5
sglang:token_usage{model_name="m",dp_rank="1"} 0.3
sglang:page_size{model_name="m",dp_rank="0"} 64.0
sglang:page_size{model_name="m",dp_rank="1"} 64.0
sglang:num_pages{model_name="m",dp_rank="0"} 100.0
sglang:num_pages{model_name="m",dp_rank="1"} 100.0
sglang:prompt_tokens_total{model_name="m",is_streaming="true"} 1000.0
sglang:prompt_tokens_total{model_name="m",is_streaming="false"} 500.0
sglang:cached_tokens_total{model_name="m",cache_source="device"} 600.0
"""


def batches() -> list[tuple[Event, ...]]:
    payloads = (bytes.fromhex(json.loads(line)["payload"]) for line in FILE.read_text().splitlines())
    decoded = [kv_events.decode(payload) for payload in payloads]
    assert [(batch.malformed, batch.unknown) for batch in decoded] == [(0, 0)] * len(decoded)
    return [batch.events for batch in decoded]


class Cache:
    """What the gateway knows of one engine."""

    def __init__(self) -> None:
        self.index = PrefixIndex(1000, 10.0)
        self.blocks = EngineBlocks(self.index, PAGE, store=False)

    def apply(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.blocks.apply(E, event, 0.0)

    def pages(self, tokens: list[int], salt: str = "") -> int:
        """Return how many leading pages of a prompt are known on the device."""
        names = blocks.chain(tokens, PAGE, blocks.prefix_root("", salt))
        return self.index.find_matches(names, 0.0).device.get(E, 0)


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_pages_are_blocks_of_the_tokens_that_the_events_have() -> None:
    first, second, *_ = batches()
    (stored,) = first
    assert isinstance(stored, BlockStored)
    assert (stored.block_size, len(stored.block_hashes), stored.parent_block_hash) == (PAGE, 3, None)
    assert list(stored.token_ids) == tokens(1000, 48)
    assert isinstance(second[0], BlockStored)
    assert second[0].parent_block_hash == stored.block_hashes[-1]
    assert second[0].session_id == "s"


def test_what_it_caches_is_known() -> None:
    cache, (first, second, pairs, rest) = Cache(), batches()
    prompt = tokens(1000, 48) + tokens(2000, 16)
    cache.apply(first)
    assert cache.pages(prompt) == 3
    cache.apply(second[:1])
    assert cache.pages(prompt) == 4
    cache.apply(second[1:])
    assert cache.pages(prompt) == 2
    cache.apply(pairs)
    assert cache.pages(tokens(3000, 32)) == 2
    on_host, salted, cleared = rest
    cache.apply((on_host,))
    assert cache.index.leading_offloaded(E, blocks.chain(prompt, PAGE, 0)) == 1
    cache.apply((salted,))
    assert cache.pages(tokens(1000, 16), "tenant-a") == 1
    assert cache.pages(tokens(1000, 16), "tenant-b") == 0
    cache.apply((cleared,))
    assert cache.pages(prompt) == 0


def test_of_pairs_of_tokens_the_first_ones_are_taken() -> None:
    (stored,) = batches()[2]
    assert isinstance(stored, BlockStored)
    assert list(stored.token_ids) == tokens(3000, 32)
    assert len(stored.block_hashes) == 2


def test_its_hashes_are_recognised_and_no_difference_is_reported() -> None:
    check = ParityCheck(Hashing(), PAGE)
    (stored,) = batches()[0]
    assert isinstance(stored, BlockStored)
    assert check.observe(E, stored) is Parity.OK
    assert check.report(E).cause == ""


def test_its_metrics_are_read() -> None:
    found = engine_metrics.parse(METRICS)
    assert (found.running, found.waiting, found.kv_usage) == (4, 2, 0.4)
    assert (found.block_size, found.gpu_blocks) == (64, 200)
    assert (found.prefix_queries_tokens, found.prefix_hits_tokens) == (1500.0, 600.0)
    told = read_config(METRICS)
    assert (told.has_metrics, told.block_size, told.kv_tokens) == (True, 64, 12_800)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        pytest.param(
            "python -m sglang.launch_server --page-size 16 --kv-events-config"
            ' \'{"publisher": "zmq", "topic": "kv-events", "replay_endpoint": "tcp://*:5558"}\'',
            Published(port=5557, replay_port=5558),
            id="published",
        ),
        pytest.param(
            'sglang serve m --kv-events-config \'{"publisher": "zmq"}\'', Published(), id="pages of one token"
        ),
        pytest.param("sglang serve m --page-size=64 --kv-events-config '{}'", Published(), id="no publisher"),
    ],
)
def test_where_a_pod_of_it_publishes_its_events(line: str, told: Published) -> None:
    pod: dict[str, Any] = {
        "metadata": {},
        "spec": {"containers": [{"command": ["sh", "-c"], "args": [line]}]},
    }
    assert published(pod, Selector(labels={"app": "sglang"})) == told
