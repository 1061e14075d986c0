"""An engine's events become stores and removals in the prefix index."""

import pytest

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

    def __init__(self, *, store=True, max_names=1000, max_blocks=1000) -> None:
        self.index = PrefixIndex(max_blocks, 10.0)
        self.blocks = EngineBlocks(self.index, SIZE, store=store, max_names=max_names)

    def apply(self, event, endpoint="a", rank=0):
        return self.blocks.apply(endpoint, event, 0.0, rank)

    def device(self, tokens=TOKENS, root=0) -> dict[str, int]:
        return dict(self.index.find_matches(blocks.chain(tokens, SIZE, root), 0.0).device)


def stored(names=NAMES, tokens=TOKENS, parent=None, **more) -> BlockStored:
    return BlockStored(tuple(names), parent, tuple(tokens), SIZE, medium=more.pop("medium", "GPU"), **more)


def test_a_prompt_stored_in_steps_is_one_chain():
    pool = Pool()
    first = pool.apply(stored(NAMES[:1], TOKENS[:2], session_id="s"))
    rest = pool.apply(stored(NAMES[1:], TOKENS[2:], parent=101))
    chain = blocks.chain(TOKENS, SIZE, 0)
    assert (first.parent, first.stored, first.session_id) == (0, (chain[0],), "s")
    assert (rest.parent, rest.stored, rest.session_id) == (chain[0], tuple(chain[1:]), "")
    assert pool.device() == {"a": 3}


def test_removed_by_name_and_cleared():
    pool = Pool()
    pool.apply(stored())
    assert pool.apply(BlockRemoved((103, 102), "GPU")).removed == 2
    assert pool.device() == {"a": 1}
    applied = pool.apply(AllBlocksCleared())
    assert applied.cleared
    assert pool.device() == {}


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
    assert pool.blocks.ours(digest) == pool.blocks.ours(101)


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
    applied = pool.apply(BlockStored(NAMES, None, (), 0, medium="CPU"))
    assert (applied.tier, len(applied.stored)) == (Tier.HOST, 3)
    pool.apply(BlockRemoved(NAMES, "GPU"))
    chain = blocks.chain(TOKENS, SIZE, 0)
    assert pool.index.find_matches(chain, 0.0).of("a") == (0, 3, 3)
    assert pool.apply(BlockRemoved((103,), "CPU")).removed == 1
    assert pool.index.find_matches(chain, 0.0).of("a") == (0, 2, 2)


def test_store_tier_belongs_to_the_pool_and_is_never_removed():
    pool = Pool()
    pool.apply(stored())
    pool.apply(BlockStored(NAMES, None, TOKENS, SIZE, medium="cpu"))
    pool.apply(BlockRemoved(NAMES, "cpu"))
    pool.apply(AllBlocksCleared())
    assert pool.index.find_matches(blocks.chain(TOKENS, SIZE, 0), 0.0).of("b") == (0, 0, 3)


@pytest.mark.parametrize(
    ("event", "why", "count"),
    [
        pytest.param(stored(parent=999), Unused.UNKNOWN_PARENT, 3, id="parent never announced"),
        pytest.param(BlockRemoved((999,), "GPU"), Unused.UNKNOWN_BLOCK, 1, id="removal of an unknown block"),
        pytest.param(stored(medium="cpu"), Unused.UNKNOWN_BLOCK, 3, id="store block never on a device"),
        pytest.param(BlockStored(NAMES[:1], None, TOKENS[:3], 3), Unused.BLOCK_SIZE, 1, id="block size"),
        pytest.param(stored(tokens=TOKENS[:5]), Unused.MALFORMED, 3, id="too few tokens"),
        pytest.param(stored(tokens=(-1, *TOKENS[1:])), Unused.MALFORMED, 3, id="impossible token"),
        pytest.param(stored(group_idx=1), Unused.GROUP, 3, id="second KV cache group"),
        pytest.param(stored(medium="DISK"), Unused.MEDIUM, 3, id="unknown medium"),
    ],
)
def test_what_cannot_be_used_is_counted(event, why, count):
    pool = Pool()
    applied = pool.apply(event)
    assert (applied.stored, applied.removed, applied.unused) == ((), 0, count)
    assert pool.blocks.unused == {why: count}
    assert len(pool.index) == 0


def test_old_engines_name_no_medium():
    pool = Pool()
    pool.apply(stored(medium=None))
    pool.apply(BlockRemoved((103,)))
    assert pool.device() == {"a": 2}


def test_ranks_hold_blocks_of_their_own():
    """Either rank's blocks count; the reset of one leaves the other's."""
    pool = Pool()
    pool.apply(stored(), rank=0)
    pool.apply(stored((201, 202), TOKENS[:4]), rank=1)
    assert pool.device() == {"a": 3}
    pool.apply(BlockRemoved((103,), "GPU"), rank=1)
    assert pool.device() == {"a": 3}
    assert pool.blocks.reset("a", 0).cleared
    assert pool.device() == {"a": 2}
    pool.apply(AllBlocksCleared(), rank=1)
    assert pool.device() == {}


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
