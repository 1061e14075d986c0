"""The session-run index against the gateway's own."""

from random import Random

import pytest

from perilune_gateway.model import Tier
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_lab.simulate.runs import ROOT, Runs
from perilune_research.simulator.index import RunIndex

BLOCK = 16
TTL_S = 10.0


def tree(rng: Random, runs: int) -> Runs:
    found = Runs()
    for n in range(runs):
        parent = rng.choice([ROOT, *range(n)]) if n else ROOT
        found.add(parent, BLOCK * rng.randint(1, 4))
    return found


def blocks(runs: Runs, run: int, depth: int) -> list[int]:
    """Chained hashes: one per (run, block of it), in order."""
    found = []
    for r in runs.chain[run]:
        for at in range(runs.start[r], min(depth, runs.end[r]), BLOCK):
            found.append(1 + r * 1000 + at)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_it_answers_like_the_gateways_index(seed: int):
    rng = Random(seed)
    runs = tree(rng, 12)
    ours, theirs = RunIndex(runs, TTL_S), PrefixIndex(100_000, TTL_S)
    held: dict[tuple[int, int], int] = {}
    now = 0.0
    for _ in range(120):
        now += rng.random() * 2
        e, run = rng.randrange(3), rng.randrange(len(runs))
        depth = rng.randrange(runs.start[run], runs.end[run] + 1, BLOCK)
        action = rng.random()
        if action < 0.45:
            path = runs.chain[run]
            theirs.stored(str(e), Tier.DEVICE, blocks(runs, run, depth), now)
            for r in path:
                top = min(depth, runs.end[r])
                if top > held.get((e, r), runs.start[r]):
                    held[e, r] = top
                    ours.changed(e, r, top, now)
        elif action < 0.65:
            have = held.get((e, run), runs.start[run])
            longer = [r for r in range(len(runs)) if r != run and run in runs.chain[r]]
            evictable = all(held.get((e, r), runs.start[r]) == runs.start[r] for r in longer)
            if depth < have and evictable:  # an engine evicts the end of a prompt before its beginning
                gone = [b for b in blocks(runs, run, have) if b not in set(blocks(runs, run, depth))]
                theirs.removed(str(e), Tier.DEVICE, gone)
                held[e, run] = depth
                ours.changed(e, run, depth, now)
        elif action < 0.9:
            theirs.speculate(str(e), blocks(runs, run, depth), now)
            ours.claim(e, run, depth, now)
        elif action < 0.93:
            theirs.forget(str(e))
            ours.forget(e)
            held = {key: top for key, top in held.items() if key[0] != e}
        theirs.expire(now)
        for asked in range(len(runs)):
            whole = runs.end[asked]
            matches = theirs.find_matches(blocks(runs, asked, whole), now)
            expected = {int(a): n * BLOCK for a, n in matches.device.items() if n}
            assert ours.match(asked, whole, now) == expected


def test_events_come_late():
    runs = Runs()
    run = runs.add(ROOT, 64)
    index = RunIndex(runs, TTL_S, lag_s=2.0)
    index.changed(0, run, 64, now=1.0)
    index.catch_up(2.9)
    assert index.match(run, 64, 2.9) == {}
    index.catch_up(3.0)
    assert index.match(run, 64, 3.0) == {0: 64}


def test_what_everybody_holds_is_left_out_of_a_short_answer():
    runs = Runs()
    system = runs.add(ROOT, 16)
    session = runs.add(system, 64)
    index = RunIndex(runs, TTL_S)
    for e in range(10):
        index.changed(e, system, 16, 0.0)
    index.changed(3, session, 80, 0.0)
    assert index.match(session, 80, 0.0, most=5) == {3: 80}
    assert len(index.match(session, 80, 0.0)) == 10
