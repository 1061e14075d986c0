"""Events of mad engines: whatever arrives, decoding raises ProtocolError or nothing, and what was decoded can
be applied: to the index, to the comparison of hashes, to the router's listeners."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from perilune_api.pool import Hashing
from perilune_gateway.feeds.kv_events import Batch, decode
from perilune_gateway.feeds.pool_events import EventSink
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.applied import Applied
from perilune_gateway.state.block_tokens import BlockTokens
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.parity import ParityCheck
from perilune_gateway.state.prefix_index import PrefixIndex

encode = msgspec.msgpack.Encoder().encode
BLOCK = 4


class Listener:
    def __init__(self) -> None:
        self.heard: list[Applied] = []

    def on_applied(self, applied: Applied) -> None:
        self.heard.append(applied)

    def on_learning(self, endpoint: str, learning: bool) -> None:
        pass


def take(*payloads: bytes) -> list[Batch]:
    """Decode and apply; what is no batch is left out."""
    index = PrefixIndex(1_000, 30.0)
    blocks = EngineBlocks(index, BLOCK, store=True, max_names=2_000)
    sink = EventSink(blocks, ParityCheck(Hashing(), BLOCK), Listener(), lambda: 1.0, BlockTokens(BLOCK))
    batches = []
    for payload in payloads:
        try:
            batches.append(decode(payload))
        except ProtocolError:
            continue
        sink.batch("a", batches[-1].rank or 0, batches[-1], 0.0)
    for number in (0, 1, 2**62):
        index.find_matches((number,), 2.0)
    return batches


# values where one of them is expected

numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 20)
odd: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5) | st.binary(max_size=40)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=6)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
hashes = st.integers(0, 30) | st.binary(min_size=1, max_size=33) | numbers
token = st.integers(0, 9) | numbers


@st.composite
def stored(draw: st.DrawFn) -> dict[str, Any]:
    """Nearly right: as many tokens as the blocks need, mostly."""
    count, surplus = draw(st.integers(0, 4)), draw(st.integers(0, 1))
    return {
        "type": "BlockStored",
        "block_hashes": draw(st.lists(hashes, min_size=count, max_size=count)),
        "parent_block_hash": draw(st.none() | hashes),
        "token_ids": draw(st.lists(token, min_size=count * BLOCK, max_size=count * BLOCK + surplus)),
        "block_size": draw(st.just(BLOCK) | numbers),
        "lora_id": draw(st.none() | numbers),
        "medium": draw(st.sampled_from([None, "GPU", "CPU", "cpu", "", "DISK", "\x00"])),
        "lora_name": draw(st.none() | st.text(max_size=3)),
        "extra_keys": draw(st.none() | st.lists(st.none() | odd, max_size=5)),
        "group_idx": draw(st.none() | st.just(0) | numbers),
        "session_id": draw(st.none() | st.text(max_size=3)),
    }


removed = st.fixed_dictionaries(
    {
        "type": st.just("BlockRemoved"),
        "block_hashes": st.lists(hashes, max_size=5),
        "medium": st.sampled_from([None, "GPU", "CPU", "cpu", "x"]),
    }
)
cleared = st.just({"type": "AllBlocksCleared"})
other = st.fixed_dictionaries({"type": st.text(max_size=5) | odd, "x": odd})
events = st.one_of(stored(), stored(), removed, cleared, other, odd)
batches = st.tuples(st.floats(), st.lists(events, max_size=4), st.none() | numbers)


@settings(max_examples=examples(50))
@given(st.lists(batches, max_size=4))
def test_nearly_right_batches_are_applied_or_refused(values: list[Any]) -> None:
    take(*map(encode, values))


@settings(max_examples=examples(50))
@given(st.data())
def test_captured_batches_with_bytes_changed(captures: Any, data: st.DataObject) -> None:
    """A real engine's, 32 tokens a block."""
    message = data.draw(st.sampled_from(captures["main"].messages))
    payload = bytearray(message[-1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "drop"])):
            case "set":
                payload[at] = data.draw(st.integers(0, 255))
            case "cut":
                del payload[max(at, 1) :]
            case "insert":
                payload[at:at] = data.draw(st.binary(max_size=8))
            case "drop":
                del payload[at : at + data.draw(st.integers(1, 9))]
        payload = payload or bytearray(b"\x90")
    take(bytes(payload))


BEGIN = b"\x92" + encode(1.0) + b"\x91"
"""Of a batch with one event."""
DEEP = b"\x91" * 100_000 + b"\xc0"


def with_extra_keys(keys: bytes) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": BLOCK}
    fields = encode(event)
    more = bytes([fields[0] + 1]) + fields[1:] + encode("extra_keys") + keys
    return BEGIN + more


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(DEEP, id="deep itself"),
        pytest.param(with_extra_keys(b"\x91" + DEEP), id="deep in a field"),
        pytest.param(BEGIN + b"\x92" + encode("Later") + DEEP, id="deep in an unknown event"),
        pytest.param(BEGIN + DEEP, id="deep instead of an event"),
    ],
)
def test_nesting_without_end_is_a_malformed_message(payload: bytes) -> None:
    """Found by nesting: it raised RecursionError, which would have ended the gateway."""
    with pytest.raises(ProtocolError):
        decode(payload)


@pytest.mark.parametrize(("depth", "events"), [(3, 1), (13, 1), (40, 0), (900, 0)])
def test_only_nesting_that_can_be_hashed_is_applied(depth: int, events: int) -> None:
    """Found by nesting: pickling keys 900 deep raised RecursionError."""
    (batch,) = take(with_extra_keys(b"\x91" + b"\x91" * depth + b"\xc0"))
    assert (len(batch.events), batch.malformed) == (events, 1 - events)


def test_random_bytes() -> None:
    rng = random.Random(7)
    take(*(rng.randbytes(rng.randrange(80)) for _ in range(2_000)))
