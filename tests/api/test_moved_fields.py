"""Every field of the former routing.params is named with the place where it is now, and that place exists."""

import msgspec
import pytest

from perilune_api import pool
from perilune_api.moved_fields import GONE, PARAMS, explain


@pytest.mark.parametrize("former", PARAMS)
def test_a_former_field_is_told_its_new_place(former: str) -> None:
    said = explain({"routing": {"params": {former: 1}}})
    assert said == f"{former} is now {PARAMS[former]} - at `$.spec.routing.params`"
    routing = msgspec.to_builtins(pool.Routing())
    for place in PARAMS[former].split(" and "):
        value = routing
        for name in place.split("."):
            value = value[name]
        assert not isinstance(value, dict)


@pytest.mark.parametrize("former", sorted(GONE))
def test_a_field_that_nothing_used_is_said_to_be_gone(former: str) -> None:
    assert explain({"routing": {"params": {former: 1}}}).startswith(f"{former} is gone")


@pytest.mark.parametrize("spec", [None, {}, {"routing": None}, {"routing": {"policy": {"name": "ear"}}}])
def test_nothing_is_said_of_a_spec_without_former_fields(spec: object) -> None:
    assert explain(spec) == ""
