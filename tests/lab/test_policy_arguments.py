"""Policies and parameters on a command line."""

import pytest
from routing_objects import chosen

from perilune_api.policies import EarParams
from perilune_api.pool import Routing, SpecError
from perilune_gateway.policy import POLICIES
from perilune_lab.terminal.policy_arguments import changed, live_policies


def test_policies_each_once_or_all():
    assert live_policies("ear, sticky,ear", "--policy") == ("ear", "sticky")
    assert live_policies("all", "--policy") == live_policies("all,ear", "--policy") == tuple(POLICIES)
    assert live_policies("sticky, all", "--policy")[:2] == ("sticky", next(iter(POLICIES)))


@pytest.mark.parametrize("text", ["ear,magic", "ear,static_pd"], ids=["unknown", "of another system"])
def test_what_is_wrong_with_a_policy_is_said(text: str):
    name = text.split(",")[1]
    with pytest.raises(SpecError, match=f"Unknown policy '{name}', known are .* - at `--policy`"):
        live_policies(text, "--policy")


@pytest.mark.parametrize("name", ["ear.cooldown_seconds", "ear.cooldownSeconds"])
def test_parameters_in_either_spelling_change_only_themselves(name: str):
    base = Routing(policy=chosen("perilune", ear=EarParams(hot_pending_tokens=7)), fallbacks=5)
    assert changed(base, {name: "1.5"}, "--param") == Routing(
        policy=chosen("perilune", ear=EarParams(hot_pending_tokens=7, cooldown_seconds=1.5)), fallbacks=5
    )


def test_the_planner_and_the_engines_order_have_parameters_too():
    found = changed(
        Routing(),
        {"migration.worth": "3", "engine_priority.ageing_weight": "2", "dynamo_v1.overlapWeight": "1"},
        "",
    )
    assert (found.migration.worth, found.engine_priority.ageing_weight) == (3.0, 2.0)
    assert found.policy.dynamo_v1.overlap_weight == 1.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nonsense": "1"}, "'nonsense' is not BLOCK.NAME with a block of ear, .* - at `--param`"),
        (
            {"ear.nonsense": "1"},
            "ear has no parameter 'nonsense', known are hotPendingTokens, .* - at `--param`",
        ),
        ({"ear.cooldown_seconds": "-1"}, r"Expected `float` >= 0.0 - at `\$.policy.ear.cooldownSeconds`"),
        ({"ear.cooldown_seconds": "soon"}, "Expected `float`, got `str`"),
    ],
)
def test_what_is_wrong_with_a_parameter_is_said(values: dict[str, str], said: str):
    with pytest.raises(SpecError, match=said):
        changed(Routing(), values, "--param")
