"""Token ids of blocks, from the engines' events: whole prompts come back, within a budget."""

from collections.abc import Sequence

import pytest

from perilune_gateway.model.applied import Applied
from perilune_gateway.model.handoff import Content, Immovable
from perilune_gateway.model.kv_events import BlockStored
from perilune_gateway.request import block_hashes
from perilune_gateway.state.block_tokens import BLOCK_BYTES, RUN_BYTES, BlockTokens

SIZE = 4
A_BLOCK = BLOCK_BYTES + 4 * SIZE


class Engine:
    """Announces prompts, in whole blocks, and names their blocks as the index does."""

    def __init__(self, tokens: BlockTokens) -> None:
        self.tokens = tokens

    def stores(
        self, ids: Sequence[int], after: int = 0, *, lora: str = "", salt: str = "", picture: bool = False
    ) -> int:
        """Store the prompt's blocks from number `after` on. Return the last block."""
        chain = block_hashes.chain(ids, SIZE, block_hashes.prefix_root(lora, salt))
        new = chain[after:]
        keys: list[list[object]] = [[lora] if lora else [] for _ in new]
        if salt and not after:
            keys[0].append(salt)
        if picture:
            keys[-1].append(("hash", 0))
        event = BlockStored(
            block_hashes=new,
            parent_block_hash=chain[after - 1] if after else None,
            token_ids=list(ids[after * SIZE :]),
            block_size=SIZE,
            lora_name=lora or None,
            extra_keys=keys,
        )
        parent = chain[after - 1] if after else block_hashes.prefix_root(lora, salt)
        self.tokens.stored(event, Applied(endpoint="e", parent=parent, stored=tuple(new)))
        return chain[-1]


@pytest.fixture
def tokens() -> BlockTokens:
    return BlockTokens(SIZE, 1_000_000)


@pytest.fixture
def engine(tokens: BlockTokens) -> Engine:
    return Engine(tokens)


def ids(tokens: BlockTokens, last: int) -> list[int]:
    found = tokens.prompt(last)
    assert isinstance(found, Content), found
    assert found.tokens == SIZE * len(found.blocks)
    return list(found.ids)


def test_a_prompt_comes_back_however_its_blocks_were_announced(tokens, engine) -> None:
    prompt = list(range(100, 140))
    engine.stores(prompt[:12])
    engine.stores(prompt[:16], after=3)
    last = engine.stores(prompt, after=4)
    assert ids(tokens, last) == prompt
    engine.stores(prompt)  # by another engine, all at once
    assert ids(tokens, last) == prompt


def test_a_prompt_that_ends_inside_what_another_announced(tokens, engine) -> None:
    prompt = list(range(40))
    engine.stores(prompt)
    middle = block_hashes.chain(prompt[:20], SIZE, 0)[-1]
    assert ids(tokens, middle) == prompt[:20]


def test_forks_share_their_head(tokens, engine) -> None:
    head = list(range(20))
    left, right = head + [1] * 8, head + [2] * 8
    engine.stores(head)
    ends = engine.stores(left, after=5), engine.stores(right, after=5)
    assert [ids(tokens, end) for end in ends] == [left, right]
    assert tokens.bytes == 2 * RUN_BYTES + 9 * A_BLOCK, "the head is there once"


def test_adapter_and_salt_belong_to_the_prompt(tokens, engine) -> None:
    prompt = list(range(8))
    plain, own = engine.stores(prompt), engine.stores(prompt, lora="fine", salt="mine")
    found = tokens.prompt(own)
    assert (found.lora, found.salt, list(found.ids)) == ("fine", "mine", prompt)
    assert (tokens.prompt(plain).lora, tokens.prompt(plain).salt) == ("", "")
    assert tokens.why_not(own, {"fine"}) is None
    assert tokens.why_not(own, ()) is Immovable.ADAPTER


def test_what_depends_on_more_than_tokens_is_refused_by_name(tokens, engine) -> None:
    before = engine.stores(list(range(8)))
    last = engine.stores(list(range(16)), after=2, picture=True)
    assert tokens.why_not(last) is Immovable.PICTURES
    assert tokens.why_not(before) is None
    assert tokens.why_not(12345) is Immovable.TOKENS


def test_a_prompt_whose_head_was_not_announced_is_not_known(tokens, engine) -> None:
    last = engine.stores(list(range(16)), after=2)
    assert tokens.prompt(last) is Immovable.TOKENS


def test_blocks_of_several_cache_groups_are_refused(tokens, engine) -> None:
    last = engine.stores(list(range(8)))
    other = BlockStored(
        block_hashes=[1], parent_block_hash=None, token_ids=[1] * SIZE, block_size=SIZE, group_idx=1
    )
    tokens.stored(other, Applied(endpoint="e"))
    assert tokens.why_not(last) is Immovable.GROUPS


def test_the_oldest_are_forgotten_and_a_head_outlives_its_tails() -> None:
    tokens = BlockTokens(SIZE, 3 * RUN_BYTES + 12 * A_BLOCK)
    engine, head = Engine(tokens), list(range(20))
    engine.stores(head)
    ends = [engine.stores(head + [i] * 12, after=5) for i in range(1, 8)]
    assert tokens.bytes <= tokens.max_bytes
    assert tokens.forgotten > 0
    known = [tokens.why_not(end) is None for end in ends]
    assert known == [True] + [False] * 5 + [True], "the first tail is one run with the head"
    assert ids(tokens, ends[-1]) == head + [7] * 12


def test_without_memory_nothing_is_kept() -> None:
    tokens = BlockTokens(SIZE)
    last = Engine(tokens).stores(list(range(8)))
    assert (tokens.why_not(last), tokens.bytes) == (Immovable.TOKENS, 0)


def test_what_no_endpoint_caches_is_forgotten_first_and_is_not_missed() -> None:
    cached: set[int] = set()
    tokens = BlockTokens(SIZE, 3 * RUN_BYTES + 12 * A_BLOCK, cached.__contains__)
    engine = Engine(tokens)
    kept = engine.stores(list(range(16)))
    cached.add(kept)
    for i in range(1, 9):
        engine.stores([i * 100 + n for n in range(16)])
    assert tokens.forgotten > 0
    assert (tokens.why_not(kept), tokens.missing) == (None, 0)


def test_what_is_cached_and_was_forgotten_is_missed_until_it_is_evicted_or_told_again() -> None:
    cached: set[int] = set()
    tokens = BlockTokens(SIZE, 2 * RUN_BYTES + 8 * A_BLOCK, cached.__contains__)
    engine, prompts = Engine(tokens), [[i * 100 + n for n in range(16)] for i in range(4)]
    for prompt in prompts:
        cached.update(block_hashes.chain(prompt, SIZE, 0))
        engine.stores(prompt)
    assert tokens.missing == 8
    cached.difference_update(block_hashes.chain(prompts[0], SIZE, 0))
    assert tokens.missing == 4, "evicted"
    cached.difference_update(block_hashes.chain(prompts[3], SIZE, 0))
    engine.stores(prompts[1])
    assert tokens.missing == 0, "told again in the room of what was evicted"
