"""Policies and parameters on a command line."""

import pytest

from perilune_api.pool import PolicyParams, SpecError
from perilune_gateway.policy import LIVE, SIMULATED_ONLY
from perilune_lab.policy_arguments import changed, live_policies


def test_policies_each_once_or_all():
    assert live_policies("ear, sticky,ear", "--policy") == ("ear", "sticky")
    assert live_policies("all", "--policy") == live_policies("all,ear", "--policy") == tuple(LIVE)
    assert live_policies("sticky, all", "--policy")[:2] == ("sticky", next(iter(LIVE)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("ear,magic", "Unknown policy 'magic', known are .* - at `--policy`", id="unknown"),
        pytest.param("static_pd", SIMULATED_ONLY["static_pd"], id="of the simulator"),
    ],
)
def test_what_is_wrong_with_a_policy_is_said(text: str, said: str):
    with pytest.raises(SpecError, match=said):
        live_policies(text, "--policy")


@pytest.mark.parametrize("name", ["cooldown_seconds", "cooldownSeconds"])
def test_parameters_in_either_spelling_change_only_themselves(name: str):
    base = PolicyParams(hot_pending_tokens=7)
    found = changed(base, {name: "1.5"}, "--params")
    assert (found.cooldown_seconds, found.hot_pending_tokens) == (1.5, 7)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nonsense": "1"}, "unknown field `nonsense` - at `--params`"),
        ({"cooldown_seconds": "-1"}, "Expected `float` >= 0"),
        ({"cooldown_seconds": "soon"}, "Expected `float`, got `str`"),
    ],
)
def test_what_is_wrong_with_a_parameter_is_said(values: dict[str, str], said: str):
    with pytest.raises(SpecError, match=said):
        changed(PolicyParams(), values, "--params")
