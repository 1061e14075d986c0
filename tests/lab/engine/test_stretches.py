"""Steps that are taken together give the same times, tokens and cache as one by one."""

from random import Random

import pytest
from stepped_engine import SteppedEngine

from perilune_gateway.model import H20_30B
from perilune_lab.engine.kv_cache import Removed, Stored
from perilune_lab.engine.request import Request
from perilune_lab.engine.scheduler import Limits
from perilune_lab.engine.stretches import Stretch


@pytest.mark.parametrize("sequences", [1, 8, 60])
def test_a_stretch_takes_as_long_as_its_steps(sequences: int) -> None:
    stretch = Stretch.of(H20_30B, sequences, 9_000)
    total_s = 0.0
    for step in range(400):
        total_s += H20_30B.decode_step_s(sequences, 9_000 + step * sequences)
        assert stretch.seconds(step + 1) == pytest.approx(total_s)
        assert stretch.steps_until(total_s - 1e-6) == step + 1


def played(*, stretches: bool, blocks: int) -> tuple[list[Request], SteppedEngine]:
    """Play random requests that share prefixes and come at random times; some of their clients leave."""
    engine, rng = SteppedEngine(blocks=blocks, limits=Limits(stretches=stretches, max_sequences=6)), Random(7)
    requests: list[Request] = []
    for number in range(60):
        shared = [rng.randrange(3)] * rng.randrange(1, 900)
        prompt = [*shared, *([1000 + number] * rng.randrange(1, 600))]
        requests.append(engine.add(prompt, rng.randrange(1, 300)))
        engine.run(rng.expovariate(2.0))
        if rng.random() < 0.1:
            engine.scheduler.abort(requests[-1], engine.now)
    engine.run()
    return requests, engine


@pytest.mark.parametrize("blocks", [17_601, 300])
def test_times_and_cache_are_those_of_single_steps(blocks: int) -> None:
    (one_by_one, single), (together, stretched) = (
        played(stretches=on, blocks=blocks) for on in (False, True)
    )
    for a, b in zip(one_by_one, together, strict=True):
        assert a.finish == b.finish
        assert a.cached_tokens == b.cached_tokens
        assert b.first_token_s == pytest.approx(a.first_token_s)
        assert b.finished_s == pytest.approx(a.finished_s)
        assert a.table.tokens == b.table.tokens
    assert len(stretched.steps) < len(single.steps) / 5
    assert sum(step.tokens for step in stretched.steps) == sum(step.tokens for step in single.steps)
    assert announced(stretched) == announced(single)


def announced(engine: SteppedEngine) -> list[tuple[str, bytes]]:
    """Return the blocks that entered and left the cache, in their order."""
    found = []
    for change in (change for step in engine.steps for change in step.changes):
        match change:
            case Stored():
                found += [("stored", digest) for digest in change.digests]
            case Removed():
                found.append(("removed", change.digest))
    return found
