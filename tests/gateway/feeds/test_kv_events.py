"""What engines publish, read: both encodings, recordings of real engines, and whatever else comes."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.feeds.kv_events import decode, live_frames, pieces, replay_frames
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.kv_events import AllBlocksCleared, Batch, BlockRemoved, BlockStored

pack = msgspec.msgpack.encode

STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2**64 - 1],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "l",
    "extra_keys": [["salt"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
}
FIELDS = list(STORED)


def as_array(event: dict) -> list:
    """Return the wire format until 0.23: fields in order, trailing defaults left out."""
    if event["type"] == "BlockStored":
        return [event.get(name) for name in FIELDS]
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], event["medium"], event.get("group_idx")]
    return ["AllBlocksCleared"]


def older(payload: bytes) -> bytes:
    ts, events, rank = msgspec.msgpack.decode(payload)
    return pack([ts, [as_array(event) for event in events], rank])


@pytest.mark.parametrize(
    "event", [pytest.param(STORED, id="map"), pytest.param(as_array(STORED), id="array")]
)
def test_both_encodings(event):
    batch = decode(pack([1.5, [event], 3]))
    assert (batch.published_s, batch.rank, batch.unknown) == (1.5, 3, 0)
    assert batch.events == (
        BlockStored(
            block_hashes=(1, 2**64 - 1),
            parent_block_hash=None,
            token_ids=(5, 6, 7, 8),
            block_size=2,
            lora_id=None,
            medium="GPU",
            lora_name="l",
            extra_keys=(["salt"], None),
            group_idx=0,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=128,
        ),
    )


@pytest.mark.parametrize("name", ["main", "H", "T"])
def test_a_capture_says_the_same_in_the_older_encoding(captures, name):
    for frames in captures[name].messages:
        new, old = decode(frames[2]), decode(older(frames[2]))
        assert (new.published_s, new.rank) == (old.published_s, old.rank)
        for a, b in zip(new.events, old.events, strict=True):
            if isinstance(a, BlockStored):
                a = msgspec.structs.replace(a, session_id=None)
            assert a == b


@pytest.mark.parametrize(
    ("event", "decoded"),
    [
        pytest.param({"type": "AllBlocksCleared"}, AllBlocksCleared(), id="cleared, map"),
        pytest.param(["AllBlocksCleared"], AllBlocksCleared(), id="cleared, array"),
        pytest.param(
            {"type": "BlockRemoved", "block_hashes": [b"x" * 32]}, BlockRemoved((b"x" * 32,)), id="bytes"
        ),
        pytest.param(
            {"type": "BlockRemoved", "block_hashes": [1], "locality": "REMOTE", "new": {"a": [1]}},
            BlockRemoved((1,)),
            id="unknown fields",
        ),
        pytest.param(
            ["BlockRemoved", [1], "CPU", 0, "more"], BlockRemoved((1,), "CPU", 0), id="longer array"
        ),
        pytest.param(["BlockRemoved", [1]], BlockRemoved((1,)), id="oldest array"),
    ],
)
def test_an_event_is_decoded(event, decoded):
    assert decode(pack([0.0, [event]])).events == (decoded,)


@pytest.mark.parametrize("event", [{"type": "BlockMoved", "from": 1}, ["BlockMoved", 1], {"type": "X" * 99}])
def test_unknown_types_are_counted(event):
    batch = decode(pack([0.0, [event, {"type": "AllBlocksCleared"}], 0]))
    assert (batch.events, batch.unknown) == ((AllBlocksCleared(),), 1)


REMOVED = {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"}


@pytest.mark.parametrize("encoding", [pytest.param(dict, id="maps"), pytest.param(as_array, id="arrays")])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({"token_ids": None}, id="no tokens"),
        pytest.param({"token_ids": ["a"]}, id="token is a string"),
        pytest.param({"block_hashes": [1.5]}, id="hash is a fraction"),
    ],
)
def test_one_damaged_event_of_a_batch_costs_itself_alone(encoding, damage):
    sound = encoding(STORED)
    batch = decode(pack([1.5, [sound, encoding(STORED | damage), encoding(REMOVED)], 3]))
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved]
    assert (batch.malformed, batch.unknown) == (1, 0)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(5, id="an event that is a number"),
        pytest.param([], id="an empty event"),
        pytest.param({}, id="no type"),
        pytest.param({"type": 5}, id="type is a number"),
        pytest.param({"type": "BlockRemoved", "block_hashes": ["a"]}, id="hash is a string"),
    ],
)
def test_what_may_have_removed_any_block_has_removed_all(event):
    batch = decode(pack([0.0, [STORED, event, STORED]]))
    assert [type(event) for event in batch.events] == [BlockStored, AllBlocksCleared, BlockStored]
    assert (batch.malformed, batch.unknown) == (1, 0)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(pack({}), id="a map"),
        pytest.param(pack(["late", []]), id="no time"),
        pytest.param(pack([float("nan"), []]), id="a time that is none"),
        pytest.param(pack([float("inf"), []]), id="a time after which nothing comes"),
        pytest.param(pack([0.0, [{"type": "AllBlocksCleared"}]]) + b"x", id="more behind"),
    ],
)
def test_garbage_is_a_protocol_error(payload):
    with pytest.raises(ProtocolError):
        decode(payload)


def test_truncated_messages_are_refused(captures):
    payload = captures["main"].messages[0][2]
    for size in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(payload[:size])


@given(st.binary(max_size=200))
def test_bytes_decode_or_raise_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        decode(data)


@given(st.data())
def test_a_changed_byte_decodes_or_raises_protocol_error(data):
    payload = bytearray(pack([1.5, [STORED, as_array(STORED), {"type": "AllBlocksCleared"}], 0]))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode(bytes(payload))


@pytest.mark.parametrize(
    ("frames", "parsed"),
    [
        pytest.param([b"", b"topic", bytes(7) + b"\5", b"p"], (5, b"p"), id="with topic"),
        pytest.param([b"", bytes(7) + b"\5", b"p"], (5, b"p"), id="without, until 0.25"),
        pytest.param([b"", b"", b"\xff" * 8, b""], (-1, None), id="end"),
        pytest.param([b"", b"\xff" * 8, b""], (-1, None), id="end, until 0.25"),
    ],
)
def test_replay_frames(frames, parsed):
    assert replay_frames(frames) == parsed


@pytest.mark.parametrize("frames", [[], [b"p"], [b"x", b"", bytes(8), b""], [b"", bytes(7), b"p"]])
def test_no_replay_frames(frames):
    with pytest.raises(ProtocolError):
        replay_frames(frames)


LONG = BlockStored(
    block_hashes=tuple(range(100, 107)),
    parent_block_hash=7,
    token_ids=tuple(range(28)),
    block_size=4,
    medium="GPU",
    extra_keys=(None, ("a",), None, None, ("b",), None, None),
)


def test_a_long_event_in_pieces_says_the_same():
    """Blocks, their parents, tokens and keys; what is removed; and everything else is in every piece."""
    removed = BlockRemoved((1, 2, 3), "CPU")
    batch = Batch(5.0, (LONG, AllBlocksCleared(), removed), rank=1, unknown=2)
    found = [*pieces(batch, 3)]
    events = [event for piece in found for event in piece.events]
    assert [type(event).__name__ for event in events] == ["BlockStored"] * 3 + [
        "AllBlocksCleared",
        "BlockRemoved",
    ]
    first, second, third = events[:3]
    assert [e.block_hashes for e in events[:3]] == [(100, 101, 102), (103, 104, 105), (106,)]
    assert [e.parent_block_hash for e in events[:3]] == [7, 102, 105]
    assert first.token_ids + second.token_ids + third.token_ids == LONG.token_ids
    assert first.extra_keys + second.extra_keys + third.extra_keys == LONG.extra_keys
    assert {(e.medium, e.block_size) for e in events[:3]} == {("GPU", 4)}
    assert events[-1] == removed
    assert all((piece.published_s, piece.rank) == (5.0, 1) for piece in found)
    assert [*pieces(batch, 10)] == [batch], "it is short enough"


def test_removals_in_a_row_become_one():
    """From the same place only, and in their order among other events."""
    rows = [([1], "GPU", 0), ([2, 3], "GPU", 0), ([4], "CPU", 0), None, ([5], "GPU", 1), ([6], "GPU", 1)]
    events = [
        {"type": "BlockRemoved", "block_hashes": row[0], "medium": row[1], "group_idx": row[2]}
        if row
        else {"type": "AllBlocksCleared"}
        for row in [*rows, ([7], "GPU", 0)]
    ]
    assert decode(pack([0.0, events])).events == (
        BlockRemoved((1, 2, 3), "GPU", 0),
        BlockRemoved((4,), "CPU", 0),
        AllBlocksCleared(),
        BlockRemoved((5, 6), "GPU", 1),
        BlockRemoved((7,), "GPU", 0),
    )


NAMES = st.integers(1 << 32, (1 << 64) - 1) | st.binary(min_size=32, max_size=32) | st.integers(0, 300)
ROWS_OF_REMOVALS = st.tuples(
    st.lists(NAMES, min_size=1, max_size=30) | st.lists(st.integers(1 << 60, 1 << 61), min_size=8),
    st.sampled_from(["GPU", "CPU", None]),
    st.sampled_from([0, 1, 300]),
)


@given(rows=st.lists(ROWS_OF_REMOVALS | st.none(), max_size=12), damage=st.integers(0, 2_000))
def test_rows_of_removals_are_read_as_if_one_by_one(rows, damage):
    """However long they are, whatever is between them, and with a byte of another value."""
    events = []
    for row in rows:
        if row is None:
            events.append(STORED)
            continue
        names, medium, group = row
        events += [
            {"type": "BlockRemoved", "block_hashes": [name], "medium": medium, "group_idx": group}
            for name in names
        ]

    def told(payload):
        batch, found = decode(payload), []
        for event in batch.events:
            if isinstance(event, BlockRemoved):
                found += [(name, event.medium, event.group_idx) for name in event.block_hashes]
            else:
                found.append(event)
        return found, batch.malformed, batch.unknown

    # Read from one message each, in which nothing stands in a row.
    alone = [told(pack([0.0, [event], 0])) for event in events]
    assert told(pack([0.0, events, 0])) == ([event for found, _, _ in alone for event in found], 0, 0)
    if events:
        changed = [*events]
        at = damage % len(events)
        changed[at] = {**changed[at], "block_hashes": None}
        found, malformed, _ = told(pack([0.0, changed, 0]))
        one_less = [one for n, (found_there, _, _) in enumerate(alone) if n != at for one in found_there]
        assert malformed == 1
        assert [e for e in found if not isinstance(e, AllBlocksCleared)] == one_less


def test_a_long_event_without_tokens_has_pieces_without_tokens():
    """As connectors send them for host memory."""
    event = BlockStored(block_hashes=tuple(range(5)), parent_block_hash=None, medium="CPU")
    found = [piece.events[0] for piece in pieces(Batch(0.0, (event,)), 2)]
    assert [(e.block_hashes, e.token_ids) for e in found] == [((0, 1), ()), ((2, 3), ()), ((4,), ())]


def test_a_malformed_event_stays_whole():
    """Its reader counts all its blocks as malformed."""
    event = BlockStored(
        block_hashes=tuple(range(5)), parent_block_hash=None, token_ids=(1, 2, 3), block_size=4
    )
    assert [piece.events for piece in pieces(Batch(0.0, (event,)), 2)] == [(event,)]


def test_live_frames():
    assert live_frames([b"topic", bytes(7) + b"\5", b"p"]) == (5, b"p")


@pytest.mark.parametrize("frames", [[], [b"p"], [b"", bytes(7), b"p"], [b"", b"t", bytes(8), b"p"]])
def test_no_live_frames(frames):
    with pytest.raises(ProtocolError):
        live_frames(frames)
