"""Engines share blocks through a store."""

from hashlib import sha256

import pytest

from perilune_lab.engine.store import FileStore


def digests(*keys: int) -> list[bytes]:
    return [sha256(bytes([key])).digest() for key in keys]


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def open_(blocks: int = 100) -> FileStore:
        stores.append(FileStore(tmp_path / "pool", blocks))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def test_what_one_puts_all_find(open_store):
    one, two = open_store(), open_store()
    assert one.put(digests(1, 2, 3)) == [True, True, True]
    assert two.leading(digests(1, 2, 9, 3)) == 2
    assert two.put(digests(3, 4)) == [False, True]
    assert one.leading(digests(1, 2, 3, 4)) == 4
    assert open_store().leading(digests(4)) == 1


def test_the_oldest_entries_go_first_and_all_agree(open_store):
    one, two = open_store(3), open_store(3)
    one.put(digests(1, 2))
    two.put(digests(3, 4))
    for store in (one, two):
        assert [store.leading(digests(key)) for key in (1, 2, 3, 4)] == [0, 1, 1, 1]
        assert len(store) == 3


def test_clear_empties_it_for_everyone(open_store):
    one, two = open_store(), open_store()
    one.put(digests(1))
    assert two.leading(digests(1)) == 1
    one.clear()
    assert two.leading(digests(1)) == 0
    assert one.put(digests(2)) == [True]
    assert two.leading(digests(2)) == 1


def test_short_digests_are_kept_apart(open_store):
    store = open_store()
    store.put([b"a" * 16])
    assert store.leading([b"a" * 16]) == 1
    assert store.leading([b"a" * 15 + b"b"]) == 0
