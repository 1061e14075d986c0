"""The prefix index says how many leading blocks of a prompt each endpoint holds, in which tier."""

import json
import random
from itertools import pairwise
from math import sqrt

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property_examples import examples

from perilune_gateway.model import Tier
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.prefix_index import Group, PrefixIndex

DEVICE, HOST, STORE = Tier
A, B, C, D, E = blocks.chain(range(5), 1, 0)
PROMPT = [A, B, C, D, E]
X = blocks.chain([0, 1, 9], 1, 0)[-1]
Y = blocks.chain([8], 1, 0)[-1]


class Timed(PrefixIndex):
    """An index whose time passes before each question, as `PoolState.pass_time` lets it pass."""

    def find_matches(self, blocks, now):
        self.expire(now)
        return super().find_matches(blocks, now)

    def find_block(self, block, now):
        self.expire(now)
        return super().find_block(block, now)

    def leading(self, endpoint, blocks, now):
        self.expire(now)
        return super().leading(endpoint, blocks, now)

    def stats(self, now):
        self.expire(now)
        return super().stats(now)


def index(max_blocks=1000, ttl_s=10.0, **options) -> PrefixIndex:
    return Timed(max_blocks, ttl_s, **options)


def test_a_question_changes_nothing():
    it = PrefixIndex(1000, 10.0)
    it.speculate("1", [A, B], 0)
    assert it.find_matches([A, B], 11).device == {"1": 2}
    assert it.leading("1", [A, B], 11) == it.stats(11).speculative == 2
    it.expire(11)
    assert it.find_matches([A, B], 11).device == {}
    assert it.leading("1", [A, B], 11) == it.stats(11).speculative == 0


def test_the_example_of_three_holders():
    """A held by 1, 2, 3; B by 1, 2; C by 1."""
    it = index()
    it.stored("1", DEVICE, [A, B, C], 0)
    it.stored("2", DEVICE, [A, B], 0)
    it.stored("3", DEVICE, [A], 0)
    matches = it.find_matches([A, B, C, D], 0)
    assert matches.device == {"1": 3, "2": 2, "3": 1}
    assert (matches.blocks, matches.longest, matches.store) == (4, 3, 0)


def test_a_pool_that_grew_has_more_room_and_one_that_shrank_no_less():
    it = index(max_blocks=2)
    it.widen(5)
    it.widen(1)
    it.stored("1", DEVICE, PROMPT, 0)
    assert it.find_matches(PROMPT, 0).device == {"1": 5}


def test_a_match_ends_at_any_block_boundary():
    it = index()
    it.stored("1", DEVICE, PROMPT, 0)
    assert [it.find_matches(PROMPT[:n], 0).device for n in (0, 1, 3)] == [{}, {"1": 1}, {"1": 3}]


def test_a_match_is_leading_and_contiguous():
    it = index()
    it.stored("1", DEVICE, PROMPT, 0)
    it.stored("2", DEVICE, PROMPT, 0)
    it.removed("1", DEVICE, [B])
    it.removed("2", DEVICE, [A])
    assert it.find_matches(PROMPT, 0).device == {"1": 1}
    it.stored("1", DEVICE, [B], 0)
    assert it.find_matches(PROMPT, 0).device == {"1": 5}


def test_tiers_are_cumulative():
    it = index()
    it.stored("1", DEVICE, [A], 0)
    it.stored("1", HOST, [B, C], 0)
    it.stored("2", HOST, [A], 0)
    it.stored("whoever", STORE, [A, B, C, D], 0)
    matches = it.find_matches(PROMPT, 0)
    assert matches.device == {"1": 1}
    assert matches.host == {"1": 3, "2": 1}
    assert matches.store == 4
    assert matches.of("1") == (1, 3, 4)
    assert matches.of("2") == (0, 1, 4)
    assert matches.of("never seen") == (0, 0, 4)


def test_what_is_in_host_memory_is_told_apart():
    it = index()
    it.stored("1", DEVICE, [A, B, C], 0)
    it.stored("1", HOST, [A, B], 0)
    it.stored("2", HOST, [A, B, C], 0)
    it.stored("2", DEVICE, [D], 0)
    it.stored("3", DEVICE, [A], 0)
    assert it.find_matches(PROMPT, 0).offloaded == {"1": 2, "2": 3}
    it.removed("2", HOST, [B])
    assert it.find_matches(PROMPT, 0).offloaded == {"1": 2, "2": 1}


def test_store_and_own_blocks_make_one_prefix():
    """The store lacks the head, which one endpoint has: only that one reaches the rest."""
    it = index()
    it.stored("1", DEVICE, [A], 0)
    it.stored("2", DEVICE, [B], 0)
    it.stored("1", STORE, [B, C], 0)
    matches = it.find_matches(PROMPT, 0)
    assert matches.reach == {"1": 3}
    assert matches.store == 0


def test_a_removal_is_of_one_tier():
    it = index()
    it.stored("1", DEVICE, [A], 0)
    it.stored("1", HOST, [A], 0)
    it.removed("1", DEVICE, [A])
    assert it.find_matches([A], 0).of("1") == (0, 1, 1)
    it.removed("1", HOST, [A])
    assert len(it) == 0


def test_store_entries_age():
    it = index(store_ttl_s=60.0)
    it.stored("1", STORE, [A], 0)
    it.stored("1", STORE, [B], 30)
    assert it.find_matches([A, B], 59).store == 2
    assert it.find_matches([A, B], 60).store == 0
    assert A not in it
    assert B in it
    it.expire(90)
    assert B not in it


def test_clearing_and_removing_leave_no_credit():
    it = index()
    for endpoint in ("1", "2"):
        it.stored(endpoint, DEVICE, [A, B], 0)
        it.speculate(endpoint, [A, B, C], 0)
    it.forget("1")
    assert it.find_matches(PROMPT, 0).device == {"2": 3}
    it.forget("2")
    assert len(it) == 0
    it.stored("3", DEVICE, [A], 0)
    it.stored("2", DEVICE, [A, B], 0)
    assert it.find_matches(PROMPT, 0).device == {"2": 2, "3": 1}


# -- claims ---------------------------------------------------------------------------------------------


def test_a_claim_counts_until_its_time_is_over():
    it = index(ttl_s=10)
    it.speculate("1", [A, B], 0)
    assert it.find_matches(PROMPT, 9.9).device == {"1": 2}
    assert it.stats(9.9).speculative == 2
    assert it.find_matches(PROMPT, 10).device == {}
    assert it.stats(10).speculative == 0
    assert len(it) == 0


def test_an_event_confirms_a_claim():
    it = index(ttl_s=10)
    it.speculate("1", [A, B], 0)
    it.stored("1", DEVICE, [A], 5)
    assert it.find_matches(PROMPT, 20).device == {"1": 1}
    assert it.announced("1", A)
    assert not it.announced("1", B)


def test_a_repeated_prompt_renews_its_claim():
    it = index(ttl_s=10)
    it.speculate("1", [A, B], 0)
    it.speculate("1", [A], 5)
    assert it.find_matches(PROMPT, 12).device == {"1": 1}
    it.expire(12)
    assert len(it) == 1


@pytest.mark.parametrize(
    "take_out",
    [
        pytest.param(lambda it: it.removed("1", DEVICE, [B]), id="evicted"),
        pytest.param(lambda it: it.forget("1"), id="cleared"),
        pytest.param(lambda it: it.forget("1"), id="gone and back"),
    ],
)
@pytest.mark.parametrize("confirmed", [0, 1, 2])
def test_what_was_taken_out_is_claimed_at_once(take_out, confirmed):
    it = index(ttl_s=16)
    it.speculate("1", [A, B], 0)
    it.stored("1", DEVICE, [A, B][:confirmed], 0)
    it.speculate("1", [A, B], 0.1)
    take_out(it)
    it.speculate("1", [A, B], 0.2)
    assert it.find_matches([A, B], 0.2).device == {"1": 2}


def test_a_claim_for_longer_is_made_at_once():
    """An endpoint that has lost its events."""
    it = index(ttl_s=30)
    it.speculate("1", PROMPT, 0)
    it.speculate("1", PROMPT, 1, ttl_s=600)
    assert it.find_matches(PROMPT, 500).device == {"1": 5}


def test_a_claim_that_gave_way_to_others_is_made_at_once():
    it = index(ttl_s=16, claims_per_endpoint=2)
    for prompt in ([A, B], blocks.chain([8, 8], 1, 0), [A, B]):
        it.speculate("1", prompt, 0)
    assert it.find_matches([A, B], 0).device == {"1": 2}


def test_an_endpoint_without_events_keeps_a_prompt_that_comes_again():
    it = index(claims_per_endpoint=3)
    it.speculate("1", [A, B], 0, ttl_s=600)
    once, new = blocks.chain([9], 1, 0), blocks.chain([8], 1, 0)
    it.speculate("1", once, 0.5, ttl_s=600)
    it.speculate("1", [A, B], 2.1, ttl_s=600)
    it.speculate("1", new, 2.2, ttl_s=600)
    assert [it.find_matches(p, 2.2).device.get("1", 0) for p in ([A, B], once, new)] == [2, 0, 1]


def test_claims_that_were_confirmed_are_gone_with_their_blocks():
    it = index(ttl_s=600)
    for n in range(10_000):
        endpoint, now = "12"[n % 2], n / 1000
        it.speculate(endpoint, [A, B], now)
        it.stored(endpoint, DEVICE, [A, B], now)
        it.removed(endpoint, DEVICE, [A, B])
    assert (len(it), it.stats(10).speculative) == (0, 0)


def test_an_endpoint_without_events_keeps_its_latest_prompts():
    it = index(claims_per_endpoint=3)
    other = blocks.chain([9, 9], 1, 0)
    it.speculate("1", [A, B, C], 0, ttl_s=600)
    it.speculate("1", other, 1, ttl_s=600)
    assert it.find_matches([A, B, C], 1).device == {"1": 1}, "the tail goes first"
    assert it.find_matches(other, 1).device == {"1": 2}
    assert it.stats(1).endpoints["1"].speculative == 3
    assert it.find_matches(other, 599).device == {"1": 2}


def test_a_prompt_leaves_a_claim_where_it_differs():
    it = index()
    first, second = (blocks.chain([7] * 5 + [n] * 5, 1, 0) for n in (1, 2))
    it.speculate("1", first, 0)
    it.speculate("2", second, 0)
    assert it.find_matches(first, 0).device == {"1": 10, "2": 5}
    assert it.find_matches(second[:8], 0).device == {"1": 5, "2": 8}
    assert it.stats(0).speculative == 20
    assert len(it) == 15


def test_prompts_that_begin_alike_claim_their_beginning_once():
    it = index(ttl_s=10)
    first, second = (blocks.chain([7] * 5 + [n] * 5, 1, 0) for n in (1, 2))
    it.speculate("1", first, 0)
    it.speculate("1", second, 5)
    assert it.stats(5).speculative == 15
    assert it.find_matches(first, 11).device == {"1": 5}
    assert it.find_matches(second, 11).device == {"1": 10}


@pytest.mark.parametrize("parent", [0, None], ids=["in order", "any blocks"])
def test_what_is_announced_again_confirms_a_claim_that_follows_it(parent):
    it = index()
    it.stored("1", DEVICE, [A, B], 0, parent=0)
    it.speculate("1", PROMPT, 0)
    it.stored("1", DEVICE, [A, B, C], 1, parent=parent)
    assert it.stats(1).speculative == 2
    it.removed("1", DEVICE, [C])
    assert it.find_matches(PROMPT, 1).device == {"1": 2}


def test_a_claim_goes_on_after_what_other_endpoints_announced():
    it = index()
    it.stored("2", DEVICE, [A, B, C], 0, parent=0)
    it.stored("1", DEVICE, [A], 0, parent=0)
    it.speculate("1", PROMPT, 0)
    it.stored("1", STORE, [A, B], 0)
    matches = it.find_matches(PROMPT, 0)
    assert (matches.device, matches.reach, matches.store) == ({"1": 5, "2": 3}, {"1": 5, "2": 3}, 2)


@pytest.mark.parametrize("parent", [B, None])
def test_the_end_of_a_prompt_that_is_claimed_already_is_claimed_once(parent):
    """Another replica tells only what it did not know to be announced."""
    it = index(ttl_s=10)
    it.speculate("1", PROMPT, 0)
    it.speculate("1", PROMPT[2:], 5, parent=parent)
    assert it.stats(5).speculative == 5
    assert it.find_block(E, 11).device == {"1": 1}
    assert it.find_block(A, 11).device == {}


@pytest.mark.parametrize(
    ("claimed", "refused", "left"),
    [
        pytest.param([[A, B, C]], [0], [], id="the only one"),
        pytest.param([[A, B, C], [A, B, C, D]], [0], [A, B, C, D], id="a longer one came later"),
        pytest.param([[A, B, C, D], [A, B, C]], [1], [A, B, C, D], id="a longer one came before"),
        pytest.param([[A, B, C], [A, B, C, D]], [1], [A, B, C], id="a shorter one came before"),
        pytest.param([[A, B, C], [A, B, C, D]], [1, 0], [], id="both, the later first"),
        pytest.param([[A, B, C], [A, B, C, D]], [0, 1], [], id="both, the earlier first"),
        pytest.param([[A, B], [A, B]], [0], [A, B], id="the same prompt twice"),
        pytest.param([[A, B], [A, B]], [1, 0], [], id="and both refused"),
        pytest.param([[A, B, C], [A, B, X]], [0], [A, B, X], id="a branch came later"),
        pytest.param([[A, B, C], [A, B, X]], [1], [A, B, C], id="a branch came before"),
        pytest.param([[A, B, C], [A, B, X]], [0, 1], [], id="both branches"),
        pytest.param([[A], [A, B], [A, B, C]], [2, 0], [A, B], id="turns of a conversation"),
    ],
)
@pytest.mark.parametrize("events", [False, True], ids=["estimated", "behind announced blocks"])
def test_a_refused_prompt_takes_along_what_no_other_one_claims(claimed, refused, left, events):
    """All of them were sent to one endpoint."""
    it, first = index(), [Y] if events else []
    if events:
        it.stored("1", DEVICE, first, 0, parent=0)
    returned = [it.speculate("1", [*first, *prompt], 0) for prompt in claimed]
    for prompt in refused:
        it.unclaim("1", returned[prompt])
    assert it.stats(0).speculative == len(left)
    for prompt in (PROMPT, [A, B, X]):
        common = leading(prompt, left.__contains__)
        assert it.find_matches([*first, *prompt], 0).of("1")[0] == len(first) + common


def test_a_block_that_is_only_claimed_has_statistics_until_the_claim_ends():
    it = index(ttl_s=10)
    it.speculate("1", [A, B, C], 0)
    for now in (4, 8):
        it.record_match([A, B, D], it.find_matches([A, B, D], now), now)
    assert it.statistics(B, 9) == (2, 8, 2 / sqrt(9))
    it.expire(10)
    it.speculate("1", [A, B], 20)
    assert it.statistics(B, 20) == (0, 0, 0)


# -- statistics -----------------------------------------------------------------------------------------


def test_statistics_are_written_by_record_match_only():
    it = index()
    it.stored("1", DEVICE, [A, B], 0)
    for now in (4, 16):
        before = it.find_matches(PROMPT, now)
        assert it.find_matches(PROMPT, now) == before
        it.record_match(PROMPT, before, now)
    assert it.statistics(B, 25) == (2, 16, 2 / sqrt(25))
    assert it.statistics(A, 25) == (0, 0, 0), "one write per match, at its deepest block"
    it.removed("1", DEVICE, [B])
    it.stored("2", DEVICE, [B], 30)
    assert it.statistics(B, 30) == (0, 0, 0), "it was forgotten meanwhile"


def test_an_entry_of_age_0_counts_as_one_second_old():
    it = index()
    it.stored("1", DEVICE, [A], 7)
    it.record_match([A], it.find_matches([A], 7), 7)
    assert it.statistics(A, 7) == (1, 7, 1)


def test_recent_outcomes():
    it = index()
    it.stored("1", DEVICE, [A, B], 0)
    for prompt in ([A, B], [A, B, C, D], [E]):
        it.record_match(prompt, it.find_matches(prompt, 0), 0)
    stats = it.stats(0)
    assert (stats.recent_full, stats.recent_partial, stats.recent_missed) == (1, 1, 1)
    assert stats.recent_hit_ratio == 4 / 7
    assert (stats.entries, stats.depth_blocks) == (2, 2)


# -- memory ---------------------------------------------------------------------------------------------


def test_what_is_stored_again_is_as_new():
    it = index(max_blocks=6)
    old, hot, new = (blocks.chain([n] * 3, 1, 0) for n in (1, 2, 3))
    it.stored("1", DEVICE, old, 0)
    it.stored("1", DEVICE, hot, 1)
    it.stored("2", DEVICE, old, 2)
    it.stored("1", DEVICE, new[:2], 3)
    assert it.find_matches(old, 3).device == {"1": 3, "2": 3}
    assert it.find_matches(hot, 3).device == {"1": 1}, "its tail is gone"


def test_claims_that_were_cleared_lengthen_no_other():
    it = index()
    it.speculate("1", [A], 0, ttl_s=600.0)
    it.forget("1")
    it.speculate("1", [A], 1, ttl_s=30.0)
    assert it.find_matches([A], 30).device == {"1": 1}
    assert it.find_matches([A], 31).device == {}


def test_the_coldest_go_first():
    it = index(max_blocks=6)
    old, hot, new = (blocks.chain([n] * 3, 1, 0) for n in (1, 2, 3))
    it.stored("1", DEVICE, old, 0)
    it.stored("1", DEVICE, hot, 1)
    it.speculate("1", old, 2)
    it.stored("1", DEVICE, new[:2], 3)
    assert len(it) == 6
    assert it.stats(3).evicted == 2
    assert it.find_matches(old, 3).device == {"1": 3}, "just used"
    assert it.find_matches(hot, 3).device == {"1": 1}, "its tail is gone"
    assert it.find_matches(new, 3).device == {"1": 2}


def test_memory_is_bounded_whatever_comes():
    dice = random.Random(1)
    it = index(max_blocks=500)
    for step in range(2_000):
        prompt = blocks.chain([dice.randrange(50) for _ in range(dice.randrange(1, 40))], 1, 0)
        match dice.randrange(4):
            case 0:
                it.stored(str(dice.randrange(5)), dice.choice(list(Tier)), prompt, step)
            case 1:
                it.speculate(str(dice.randrange(5)), prompt, step)
            case 2:
                it.removed(str(dice.randrange(5)), DEVICE, prompt)
            case 3:
                it.record_match(prompt, it.find_matches(prompt, step), step)
        assert len(it) <= 500
    assert it.stats(2_000).evicted > 0


def test_claims_fill_the_index_too_and_the_oldest_go_when_nothing_else_is_left():
    it = index(max_blocks=10)
    old, new = (blocks.chain([n] * 8, 1, 0) for n in (1, 2))
    it.stored("1", DEVICE, PROMPT[:2], 0)
    it.speculate("1", old, 0)
    it.speculate("2", new, 1)
    assert it.stats(1).entries == 10
    assert it.find_matches(PROMPT, 1).device == {}
    assert it.find_matches(old, 1).device == {"1": 2}, "its tail is gone"
    assert it.find_matches(new, 1).device == {"2": 8}


def test_many_claims_of_an_endpoint_that_left_count_no_more():
    it = index(max_blocks=100_000)
    rows = [blocks.chain([n, n], 1, 0) for n in range(3_000)]
    for row in rows:
        it.speculate("1", row, 0)
    it.forget("1")
    it.speculate("2", rows[0], 0)
    assert it.stats(0).entries == 2
    assert it.find_matches(rows[0], 0).device == {"2": 2}
    for _ in range(4):
        it.expire(0)
    it.speculate("3", rows[1], 0)
    assert it.find_matches(rows[1], 0).device == {"3": 2}


# -- Dynamo's answers -----------------------------------------------------------------------------------


def radix_cases():
    from pathlib import Path

    path = Path(__file__).parents[2] / "fixtures" / "dynamo-radix" / "radix_tree.jsonl"
    return [json.loads(line)["steps"] for line in path.read_text().splitlines()]


def dynamo_sequence_hashes(local, parent=None):
    """Chains Dynamo's hashes of single blocks: the first is itself, each later one covers (parent, block)."""
    hashes = []
    for block in local:
        both = None if parent is None else parent.to_bytes(8, "little") + block.to_bytes(8, "little")
        parent = block if both is None else xxhash.xxh3_64_intdigest(both, 1337)
        hashes.append(parent)
    return hashes


class Adapter:
    """Dynamo's events (engine hashes, tokens hashes) → the index."""

    def __init__(self) -> None:
        self.index = index(10_000)
        self.names: dict[str, dict[int, int]] = {}

    def apply(self, worker: str, data) -> None:
        names = self.names.setdefault(worker, {})
        if data == "cleared":
            self.index.forget(worker)
            names.clear()
        elif "removed" in data:
            hashes = data["removed"]["block_hashes"]
            self.index.removed(worker, DEVICE, [names.pop(h) for h in hashes if h in names])
        else:
            parent = data["stored"]["parent_hash"]
            before = None if parent is None else names[parent]
            news = data["stored"]["blocks"]
            chain = dynamo_sequence_hashes([b["tokens_hash"] for b in news], before)
            names.update(zip([b["block_hash"] for b in news], chain, strict=True))
            self.index.stored(worker, DEVICE, chain, 0)


def test_find_matches_equals_dynamos_answers():
    asked = 0
    for number, steps in enumerate(radix_cases()):
        adapter = Adapter()
        for step in steps:
            if "event" in step:
                adapter.apply(str(step["worker"]), step["event"]["data"])
            elif "remove_worker" in step:
                adapter.index.forget(str(step["remove_worker"]))
                adapter.names.pop(str(step["remove_worker"]), None)
            else:
                chain = dynamo_sequence_hashes(step["find"])
                found = adapter.index.find_matches(chain, 0).device
                assert found == step["all"], (number, steps.index(step))
                asked += 1
    assert asked == 284


# -- against a naive model ------------------------------------------------------------------------------

ENDPOINTS = st.sampled_from(["1", "2", "3"])
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda t: blocks.chain(t, 1, 0))
ROWS = st.lists(PROMPTS.map(lambda chain: chain[-1]), max_size=8, unique=True)
"""Blocks of any prompts in any order."""
TTL_S = 10.0


class AgainstSets(RuleBasedStateMachine):
    """Sets of (endpoint, block) per tier, claims as a dict with expiry, the store as a dict with expiry."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.it = index(100_000, TTL_S, store_ttl_s=25.0)
        self.device: set[tuple[str, int]] = set()
        self.host: set[tuple[str, int]] = set()
        self.claims: dict[tuple[str, int], float] = {}
        self.store: dict[int, float] = {}

    @rule(endpoint=ENDPOINTS, row=PROMPTS | ROWS, tier=st.sampled_from(list(Tier)))
    def stored(self, endpoint, row, tier):
        self.it.stored(endpoint, tier, row, self.now)
        if tier is STORE:
            self.store |= dict.fromkeys(row, self.now + 25.0)
        else:
            (self.device if tier is DEVICE else self.host).update((endpoint, b) for b in row)
        if tier is DEVICE:
            for block in row:
                self.claims.pop((endpoint, block), None)

    @rule(endpoint=ENDPOINTS, row=PROMPTS | ROWS, tier=st.sampled_from([DEVICE, HOST]), at=st.integers(0, 5))
    def removed(self, endpoint, row, tier, at):
        self.it.removed(endpoint, tier, row[at:])
        (self.device if tier is DEVICE else self.host).difference_update((endpoint, b) for b in row[at:])

    @rule(endpoint=ENDPOINTS)
    def forgotten(self, endpoint):
        self.it.forget(endpoint)
        self.device = {held for held in self.device if held[0] != endpoint}
        self.host = {held for held in self.host if held[0] != endpoint}
        self.claims = {held: t for held, t in self.claims.items() if held[0] != endpoint}

    @rule(endpoint=ENDPOINTS, prompt=PROMPTS)
    def speculate(self, endpoint, prompt):
        """All after the last block that was announced."""
        self.it.speculate(endpoint, prompt, self.now)
        for block in reversed(prompt):
            if (endpoint, block) in self.device:
                break
            self.claims[endpoint, block] = self.now + TTL_S

    @rule(endpoint=ENDPOINTS, prompt=PROMPTS)
    def refused(self, endpoint, prompt):
        """Keep what other prompts have claimed, for as long as if this one had been served."""
        before = {block for block in prompt if self.claims.get((endpoint, block), -1.0) > self.now}
        claimed = self.it.speculate(endpoint, prompt, self.now)
        self.it.unclaim(endpoint, claimed)
        for block in before.intersection(claimed):
            self.claims[endpoint, block] = self.now + TTL_S

    @rule(by_s=st.floats(0, 12))
    def time_passes(self, by_s):
        self.now += by_s

    @rule()
    def expire(self):
        self.it.expire(self.now)
        known = {block for _, block in self.device | self.host}
        known |= {block for (_, block), t in self.claims.items() if t > self.now}
        known |= {block for block, t in self.store.items() if t > self.now}
        assert len(self.it) == len(known)
        assert all(block in self.it for block in known)

    @rule(endpoint=ENDPOINTS, prompt=PROMPTS, at=st.integers(0, 5))
    def look_at_one(self, endpoint, prompt, at):
        block = prompt[min(at, len(prompt) - 1)]
        assert self.it.announced(endpoint, block) == ((endpoint, block) in self.device)
        held = {e for e in "123" if self._device(e, block)}
        assert self.it.find_block(block, self.now).device == dict.fromkeys(held, 1)

    @rule(endpoint=ENDPOINTS, prompt=PROMPTS)
    def ask_for_one_endpoint(self, endpoint, prompt):
        """Bisection: right for engines, which evict the end of a prompt before its beginning."""
        on = [self._device(endpoint, block) for block in prompt]
        if on == sorted(on, reverse=True):
            assert self.it.leading(endpoint, prompt, self.now) == sum(on)

    @rule(prompt=PROMPTS)
    def record(self, prompt):
        self.it.record_match(prompt, self.it.find_matches(prompt, self.now), self.now)

    @rule(prompt=PROMPTS)
    def find(self, prompt):
        matches = self.it.find_matches(prompt, self.now)
        device, host, reach = {}, {}, {}
        for endpoint in ("1", "2", "3"):
            for found, holds in ((device, self._device), (host, self._host), (reach, self._reach)):
                n = leading(prompt, lambda block, holds=holds, endpoint=endpoint: holds(endpoint, block))
                if n:
                    found[endpoint] = n
        assert matches.device == device
        assert matches.host == host
        store = leading(prompt, self._in_store)
        assert matches.store == store
        assert [matches.of(e)[2] for e in "123"] == [reach.get(e, store) for e in "123"]

    def _device(self, endpoint, block):
        held = (endpoint, block)
        return held in self.device or self.claims.get(held, -1.0) > self.now

    def _host(self, endpoint, block):
        return self._device(endpoint, block) or (endpoint, block) in self.host

    def _in_store(self, block):
        return self.store.get(block, -1.0) > self.now

    def _reach(self, endpoint, block):
        return self._host(endpoint, block) or self._in_store(block)

    @invariant()
    def counts_agree(self):
        stats = self.it.stats(self.now)
        assert sum(e.device for e in stats.endpoints.values()) == len(self.device)
        assert sum(e.host for e in stats.endpoints.values()) == len(self.host)
        assert stats.speculative == sum(t > self.now for t in self.claims.values())
        assert stats.store == sum(t > self.now for t in self.store.values())


class AgainstEngines(RuleBasedStateMachine):
    """Claims together with endpoints that announce prompts in order and evict them from their ends, as
    engines do. Every block has an expiry in the model, in the order in which claims end when there are too
    many. `disturbed`: events are lost, replicas tell pieces of prompts, and endpoints refuse some."""

    MOST = 8
    both = st.sampled_from(["1", "2"])
    whole = st.sampled_from([[0] * 6, [0] * 2 + [1] * 4, [1] * 6])
    prompts = st.builds(lambda tokens, n: blocks.chain(tokens[:n], 1, 0), whole, st.integers(1, 6))

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.it = index(100_000, TTL_S, claims_per_endpoint=self.MOST)
        self.device = {e: set() for e in "12"}
        self.claims = {e: {} for e in "12"}
        """Endpoint → block → expiry, the next one to drop first."""
        self.last_expiry_s = {}
        self.parents = {}

    @initialize(disturbed=st.booleans())
    def begin(self, disturbed):
        self.disturbed = disturbed

    @rule(endpoint=both, prompt=prompts, ttl_s=st.sampled_from([None, TTL_S, 25.0]))
    def routed(self, endpoint, prompt, ttl_s):
        """Claim a whole prompt after the last block that is announced."""
        self._follow(prompt)
        assert list(self.it.speculate(endpoint, prompt, self.now, ttl_s)) == self._new(endpoint, prompt)
        self._claim(endpoint, self._new(endpoint, prompt), ttl_s)

    @precondition(lambda self: self.disturbed)
    @rule(endpoint=both, prompt=prompts, at=st.integers(0, 5), told=st.booleans())
    def told_by_a_replica(self, endpoint, prompt, at, told):
        """Another replica tells the end of a prompt, after what it knew to be announced."""
        self._follow(prompt)
        piece = prompt[at:]
        parent = prompt[:at][-1] if at and told else None
        self.it.speculate(endpoint, piece, self.now, parent=parent)
        self._claim(endpoint, self._new(endpoint, piece))

    @rule(endpoint=both, prompt=prompts, at=st.integers(0, 5), lost=st.booleans())
    def announced(self, endpoint, prompt, at, lost):
        """Announce the next blocks of a prompt, or some again. `lost`: whatever came before was not heard."""
        self._follow(prompt)
        start = min(
            at,
            len(prompt) if lost and self.disturbed else leading(prompt, self.device[endpoint].__contains__),
        )
        piece = prompt[start:]
        self.it.stored(endpoint, DEVICE, piece, self.now, parent=prompt[start - 1] if start else 0)
        self.device[endpoint].update(piece)
        for block in piece:
            self.claims[endpoint].pop(block, None)

    @rule(endpoint=both, prompt=prompts)
    def evicted(self, endpoint, prompt):
        """Evict the last announced block that no announced or claimed block follows."""
        self._follow(prompt)
        known = self.device[endpoint] | self._live(endpoint)
        used = {self.parents.get(block) for block in known}
        for block in reversed(prompt):
            if block in self.device[endpoint] and block not in used:
                self.it.removed(endpoint, DEVICE, [block])
                self.device[endpoint].discard(block)
                return

    @rule(endpoint=both, prompt=prompts)
    def refused(self, endpoint, prompt):
        """Keep what other prompts have claimed."""
        self._follow(prompt)
        before = self._live(endpoint)
        claimed = self.it.speculate(endpoint, prompt, self.now)
        self._claim(endpoint, claimed)
        self.it.unclaim(endpoint, claimed)
        kept = max((at for at, block in enumerate(claimed, 1) if block in before), default=0)
        for block in claimed[kept:]:
            self.claims[endpoint].pop(block, None)

    @rule(endpoint=both)
    def left(self, endpoint):
        self.it.forget(endpoint)
        self.device[endpoint], self.claims[endpoint] = set(), {}
        self.last_expiry_s.pop(endpoint, None)

    @rule(by_s=st.floats(0, 6))
    def time_passes(self, by_s):
        self.now += by_s

    @rule(prompt=prompts)
    def find(self, prompt):
        found = {
            endpoint: leading(prompt, (self.device[endpoint] | self._live(endpoint)).__contains__)
            for endpoint in "12"
        }
        assert self.it.find_matches(prompt, self.now).device == {e: n for e, n in found.items() if n}
        for endpoint in "12":
            self.it.record_match(prompt, self.it.find_matches(prompt, self.now), self.now)
            if not any(self.it.announced(endpoint, block) for block in prompt[found[endpoint] :]):
                assert self.it.leading(endpoint, prompt, self.now) == found[endpoint]

    @invariant()
    def counts_agree(self):
        stats = self.it.stats(self.now)
        for endpoint, counts in stats.endpoints.items():
            live = self._live(endpoint)
            assert (counts.device, counts.speculative) == (len(self.device[endpoint]), len(live))
        assert len(self.it) == len(set().union(*self.device.values(), *map(self._live, "12")))

    def _new(self, endpoint, prompt):
        announced = [n for n, block in enumerate(prompt, 1) if block in self.device[endpoint]]
        return prompt[max(announced, default=0) :]

    def _claim(self, endpoint, piece, ttl_s=None):
        claims = {b: t for b, t in self.claims[endpoint].items() if t > self.now and b not in piece}
        expiry_s = max(self.last_expiry_s.get(endpoint, 0), self.now + (TTL_S if ttl_s is None else ttl_s))
        self.last_expiry_s[endpoint] = expiry_s
        claims |= dict.fromkeys(reversed(piece), expiry_s)
        while len(claims) > self.MOST:
            del claims[next(iter(claims))]
        self.claims[endpoint] = claims

    def _live(self, endpoint):
        return {block for block, t in self.claims[endpoint].items() if t > self.now}

    def _follow(self, prompt):
        self.parents.update(pairwise(reversed(prompt)))


TestAgainstEngines = AgainstEngines.TestCase
TestAgainstEngines.settings = settings(max_examples=examples(60), stateful_step_count=40)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["routed", "announced", "evicted", "told", "time"]),
            AgainstEngines.prompts,
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_claims_end_whatever_order_an_endpoint_evicts_in(steps):
    """Engines are trusted to evict the end of a prompt first. What does not costs truth, for a while."""
    it, now = index(claims_per_endpoint=8), 0.0
    for step, prompt, at in steps:
        match step:
            case "routed":
                it.speculate("1", prompt, now)
            case "announced":
                it.stored("1", DEVICE, prompt[at:], now, parent=prompt[:at][-1] if at else 0)
            case "evicted":
                it.removed("1", DEVICE, prompt[at : at + 1])
            case "told":
                it.speculate("1", prompt[at:], now, parent=None)
            case "time":
                now += at
        assert it.find_matches(prompt, now).longest <= len(prompt)
        assert 0 <= it.stats(now).speculative <= 8
    it.expire(now + TTL_S)
    assert it.stats(now + TTL_S).speculative == 0


def test_a_claim_takes_the_place_of_one_behind_a_block_that_was_evicted_too_early():
    it = index(ttl_s=10)
    it.stored("1", DEVICE, [A, B, C], 0, parent=0)
    it.speculate("1", PROMPT, 0)
    it.removed("1", DEVICE, [C])
    it.speculate("1", PROMPT, 1)
    it.stored("1", DEVICE, [C], 2, parent=B)
    assert it.find_matches(PROMPT, 2).device == {"1": 5}
    assert it.stats(2).speculative == 2
    assert it.find_matches(PROMPT, 11).device == {"1": 3}
    assert it.stats(11).speculative == 0


def leading(prompt, holds) -> int:
    for n, block in enumerate(prompt):
        if not holds(block):
            return n
    return len(prompt)


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=examples(60), stateful_step_count=40)


@given(st.lists(st.tuples(ENDPOINTS, PROMPTS), max_size=30), st.integers(1, 12))
def test_bounded_and_never_wrong(stores, max_blocks):
    """Eviction loses knowledge; what is left is true."""
    it, truth = index(max_blocks), set()
    for now, (endpoint, prompt) in enumerate(stores):
        it.stored(endpoint, DEVICE, prompt, now)
        truth |= {(endpoint, block) for block in prompt}
        assert len(it) <= max_blocks
        for address, n in it.find_matches(prompt, now).device.items():
            assert all((address, block) in truth for block in prompt[:n])


@pytest.mark.parametrize("prompt", [[], [A]])
def test_an_empty_index_and_an_empty_prompt(prompt):
    matches = index().find_matches(prompt, 0)
    assert (matches.device, matches.host, matches.reach, matches.store) == ({}, {}, {}, 0)
    it = index()
    it.stored("1", DEVICE, [A], 0)
    assert it.find_matches([], 0).device == {}
    it.record_match([], it.find_matches([], 0), 0)
    assert it.stats(0).recent_missed == 0


# -- hybrid models: several KV cache groups ---------------------------------------------------------------

WINDOW = Group(1, window=2)
STATE = Group(2, window=1)


@pytest.mark.parametrize(
    ("held", "reached"),
    [
        pytest.param({WINDOW: [C, D]}, 4, id="the window's last blocks suffice"),
        pytest.param({WINDOW: [B, C]}, 3, id="its end is where they end"),
        pytest.param({WINDOW: [B, D, E]}, 5, id="what is outside of the window does not matter"),
        pytest.param({WINDOW: [B, D]}, 0, id="a hole in the window"),
        pytest.param({WINDOW: [A, C]}, 1, id="a prompt shorter than the window needs all of it"),
        pytest.param({STATE: [B]}, 2, id="a state"),
        pytest.param({STATE: [B, D], WINDOW: [A, B, C]}, 2, id="all groups have to agree"),
        pytest.param({STATE: [D], WINDOW: [A, B]}, 0, id="and they do not"),
    ],
)
def test_a_hybrid_models_match_ends_where_every_group_has_what_it_needs(held, reached):
    it = index()
    it.stored("1", DEVICE, PROMPT, 0)
    it.stored("2", DEVICE, PROMPT[:2], 0)
    for group, row in held.items():
        it.stored("1", DEVICE, row, 0, group)
    found = {"1": reached, "2": 2} if reached else {"2": 2}
    assert it.find_matches(PROMPT, 0).device == found
    assert it.leading("1", PROMPT, 0) == reached


def test_a_removal_is_of_one_group():
    it = index()
    it.stored("1", DEVICE, PROMPT, 0)
    it.stored("1", DEVICE, PROMPT, 0, WINDOW)
    it.removed("1", DEVICE, [E], WINDOW.number)
    assert it.find_matches(PROMPT, 0).device == {"1": 4}
    it.removed("1", DEVICE, [C, D, E])
    assert it.find_matches(PROMPT, 0).device == {"1": 2}
    it.forget("1")
    assert len(it) == 0


def test_a_model_of_sliding_windows_alone():
    it = index()
    it.stored("1", DEVICE, [C, D], 0, Group(0, window=2))
    assert it.find_matches(PROMPT, 0).device == {"1": 4}


def test_larger_blocks_end_matches_where_they_end():
    """A group whose blocks are twice as long: of each, only the end has a name."""
    it = index()
    it.stored("1", DEVICE, PROMPT, 0)
    it.stored("1", DEVICE, [B, D], 0, Group(1, window=1, stride=2))
    assert it.find_matches(PROMPT, 0).device == {"1": 4}
    assert it.find_matches(PROMPT[:3], 0).device == {"1": 2}


def test_a_claim_is_one_of_all_groups():
    it = index()
    it.stored("1", DEVICE, [A], 0)
    it.stored("1", DEVICE, [A], 0, WINDOW)
    it.speculate("1", PROMPT[:3], 0)
    assert it.find_matches(PROMPT, 0).device == {"1": 3}


# -- a large index --------------------------------------------------------------------------------------


def test_a_large_endpoint_is_forgotten_at_once_and_swept_in_steps():
    it = index(max_blocks=1_000_000)
    rows = [blocks.chain([n] * 1_000, 1, 0) for n in range(100)]
    for row in rows:
        it.stored("1", DEVICE, row, 0)
        it.stored("2", DEVICE, row[:500], 0)
    it.forget("1")
    assert it.find_matches(rows[-1], 0).device == {"2": 500}
    it.stored("1", DEVICE, rows[0][:10], 1)
    for _ in range(20):
        it.expire(1)
    assert len(it) == 50_000
    assert it.find_matches(rows[0], 1).device == {"1": 10, "2": 500}
    assert (it.stats(1).endpoints["1"].device, it.stats(1).endpoints["2"].device) == (10, 50_000)
