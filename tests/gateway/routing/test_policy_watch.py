"""A router with a policy of a package that fails: requests go on, faults are counted, health says it."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from policy_packages import MINE, answering, install, installed, on_path
from prometheus_client import generate_latest
from router_rig import A, B, C, Rig, pool
from routing_objects import fleet, head, request

from perilune_api.policies import PeriluneParams, PolicyChoice
from perilune_api.pool import Canary, Routing
from perilune_api.trial import Arm
from perilune_gateway.model import Decision, Routed
from perilune_gateway.observe import health
from perilune_gateway.policy import POLICIES, PolicyError
from perilune_gateway.routing.policy_watch import BOUND_S, Asked, PolicyWatch

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
    watch.run(False, name, request(), fleet(a=0), PolicyChoice(), Random(0))


def test_time_is_measured_after_it_returns_and_its_answer_counts(tmp_path: Path) -> None:
    with installed(tmp_path, MINE):
        watch, told = slow_watch(BOUND_S * 1.01)
        for _ in range(49):
            run(watch, "mine")
        assert (len(told), watch.standing(Asked("mine"))) == (49, Asked("mine"))
        run(watch, "mine")
        assert watch.standing(Asked("mine")) == Asked("perilune")
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
            watch.failed(Asked("mine"), caught.value)
        assert [watch.standing(Asked(name)).policy for name in ("mine", "good")] == ["perilune", "good"]


# -- what decides in place of a canary's policy, or of the pool's ---------------------------------------


def with_canary(own: PolicyChoice, canary: PolicyChoice) -> Rig:
    """Return a router whose canary decides for all sessions but few."""
    return Rig(
        pool(endpoints=[A, B, C], routing=Routing(policy=own, canary=Canary(policy=canary, share=0.999)))
    )


def outside(name: str, **block: object) -> PolicyChoice:
    return PolicyChoice(name=name, outside={name: block})


COUNTS = answering(
    "Decision('10.0.0.1:8000', Reason.COLD, (Cost('10.0.0.1:8000', parameters.gain, {}),))"
).replace(
    "    def decide(",
    """    class Given(Parameters, frozen=True):
        gain: float = 4.0

        def __post_init__(self):
            if self.gain < 0:
                raise ValueError("gain is below 0")


    def decide(""",
)
"""A policy whose decision tells its parameter."""
COUNTS = COUNTS.replace("decide=decide,", "decide=decide, parameters=Given,")


def gains(made: Rig, n: int) -> list[tuple[str, float]]:
    """Return who decided each of `n` requests, and what its decision tells of its parameters."""
    found = []
    for _ in range(n):
        routed = made.route(h=head("/v1/completions", x_session_id="s"))
        record = made.record(routed)
        assert isinstance(record.verdict, Decision)
        assert not record.canary, "a replay would take the canary's parameters"
        found.append((record.policy, record.verdict.costs[0].total))
        made.finish(routed)
    return found


@pytest.mark.parametrize("broken", [RAISES, "import nothing_like_it"], ids=["raises", "cannot be loaded"])
def test_the_pools_policy_of_a_package_takes_the_place_of_a_canary(tmp_path: Path, broken: str) -> None:
    install(tmp_path, COUNTS)
    install(tmp_path, broken, "other", package="others")
    with on_path(tmp_path):
        made = with_canary(outside("mine", gain=77.0), outside("other"))
        assert gains(made, 7) == [("mine", 77.0)] * 7
        (problem,) = problems(made)
        assert problem.message.startswith("policy other of the canary is switched off")
        assert problem.effect == "mine decides in its place"


def test_what_takes_the_place_of_a_canary_has_the_parameters_of_the_pool(tmp_path: Path) -> None:
    def moves(made: Rig) -> list[str]:
        """Return who decided the second turn of a session whose host has a long queue, and why."""
        routed = made.route(range(20), head("/v1/completions", x_session_id="s"))
        host = made.record(routed).target
        made.finish(routed)
        made.queue(host, 20.0)
        record = made.record(made.route(range(20), head("/v1/completions", x_session_id="s")))
        return [record.policy, "stays" if record.target == host else "moves"]

    with installed(tmp_path, RAISES):
        keeps = PeriluneParams(least_gain_seconds=77.0)
        own = PolicyChoice(perilune=keeps)
        assert moves(with_canary(own, outside("mine"))) == ["perilune", "stays"]
        assert moves(Rig(pool(endpoints=[A, B, C], routing=Routing(policy=own)))) == ["perilune", "stays"]
        assert moves(with_canary(PolicyChoice(), outside("mine"))) == ["perilune", "moves"]
        failing = PolicyChoice(name="mine", outside={"mine": {}}, perilune=keeps)
        assert moves(Rig(pool(endpoints=[A, B, C], routing=Routing(policy=failing)))) == ["perilune", "stays"]
        assert moves(with_canary(failing, PolicyChoice(name="mine", outside={"mine": {}, "more": {}}))) == [
            "perilune",
            "stays",
        ]


def test_where_both_policies_fail_the_default_decides_and_both_are_at_fault(tmp_path: Path) -> None:
    install(tmp_path, RAISES)
    install(tmp_path, RAISES, "other", package="others")
    with on_path(tmp_path):
        made = with_canary(outside("mine"), outside("other"))
        assert policies(made, 6, x_session_id="s") == ["perilune"] * 6
        assert [problem.message.split(" is ")[0] for problem in problems(made)] == [
            "policy other of the canary",
            "policy mine",
        ]


def test_a_canary_with_other_parameters_does_not_switch_off_the_pools_policy(tmp_path: Path) -> None:
    with installed(tmp_path, COUNTS):
        made = with_canary(outside("mine", gain=2.0), outside("mine", gain=-1.0))
        assert gains(made, 7) == [("mine", 2.0)] * 7
        tally = made.router.trial.sums.whole(Arm.CANARY)
        assert (tally.requests, tally.failed) == (7, 7)
