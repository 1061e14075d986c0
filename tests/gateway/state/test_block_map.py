"""Blocks and their values: what is kept in runs equals what a dict has, in whatever order they come."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from property_examples import examples

from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.block_map import BORN, BlockMap

BITS = st.sampled_from([1 << 32, 1 << 33, 1 << 34])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
PROMPTS = TOKENS.map(lambda tokens: blocks.chain(tokens, 1, 0))
LONG = st.tuples(TOKENS, st.integers(1, 700)).map(lambda it: blocks.chain(it[0] + [2] * it[1], 1, 0))
PIECES = st.tuples(PROMPTS | LONG, st.integers(0, 300), st.integers(1, 300)).map(
    lambda it: it[0][it[1] :][: it[2]]
)
SCATTERED = st.lists(PROMPTS.map(lambda chain: chain[-1]), max_size=8)
"""Blocks of any prompts in any order, some twice."""
ROWS = PROMPTS | LONG | PIECES | SCATTERED


class AgainstADict(RuleBasedStateMachine):
    """A dict: block → value, of which the retired bits mean nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, int] = {}
        self.now = 0
        self.retired = 0

    @initialize(max_blocks=st.sampled_from([100, 100_000]))
    def begin(self, max_blocks):
        self.notes: dict[int, str] = {}
        self.it = BlockMap(max_blocks, self.notes)

    @rule(row=ROWS, bit=BITS, follows=st.booleans())
    def add(self, row, bit, follows):
        self.sweep_before(bit)
        self.now += 1
        at = len(row) // 3 if follows else 0
        before, row = row[:at], row[at:]
        lack = {block for block in row if not self.values.get(block, 0) & bit}
        assert self.it.add(row, bit, self.now, before[-1] if before else 0) == len(lack)
        for block in lack:
            self.values[block] = self.values.get(block, self.now) | bit

    @rule(row=ROWS, bit=BITS, order=st.sampled_from([1, -1]))
    def take(self, row, bit, order):
        self.sweep_before(bit)
        self.check_take(row[::order], bit)

    @rule(row=PROMPTS | LONG, bit=BITS, at=st.integers(0, 300))
    def evict_one_by_one(self, row, bit, at):
        """As an engine does, from the end."""
        self.sweep_before(bit)
        for block in reversed(row[at:]):
            self.check_take((block,), bit)

    @rule(bit=BITS)
    def retire(self, bit):
        self.it.retire(bit)
        self.retired |= bit

    @rule()
    def sweep(self):
        while not self.it.sweep():
            pass
        self.clear(list(self.values), self.retired)
        self.retired = 0

    @rule(row=ROWS)
    def renew(self, row):
        self.it.renew(row)

    @rule(count=st.integers(1, 50))
    def drop_oldest(self, count):
        dropped = {}
        for some, value in self.it.drop_oldest(count):
            dropped |= dict.fromkeys(some, value)
        assert len(dropped) >= min(count, len(self.values))
        for block, value in dropped.items():
            assert self.values.pop(block) & ~self.retired == value

    @rule(row=ROWS, start=st.integers(0, 300), past_unknown=st.booleans())
    def walk(self, row, start, past_unknown):
        plain = [self.values.get(block, 0) for block in row]
        until = (
            len(row)
            if past_unknown
            else next((n for n, v in enumerate(plain) if n >= start and not v), len(row))
        )
        steps, end = self.it.steps(row, start, past_unknown=past_unknown)
        assert end == max(start, until)
        assert [at for at, _ in steps] == [
            at for at in range(start, end) if at == start or plain[at] != plain[at - 1]
        ]
        assert all(value == plain[at] for at, value in steps)

    @rule(row=PROMPTS | LONG)
    def look_up(self, row):
        assert [self.it.value(block) for block in row] == [
            self.values.get(block, 0) & ~self.retired for block in row
        ]

    @rule(row=PROMPTS)
    def note(self, row):
        self.notes |= {block: "known" for block in row if block in self.values}

    @invariant()
    def agrees(self):
        assert len(self.it) == len(self.values)
        assert self.notes.keys() <= self.values.keys()

    def sweep_before(self, bit):
        """Sweep bits that are about to be used again."""
        if self.retired & bit:
            self.sweep()

    def check_take(self, row, bit):
        held = {block for block in row if self.values.get(block, 0) & bit}
        assert self.it.take(row, bit) == len(held)
        self.clear(held, bit)

    def clear(self, held, bits):
        for block in held:
            self.values[block] &= ~bits
            if self.values[block] <= BORN:
                del self.values[block]


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_a_row_of_blocks_that_come_one_by_one_is_walked_at_once():
    """Blocks of decoding come one at a time, and a run is what they make together."""
    it, prompt = BlockMap(1_000, {}), blocks.chain(range(600), 1, 0)
    for at, block in enumerate(prompt):
        it.add((block,), 1 << 32, 5.0, prompt[at - 1] if at else 0)
    assert it.steps(prompt, past_unknown=False) == ([(0, 5 | 1 << 32)], 600)


@pytest.mark.parametrize("hole", [0, 1, 255, 256, 300, 599])
def test_a_hole_is_seen_wherever_it_is(hole):
    it, prompt = BlockMap(1_000, {}), blocks.chain(range(600), 1, 0)
    one, two = 1 << 32, 1 << 33
    for bit in (one, two):
        it.add(prompt, bit, 0.0)
    it.take((prompt[hole],), two)
    both = [(at, one | two) for at in (0, hole + 1) if at not in (hole, 600)]
    assert it.steps(prompt, past_unknown=False) == (sorted([*both, (hole, one)]), 600)
    it.add((prompt[hole],), two, 0.0)
    assert it.steps(prompt, past_unknown=False) == ([(0, one | two)], 600)


def test_what_is_in_use_stays_and_ends_of_prompts_go_first():
    it = BlockMap(1_000, {})
    prompts = [blocks.chain([n] * 300, 1, 0) for n in range(3)]
    for prompt in prompts:
        it.add(prompt, 1 << 32, 0.0)
    it.renew(prompts[0])
    dropped = {block for some, _ in it.drop_oldest(310) for block in some}
    assert dropped == {*prompts[1], *prompts[2][290:]}
