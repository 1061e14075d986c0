"""What the store's master lists is in the store, though no event has told the gateway."""

import pytest

from perilune_api.pool import Hashing
from perilune_gateway.model.kv_events import BlockStored
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state import prompt_names
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.prompt_names import PromptNames

SIZE = 4
PROMPT = tuple(range(1, 41))
"""Ten blocks."""


class Late:
    """The index of a gateway that has heard nothing of what came before."""

    def __init__(self, seed="") -> None:
        self.index = PrefixIndex(100_000, 10.0)
        names = PromptNames(Hashing(seed=seed), SIZE, {"lora": "/adapters/lora"})
        self.blocks = EngineBlocks(self.index, SIZE, store=True, prompt_names=names)

    def list(self, names, since=0.0, now=0.0):
        for _ in self.blocks.listed(names, since, now):
            pass

    def prompt(self, tokens=PROMPT, lora="", salt="", now=0.0):
        """Return how much of the prompt the store has, and the one engine's device."""
        ours = blocks.chain(tokens, SIZE, blocks.prefix_root(lora, salt))
        self.blocks.prompt(tokens, ours, lora, salt, now)
        found = self.index.find_matches(ours, now)
        return found.store, found.device.get("engine", 0)


def names(tokens=PROMPT, lora="", salt=""):
    path = "/adapters/lora" if lora else ""
    return [blocks.low64(d) for d in blocks.vllm_chain(tokens, SIZE, Hashing(), lora, path, salt)]


def stored(names, tokens, parent=None, medium="GPU"):
    return BlockStored(
        block_hashes=tuple(names),
        parent_block_hash=parent,
        token_ids=tuple(tokens),
        block_size=SIZE,
        medium=medium,
    )


@pytest.mark.parametrize(
    ("lora", "salt"),
    [("", ""), ("lora", ""), ("", "salt"), ("lora", "salt")],
    ids=["plain", "lora", "salt", "both"],
)
def test_a_prompt_finds_what_was_stored_before_the_gateway_listened(lora, salt):
    late = Late()
    assert late.prompt(lora=lora, salt=salt) == (0, 0)
    late.list(names(lora=lora, salt=salt)[:7])
    assert late.prompt(lora=lora, salt=salt) == (7, 0)
    assert late.prompt(salt="another") == (0, 0)
    assert late.blocks.unlearnt == 0


def test_a_longer_turn_finds_more_of_it():
    late = Late()
    late.list(names()[:7])
    assert late.prompt(PROMPT[:12]) == (3, 0)
    assert late.prompt(PROMPT) == (7, 0)


def test_blocks_of_which_an_event_told_are_listed_too():
    late = Late()
    late.blocks.apply("engine", stored(names(), PROMPT), 0.0)
    late.list(names()[:4])
    assert late.prompt() == (4, 10)


def test_an_event_tells_what_a_listed_name_means():
    late = Late()
    late.list(names()[:4])
    late.blocks.apply("engine", stored(names(), PROMPT), 0.0)
    assert late.prompt() == (4, 10)


def test_a_prompt_tells_the_parents_of_blocks_that_wait():
    """The store has the beginning, an engine has announced the end alone."""
    late = Late()
    late.list(names()[:6])
    late.blocks.apply("engine", stored(names()[6:], PROMPT[24:], parent=names()[5]), 0.0)
    assert late.blocks.waiting["engine"] == 4
    late.prompt()
    assert late.blocks.waiting["engine"] == 0
    ends = blocks.chain(PROMPT, SIZE, 0)[6:]
    assert all(late.index.announced("engine", block) for block in ends)


def test_what_is_listed_no_longer_is_lost():
    late = Late()
    late.list(names(), since=1.0, now=1.0)
    assert late.prompt(now=1.0) == (10, 0)
    late.list(names()[:3], since=2.0, now=2.0)
    assert late.prompt(now=2.0) == (3, 0)
    late.list([], since=3.0, now=3.0)
    assert late.prompt(now=3.0) == (0, 0)


def test_what_was_stored_after_the_master_was_asked_is_not_lost():
    late = Late()
    late.blocks.apply("engine", stored(names(), PROMPT), 1.0)
    late.blocks.apply("engine", stored(names()[:5], PROMPT[:20], medium="cpu"), 1.5)
    late.list(names()[:2], since=1.2, now=2.0)
    assert late.prompt(now=2.0) == (5, 10)
    late.list(names()[:2], since=2.2, now=3.0)
    assert late.prompt(now=3.0) == (2, 10)


def test_names_that_are_listed_no_longer_are_not_learnt():
    late = Late()
    late.list(names()[:7])
    late.list(names()[:2], since=1.0, now=1.0)
    assert late.prompt(now=1.0) == (2, 0)


def test_a_master_that_has_ended_has_nothing():
    late = Late()
    late.list(names())
    assert late.prompt(PROMPT[:20]) == (5, 0)
    late.blocks.segments({})
    assert late.prompt() == (0, 0)


def test_engines_of_another_seed_teach_nothing():
    late = Late(seed="7")
    late.list(names())
    assert late.prompt() == (0, 0)


def test_a_long_prompt_is_learnt_turn_by_turn(monkeypatch):
    monkeypatch.setattr(prompt_names, "LIMIT", 4)
    late = Late()
    late.list(names())
    assert [late.prompt()[0] for _ in range(4)] == [4, 8, 10, 10]
