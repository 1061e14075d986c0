"""The simulated engine's KV cache shares, evicts and announces blocks as vLLM does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from perilune_lab.engine.hashing import Algorithm, BlockHasher
from perilune_lab.engine.kv_cache import Cleared, KvCache, Removed, Stored


def cache_of(blocks: int) -> KvCache:
    """`blocks` usable blocks of 4 tokens."""
    return KvCache(BlockHasher(Algorithm.SHA256, 4), blocks + 1)


def fill(cache: KvCache, tokens: list[int]):
    """Return a sequence that ran: attached, grown, still holding its blocks."""
    table = cache.open(tokens[:])
    cache.attach(table, cache.match(table))
    assert cache.grow(table, len(tokens))
    return table


def tokens(start: int, n: int) -> list[int]:
    return list(range(start, start + n))


def test_a_hit_never_covers_the_last_token():
    cache = cache_of(8)
    cache.release(fill(cache, tokens(0, 8)))
    hits = {n: len(cache.match(cache.open(tokens(0, n)))[0]) for n in (4, 5, 8, 9)}
    assert hits == {4: 0, 5: 1, 8: 1, 9: 2}


def test_freed_blocks_stay_hittable_until_taken_and_tails_go_first():
    cache = cache_of(4)
    cache.release(fill(cache, tokens(0, 16)))
    assert cache.usage == 0.0
    held = fill(cache, tokens(100, 8))
    chain = cache.open(tokens(0, 16)).chain
    assert [c.digest for c in cache.take_changes() if isinstance(c, Removed)] == [chain[3], chain[2]]
    assert len(cache.match(cache.open(tokens(0, 16)))[0]) == 2
    cache.release(held)


def test_a_block_that_holds_nothing_reusable_is_taken_before_cached_ones():
    cache = cache_of(4)
    cache.release(fill(cache, tokens(0, 14)))  # three full blocks, one half full
    cache.release(fill(cache, tokens(100, 3)))
    assert not [c for c in cache.take_changes() if isinstance(c, Removed)]


def test_attached_blocks_are_not_evicted():
    cache = cache_of(4)
    cache.release(fill(cache, tokens(0, 8)))
    sharing = fill(cache, tokens(0, 12))
    other = cache.open(tokens(50, 8))
    assert not cache.fits(other, [[]], 8)
    assert not cache.grow(other, 8)
    assert other.length == 0
    cache.release(sharing)
    assert cache.grow(other, 8)


def test_equal_blocks_computed_side_by_side_are_both_kept_and_both_removed():
    cache = cache_of(4)
    one, two = cache.open(tokens(0, 4)), cache.open(tokens(0, 4))
    assert cache.grow(one, 4)
    assert cache.grow(two, 4)
    assert one.blocks != two.blocks
    cache.release(one)
    cache.release(two)
    fill(cache, tokens(9, 16))
    removed = [c.digest for c in cache.take_changes() if isinstance(c, Removed)]
    assert removed == [one.chain[0]] * 2


def test_generated_tokens_fill_blocks_that_a_later_prompt_finds():
    cache = cache_of(8)
    table = fill(cache, tokens(0, 6))
    for token in (6, 7, 8):
        table.tokens.append(token)
        assert cache.grow(table, len(table.tokens))
    cache.release(table)
    assert len(cache.match(cache.open(tokens(0, 12)))[0]) == 2
    stored = [c for c in cache.take_changes() if isinstance(c, Stored)]
    assert [(list(c.positions), c.tokens) for c in stored] == [([0], [0, 1, 2, 3]), ([1], [4, 5, 6, 7])]
    assert stored[1].parent == stored[0].digests[-1]


def test_reset_waits_for_sequences_and_is_announced():
    cache = cache_of(4)
    table = fill(cache, tokens(0, 8))
    assert not cache.reset()
    cache.release(table)
    cache.take_changes()
    assert cache.reset()
    assert cache.take_changes() == [Cleared()]
    assert cache.match(cache.open(tokens(0, 8))) == [[]]


def test_a_pool_of_nothing_but_the_null_block_is_refused():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        cache_of(0)


class Mirror:
    """What a reader of the announcements believes: how many blocks of each digest are cached."""

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}

    def apply(self, changes) -> None:
        for change in changes:
            match change:
                case Stored():
                    for digest in change.digests:
                        self.held[digest] = self.held.get(digest, 0) + 1
                case Removed():
                    self.held[change.digest] -= 1
                    if not self.held[change.digest]:
                        del self.held[change.digest]
                case Cleared():
                    self.held.clear()


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 12)), max_size=40),
)
def test_announcements_tell_exactly_what_is_hittable(runs):
    """Any sequences, several at once, evictions: a reader of the events predicts every hit."""
    cache, mirror, open_tables = cache_of(12), Mirror(), []
    for start, n, generated in runs:
        table = cache.open(tokens(start * 7, n))
        mirror.apply(cache.take_changes())
        expected = 0
        for digest in table.chain[: (n - 1) // 4]:
            if digest not in mirror.held:
                break
            expected += 1
        hits = cache.match(table)
        assert len(hits[0]) == expected
        if len(open_tables) == 2 or not cache.fits(table, hits, n + generated):
            for held in open_tables:
                cache.release(held)
            open_tables.clear()
            hits = cache.match(table)
        if not cache.fits(table, hits, n + generated):
            continue
        cache.attach(table, hits)
        assert cache.grow(table, n)
        for token in range(generated):
            table.tokens.append(token)
            assert cache.grow(table, len(table.tokens))
        open_tables.append(table)
        used = {block for table in open_tables for block in table.blocks[0]}
        assert cache.usage == pytest.approx(len(used) / 12)
