"""A canary: which sessions it decides for, what is counted of their requests, and how its trial ends."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from msgspec.structs import replace
from router_rig import A, B, Rig, pool
from routing_objects import head

from perilune_api import names
from perilune_api.policies import PolicyChoice
from perilune_api.pool import Canary, Limits, Pool, Routing
from perilune_api.trial import Arm, Tally
from perilune_gateway.model import Outcome, Refusal, RequestHead, Routed
from perilune_gateway.routing.trial import Trial, arm_and_bucket

SHARES = (0.1, 0.3, 0.31, 0.8)
POLICY, OTHER = PolicyChoice(), PolicyChoice(name="least_loaded")


def with_canary(share: float = 0.5, policy: PolicyChoice = OTHER, **more: object) -> Pool:
    routing = Routing(policy=POLICY, canary=Canary(policy=policy, share=share), **more)  # type: ignore[arg-type]
    return pool(routing=routing)


def turn(rig: Rig, session: str, ids: range = range(20)) -> Routed:
    """Play one turn of a session, to its end."""
    routed = rig.route(ids, of(session))
    rig.stored(rig.record(routed).target, ids)
    rig.router.on_response(routed.ticket, 200, "", streamed=True)
    rig.finish(routed)
    return routed


def of(session: str, **headers: str) -> RequestHead:
    return head("/v1/completions", x_session_id=session, **headers)


def sessions(count: int = 200) -> Iterator[str]:
    return (f"s{i}" for i in range(count))


def by_canary(rig: Rig) -> set[str]:
    """Return the sessions whose last turn the canary decided."""
    return {session for session in sessions() if rig.record(turn(rig, session)).canary}


def whole(rig: Rig, arm: Arm) -> Tally:
    return rig.router.trial.sums.whole(arm)


# -- which sessions ------------------------------------------------------------------------------------


def test_a_share_of_the_sessions_is_decided_by_the_canary() -> None:
    rig = Rig(with_canary(0.3))
    chosen = by_canary(rig)
    assert 40 <= len(chosen) <= 80
    policies = {rig.record(turn(rig, session)).policy for session in chosen}
    assert policies == {"least_loaded"}
    assert {rig.record(turn(rig, s)).policy for s in sessions() if s not in chosen} == {"perilune"}


def test_every_replica_gives_a_session_to_the_same_arm() -> None:
    assert by_canary(Rig(with_canary())) == by_canary(Rig(with_canary(), seed=7))


@pytest.mark.parametrize(("less", "more"), list(pairwise(SHARES)))
def test_a_larger_share_takes_sessions_from_the_pool_only(less: float, more: float) -> None:
    assert by_canary(Rig(with_canary(less))) <= by_canary(Rig(with_canary(more)))


def test_arms_have_the_shares_that_they_should_and_buckets_are_even() -> None:
    placed = [arm_and_bucket("default/p", f"s{i}", 0.1) for i in range(20_000)]
    assert sum(arm is Arm.CANARY for arm, _ in placed) / len(placed) == pytest.approx(0.1, abs=0.01)
    in_canary = [bucket for arm, bucket in placed if arm is Arm.CANARY]
    assert len(set(in_canary)) == 64
    assert max(in_canary.count(bucket) for bucket in set(in_canary)) < 70


def test_a_request_without_a_session_counts_as_one_of_its_own() -> None:
    rig = Rig(
        pool(routing=replace(with_canary().spec.routing, session=replace(Routing().session, infer=False)))
    )
    for _ in range(100):
        rig.finish(rig.route())
    both = [whole(rig, arm).sessions for arm in Arm]
    assert sum(both) == 100
    assert min(both) > 25


# -- no session moves ----------------------------------------------------------------------------------


def test_no_session_moves_because_a_canary_begins_or_ends() -> None:
    rig = Rig(pool())
    hosts = {session: rig.record(turn(rig, session)).target for session in sessions(60)}
    keeps = Canary(policy=PolicyChoice(name="ear"), share=0.5)
    for routing in (Routing(canary=keeps), Routing(canary=replace(keeps, share=0.2)), Routing()):
        rig.router.configure(pool(routing=routing))
        assert {session: rig.record(turn(rig, session)).target for session in sessions(60)} == hosts


# -- what is counted -----------------------------------------------------------------------------------


def test_real_times_hits_and_sessions_are_counted() -> None:
    rig = Rig(with_canary(share=0.999))
    routed = rig.route(range(20), of("s0"))
    rig.now += 2.0
    rig.stored(rig.record(routed).target, range(20))
    rig.router.on_response(routed.ticket, 200, "", streamed=True)
    rig.now += 3.0
    rig.router.on_output(routed.ticket, 31)
    rig.router.on_usage(routed.ticket, 8)
    rig.finish(routed)
    told = whole(rig, Arm.CANARY)
    assert (told.sessions, told.requests, told.failed, told.first_tokens, told.streams) == (1, 1, 0, 1, 1)
    assert told.ttft_log == pytest.approx(0.6931, abs=1e-3)
    assert told.tpot_log == pytest.approx(-2.3026, abs=1e-3)
    assert (told.prompt_tokens, told.cached_tokens) == (20, 8)


def test_where_an_engine_does_not_report_hits_its_events_tell() -> None:
    rig = Rig(with_canary(share=0.999, policy=PolicyChoice(name="ear")))
    turn(rig, "s0")
    turn(rig, "s0")
    told = whole(rig, Arm.CANARY)
    assert (told.sessions, told.requests, told.prompt_tokens, told.cached_tokens) == (1, 2, 40, 16)


@pytest.mark.parametrize(
    ("status", "outcome", "failed"),
    [
        pytest.param(200, Outcome.COMPLETED, 0, id="answered"),
        pytest.param(503, Outcome.COMPLETED, 1, id="the endpoint fails"),
        pytest.param(200, Outcome.FAILED, 1, id="the answer breaks off"),
        pytest.param(404, Outcome.COMPLETED, 0, id="the client's fault"),
        pytest.param(200, Outcome.CANCELLED, 0, id="the client left"),
    ],
)
def test_failures_are_what_clients_do_not_cause(status: int, outcome: Outcome, failed: int) -> None:
    rig = Rig(with_canary(share=0.999))
    routed = rig.route(range(20), of("s0"))
    rig.router.on_response(routed.ticket, status, "", streamed=True)
    rig.finish(routed, outcome)
    assert whole(rig, Arm.CANARY).failed == failed


def test_a_refusal_after_the_policy_was_asked_is_a_failure() -> None:
    rig = Rig(with_canary(share=0.999, limits=Limits(max_pending_seconds=1.0)))
    rig.queue(A, 10.0)
    rig.queue(B, 10.0)
    assert isinstance(rig.ask(range(20), of("s0")), Refusal)
    assert (whole(rig, Arm.CANARY).requests, whole(rig, Arm.CANARY).failed) == (1, 1)


def test_a_request_that_names_its_policy_counts_nowhere() -> None:
    rig = Rig(with_canary(allow_policy_header=True))
    rig.finish(rig.route(range(20), of("s0", **{names.POLICY_HEADER.replace("-", "_"): "sticky"})))
    assert [whole(rig, arm).requests for arm in Arm] == [0, 0]


def test_requests_of_an_earlier_trial_do_not_count_in_the_next() -> None:
    rig = Rig(with_canary())
    routed = rig.route(range(20), of("s0"))
    rig.router.configure(with_canary(policy=PolicyChoice(name="sticky")))
    rig.finish(routed)
    assert [whole(rig, arm).requests for arm in Arm] == [0, 0]


def test_a_change_of_endpoints_leaves_the_counts() -> None:
    rig = Rig(with_canary())
    turn(rig, "s0")
    rig.router.configure(pool(endpoints=[A], routing=with_canary().spec.routing))
    assert sum(whole(rig, arm).requests for arm in Arm) == 1


# -- how it ends ---------------------------------------------------------------------------------------


def decided(slower: float) -> Rig:
    """Return a gateway on its own in which the canary's first tokens take so many times as long."""
    rig = Rig(with_canary(), trial=Trial(decides=True))
    for arm, tallies in rig.router.trial.sums.arms.items():
        for i, tally in enumerate(tallies):
            for _ in range(400):
                tally.ended(failed=False)
                tally.first_token((1 + i % 3) * (slower if arm is Arm.CANARY else 1.0))
    rig.now += 2.0
    rig.router.tick()
    return rig


def test_after_a_roll_back_the_pool_s_policy_decides_for_all() -> None:
    rig = decided(slower=3.0)
    assert by_canary(rig) == set()
    assert {rig.record(turn(rig, session)).policy for session in sessions(20)} == {"perilune"}


def test_after_a_promotion_the_canary_decides_for_all() -> None:
    rig = decided(slower=0.3)
    assert {rig.record(turn(rig, session)).policy for session in sessions(20)} == {"least_loaded"}


def test_a_gateway_among_others_leaves_the_verdict_to_the_operator() -> None:
    rig = Rig(with_canary())
    for tallies in rig.router.trial.sums.arms.values():
        for tally in tallies:
            for _ in range(400):
                tally.ended(failed=tallies is rig.router.trial.sums.arms[Arm.CANARY])
    rig.now += 2.0
    rig.router.tick()
    assert by_canary(rig)


def test_another_canary_begins_again() -> None:
    rig = decided(slower=3.0)
    rig.router.configure(with_canary(policy=PolicyChoice(name="sticky")))
    assert by_canary(rig)
