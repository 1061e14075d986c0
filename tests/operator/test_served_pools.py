"""Pools behind one gateway: what the status of each says of the others, and who is woken by a change."""

from typing import Any

import pytest
from plans import NOW, made

from perilune_operator.observe import readers
from perilune_operator.observe.copies import Copies
from perilune_operator.observe.facts import Observed, PodFacts

Object = dict[str, Any]
SERVED: Object = {"model": {"name": "m"}, "engine": {"kind": "simulated"}, "gateway": {"servedBy": "coder"}}
SERVING: Object = {
    "model": {"name": "m"},
    "engine": {"kind": "simulated"},
    "gateway": {"serves": ["chat"], "failOpen": False},
}
TRUE = {"GatewayReady": "True", "RouteProgrammed": "True", "Ready": "True"}


def other(name: str, gateway: Object, **conditions: str) -> Object:
    """Another pool as it is stored. A condition is its status, or its status and reason."""
    told = [
        {
            "type": kind,
            "status": said.partition(" ")[0],
            "reason": said.partition(" ")[2],
            "message": "It says.",
        }
        for kind, said in conditions.items()
    ]
    meta = {"name": name, "namespace": "ns", "uid": name}
    return {"metadata": meta, "spec": {"gateway": gateway}, "status": {"conditions": told}}


def conditions(spec: Object, *others: Object) -> dict[str, tuple[str, str]]:
    pods = (PodFacts("e", "engine", "both", "n", ready=True, terminating=False),)
    known = {pool["metadata"]["name"]: readers.other_pool(pool) for pool in others}
    status = made(spec, Observed("u", 1, pods=pods, others=known), NOW).status
    return {c.type: (c.status, c.reason) for c in status.conditions}


@pytest.mark.parametrize(
    ("others", "gateway", "ready"),
    [
        pytest.param([], "NoSuchPool", "NoSuchPool", id="nobody"),
        pytest.param(
            [other("coder", {}, **TRUE)], "NotNamed", "NotNamed", id="a pool that does not serve it"
        ),
        pytest.param(
            [other("coder", {"serves": ["chat"]}, **TRUE)],
            "NotNamed",
            "NotNamed",
            id="one that serves others",
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]})], "WaitingForGateway", "WaitingForGateway", id="a new one"
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]}, **{**TRUE, "GatewayReady": "False WaitingForGateway"})],
            "WaitingForGateway",
            "WaitingForGateway",
            id="its gateway is not ready",
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]}, **{**TRUE, "RouteProgrammed": "False RouteRefused"})],
            "Available",
            "RouteRefused",
            id="its route is refused",
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]}, **TRUE)], "Available", "Serving", id="one that is ready"
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]}, **{**TRUE, "Ready": "False WaitingForEngines"})],
            "Available",
            "Serving",
            id="one whose own engines are not",
        ),
    ],
)
def test_a_served_pool_is_as_ready_as_the_gateway_that_serves_it(
    others: list[Object], gateway: str, ready: str
) -> None:
    told = conditions(SERVED, *others)
    assert (told["GatewayReady"][1], told["Ready"][1]) == (gateway, ready)
    assert (told["Ready"][0] == "True") is (ready == "Serving")


@pytest.mark.parametrize(
    ("others", "told"),
    [
        pytest.param([], ("False", "NoSuchPool"), id="missing"),
        pytest.param([other("chat", {}, **TRUE)], ("False", "NotNamed"), id="with a gateway of its own"),
        pytest.param([other("chat", {"servedBy": "x"}, **TRUE)], ("False", "NotNamed"), id="of another"),
        pytest.param([other("chat", {"servedBy": "p"})], ("False", "PoolNotReady"), id="new"),
        pytest.param(
            [other("chat", {"servedBy": "p"}, Ready="False WaitingForEngines")],
            ("False", "PoolNotReady"),
            id="not ready",
        ),
        pytest.param([other("chat", {"servedBy": "p"}, **TRUE)], ("True", "Available"), id="ready"),
    ],
)
def test_a_serving_pool_says_which_pools_it_misses(others: list[Object], told: tuple[str, str]) -> None:
    """Its own model does not depend on them."""
    found = conditions(SERVING, *others)
    assert found["ServedPoolsReady"] == told
    assert found["Ready"] == conditions({**SERVING, "gateway": {"failOpen": False}})["Ready"]


@pytest.mark.parametrize("spec", [None, "x", {"gateway": "x"}, {"gateway": {"serves": None}}])
def test_a_spec_that_is_none_names_no_pool(spec: object) -> None:
    """The operator sees such a pool, too, and refuses it."""
    assert not readers.other_pool({"metadata": {"name": "p"}, "spec": spec}).serves


def test_a_change_wakes_the_pools_that_name_it_or_that_it_names() -> None:
    def key(pool: Object) -> str:
        return f"ns/{pool['metadata']['name']}"

    copies = Copies()
    coder, chat, alone = other("coder", {"serves": ["chat"]}), other("chat", {}), other("alone", {})
    pools = {key(pool): pool for pool in (coder, chat, alone)}
    copies.take_other_pools(pools, pools)
    assert copies.others(("ns", "chat")).keys() == {"coder"}
    assert copies.others(("ns", "coder")).keys() == {"chat"}
    assert copies.others(("ns", "alone")) == {}
    pools["ns/chat"] = other("chat", {"servedBy": "coder"}, **TRUE)
    assert copies.take_other_pools(pools, ["ns/chat"]) == {("ns", "coder")}
    assert copies.take_other_pools(pools, ["ns/chat"]) == set(), "nothing has changed"
    pools["ns/coder"] = other("coder", {})
    assert copies.take_other_pools(pools, ["ns/coder"]) == {("ns", "chat")}
    del pools["ns/chat"]
    assert copies.take_other_pools(pools, ["ns/chat"]) == {("ns", "coder")}
