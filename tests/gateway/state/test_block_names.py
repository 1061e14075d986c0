"""Names of blocks: a dict that is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.state.block_names import SEGMENTS, Names

NAME = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1), st.integers(0, 9).map(lambda n: n * SEGMENTS))


@given(st.lists(st.lists(st.tuples(NAME, st.integers(0, 2**60))), max_size=8))
def test_they_are_a_dict(batches: list[list[tuple[int, int]]]) -> None:
    names, known = Names(1_000_000), dict[int, int]()
    for batch in batches:
        names.enter([name for name, _ in batch], [block for _, block in batch])
        known.update(batch)
        assert len(names) == len(known)
    assert {name: names.get(name) for name in known} == known
    assert names.find(known) == [*known.values()]
    assert names.get(2**63 + 12_345) == known.get(2**63 + 12_345)


@pytest.mark.parametrize(
    ("held", "left"),
    [(0, {*range(1, 1_000)}), (900, {*range(900)} | {*range(901, 1_000)}), (1_000, None)],
    ids=["nobody holds any", "those that are held stay", "all are held: some go all the same"],
)
def test_too_many_are_forgotten(held: int, left: set[int] | None) -> None:
    names = Names(999)
    names.enter(range(1_000), range(1_000))
    names.shrink(lambda block: block < held)
    found = {name for name in range(1_000) if names.get(name) is not None}
    assert len(found) == len(names) == 999
    assert left in (None, found)


def test_many_are_forgotten_step_by_step() -> None:
    names, calls = Names(9_000), 0
    names.enter(range(30_000), range(30_000))
    while len(names) > 9_000:
        before = len(names)
        names.shrink(lambda block: block >= 25_000)
        assert 0 < before - len(names) <= 2_100, "a call does not take long"
        calls += 1
    assert calls > 9
    assert names.find(range(25_000, 30_000)) == [*range(25_000, 30_000)]


def test_nothing_is_forgotten_while_there_is_room() -> None:
    names = Names(10)
    names.enter(range(10), range(10))
    names.shrink(lambda _: False)
    assert len(names) == 10


def test_room_only_grows() -> None:
    names = Names(10)
    names.widen(20)
    names.widen(5)
    names.enter(range(20), range(20))
    names.shrink(lambda _: False)
    assert len(names) == 20
