"""The simulated engine against what a real vLLM 0.32 announced and answered for the same requests.

What cannot be equal: inside bursts, how concurrent requests' events fall into batches and in which order
they come depends on arrival times that were not recorded. Each burst is replayed one request after the
other, in the recorded order of completion; its hashes are compared as sets, and everything outside bursts
byte by byte.
"""

import asyncio
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from stepped_engine import SteppedEngine
from vllm_captures import Message, namespace_of, read_messages, read_requests, replay
from waiting import HANG

from perilune_lab.engine.events import END_OF_REPLAY, Publisher, to_event
from perilune_lab.engine.hashing import Algorithm, BlockHasher, low64
from perilune_lab.engine.kv_cache import Medium, Stored
from perilune_lab.engine.scheduler import Limits
from perilune_lab.engine.store import FileStore

CAPTURES = Path(__file__).parents[2] / "fixtures" / "vllm-kv-events"
BLOCK = 32
BLOCKS = 160
RECORDED_MESSAGES = 269
"""Messages that belong to the recorded requests; what follows in the file was caused by unrecorded ones."""

# (first request, end, first message, end) of what ran one request at a time; the rest are the bursts.
SEQUENTIAL = [(0, 45, 0, 69), (77, 144, 107, 224), (144, 160, 224, 249), (160, 170, 249, 269)]


def replay_all(requests, engine):
    """Per request: (cached tokens, its batches). The cache is reset where the recording reset it."""
    outcomes = []
    for before, recorded in pairwise([{"tag": ""}, *requests]):
        if recorded["tag"] == "after-reset" != before["tag"]:
            assert engine.cache.reset()
        request, steps = replay(engine, recorded)
        outcomes.append((request.cached_tokens, [step.changes for step in steps if step.changes]))
    return outcomes


@pytest.fixture(scope="module")
def main_run():
    messages = read_messages(CAPTURES / "kv_events_capture.bin")[:RECORDED_MESSAGES]
    requests = read_requests(CAPTURES / "kv_events_requests.jsonl")
    engine = SteppedEngine(blocks=BLOCKS, block_size=BLOCK, algorithm=Algorithm.SHA256_CBOR)
    return messages, requests, replay_all(requests, engine)


def encoded_as(message: Message, changes) -> bytes:
    """Our batch with the recorded time and rank."""
    ts, _, rank = message.batch
    return msgspec.msgpack.encode((ts, [to_event(change, BLOCK) for change in changes], rank))


def test_cached_tokens_equal_vllms_in_every_request(main_run):
    _, requests, outcomes = main_run
    assert len(requests) == 170
    assert [cached for cached, _ in outcomes] == [r["cached_tokens"] for r in requests]


def test_batches_outside_bursts_equal_vllms_byte_by_byte(main_run):
    messages, _, outcomes = main_run
    different, compared = [], 0
    for first, end, first_message, end_message in SEQUENTIAL:
        ours = [changes for _, batches in outcomes[first:end] for changes in batches]
        theirs = messages[first_message:end_message]
        assert len(ours) == len(theirs)
        compared += len(ours)
        different += [m.seq for m, c in zip(theirs, ours, strict=True) if encoded_as(m, c) != m.payload]
    assert compared == 231
    # The first eviction after the bursts: how many half-full blocks lie at the head of the free queue depends
    # on how the burst's requests overlapped, so it removes two blocks more than vLLM did.
    assert different == [107]


def test_every_gpu_store_and_every_removal_equals_vllms(main_run):
    messages, _, outcomes = main_run
    theirs = [event for message in messages for event in message.events]
    ours = [to_event(change, BLOCK) for _, batches in outcomes for changes in batches for change in changes]
    for kind, n in (("BlockStored", 478 - 215), ("BlockRemoved", 323)):
        recorded = Counter(h for event in theirs if event["type"] == kind for h in event["block_hashes"])
        announced = Counter(h for event in ours if type(event).__name__ == kind for h in event.block_hashes)
        assert announced == recorded
        assert sum(event["type"] == kind for event in theirs) == n


def test_removals_come_in_vllms_order(main_run):
    messages, _, outcomes = main_run
    theirs = [e["block_hashes"] for m in messages for e in m.events if e["type"] == "BlockRemoved"]
    ours = [to_event(change, BLOCK) for _, batches in outcomes for changes in batches for change in changes]
    assert [event.block_hashes for event in ours if type(event).__name__ == "BlockRemoved"] == theirs


@pytest.mark.parametrize(
    ("files", "algorithm"),
    [
        pytest.param(("capture", "requests"), Algorithm.SHA256_CBOR, id="sha256_cbor with salts"),
        pytest.param(("capture_mooncake_H", "requests_mooncake_H"), Algorithm.SHA256, id="sha256 H"),
        pytest.param(("capture_mooncake_T", "requests_mooncake_T"), Algorithm.SHA256, id="sha256 T"),
    ],
)
def test_every_announced_hash_is_recomputed_from_tokens(files, algorithm):
    hasher = BlockHasher(algorithm, BLOCK)
    ours = set()
    for recorded in read_requests(CAPTURES / f"kv_events_{files[1]}.jsonl"):
        tokens = recorded["prompt_token_ids"] + recorded["output_token_ids"]
        ours |= {low64(digest) for digest in hasher.chain(tokens, namespace_of(recorded))}
    messages = read_messages(CAPTURES / f"kv_events_{files[0]}.bin")
    if files[0] == "capture":
        messages = messages[:RECORDED_MESSAGES]
    announced = {
        h for m in messages for e in m.events if e["type"] == "BlockStored" for h in e["block_hashes"]
    }
    assert announced <= ours
    assert len(announced) > 400


def test_chains_of_unrecorded_requests_follow_from_their_events():
    """The other 259 messages carry tokens and parents: enough to recompute each hash."""
    hasher = BlockHasher(Algorithm.SHA256_CBOR, BLOCK)
    digests: dict[int, bytes] = {}
    checked = 0
    for message in read_messages(CAPTURES / "kv_events_capture.bin"):
        for event in message.events:
            if event["type"] != "BlockStored":
                continue
            parent = event["parent_block_hash"]
            digest = hasher.root if parent is None else digests[parent]
            for i, announced in enumerate(event["block_hashes"]):
                salt = event["extra_keys"][i]
                keys = (("cache_salt", *salt),) if salt else ()
                digest = hasher.block(digest, event["token_ids"][i * BLOCK : (i + 1) * BLOCK], keys)
                assert low64(digest) == announced
                digests[announced] = digest
                checked += 1
    assert checked == 950


def test_engines_on_one_store_pool_answer_and_announce_as_vllm_with_mooncake(tmp_path):
    """H ran with an empty pool, T on the same pool with the same prompts, without `save_decode_cache`."""
    stores = []
    for name in ("H", "T"):
        store, limits = FileStore(tmp_path / "pool", 10**6), Limits(stores_answers=False)
        engine = SteppedEngine(blocks=BLOCKS, block_size=BLOCK, store=store, limits=limits)
        requests = read_requests(CAPTURES / f"kv_events_requests_mooncake_{name}.jsonl")
        outcomes = replay_all(requests, engine)
        assert [cached for cached, _ in outcomes] == [r["cached_tokens"] for r in requests]
        events = [
            e for m in read_messages(CAPTURES / f"kv_events_capture_mooncake_{name}.bin") for e in m.events
        ]
        stored = [c for _, batches in outcomes for changes in batches for c in changes if type(c) is Stored]
        for shared, medium in ((False, "GPU"), (True, "cpu")):
            ours = {
                low64(digest)
                for change in stored
                if (change.medium is Medium.SHARED) is shared
                for digest in change.digests
            }
            theirs = {h for e in stores_of(events, medium) for h in e["block_hashes"]}
            assert ours == theirs
        shared = [c for c in stored if c.medium is Medium.SHARED]
        stores.append(len(shared))
        by_hash = {e["block_hashes"][0]: e for e in stores_of(events, "cpu")}
        for change in shared:
            event = msgspec.to_builtins(to_event(change, BLOCK))
            assert event == by_hash[low64(change.digests[0])]
            assert list(event) == list(by_hash[low64(change.digests[0])])
    assert stores == [407, 0]  # what the pool holds already is announced by nobody


def stores_of(events, medium):
    return [e for e in events if e["type"] == "BlockStored" and e["medium"] == medium]


def test_field_names_and_their_order_are_vllms(main_run):
    messages, _, outcomes = main_run
    theirs = {tuple(event) for message in messages for event in message.events}
    ours = {
        tuple(msgspec.to_builtins(to_event(change, BLOCK)))
        for _, batches in outcomes
        for changes in batches
        for change in changes
    }
    assert ours == theirs
    assert len(ours) == 4  # stored, stored with a session, removed, cleared


async def test_live_and_replayed_frames_equal_the_recorded_ones(main_run):
    """Publishes the sequential part at the recorded times and asks for a replay."""
    messages, _, outcomes = main_run
    batches = [changes for _, batches in outcomes[0:45] for changes in batches]
    recorded = messages[: len(batches)]
    times = iter([message.batch[0] for message in recorded])
    publisher = Publisher(
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:*",
        recorded[0].frames[0].decode(),
        BLOCK,
        buffer_steps=1000,
        clock=lambda: next(times),
    )
    context = zmq.asyncio.Context()
    live, replay_socket = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    serving = asyncio.create_task(publisher.serve_replay())
    try:
        live.connect(publisher.events)
        live.subscribe(b"kv@")
        for changes in batches:
            publisher.publish(changes)
        first = 40
        replay_socket.connect(publisher.replay)
        await replay_socket.send_multipart([b"", first.to_bytes(8, "big")])
        answers = []
        while not answers or tuple(answers[-1]) != END_OF_REPLAY:
            answers.append(await asyncio.wait_for(replay_socket.recv_multipart(), HANG))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        live.close(linger=0)
        replay_socket.close(linger=0)
        context.term()
        publisher.close()
    assert [tuple(answer) for answer in answers[:-1]] == [(b"", *m.frames) for m in recorded[first:]]
    theirs = read_messages(CAPTURES / "kv_events_replay_capture.bin")
    assert [len(frame) for frame in answers[-1]] == [len(frame) for frame in theirs[-1].frames]
    assert tuple(answers[-1]) == theirs[-1].frames
