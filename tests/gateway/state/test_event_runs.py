"""Runs of blocks on their whole way, from an engine's bytes to the prefix index, against sets of names."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from property_examples import examples

from perilune_gateway.feeds.kv_events import decode, pieces
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.prefix_index import PrefixIndex

SIZE, LENGTH = 2, 12
FORKS = (0, 4, 9)
"""Each prompt begins with so many blocks of the first one."""
PROMPTS = [
    [*range(fork * SIZE), *range(100 * n, 100 * n + (LENGTH - fork) * SIZE)] for n, fork in enumerate(FORKS)
]
CHAINS = [blocks.chain(tokens, SIZE, 0) for tokens in PROMPTS]
SEEDS = {"a": 1, "b": 1, "c": 2}
"""Endpoint → what its names depend on."""

endpoints = st.sampled_from(sorted(SEEDS))
prompts = st.integers(0, len(PROMPTS) - 1)
places = st.integers(0, LENGTH - 1)
counts = st.integers(1, LENGTH)


def name(endpoint: str, block: int) -> int:
    """Return an engine's name of one of our blocks, 64 bits as good as random."""
    return blocks.chain([block & 0xFFFFFFFF, block >> 32], 2, SEEDS[endpoint])[0] << 4 | block & 15


def stored(endpoint: str, prompt: int, first: int, count: int) -> dict:
    chain = CHAINS[prompt]
    names = [name(endpoint, block) for block in chain[first : first + count]]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": name(endpoint, chain[first - 1]) if first else None,
        "token_ids": PROMPTS[prompt][first * SIZE : (first + len(names)) * SIZE],
        "block_size": SIZE,
        "medium": "GPU",
        "group_idx": 0,
    }


def removed(endpoint: str, row: list[int]) -> list[dict]:
    """Return a removal for each block, as vLLM sends them."""
    return [
        {"type": "BlockRemoved", "block_hashes": [name(endpoint, block)], "medium": "GPU", "group_idx": 0}
        for block in row
    ]


class Runs(RuleBasedStateMachine):
    """Three engines with prompts that share their beginnings. Messages may be cut into pieces anywhere."""

    @initialize(step=st.integers(1, 5))
    def begin(self, step):
        self.step = step
        self.index = PrefixIndex(1_000, 10.0)
        self.blocks = EngineBlocks(self.index, SIZE, store=False, max_names=1_000)
        self.held: dict[str, set[int]] = {endpoint: set() for endpoint in SEEDS}

    def hear(self, endpoint: str, events: list[dict]) -> None:
        for piece in pieces(decode(msgspec.msgpack.encode([0.0, events, 0])), self.step):
            for event in piece.events:
                self.blocks.apply(endpoint, event, 0.0)

    @rule(endpoint=endpoints, prompt=prompts, first=places, count=counts)
    def store(self, endpoint, prompt, first, count):
        """Store a run of a prompt: before what it follows, after it, again, or over other runs."""
        self.hear(endpoint, [stored(endpoint, prompt, first, count)])
        self.held[endpoint].update(CHAINS[prompt][first : first + count])

    @rule(endpoint=endpoints, prompt=prompts, keep=places)
    def evict(self, endpoint, prompt, keep):
        """Evict the end of a prompt, its last block first."""
        self.hear(endpoint, removed(endpoint, CHAINS[prompt][keep:][::-1]))
        self.held[endpoint].difference_update(CHAINS[prompt][keep:])

    @rule(endpoint=endpoints, prompt=prompts, row=st.permutations(range(LENGTH)), count=counts)
    def remove(self, endpoint, prompt, row, count):
        """Evict any blocks, in any order."""
        gone = [CHAINS[prompt][at] for at in row[:count]]
        self.hear(endpoint, removed(endpoint, gone))
        self.held[endpoint].difference_update(gone)

    @rule(endpoint=endpoints, old=prompts, new=prompts, keep=places, count=counts)
    def replace(self, endpoint, old, new, keep, count):
        """Evict and store in one message, as in a step of an engine whose cache is full."""
        gone = CHAINS[old][keep:][::-1]
        self.hear(endpoint, [*removed(endpoint, gone), stored(endpoint, new, 0, count)])
        self.held[endpoint].difference_update(gone)
        self.held[endpoint].update(CHAINS[new][:count])

    @rule(endpoint=endpoints)
    def clear(self, endpoint):
        self.hear(endpoint, [{"type": "AllBlocksCleared"}])
        self.held[endpoint].clear()

    @invariant()
    def leading_blocks_are_those_of_the_model(self):
        for chain in CHAINS:
            expected = {e: n for e in SEEDS if (n := leading(chain, self.held[e]))}
            assert self.index.find_matches(chain, 0.0).device == expected

    def teardown(self):
        for endpoint in SEEDS:
            self.blocks.reset(endpoint, 0.0)
        assert len(self.index) == 0
        assert not self.blocks.waiting


def leading(chain: list[int], held: set[int]) -> int:
    return next((at for at, block in enumerate(chain) if block not in held), len(chain))


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=examples(100), stateful_step_count=30)
