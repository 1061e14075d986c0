"""A router with a policy of a package that fails: requests go on, faults are counted, health says it."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from policy_packages import MINE, answering, install, installed, on_path
from prometheus_client import generate_latest
from router_rig import A, B, C, Rig, pool
from routing_objects import fleet, head, request

from perilune_api.policies import PolicyChoice
from perilune_api.pool import Canary, Routing
from perilune_gateway.model import Decision, Routed
from perilune_gateway.observe import health
from perilune_gateway.policy import POLICIES, PolicyError
from perilune_gateway.routing.policy_watch import BOUND_S, PolicyWatch

RAISES = answering("1 / 0")
BREAKS = (
    MINE.replace("class Mine", "BROKEN = []\n\n    class Mine")
    .replace("if self", "assert not BROKEN, 'broken'\n            if self")
    .replace("best, host =", "BROKEN.append(1)\n        raise KeyError\n        best, host =")
)
"""A policy whose parameters raise, too, once it was called."""


def routing(name: str = "mine", **block: object) -> Routing:
    return Routing(policy=PolicyChoice(name=name, outside={"mine": block}), allow_policy_header=True)


def rig(name: str = "mine", **block: object) -> Rig:
    return Rig(pool(endpoints=[A, B, C], routing=routing(name, **block)))


def policies(made: Rig, n: int, **headers: str) -> list[str]:
    """Return who decided each of `n` requests."""
    found = []
    for _ in range(n):
        routed = made.route(h=head("/v1/completions", **headers))
        found.append(made.record(routed).policy)
        made.finish(routed)
    return found


def problems(made: Rig) -> list[health.Problem]:
    report = health.report(
        (),
        block_size=4,
        pool="p",
        policy="mine",
        version="1",
        uptime_s=0.0,
        policies=made.router.policies.states(),
    )
    return [problem for problem in report.problems if problem.kind is health.ProblemKind.POLICY]


def test_one_that_is_right_decides(tmp_path: Path) -> None:
    with installed(tmp_path, MINE):
        made = rig()
        assert policies(made, 3) == ["mine"] * 3
        assert problems(made) == []


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (RAISES, "raised"),
        (answering("raised(CancelledError())"), "raised"),
        (BREAKS, "raised"),
        (answering("Decision('z', Reason.HOST)"), "nonsense"),
        (answering("Decision('10.0.0.1:8000', Reason.HOST, estimated_ttft_s=10**400)"), "nonsense"),
    ],
    ids=["raises", "cancels", "takes its parameters no more", "nonsense", "a number above all floats"],
)
def test_one_that_fails_does_not_decide_is_counted_and_switched_off(
    tmp_path: Path, source: str, kind: str
) -> None:
    with installed(tmp_path, source):
        made = rig()
        assert policies(made, 4) == ["perilune"] * 4
        (problem,) = problems(made)
        assert problem.message.startswith("policy mine failed: 4 ")
        policies(made, 3)
        (problem,) = problems(made)
        assert problem.message.startswith("policy mine is switched off: 5 of its last 5 decisions were bad")
        assert problem.effect == "perilune decides in its place"
    metrics = generate_latest(made.metrics.registry).decode()
    assert f'perilune_policy_faults_total{{kind="{kind}",policy="mine"}} 5.0' in metrics


def test_weighing_a_turn_counts_no_fault(tmp_path: Path) -> None:
    with installed(tmp_path, RAISES):
        made = rig()
        policies(made, 1, x_session_id="s")
        before = problems(made)
        asked = head("/v1/completions", x_session_id="s", content_length="400")
        for seed in range(9):
            _, _, verdict = made.router.weigh(asked, None, seed)
            assert isinstance(verdict, Decision)
        assert problems(made) == before


def test_the_pools_own_policy_takes_the_place_of_one_that_a_header_names(tmp_path: Path) -> None:
    with installed(tmp_path, RAISES):
        assert policies(rig("sticky"), 2, x_perilune_policy="mine") == ["sticky"] * 2


def test_a_few_faults_among_many_decisions_switch_nothing_off(tmp_path: Path) -> None:
    sometimes = answering("1 / 0 if request.ordinal % 30 == 0 else Decision('10.0.0.1:8000', Reason.COLD)")
    with installed(tmp_path, sometimes):
        made = rig()
        assert policies(made, 301).count("perilune") == 11
        assert "switched off" not in problems(made)[0].message


def test_a_changed_pool_switches_it_on_again_and_an_equal_one_does_not(tmp_path: Path) -> None:
    with installed(tmp_path, RAISES):
        made = rig()
        policies(made, 5)
        made.router.configure(pool(endpoints=[A, B], routing=routing()))
        assert "switched off" in problems(made)[0].message
        made.router.configure(pool(endpoints=[A, B], routing=routing("ear")))
        made.router.configure(pool(endpoints=[A, B], routing=routing()))
        assert problems(made) == []


@pytest.mark.parametrize(
    ("source", "block", "said"),
    [
        (
            MINE,
            {"gainTokens": -1},
            "Expected `int` >= 0 - at `$.spec.routing.policy.outside.mine.gainTokens`",
        ),
        ("import nothing_like_it", {}, "cannot be imported"),
    ],
    ids=["wrong parameters", "cannot be loaded"],
)
def test_one_that_cannot_run_leaves_the_pool_to_the_default(
    tmp_path: Path, source: str, block: dict[str, object], said: str
) -> None:
    with installed(tmp_path, source):
        made = rig(**block)
        assert policies(made, 2) == ["perilune"] * 2
        assert said in problems(made)[0].message


def test_what_is_wrong_with_a_canarys_parameters_names_its_field(tmp_path: Path) -> None:
    canary = Canary(policy=PolicyChoice(name="mine", outside={"mine": {"gainTokens": -1}}))
    with installed(tmp_path, MINE):
        made = Rig(pool(endpoints=[A, B, C], routing=Routing(canary=canary)))
        assert "$.spec.routing.canary.policy.outside.mine.gainTokens" in problems(made)[0].message


def test_an_unknown_policy_in_a_header_is_refused_with_what_is_there(tmp_path: Path) -> None:
    with installed(tmp_path, MINE):
        refused = rig().ask(h=head("/v1/completions", x_perilune_policy="yours"))
        assert not isinstance(refused, Routed)
        assert "Unknown policy 'yours', known are conductor" in refused.message
        assert "mine" in refused.message


class Stopwatch:
    """A clock that each reading moves by what the test says."""

    def __init__(self, step_s: Callable[[], float]) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s()
        return self.now


def slow_watch(step_s: float) -> tuple[PolicyWatch, list[object]]:
    told: list[object] = []
    watch = PolicyWatch(POLICIES, Stopwatch(lambda: step_s), told.append)
    watch.configure(PolicyChoice(name="mine", outside={"mine": {}}))
    return watch, told


def run(watch: PolicyWatch, name: str) -> None:
    watch.run(name, request(), fleet(a=0), PolicyChoice(), Random(0))


def test_time_is_measured_after_it_returns_and_its_answer_counts(tmp_path: Path) -> None:
    with installed(tmp_path, MINE):
        watch, told = slow_watch(BOUND_S * 1.01)
        for _ in range(49):
            run(watch, "mine")
        assert (len(told), watch.standing("mine")) == (49, "mine")
        run(watch, "mine")
        assert watch.standing("mine") == "perilune"
        assert "50 of its last 50 decisions were bad (slow: it took more than 5 ms)" in watch.states()[0].off


def test_one_within_the_bound_is_not_counted_nor_is_one_of_ours(tmp_path: Path) -> None:
    with installed(tmp_path, MINE):
        watch, told = slow_watch(BOUND_S)
        run(watch, "mine")
        assert told == []
        watch, told = slow_watch(1.0)
        run(watch, "ear")
        assert told == []


def test_policies_fail_each_for_itself(tmp_path: Path) -> None:
    install(tmp_path, RAISES)
    install(tmp_path, MINE, "good")
    with on_path(tmp_path):
        watch, _ = slow_watch(0.0)
        for _ in range(5):
            with pytest.raises(PolicyError) as caught:
                run(watch, "mine")
            watch.failed("mine", caught.value)
        assert [watch.standing(name) for name in ("mine", "good")] == ["perilune", "good"]
