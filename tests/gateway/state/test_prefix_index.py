"""The prefix index says how many leading blocks of a prompt each endpoint holds, in which tier."""

import json
import random
import weakref
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perilune_gateway.model import Tier
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.prefix_index import FIRST, Matches, PrefixIndex
from perilune_gateway.state.prefix_index.runs import last

DEVICE, HOST, STORE = Tier
A, B, C, D, E = blocks.chain(range(5), 1, 0)
PROMPT = [A, B, C, D, E]


def index(max_blocks=1000, ttl_s=10.0, **options) -> PrefixIndex:
    return PrefixIndex(max_blocks, ttl_s, **options)


def test_the_example_of_three_holders():
    """A held by 1, 2, 3; B by 1, 2; C by 1."""
    it = index()
    it.stored("1", DEVICE, [A, B, C], 0)
    it.stored("2", DEVICE, [A, B], 0)
    it.stored("3", DEVICE, [A], 0)
    matches = it.find_matches([A, B, C, D], 0)
    assert matches.device == {"1": 3, "2": 2, "3": 1}
    assert it.find_matches([A, B, C, D], 0, early_exit=True).device == {"1": 3, "2": 2, "3": 1}
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
    assert [it.find_matches([A, B], t).store for t in (59, 60, 90)] == [2, 0, 0]
    it.expire(60)
    assert A not in it
    assert B in it


def test_ranks_are_holders_of_their_own():
    it = index()
    it.stored("1", DEVICE, [A, B], 0, rank=0)
    it.stored("1", DEVICE, [A, B, C], 0, rank=1)
    assert it.find_matches(PROMPT, 0).device == {"1": 3}
    it.removed("1", DEVICE, [B], rank=1)
    assert it.find_matches(PROMPT, 0).device == {"1": 2}
    it.cleared("1", rank=0)
    assert it.find_matches(PROMPT, 0).device == {"1": 1}
    it.cleared("1")
    assert len(it) == 0


def test_clearing_and_removing_leave_no_credit():
    it = index()
    for endpoint in ("1", "2"):
        it.stored(endpoint, DEVICE, [A, B], 0)
        it.speculate(endpoint, [A, B, C], 0)
    it.cleared("1")
    assert it.find_matches(PROMPT, 0).device == {"2": 3}
    it.remove_endpoint("2")
    assert len(it) == 0
    it.stored("3", DEVICE, [A], 0)
    it.stored("2", DEVICE, [A, B], 0)
    assert it.find_matches(PROMPT, 0).device == {"2": 2, "3": 1}


# -- claims ---------------------------------------------------------------------------------------------


def test_a_claim_counts_until_its_time_is_over():
    it = index(ttl_s=10)
    it.speculate("1", [A, B], 0)
    assert it.find_matches(PROMPT, 9.9).device == {"1": 2}
    assert it.find_matches(PROMPT, 10).device == {}
    assert it.stats(9.9).speculative == 2
    assert it.stats(10).speculative == 0
    assert len(it) == 2, "a question changes nothing"
    it.expire(10)
    assert len(it) == 0


def test_an_event_confirms_a_claim():
    it = index(ttl_s=10)
    it.speculate("1", [A, B], 0)
    it.stored("1", DEVICE, [A], 5)
    assert it.find_matches(PROMPT, 20).device == {"1": 1}
    assert it.announced("1", A)
    assert not it.announced("1", B)


def test_any_ranks_event_confirms_a_claim():
    it = index(ttl_s=10)
    it.speculate("1", [A, B], 0)
    it.stored("1", DEVICE, [A, B], 5, rank=1)
    assert it.stats(5).speculative == 0
    assert it.find_matches(PROMPT, 20).device == {"1": 2}


def test_a_repeated_prompt_renews_its_claim():
    it = index(ttl_s=10)
    it.speculate("1", [A, B], 0)
    it.speculate("1", [A], 5)
    assert it.find_matches(PROMPT, 12).device == {"1": 1}
    it.expire(12)
    assert len(it) == 1


@pytest.mark.parametrize(
    ("again", "prompt", "until"),
    [
        pytest.param(0.9, [A, B], 16.0, id="just claimed"),
        pytest.param(1.1, [A, B], 17.1, id="a sixteenth of its time is over"),
        pytest.param(0.9, [A, B, C], 16.9, id="just claimed, but not all of it"),
    ],
)
def test_what_was_claimed_just_now_is_not_claimed_anew(again, prompt, until):
    it = index(ttl_s=16)
    it.speculate("1", [A, B], 0)
    it.speculate("1", prompt, again)
    assert it.find_matches(prompt, until - 0.01).device == {"1": len(prompt)}
    assert it.find_matches(prompt, until).device == {}


def test_what_was_claimed_just_now_is_renewed_in_time():
    it = index(ttl_s=16)
    it.speculate("1", [A, B], 0)
    it.speculate("2", [C], 0)
    it.cleared("2")  # something was taken out: what was claimed has to be looked at again
    for now in (0.7, 0.8, 0.9, 1.1):
        it.speculate("1", [A, B], now)
    assert it.find_matches([A, B], 17.0).device == {"1": 2}


@pytest.mark.parametrize(
    "take_out",
    [
        pytest.param(lambda it: it.removed("1", DEVICE, [B]), id="evicted"),
        pytest.param(lambda it: it.cleared("1"), id="cleared"),
        pytest.param(lambda it: it.remove_endpoint("1"), id="gone and back"),
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


def test_a_claim_that_another_rank_confirmed_in_part_is_made_at_once():
    it = index(ttl_s=30)
    it.speculate("1", PROMPT, 0)
    it.stored("1", DEVICE, [A], 0.1, rank=1, parent=FIRST)
    it.speculate("1", PROMPT, 0.2)
    assert it.find_matches(PROMPT, 0.2).device == {"1": 5}


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


def test_renewing_a_claim_changes_no_answer():
    it = index(ttl_s=16)
    it.speculate("1", [A, B], 0)
    before = it.changes
    it.speculate("1", [A, B], 10)
    assert it.changes == before
    assert it.find_matches([A, B], 25).device == {"1": 2}
    it.expire(26)
    assert it.changes != before


def test_a_run_that_is_parted_is_a_change():
    """Else who remembers a match would ask the wrong run for its statistics."""
    it = index()
    other = blocks.chain([0, 1, 9], 1, 0)
    it.stored("1", DEVICE, [A, B, C], 0, parent=FIRST)
    it.stored("1", DEVICE, other[2:], 0)
    before = it.changes
    it.speculate("1", other, 0)
    assert it.find_matches([A, B, C], 0).last_run.blocks.tolist() == [C]
    assert it.changes != before


def test_who_comes_or_goes_is_a_change_where_the_store_holds_something():
    it = index()
    it.stored("", STORE, [A], 0)
    seen = []
    for step in (lambda: it.speculate("1", [B], 0), lambda: it.cleared("1"), lambda: it.remove_endpoint("1")):
        step()
        seen.append((it.changes, dict(it.find_matches([A], 0).reach)))
    assert [reach for _, reach in seen] == [{"1": 1}, {"1": 1}, {}]
    assert seen[1][0] != seen[2][0]


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


# -- statistics -----------------------------------------------------------------------------------------


def test_statistics_are_written_by_record_match_only():
    it = index()
    it.stored("1", DEVICE, [A, B], 0)
    for now in (4, 16):
        before = it.find_matches(PROMPT, now)
        assert it.find_matches(PROMPT, now) == before
        it.record_match(PROMPT, before, now)
    matches = it.find_matches(PROMPT, 25)
    assert it.statistics(PROMPT, matches, 25) == (2, 16, 2 / sqrt(25))
    assert it.frequency_score(B, 25) == 2 / sqrt(25)
    assert it.frequency_score(A, 25) == 0, "one write per match, at its deepest block"


def test_an_entry_of_age_0_counts_as_one_second_old():
    it = index()
    it.stored("1", DEVICE, [A], 7)
    it.record_match([A], it.find_matches([A], 7), 7)
    assert it.frequency_score(A, 7) == 1


def test_recent_outcomes():
    it = index()
    it.stored("1", DEVICE, [A, B], 0)
    for prompt in ([A, B], [A, B, C, D], [E]):
        it.record_match(prompt, it.find_matches(prompt, 0), 0)
    stats = it.stats(0)
    assert (stats.recent_full, stats.recent_partial, stats.recent_missed) == (1, 1, 1)
    assert stats.recent_hit_ratio == 4 / 7
    assert (stats.entries, stats.depth_blocks) == (2, 2)


def test_frequencies_count_uses_before_this_one():
    it = index(window_s=10)
    it.stored("1", DEVICE, [A, B], 0)
    it.record_match([A], it.find_matches([A], 1), 1)
    it.record_match([A, B], it.find_matches([A, B], 5), 5)
    assert it.find_matches([A, B, C], 6).frequencies == (2, 1)
    assert it.find_matches([A, B, C], 11).frequencies == (1, 1)
    assert index().find_matches([A], 0).frequencies == ()


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
    it.cleared("1", 0)
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


def test_prompts_that_part_inside_of_what_does_not_follow():
    """An event put a prompt's beginning behind other blocks; a claim then parts them after it."""
    it = index()
    before, prompt = blocks.chain([1] * 3, 1, 0), blocks.chain([2] * 3, 1, 0)
    it.stored("1", HOST, [*before, *prompt], 0)
    it.speculate("2", [*before, prompt[0], 7], 0)
    assert it.find_matches(prompt, 0).host == {"1": 3, "2": 1}
    it.speculate("2", [*before, 8], 0)
    it.speculate("2", prompt, 0)
    assert it.find_matches(prompt, 0).device == {"2": 3}


def test_prompts_that_part_twice():
    it = index()
    it.stored("2", DEVICE, blocks.chain([5, 5, 5], 1, 0), 0, parent=FIRST)
    it.speculate("1", blocks.chain([5, 5, 6], 1, 0), 0)
    it.speculate("1", blocks.chain([5, 6], 1, 0), 0)
    assert it.find_matches(blocks.chain([5, 5, 5], 1, 0), 0).device == {"2": 3, "1": 2}


@pytest.mark.parametrize("options", [{}, {"window_s": 5.0, "edges": True}], ids=["loose", "all entered"])
def test_memory_is_bounded_whatever_comes(options):
    dice = random.Random(1)
    it = index(max_blocks=500, **options)
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


def test_an_index_that_nobody_has_any_more_is_freed_at_once():
    """Not when the garbage collector comes by."""
    it = index()
    it.stored("1", DEVICE, PROMPT, 0, parent=FIRST)
    it = weakref.ref(it)
    assert it() is None


# -- Dynamo's answers -----------------------------------------------------------------------------------


def radix_cases():
    from pathlib import Path

    path = Path(__file__).parents[2] / "fixtures" / "dynamo-radix" / "radix_tree.jsonl"
    return [json.loads(line)["steps"] for line in path.read_text().splitlines()]


class Adapter:
    """Dynamo's events (engine hashes, tokens hashes) → the index."""

    def __init__(self) -> None:
        self.index = index(10_000, edges=True)
        self.names: dict[str, dict[int, int]] = {}

    def apply(self, worker: str, data) -> None:
        names = self.names.setdefault(worker, {})
        if data == "cleared":
            self.index.cleared(worker)
            names.clear()
        elif "removed" in data:
            hashes = data["removed"]["block_hashes"]
            self.index.removed(worker, DEVICE, [names.pop(h) for h in hashes if h in names])
        else:
            parent = data["stored"]["parent_hash"]
            before = None if parent is None else names[parent]
            news = data["stored"]["blocks"]
            chain = blocks.dynamo_sequence_hashes([b["tokens_hash"] for b in news], before)
            names.update(zip([b["block_hash"] for b in news], chain, strict=True))
            self.index.stored(worker, DEVICE, chain, 0, parent=before)


def test_find_matches_equals_dynamos_answers():
    asked = 0
    for number, steps in enumerate(radix_cases()):
        adapter = Adapter()
        for step in steps:
            if "event" in step:
                adapter.apply(str(step["worker"]), step["event"]["data"])
            elif "remove_worker" in step:
                adapter.index.remove_endpoint(str(step["remove_worker"]))
                adapter.names.pop(str(step["remove_worker"]), None)
            else:
                chain = blocks.dynamo_sequence_hashes(step["find"])
                where = (number, steps.index(step))
                assert adapter.index.find_matches(chain, 0).device == step["all"], where
                assert adapter.index.find_matches(chain, 0, early_exit=True).device == step["early"], where
                asked += 1
    assert asked == 284


def test_early_exit_without_edges_stops_at_the_block_where_one_is_left():
    it = index()
    it.stored("1", DEVICE, PROMPT, 0)
    it.stored("2", DEVICE, [A, B], 0)
    assert it.find_matches(PROMPT, 0, early_exit=True).device == {"1": 3, "2": 2}
    assert it.find_matches(PROMPT, 0).device == {"1": 5, "2": 2}


# -- against a naive model ------------------------------------------------------------------------------

ENDPOINTS = st.sampled_from(["1", "2", "3"])
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda t: blocks.chain(t, 1, 0))
TTL_S = 10.0


class AgainstSets(RuleBasedStateMachine):
    """Sets of (endpoint, block) per tier, claims as a dict with expiry, the store as a dict with expiry."""

    run_blocks = 64

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.it = index(100_000, TTL_S, store_ttl_s=25.0, run_blocks=self.run_blocks)
        self.device: set[tuple[str, int]] = set()
        self.host: set[tuple[str, int]] = set()
        self.claims: dict[tuple[str, int], float] = {}
        self.store: dict[int, float] = {}
        self.answers: dict[tuple[int, ...], Matches] = {}
        """Found while `changes` was `as_of`."""
        self.as_of = -1

    @rule(
        endpoint=ENDPOINTS,
        prompt=PROMPTS,
        tier=st.sampled_from(list(Tier)),
        parent=st.sampled_from([None, FIRST]),
    )
    def stored(self, endpoint, prompt, tier, parent):
        self.it.stored(endpoint, tier, prompt, self.now, parent=parent)
        if tier is STORE:
            self.store |= dict.fromkeys(prompt, self.now + 25.0)
        else:
            (self.device if tier is DEVICE else self.host).update((endpoint, b) for b in prompt)
        if tier is DEVICE:
            for block in prompt:
                self.claims.pop((endpoint, block), None)

    @rule(endpoint=ENDPOINTS, prompt=PROMPTS, at=st.integers(1, 5), named=st.booleans())
    def stored_on(self, endpoint, prompt, at, named):
        """An event that goes on where another ended."""
        news = prompt[at:]
        parent = prompt[at - 1] if named and news else None
        self.it.stored(endpoint, DEVICE, news, self.now, parent=parent)
        self.device.update((endpoint, b) for b in news)
        for block in news:
            self.claims.pop((endpoint, block), None)

    @rule(endpoint=ENDPOINTS, prompt=PROMPTS, tier=st.sampled_from([DEVICE, HOST]), at=st.integers(0, 5))
    def removed(self, endpoint, prompt, tier, at):
        self.it.removed(endpoint, tier, prompt[at:])
        (self.device if tier is DEVICE else self.host).difference_update((endpoint, b) for b in prompt[at:])

    @rule(endpoint=ENDPOINTS)
    def cleared(self, endpoint):
        self.it.cleared(endpoint)
        self._forget(endpoint)

    @rule(endpoint=ENDPOINTS)
    def removed_endpoint(self, endpoint):
        self.it.remove_endpoint(endpoint)
        self._forget(endpoint)

    def _forget(self, endpoint):
        self.device = {held for held in self.device if held[0] != endpoint}
        self.host = {held for held in self.host if held[0] != endpoint}
        self.claims = {held: t for held, t in self.claims.items() if held[0] != endpoint}

    @rule(endpoint=ENDPOINTS, prompt=PROMPTS)
    def speculate(self, endpoint, prompt):
        self.it.speculate(endpoint, prompt, self.now)
        for block in prompt:
            if (endpoint, block) not in self.device:
                self.claims[endpoint, block] = self.now + TTL_S

    @rule(by_s=st.floats(25 / 16 + 0.01, 12))
    def time_passes(self, by_s):
        """So that a claim, or a hint of the store, is never just made when it is made again."""
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
        assert self.it.holds(endpoint, block, self.now) == self._device(endpoint, block)
        assert self.it.announced(endpoint, block) == ((endpoint, block) in self.device)
        held = {e for e in "123" if self._device(e, block)}
        assert self.it.find_block(block, self.now).device == dict.fromkeys(held, 1)

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

    @rule(prompt=PROMPTS)
    def find_again(self, prompt):
        """What is told to stay the same does."""
        self.it.expire(self.now)
        if self.as_of != self.it.changes:
            self.answers, self.as_of = {}, self.it.changes
        matches = self.it.find_matches(prompt, self.now)
        before = self.answers.setdefault(tuple(prompt), matches)
        assert before == matches
        assert before.last_run is matches.last_run
        assert not before.last_run or prompt[before.longest - 1] in before.last_run.blocks

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


def leading(prompt, holds) -> int:
    for n, block in enumerate(prompt):
        if not holds(block):
            return n
    return len(prompt)


class AgainstSetsInShortRuns(AgainstSets):
    run_blocks = 2


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=30, stateful_step_count=40)
TestAgainstSetsInShortRuns = AgainstSetsInShortRuns.TestCase
TestAgainstSetsInShortRuns.settings = settings(max_examples=30, stateful_step_count=40)


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


def test_blocks_that_an_event_put_together_though_they_do_not_follow_each_other():
    """Stores of several prompts may come in one event; a claim that goes through their row stays whole."""
    it = index()
    other = blocks.chain([9, 9, 9], 1, 0)
    it.stored("1", HOST, [other[1], PROMPT[3], PROMPT[4]], 0)
    it.speculate("2", PROMPT, 1)
    assert it.find_matches(PROMPT, 1).device == {"2": 5}
    it.removed("1", HOST, [other[2]])  # not known, so all blocks are entered
    assert it.find_matches(PROMPT, 1).device["2"] >= 3


@pytest.mark.parametrize(
    ("mask", "count", "expected"),
    [
        pytest.param(0b1111, 4, 0b1111, id="all"),
        pytest.param(0b1111, 9, 0b1111, id="fewer than asked for"),
        pytest.param(0b11110, 2, 0b11000, id="a row"),
        pytest.param(0b1000011, 2, 0b1000010, id="with a gap"),
        pytest.param(0b110, 0, 0, id="none"),
    ],
)
def test_the_last_positions(mask, count, expected):
    assert last(mask, count) == expected
