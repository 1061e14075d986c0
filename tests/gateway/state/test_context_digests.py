"""The digests of a context's blocks, by which the store's keys end."""

from array import array

import pytest

from perilune_api.pool import Hashing
from perilune_gateway.model.handoff import Content
from perilune_gateway.request import block_hashes
from perilune_gateway.state.context_digests import EVERY, ContextDigests

SIZE = 4


def context(blocks, lora="", salt=""):
    ids = array("I", range(1, blocks * SIZE + 1))
    return Content(
        ids, block_hashes.chain(ids, SIZE, block_hashes.prefix_root(lora, salt)), lora=lora, salt=salt
    )


def engines(of):
    path = "/adapters/lora" if of.lora else ""
    return list(block_hashes.vllm_chain(of.ids, SIZE, Hashing(), of.lora, path, of.salt))


@pytest.fixture
def digests():
    return ContextDigests(Hashing(), SIZE, {"lora": "/adapters/lora"})


@pytest.mark.parametrize("lora", ["", "lora"])
@pytest.mark.parametrize("salt", ["", "salt"])
@pytest.mark.parametrize("blocks", [1, EVERY, 3 * EVERY + 5])
@pytest.mark.parametrize("followed", [False, True], ids=["at once", "in steps"])
def test_they_are_those_of_the_engine(digests, blocks, lora, salt, followed):
    of = context(blocks, lora, salt)
    if followed:
        assert len(list(digests.follow(of))) == blocks // EVERY
    positions = [blocks - 1, 0, *range(EVERY - 1, blocks, EVERY), *range(blocks)]
    assert digests.of(of, positions) == [engines(of)[at] for at in positions]


def test_a_context_that_has_grown_is_followed_from_where_it_was(digests):
    list(digests.follow(context(2 * EVERY + 3)))
    longer = context(5 * EVERY)
    assert len(list(digests.follow(longer))) == 3
    assert digests.of(longer, [5 * EVERY - 1]) == engines(longer)[-1:]
