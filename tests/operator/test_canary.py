"""What becomes of a canary: the pool document, the status, and what is asked of the gateways."""

import json
from typing import Any

import msgspec
import pytest
from plans import made

from perilune_api import names
from perilune_api.conditions import Condition
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.status import StatusCondition
from perilune_api.pool import Pool, parse
from perilune_api.trial import Arm, State, Sums, trial_of
from perilune_operator import status
from perilune_operator.observe.facts import GatewayStats, Missing, Observed, PodFacts
from perilune_operator.observe.gateway_pages import canary_sums
from perilune_operator.plan import Plan

Object = dict[str, Any]
ROUTING: Object = {"canary": {"policy": {"name": "ear", "ear": {"cooldownSeconds": 7}}, "share": 0.2}}


def spec(routing: Object = ROUTING) -> Object:
    return {"model": {"name": "m"}, "routing": routing}


def told(slower: float, requests: int = 400, routing: Object = ROUTING, fails: bool = False) -> Sums:
    """Return what a gateway reports, in which the canary's first tokens take so many times as long."""
    sums = Sums.begin(trial_of(convert(spec(routing)).routing))
    for arm, tallies in sums.arms.items():
        for i, tally in enumerate(tallies):
            for _ in range(requests):
                tally.ended(failed=fails and arm is Arm.CANARY)
                tally.first_token((1 + i % 3) * (slower if arm is Arm.CANARY else 1.0))
    return sums


def planned(
    *sums: Sums, routing: Object = ROUTING, before: Object | None = None, pods: tuple[PodFacts, ...] = ()
) -> Plan:
    gateway = GatewayStats(sessions=0, hit_ratio=None, canaries=sums)
    observed = Observed(uid="u", generation=1, status=before or {}, gateway=gateway, pods=pods)
    return made(spec(routing), observed)


def document(plan: Plan) -> Pool:
    """Return what the gateways read."""
    assert plan.objects is not None
    name = names.gateway_name("p")
    kept = [o for o in plan.objects if (o["kind"], o["metadata"]["name"]) == ("ConfigMap", name)]
    return parse(kept[0]["data"][names.POOL_DOCUMENT])


def condition(plan: Plan) -> StatusCondition:
    return next(c for c in plan.status.conditions if c.type is Condition.CANARY_PROMOTED)


def stored(plan: Plan) -> Object:
    kept: Object = json.loads(msgspec.json.encode(plan.status))
    return kept


def test_while_it_runs_the_gateways_get_the_canary_as_it_is_specified() -> None:
    plan = planned()
    assert document(plan).spec.routing == convert(spec()).routing
    assert (condition(plan).status, condition(plan).reason) == ("Unknown", "TooFewSessions")
    assert plan.status.canary is not None
    assert (plan.status.canary.state, plan.status.canary.policy_in_force) == (State.RUNNING, "perilune")
    assert plan.tries


def test_one_that_is_slower_is_rolled_back_in_the_gateways_and_not_in_the_spec() -> None:
    plan = planned(told(slower=3.0))
    routing = document(plan).spec.routing
    assert (routing.policy.name, routing.canary) == ("perilune", None)
    assert (condition(plan).status, condition(plan).reason) == ("False", "SlowerFirstTokens")
    assert "first tokens come +200 % later" in condition(plan).message
    assert plan.scale_to is None
    assert not plan.tries


def test_one_that_is_no_worse_is_promoted_with_its_parameters() -> None:
    plan = planned(told(slower=0.5))
    routing = document(plan).spec.routing
    assert (routing.policy.name, routing.policy.ear.cooldown_seconds, routing.canary) == ("ear", 7.0, None)
    assert (condition(plan).status, condition(plan).reason) == ("True", "NoWorse")
    assert plan.status.canary is not None
    assert plan.status.canary.policy_in_force == "ear"


def test_a_promotion_says_whether_the_speed_of_output_was_known() -> None:
    assert "The speed of output tokens was not known" in condition(planned(told(slower=0.5))).message
    sums = told(slower=0.5)
    for arm, tallies in sums.arms.items():
        for i, tally in enumerate(tallies):
            for _ in range(400):
                tally.output((1 + i % 3) * (0.01 if arm is Arm.CANARY else 0.02))
    message = condition(planned(sums)).message
    assert "output tokens come -50 % later" in message
    assert "not known" not in message


def test_a_roll_back_lasts_when_a_block_for_a_shadow_policy_comes() -> None:
    first = planned(told(slower=3.0))
    more = {
        **ROUTING,
        "policy": {"name": "perilune", "outside": {"mine": {}}},
        "shadow": {"policies": ["mine"]},
    }
    later = planned(routing=more, before=stored(first))
    assert (condition(later).status, document(later).spec.routing.canary) == ("False", None)


def test_the_counts_of_all_gateways_are_summed() -> None:
    alone = [told(slower=1.15, requests=1), told(slower=1.15, requests=1)]
    for sums in alone:
        for tallies in sums.arms.values():
            del tallies[40:]
            tallies += [type(tallies[0])() for _ in range(24)]
    assert condition(planned(alone[0])).reason == "TooFewSessions"
    alone[1].arms = {arm: tallies[::-1] for arm, tallies in alone[1].arms.items()}
    assert condition(planned(*alone)).reason != "TooFewSessions"


@pytest.mark.parametrize("slower", [0.5, 3.0])
def test_a_verdict_stays_whatever_is_reported_afterwards(slower: float) -> None:
    first = planned(told(slower))
    later = planned(told(1 / slower), before=stored(first))
    assert later.status.canary == first.status.canary
    assert document(later) == document(first)
    assert not status.changed(stored(first), later.status)


def gateways(*restarts: int) -> tuple[PodFacts, ...]:
    return tuple(
        PodFacts(
            name=f"g{i}",
            component="gateway",
            role="",
            node="n",
            ready=True,
            terminating=False,
            restarts=number,
        )
        for i, number in enumerate(restarts)
    )


def test_one_under_which_gateways_die_is_rolled_back() -> None:
    """Restarts before it began do not count, and fewer pods than then do not count as fewer restarts."""
    first = planned(pods=gateways(5, 1))
    assert first.status.canary is not None
    again = planned(pods=gateways(5, 3), before=stored(first))
    assert condition(again).status == "Unknown"
    over = planned(pods=gateways(6, 3), before=stored(again))
    assert (condition(over).status, condition(over).reason) == ("False", "GatewaysRestarted")
    assert document(over).spec.routing.canary is None
    assert condition(planned(before=stored(over))).reason == "GatewaysRestarted"
    rolled_out = planned(pods=gateways(0, 0), before=stored(first))
    assert condition(planned(pods=gateways(2, 0), before=stored(rolled_out))).status == "Unknown"
    assert condition(planned(pods=gateways(2, 1), before=stored(rolled_out))).status == "False"


def test_another_share_is_another_comparison() -> None:
    first = planned(told(slower=3.0))
    changed = {"canary": {**ROUTING["canary"], "share": 0.5}}
    later = planned(told(slower=3.0), routing=changed, before=stored(first))
    assert condition(later).reason == "TooFewSessions"
    assert document(later).spec.routing.canary is not None


def test_a_verdict_is_an_event() -> None:
    running, over = planned(), planned(told(slower=3.0))
    (event,) = (
        c for c in status.changed(stored(running), over.status) if c.type is Condition.CANARY_PROMOTED
    )
    assert event.reason == "SlowerFirstTokens"


def test_copying_a_promoted_policy_into_the_spec_changes_nothing_for_the_gateways() -> None:
    promoted = planned(told(slower=0.5))
    copied = planned(routing={"policy": ROUTING["canary"]["policy"]}, before=stored(promoted))
    assert document(copied) == document(promoted)
    assert copied.status.canary is None


def test_a_pool_without_a_canary_has_no_such_condition() -> None:
    plan = planned(routing={})
    assert Condition.CANARY_PROMOTED not in {c.type for c in plan.status.conditions}


# -- the gateways' page --------------------------------------------------------------------------------


def test_a_gateway_s_sums_are_read_as_they_are_reported() -> None:
    sums = told(slower=2.0, requests=3)
    page = msgspec.json.encode({"other": Sums.begin("x"), "p": sums}).decode()
    assert canary_sums(page, "p") == sums


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("{}", id="no canary"),
        pytest.param("<html>", id="another page"),
        pytest.param('{"p": {"trial": "t", "arms": {"pool": [], "canary": []}}}', id="another shape"),
        pytest.param('{"p": {"trial": "t", "arms": {}}}', id="no arms"),
        pytest.param('{"p": ' + "[" * 5_000 + "]" * 5_000 + "}", id="nested deeply"),
        pytest.param(Missing.REFUSED, id="an older gateway"),
    ],
)
def test_what_is_no_such_page_counts_as_nothing(page: str | Missing) -> None:
    assert canary_sums(page, "p") is None
