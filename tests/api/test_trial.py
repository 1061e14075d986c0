"""The comparison of a canary: sums add up, differences are found, and no difference is rarely found."""

from math import exp, log
from random import Random

import pytest
from msgspec.structs import replace
from property_examples import examples

from perilune_api.conditions import Reason
from perilune_api.policies import EarParams, PeriluneParams, PolicyChoice
from perilune_api.pool import Canary, Routing
from perilune_api.trial import (
    ALPHA,
    BUCKETS,
    Arm,
    Measure,
    State,
    Sums,
    added,
    difference,
    judge,
    trial_of,
)

CANARY = Canary(policy=PolicyChoice(name="ear"), share=0.5)


class Traffic:
    """Sessions of unlike lengths and speeds, whose requests all come under the same conditions but for the
    canary's."""

    def __init__(self, seed: int, share: float = 0.5, *, slower: float = 1.0, fails: float = 0.0) -> None:
        self.sums = Sums.begin("t")
        self._dice, self._share, self._slower, self._fails = Random(seed), share, slower, fails

    def sessions(self, count: int) -> Sums:
        """Play so many more sessions."""
        dice = self._dice
        for _ in range(count):
            canary = dice.random() < self._share
            arm = Arm.CANARY if canary else Arm.POOL
            tally = self.sums.arms[arm][dice.randrange(BUCKETS)]
            slowness = dice.gauss(0, 0.8)  # requests of one session are alike
            fails = 0.01 + (self._fails if canary else 0.0)
            for _ in range(min(50, int(dice.paretovariate(1.15)))):
                seconds = exp(slowness + dice.gauss(0, 0.5)) * (self._slower if canary else 1.0)
                tally.first_token(seconds)
                tally.output(seconds / 50)
                tally.ended(failed=dice.random() < fails)
        return self.sums

    def verdict(self, looks: int, between: int = 25) -> State:
        """Look again and again, and return the first verdict."""
        for _ in range(looks):
            if (state := judge(self.sessions(between), CANARY).state) is not State.RUNNING:
                return state
        return State.RUNNING


@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.heavy), 0.1])
def test_a_canary_that_is_as_good_is_rarely_rolled_back_however_often_one_looks(share: float):
    verdicts = [Traffic(seed, share).verdict(looks=50, between=40) for seed in range(examples(120))]
    assert verdicts.count(State.ROLLED_BACK) <= ALPHA * len(verdicts)


def test_bounds_hold_at_all_times():
    """Each of the bounds of one measure is wrong, ever, less often than it may be."""
    alpha, runs, wrong = 0.1, examples(60), 0
    for seed in range(runs):
        traffic = Traffic(seed)
        found = (difference(traffic.sessions(25), Measure.TTFT, alpha) for _ in range(60))
        wrong += any(made is not None and made.low > 0 for made in found)
    assert wrong <= alpha * runs


def test_a_canary_that_is_slower_is_rolled_back():
    verdicts = [Traffic(seed, slower=1.6).verdict(looks=400) for seed in range(20)]
    assert set(verdicts) == {State.ROLLED_BACK}


def test_a_canary_that_fails_more_often_is_rolled_back():
    traffic = Traffic(1, fails=0.2)
    while (verdict := judge(traffic.sessions(25), CANARY)).state is State.RUNNING:
        pass
    assert (verdict.state, verdict.reason) == (State.ROLLED_BACK, Reason.MORE_FAILURES)


def test_a_canary_that_is_faster_is_promoted():
    verdicts = [Traffic(seed, slower=0.7).verdict(looks=400) for seed in range(20)]
    assert set(verdicts) == {State.PROMOTED}


def test_a_canary_that_is_as_good_is_promoted_in_the_end():
    assert Traffic(3).verdict(looks=2000, between=100) is State.PROMOTED


def test_nothing_is_judged_by_a_few_sessions():
    verdict = judge(Traffic(1, slower=100).sessions(60), CANARY)
    assert (verdict.state, verdict.reason, verdict.differences) == (
        State.RUNNING,
        Reason.TOO_FEW_SESSIONS,
        {},
    )


def test_output_tokens_count_only_where_they_are_known():
    sums = Traffic(2, slower=0.7).sessions(4000)
    for tallies in sums.arms.values():
        for tally in tallies:
            tally.streams, tally.tpot_log = 0, 0.0
    verdict = judge(sums, CANARY)
    assert verdict.state is State.PROMOTED
    assert Measure.TPOT not in verdict.differences


def test_sums_of_gateways_are_those_of_one():
    one, first, second = Sums.begin("t"), Sums.begin("t"), Sums.begin("t")
    for i, seconds in enumerate((0.5, 1.0, 2.0, 4.0)):
        for sums in (one, (first, second)[i % 2]):
            tally = sums.arms[Arm.CANARY][i]
            tally.first_token(seconds)
            tally.ended(failed=i == 3)
            tally.prompt(100, 60)
    together = added([first, second, Sums.begin("another")], "t")
    assert together == one
    whole = together.whole(Arm.CANARY)
    assert (whole.requests, whole.failed, whole.prompt_tokens, whole.cached_tokens) == (4, 1, 400, 240)
    assert whole.ttft_log == pytest.approx(log(0.5) + log(2.0) + log(4.0))


def test_sums_of_another_trial_do_not_count():
    other = Traffic(1).sessions(10)
    assert added([other], "u") == Sums.begin("u")


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        pytest.param(Routing(canary=Canary(policy=PolicyChoice(name="ear"), share=0.5)), True, id="nothing"),
        pytest.param(Routing(canary=Canary(policy=PolicyChoice(name="ear"), share=0.2)), False, id="share"),
        pytest.param(
            Routing(canary=Canary(policy=PolicyChoice(name="sticky"), share=0.5)), False, id="policy"
        ),
        pytest.param(
            Routing(canary=Canary(policy=PolicyChoice(name="ear"), share=0.5, tolerance=0.3)),
            True,
            id="tolerance",
        ),
        pytest.param(
            Routing(policy=PolicyChoice(name="sticky"), canary=CANARY), False, id="the policy beside it"
        ),
    ],
)
def test_another_comparison_has_another_name(changed: Routing, same: bool):
    assert (trial_of(changed) == trial_of(Routing(canary=CANARY))) is same


OTHERS = PolicyChoice(name="sticky", outside={"mine": {"gain": 1}}, ear=EarParams(cooldown_seconds=9))
MINE = PolicyChoice(name="mine", outside={"mine": {"gain": 1}})


@pytest.mark.parametrize(
    ("policy", "canary", "same"),
    [
        pytest.param(
            PolicyChoice(name="sticky", outside={"shadow": {"gain": 3}}),
            MINE,
            True,
            id="another block of the pool's",
        ),
        pytest.param(
            OTHERS,
            replace(MINE, outside={**MINE.outside, "shadow": {}}),
            True,
            id="another block of the canary's",
        ),
        pytest.param(
            OTHERS, replace(MINE, perilune=PeriluneParams(least_gain_seconds=9)), True, id="a block of ours"
        ),
        pytest.param(OTHERS, replace(MINE, outside={"mine": {"gain": 2}}), False, id="its own block"),
        pytest.param(replace(OTHERS, name="ear"), MINE, False, id="the pool's name"),
    ],
)
def test_only_the_blocks_of_the_policies_that_decide_count(
    policy: PolicyChoice, canary: PolicyChoice, same: bool
) -> None:
    begun = trial_of(Routing(policy=OTHERS, canary=Canary(policy=MINE, share=0.5)))
    assert (trial_of(Routing(policy=policy, canary=Canary(policy=canary, share=0.5))) == begun) is same


def test_a_policys_own_parameters_count_without_the_defaults() -> None:
    def named(block: EarParams) -> str:
        return trial_of(Routing(canary=Canary(policy=PolicyChoice(name="ear", ear=block), share=0.5)))

    assert named(EarParams(cooldown_seconds=9)) != named(EarParams())
    assert PolicyChoice(name="ear", ear=EarParams(cooldown_seconds=9)).parameters == {"cooldownSeconds": 9}


def test_without_a_canary_there_is_no_trial():
    assert trial_of(Routing()) == ""
