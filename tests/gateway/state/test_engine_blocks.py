"""An engine's events become stores and removals in the prefix index."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from perilune_gateway.model import Tier
from perilune_gateway.model.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import EngineBlocks, Unused
from perilune_gateway.state.prefix_index import PrefixIndex

SIZE = 2
TOKENS = (1, 2, 3, 4, 5, 6)
NAMES = (101, 102, 103)


class Pool:
    """An index fed through names."""

    def __init__(self, *, store=True, max_names=1000, max_blocks=1000, max_waiting=100) -> None:
        self.index = PrefixIndex(max_blocks, 10.0)
        self.blocks = EngineBlocks(
            self.index, SIZE, store=store, max_names=max_names, max_waiting=max_waiting
        )

    def apply(self, event, endpoint="a"):
        return self.blocks.apply(endpoint, event, 0.0)

    def device(self, tokens=TOKENS, root=0) -> dict[str, int]:
        return dict(self.index.find_matches(blocks.chain(tokens, SIZE, root), 0.0).device)


def stored(names=NAMES, tokens=TOKENS, parent=None, **more) -> BlockStored:
    return BlockStored(
        block_hashes=tuple(names),
        parent_block_hash=parent,
        token_ids=tuple(tokens),
        block_size=SIZE,
        medium=more.pop("medium", "GPU"),
        **more,
    )


def test_a_prompt_stored_in_steps_is_one_chain():
    pool = Pool()
    first = pool.apply(stored(NAMES[:1], TOKENS[:2], session_id="s"))
    rest = pool.apply(stored(NAMES[1:], TOKENS[2:], parent=101))
    chain = blocks.chain(TOKENS, SIZE, 0)
    assert (first.parent, first.stored, first.session_id) == (0, chain[:1], "s")
    assert (rest.parent, rest.stored, rest.session_id) == (chain[0], chain[1:], "")
    assert pool.device() == {"a": 3}


def test_an_engines_longer_block_is_several_of_the_pools():
    pool, chain = Pool(), blocks.chain(TOKENS[:4] + TOKENS[:4], SIZE, 0)
    long = BlockStored(
        block_hashes=(101, 102),
        parent_block_hash=None,
        token_ids=TOKENS[:4] + TOKENS[:4],
        block_size=2 * SIZE,
        medium="GPU",
    )
    applied = pool.apply(long)
    assert (applied.stored, applied.stride) == (chain, 2)
    assert pool.device(TOKENS[:4] + TOKENS[:4]) == {"a": 4}
    assert pool.device(TOKENS) == {"a": 2}, "it begins with one of them"


def test_removed_by_name_and_cleared():
    pool = Pool()
    pool.apply(stored())
    assert pool.apply(BlockRemoved((103, 102), "GPU")).removed == 2
    assert pool.device() == {"a": 1}
    applied = pool.apply(AllBlocksCleared())
    assert applied.cleared
    assert pool.device() == {}


def test_a_reset_that_is_told_with_the_next_step_leaves_what_that_step_has_stored():
    """As vLLM does: after /reset_prefix_cache, the news is the first event of the step of the next prompt."""
    pool = Pool()
    pool.apply(stored())
    for event in (AllBlocksCleared(), stored(NAMES[:2], TOKENS[:4])):
        pool.apply(event)
    assert pool.device() == {"a": 2}


def test_a_name_outlives_its_block():
    """Two copies of one block: vLLM announces that one is gone, and a child of the other."""
    pool = Pool()
    pool.apply(stored(NAMES[:2], TOKENS[:4]))
    pool.apply(BlockRemoved((102,), "GPU"))
    assert pool.apply(stored(NAMES[2:], TOKENS[4:], parent=102)).stored
    pool.apply(stored((102,), TOKENS[2:4], parent=101))
    assert pool.device() == {"a": 3}


def test_digests_and_their_low_64_bits_are_one_name():
    pool = Pool()
    digest = bytes(24) + (101).to_bytes(8, "big")
    pool.apply(stored((digest,), TOKENS[:2]))
    assert pool.apply(BlockRemoved((101,), "GPU")).removed == 1
    assert pool.device(TOKENS[:2]) == {}


@pytest.mark.parametrize(
    ("event", "root"),
    [
        pytest.param(stored(lora_name="l", extra_keys=(["l"], ["l"], ["l"])), ("l", ""), id="LoRA"),
        pytest.param(stored(lora_name="l"), ("l", ""), id="LoRA without extra keys"),
        pytest.param(stored(extra_keys=(["salt"], None, None)), ("", "salt"), id="salt"),
        pytest.param(
            stored(lora_name="l", extra_keys=(["l", "salt"], ["l"], ["l"])), ("l", "salt"), id="LoRA and salt"
        ),
        pytest.param(
            stored(extra_keys=([["cache_salt", "salt"]], None, None)), ("", "salt"), id="tagged salt"
        ),
        pytest.param(
            stored(
                lora_name="l",
                extra_keys=([["lora", "l", "/p"], ["cache_salt", "s"]], [["lora", "l", "/p"]], None),
            ),
            ("l", "s"),
            id="tagged LoRA and salt",
        ),
        pytest.param(stored(extra_keys=()), ("", ""), id="none at all"),
    ],
)
def test_salt_and_adapter_are_roots_of_their_own(event, root):
    pool = Pool()
    pool.apply(event)
    assert pool.device(root=blocks.prefix_root(*root)) == {"a": 3}
    others = [pair for pair in (("", ""), ("l", ""), ("", "salt")) if pair != root]
    assert all(pool.device(root=blocks.prefix_root(*other)) == {} for other in others)


def test_the_salt_reaches_later_stores_through_their_parent():
    pool = Pool()
    pool.apply(stored(NAMES[:1], TOKENS[:2], extra_keys=(["salt"],)))
    pool.apply(stored(NAMES[1:], TOKENS[2:], parent=101, extra_keys=(None, None)))
    assert pool.device(root=blocks.prefix_root("", "salt")) == {"a": 3}


def test_images_separate_equal_placeholder_tokens():
    pool = Pool()
    for endpoint, image in (("a", "cat"), ("b", "dog")):
        names = [hash((endpoint, i)) for i in range(3)]
        pool.apply(stored(names, extra_keys=(None, [[image, 0]], None)), endpoint)
    assert len(pool.index) == 5, "they share only the block before the image"
    assert pool.device() == {"a": 1, "b": 1}


def test_host_tier():
    """Offloading connectors announce neither tokens nor parent."""
    pool = Pool()
    pool.apply(stored())
    applied = pool.apply(
        BlockStored(block_hashes=NAMES, parent_block_hash=None, token_ids=(), block_size=0, medium="CPU")
    )
    assert (applied.tier, len(applied.stored)) == (Tier.HOST, 3)
    pool.apply(BlockRemoved(NAMES, "GPU"))
    chain = blocks.chain(TOKENS, SIZE, 0)
    assert pool.index.find_matches(chain, 0.0).of("a") == (0, 3, 3)
    assert pool.apply(BlockRemoved((103,), "CPU")).removed == 1
    assert pool.index.find_matches(chain, 0.0).of("a") == (0, 2, 2)


def test_store_tier_belongs_to_the_pool_and_is_never_removed():
    pool = Pool()
    pool.apply(stored())
    pool.apply(
        BlockStored(
            block_hashes=NAMES, parent_block_hash=None, token_ids=TOKENS, block_size=SIZE, medium="cpu"
        )
    )
    pool.apply(BlockRemoved(NAMES, "cpu"))
    pool.apply(AllBlocksCleared())
    assert pool.index.find_matches(blocks.chain(TOKENS, SIZE, 0), 0.0).of("b") == (0, 0, 3)


@pytest.mark.parametrize(
    ("event", "why", "count"),
    [
        pytest.param(BlockRemoved((999,), "GPU"), Unused.UNKNOWN_BLOCK, 1, id="removal of an unknown block"),
        pytest.param(
            BlockStored(block_hashes=NAMES[:1], parent_block_hash=None, token_ids=TOKENS[:3], block_size=3),
            Unused.BLOCK_SIZE,
            1,
            id="block size",
        ),
        pytest.param(stored(tokens=TOKENS[:5]), Unused.MALFORMED, 3, id="too few tokens"),
        pytest.param(stored(tokens=(-1, *TOKENS[1:])), Unused.MALFORMED, 3, id="impossible token"),
        pytest.param(
            stored(tokens=(-1, *TOKENS[1:]), parent=9),
            Unused.MALFORMED,
            3,
            id="impossible token, unknown parent",
        ),
        pytest.param(
            stored(group_idx=1, kv_cache_spec_kind="cross_attention"), Unused.GROUP, 3, id="strange group"
        ),
        pytest.param(
            stored(group_idx=1), Unused.GROUP, 3, id="second group of an engine that names no kinds"
        ),
        pytest.param(stored(medium="TAPE"), Unused.MEDIUM, 3, id="unknown medium"),
    ],
)
def test_what_cannot_be_used_is_counted(event, why, count):
    pool = Pool()
    applied = pool.apply(event)
    assert (applied.stored, applied.removed, applied.unused) == ((), 0, count)
    assert pool.blocks.unused == {why: count}
    assert len(pool.index) == 0


def test_a_group_that_is_not_understood_is_named():
    pool = Pool()
    pool.apply(stored(group_idx=3, kv_cache_spec_kind="cross_attention"))
    assert pool.blocks.strange_groups["a"].startswith("cross_attention")
    pool.blocks.reset("a", 0.0)
    assert pool.blocks.strange_groups == {}


# -- blocks that wait ------------------------------------------------------------------------------------


def test_blocks_of_an_unknown_parent_wait_and_join_when_it_is_learnt():
    pool = Pool()
    assert pool.apply(stored(NAMES[2:], TOKENS[4:], parent=102)).unused == 1
    pool.apply(stored(NAMES[1:2], TOKENS[2:4], parent=101))
    assert pool.blocks.waiting == {"a": 2}
    assert pool.device() == {}
    pool.apply(stored(NAMES[:1], TOKENS[:2]))
    assert pool.device() == {"a": 3}
    assert not pool.blocks.waiting
    assert not pool.blocks.unused


def test_they_join_when_another_endpoint_announces_the_parent():
    pool = Pool()
    pool.apply(stored(NAMES[1:], TOKENS[2:], parent=101), "a")
    pool.apply(stored(NAMES[1:2], TOKENS[2:4], parent=101), "c")
    pool.apply(stored(NAMES[:1], TOKENS[:2]), "b")
    assert pool.device() == {"b": 1}
    pool.apply(stored(NAMES[:1], TOKENS[:2]), "a")
    assert pool.device() == {"a": 3, "b": 1}


def test_a_block_that_waits_keeps_its_images_and_its_adapter():
    pool = Pool()
    rest = stored(NAMES[1:], TOKENS[2:], parent=101, lora_name="l", extra_keys=(["l", ["cat", 0]], ["l"]))
    first = stored(NAMES[:1], TOKENS[:2], lora_name="l", extra_keys=(["l"],))
    pool.apply(rest, "a")
    pool.apply(first, "a")
    pool.apply(first, "b")
    pool.apply(rest, "b")
    whole = blocks.chain(TOKENS, SIZE, blocks.prefix_root("l", ""), (None, b"", None))
    assert len(pool.index) == 3
    assert pool.index.find_matches(whole[:1], 0.0).device == {"a": 1, "b": 1}


def test_what_is_removed_or_cleared_while_it_waits_does_not_join():
    pool = Pool()
    for endpoint in "abc":
        pool.apply(stored(NAMES[1:], TOKENS[2:], parent=101), endpoint)
    assert pool.apply(BlockRemoved((103,), "GPU"), "a").unused == 0
    pool.apply(AllBlocksCleared(), "b")
    assert pool.blocks.waiting == {"a": 1, "c": 2}
    for endpoint in "abc":
        pool.apply(stored(NAMES[:1], TOKENS[:2]), endpoint)
    assert pool.device() == {"a": 2, "b": 1, "c": 3}
    assert not pool.blocks.unused


def test_blocks_of_other_tiers_wait_for_their_names():
    pool = Pool()
    pool.apply(
        BlockStored(block_hashes=NAMES, parent_block_hash=None, token_ids=(), block_size=0, medium="CPU")
    )
    pool.apply(
        BlockStored(
            block_hashes=NAMES, parent_block_hash=None, token_ids=TOKENS, block_size=SIZE, medium="cpu"
        )
    )
    pool.apply(BlockRemoved((103,), "CPU"))
    pool.apply(stored(NAMES[:2], TOKENS[:4]), "b")
    assert pool.index.find_matches(blocks.chain(TOKENS, SIZE, 0), 0.0).of("a") == (0, 2, 2)
    assert pool.index.find_matches(blocks.chain(TOKENS, SIZE, 0), 0.0).store == 2
    assert pool.blocks.waiting == {"a": 1}


def test_only_so_many_wait():
    pool = Pool(max_waiting=4)
    for n in range(10):
        pool.apply(stored((1000 + n,), TOKENS[:2], parent=n))
    assert pool.blocks.waiting == {"a": 4}
    assert pool.blocks.unused == {Unused.UNKNOWN_PARENT: 6}


def test_host_rows_in_any_order():
    """Connectors announce what they have offloaded, not prompts."""
    pool = Pool()
    pool.apply(stored())
    pool.apply(
        BlockStored(
            block_hashes=(103, 101, 102, 101),
            parent_block_hash=None,
            token_ids=(),
            block_size=0,
            medium="CPU",
        )
    )
    pool.apply(BlockRemoved(NAMES, "GPU"))
    assert pool.index.find_matches(blocks.chain(TOKENS, SIZE, 0), 0.0).of("a") == (0, 3, 3)
    pool.apply(BlockRemoved((102, 103), "CPU"))
    assert pool.index.find_matches(blocks.chain(TOKENS, SIZE, 0), 0.0).of("a") == (0, 1, 1)
    pool.index.forget("a")
    assert len(pool.index) == 0


# -- hybrid models ---------------------------------------------------------------------------------------


def test_a_sliding_window_needs_only_its_own_blocks():
    """Its events have the names of the blocks that it keeps, and the tokens of all. Here it comes first."""
    pool = Pool()
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
    pool.apply(stored(NAMES[2:], TOKENS, **window))
    pool.apply(stored(group_idx=1, kv_cache_spec_kind="full_attention"))
    assert pool.device() == {"a": 3}
    pool.apply(BlockRemoved((103,), "GPU", 0))
    assert pool.device() == {}
    pool.apply(stored((102, 103), TOKENS, **window))
    pool.apply(BlockRemoved((103,), "GPU", 1))
    assert pool.device() == {"a": 2}


def test_state_space_layers_need_one_state():
    pool = Pool()
    pool.apply(stored(group_idx=0, kv_cache_spec_kind="full_attention"))
    pool.apply(stored(NAMES[1:2], TOKENS, group_idx=1, kv_cache_spec_kind="mamba"))
    assert pool.device() == {"a": 2}


def test_groups_with_blocks_of_several_sizes():
    pool = Pool()
    pool.apply(stored(group_idx=0, kv_cache_spec_kind="full_attention"))
    long = BlockStored(
        block_hashes=(102,),
        parent_block_hash=None,
        token_ids=TOKENS[:4],
        block_size=2 * SIZE,
        group_idx=1,
        kv_cache_spec_kind="mamba",
        medium="GPU",
    )
    pool.apply(long)
    assert pool.device() == {"a": 2}


# -- any events ------------------------------------------------------------------------------------------

CHAIN = blocks.chain(range(16), SIZE, 0)


@st.composite
def events(draw):
    """Blocks of one prompt of eight blocks, named 0 to 7, in any piece and order."""
    first, count = draw(st.integers(0, 7)), draw(st.integers(1, 8))
    names = tuple(range(8))[first : first + count]
    shuffled = tuple(
        Random(draw(st.integers(0, 999))).sample(names, len(names))
    )  # permutations are slow to draw
    match draw(st.integers(0, 4)):
        case 0 | 1:
            tokens = tuple(range(first * SIZE, (first + len(names)) * SIZE))
            return BlockStored(
                block_hashes=names,
                parent_block_hash=first - 1 if first else None,
                token_ids=tokens,
                block_size=SIZE,
                medium="GPU",
            )
        case 2:
            return BlockStored(
                block_hashes=shuffled, parent_block_hash=None, token_ids=(), block_size=0, medium="CPU"
            )
        case 3:
            return BlockRemoved(shuffled, draw(st.sampled_from(["GPU", "CPU"])))
        case _:
            return AllBlocksCleared()


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from("ab"), events()), max_size=30))
def test_events_in_any_order_leave_what_they_say(told):
    """Against sets of names. A block counts once its chain is known back to the first block: from any
    endpoint's events, whenever they came."""
    pool = Pool()
    held = {(endpoint, medium): set() for endpoint in "ab" for medium in ("GPU", "CPU")}
    for endpoint, event in told:
        pool.apply(event, endpoint)
        if isinstance(event, AllBlocksCleared):
            held[endpoint, "GPU"], held[endpoint, "CPU"] = set(), set()
        elif isinstance(event, BlockRemoved):
            held[endpoint, event.medium] -= set(event.block_hashes)
        else:
            held[endpoint, event.medium] |= set(event.block_hashes)
    for endpoint in "ab":
        device = held[endpoint, "GPU"]
        found = pool.index.find_matches(CHAIN, 0.0)
        assert found.device.get(endpoint, 0) == leading(device)
        assert found.host.get(endpoint, 0) <= leading(device | held[endpoint, "CPU"])
    pool.index.forget("a")
    pool.index.forget("b")
    assert len(pool.index) == 0


def leading(names) -> int:
    return next((n for n in range(8) if n not in names), 8)


def test_old_engines_name_no_medium():
    pool = Pool()
    pool.apply(stored(medium=None))
    pool.apply(BlockRemoved((103,)))
    assert pool.device() == {"a": 2}


def test_more_names_stay_once_the_pool_has_grown():
    pool = Pool(max_names=2)
    pool.blocks.widen(20)
    for n in range(20):
        pool.apply(stored((1000 + n,), (n + 50, n + 51)))
    assert len(pool.blocks) == 20


def test_names_are_bounded_and_those_in_use_stay():
    pool = Pool(max_names=8, max_blocks=4)
    pool.apply(stored(NAMES[:2], TOKENS[:4]))
    for n in range(20):
        pool.apply(stored((1000 + n,), (n + 50, n + 51)), "b")
        pool.apply(BlockRemoved((1000 + n,), "GPU"), "b")
        assert len(pool.blocks) <= 8
    assert pool.apply(BlockRemoved((102,), "GPU")).removed == 1


@pytest.mark.parametrize(
    ("medium", "with_store", "without"),
    [
        ("GPU", (3, 0, 0), (3, 0, 0)),
        ("gpu", (3, 0, 0), (3, 0, 0)),
        ("CPU", (0, 3, 0), (0, 3, 0)),
        ("cpu", (0, 0, 3), (0, 0, 0)),  # what MooncakeStoreConnector says
        ("disk", (0, 0, 3), (0, 0, 0)),
        ("STORAGE", (0, 0, 3), (0, 0, 0)),
    ],
)
def test_media_are_read_by_meaning(medium, with_store, without):
    """Leading blocks on the device, in host memory and in the store."""
    chain = blocks.chain(TOKENS, SIZE, 0)
    for store, expected in ((True, with_store), (False, without)):
        pool = Pool(store=store)
        pool.apply(stored(), endpoint="b")  # so that the names are known
        pool.apply(stored(medium=medium))
        found = pool.index.find_matches(chain, 0.0)
        there = found.device.get("a", 0), found.host.get("a", 0) or found.reach.get("a", 0), found.store
        device, host, in_store = there
        assert (device, 0 if device or in_store else host, in_store) == expected


def test_the_store_loses_blocks_with_the_segment_of_their_engine():
    pool = Pool()
    one, other = "10.0.0.1:8000", "10.0.0.2:8000"
    pool.blocks.segments({"10.0.0.1:12001": 0, "10.0.0.2:12002": 0})
    pool.apply(stored(), endpoint="b")
    pool.apply(stored(medium="cpu"), endpoint=one)
    pool.apply(stored(NAMES[:1], TOKENS[:2], medium="cpu"), endpoint=other)
    chain = blocks.chain(TOKENS, SIZE, 0)
    assert pool.index.find_matches(chain, 0.0).store == 3
    pool.blocks.segments({"10.0.0.2:12002": 0})
    assert pool.index.find_matches(chain, 0.0).store == 1
    pool.blocks.segments({})
    assert pool.index.find_matches(chain, 0.0).store == 0
