"""The run cache against the simulated engine's block cache."""

from random import Random

import pytest

from perilune_lab.engine.hashing import Algorithm, BlockHasher
from perilune_lab.engine.kv_cache import KvCache, Table
from perilune_lab.simulate.runs import ROOT, Runs
from perilune_research.simulator.cache import RunCache

BLOCK = 16


def tokens(runs: Runs, run: int, depth: int) -> list[int]:
    """Distinct per (run, position)."""
    found: list[int] = []
    for r in runs.chain[run]:
        found += [r * 10_000 + at for at in range(runs.start[r], min(depth, runs.end[r]))]
    return found


@pytest.mark.parametrize("seed", range(30))
def test_it_keeps_and_evicts_what_a_block_cache_does(seed: int):
    """Sequences that compute whole runs and leave, in one pool of 40 blocks; one token more makes every block
    of a prompt hittable."""
    rng = Random(seed)
    runs = Runs()
    for n in range(8):
        runs.add(rng.choice([ROOT, *range(n)]) if n else ROOT, BLOCK * rng.randint(1, 5))
    cache = RunCache(runs, 40 * BLOCK)
    blocks = KvCache(BlockHasher(Algorithm.SHA256, BLOCK), 41)
    active: list[tuple[int, Table]] = []
    for _ in range(60):
        if active and (rng.random() < 0.5 or len(active) > 1):
            run, table = active.pop(rng.randrange(len(active)))
            cache.unpin(run)
            blocks.release(table)
            continue
        run = rng.randrange(len(runs))
        depth = runs.end[run]
        table = blocks.open([*tokens(runs, run, depth), 7])
        hits = blocks.match(table)
        assert cache.match(run, depth) == len(hits[0]) * BLOCK
        if not blocks.fits(table, hits, depth):
            continue
        cache.pin(run)
        blocks.attach(table, hits)
        assert blocks.grow(table, depth)
        cache.grow(run, depth)
        cache.trim(40 * BLOCK)
        active.append((run, table))
        assert cache.used_tokens - cache.idle_tokens == pytest.approx(BLOCK * 40 * blocks.usage)


def test_users_keep_what_they_use():
    runs = Runs()
    a, b = runs.add(ROOT, 32), runs.add(ROOT, 32)
    cache = RunCache(runs, 48)
    for run in (a, b):
        cache.pin(run)
        cache.grow(run, 32)
    cache.unpin(a)
    cache.trim(48)
    assert cache.match(a, 32) == 16
    assert cache.match(b, 32) == 32
    cache.trim(0)
    assert (cache.used_tokens, cache.idle_tokens) == (32, 0)


def test_changes_are_reported():
    runs = Runs()
    a = runs.add(ROOT, 32)
    told: list[tuple[int, int]] = []
    cache = RunCache(runs, 48, lambda run, depth: told.append((run, depth)))
    cache.pin(a)
    cache.grow(a, 16)
    cache.grow(a, 32)
    cache.unpin(a)
    cache.trim(20)
    cache.trim(0)
    assert told == [(a, 16), (a, 32), (a, 20), (a, 0)]


def test_releasing_twice_is_an_error():
    runs = Runs()
    a = runs.add(ROOT, 32)
    cache = RunCache(runs, 48)
    cache.pin(a)
    cache.unpin(a)
    with pytest.raises(KeyError):
        cache.unpin(a)
