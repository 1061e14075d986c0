"""Another version of the operator leaves pods as they are until it is asked, or until the spec changes them
anyway.
"""

from dataclasses import replace
from typing import Any

import pytest

from perilune_api.inference_pool.checks import convert
from perilune_operator.observe.facts import Key, Object, Observed, key
from perilune_operator.plan import Plan, plan
from perilune_operator.render.objects import Defaults

NOW = 1_760_000_000.0
OLD, NEW = (
    Defaults(
        image=f"perilune:{n}",
        engine_image=f"vllm:{n}",
        master_image=f"mooncake:{n}",
        state_image=f"valkey:{n}",
        version=f"{n}.0.0",
    )
    for n in (1, 2)
)
STORE: Object = {"mooncake": {"store": {"enabled": True}}}


def planned(defaults: Defaults, children: dict[Key, Object], *, is_turn: bool = True, **spec: Any) -> Plan:
    observed = Observed(uid="u", generation=1, children=children, is_turn=is_turn)
    return plan("p", "ns", convert({"model": {"name": "m"}, **spec}), observed, NOW, defaults)


def stored(made: Plan) -> dict[Key, Object]:
    """Return the cluster after the plan."""
    return {key(obj): obj for obj in made.objects or ()}


def image(made: Plan, name: str) -> str:
    workload = stored(made)[Key("Deployment", "ns", name)]
    return str(workload["spec"]["template"]["spec"]["containers"][0]["image"])


def images(made: Plan) -> tuple[str, str]:
    return image(made, "p-engine"), image(made, "p-gateway")


def test_a_new_operator_leaves_every_pod_as_it_is() -> None:
    before = planned(OLD, {}, **STORE)
    after = planned(NEW, stored(before), **STORE)
    assert stored(after) == stored(before)
    assert image(after, "p-master") == "mooncake:1"  # its content would be lost
    assert (after.status.revision, after.status.available_revision) == (OLD.revision, NEW.revision)
    again = planned(NEW, stored(after), **STORE)
    assert (again.objects, again.upgrades) == (after.objects, False)


@pytest.mark.parametrize("asked", ["latest", NEW.revision])
def test_a_pool_follows_when_it_is_asked_to(asked: str) -> None:
    before = planned(OLD, {})
    after = planned(NEW, stored(before), rollout={"revision": asked})
    assert images(after) == ("vllm:2", "perilune:2")
    assert (after.upgrades, after.status.revision, after.status.available_revision) == (
        True,
        NEW.revision,
        None,
    )


def test_a_pool_that_was_asked_for_another_revision_stays() -> None:
    after = planned(NEW, stored(planned(OLD, {})), rollout={"revision": OLD.revision})
    assert images(after) == ("vllm:1", "perilune:1")


def test_a_pool_waits_for_its_turn_and_says_so() -> None:
    before = stored(planned(OLD, {}))
    after = planned(NEW, before, is_turn=False, rollout={"revision": "latest"})
    assert images(after) == ("vllm:1", "perilune:1")
    assert (after.upgrades, after.waits) == (False, True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({"replicas": 5}, ("vllm:1", "perilune:1"), id="no pod's change"),
        pytest.param({"routing": {"policy": {"name": "sticky"}}}, ("vllm:1", "perilune:1"), id="a policy"),
        pytest.param({"engine": {"args": ["--seed=1"]}}, ("vllm:2", "perilune:1"), id="the engines'"),
        pytest.param({"gateway": {"logLevel": "debug"}}, ("vllm:1", "perilune:2"), id="the gateway's"),
        pytest.param({"engine": {"blockSize": 32}}, ("vllm:2", "perilune:2"), id="both"),
    ],
)
def test_a_change_of_the_spec_takes_along_the_pods_that_it_replaces_anyway(
    change: Object, expected: tuple[str, str]
) -> None:
    before = planned(OLD, {})
    upgraded = planned(NEW, stored(before))
    changed = planned(NEW, stored(upgraded), **change)
    assert images(changed) == expected
    assert images(planned(NEW, stored(changed), **change)) == expected


def test_what_is_not_a_pod_follows_at_once() -> None:
    """Routes, policies, Services, monitors, and the pool document, which gateways of both versions can
    read."""
    kinds = frozenset({"monitoring.coreos.com/PodMonitor"})
    spec = convert({"model": {"name": "m"}})
    before = stored(plan("p", "ns", spec, Observed(uid="u", generation=1, kinds=kinds), NOW, OLD))
    observed = Observed(uid="u", generation=1, children=before, kinds=kinds)
    after = plan("p", "ns", spec, observed, NOW, replace(NEW, monitor_labels={"release": "r"}))
    monitor = stored(after)[Key("PodMonitor", "ns", "p-engine")]
    assert monitor["metadata"]["labels"]["release"] == "r"
    assert images(after) == ("vllm:1", "perilune:1")


def test_a_pool_whose_memory_is_lost_is_rendered_anew() -> None:
    before = stored(planned(OLD, {}))
    del before[Key("ConfigMap", "ns", "p-rendered")]
    assert images(planned(NEW, before)) == ("vllm:2", "perilune:2")
    broken = stored(planned(OLD, {}))
    memory = broken[Key("ConfigMap", "ns", "p-rendered")]
    broken[key(memory)] = {**memory, "data": {"engine.json": "{", "spec.json": "[]"}}
    assert images(planned(NEW, broken)) == ("vllm:2", "perilune:2")


def test_an_endpoint_that_comes_to_span_nodes_is_rendered_anew() -> None:
    lws = frozenset({"leaderworkerset.x-k8s.io/LeaderWorkerSet"})
    before = planned(OLD, {})
    observed = Observed(uid="u", generation=1, children=stored(before), kinds=lws)
    spec = convert({"model": {"name": "m"}, "engine": {"tensorParallel": 16}})
    after = stored(plan("p", "ns", spec, observed, NOW, NEW))
    (group,) = [o for k, o in after.items() if k.kind == "LeaderWorkerSet"]
    leader = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    assert leader["spec"]["containers"][0]["image"] == "vllm:2"


def test_the_same_operator_changes_pods_whenever_what_it_knows_changes() -> None:
    """Such as the label by which racks are known, as without any memory."""
    spread = {"topology": {"placement": [{"level": "rack", "mode": "spread"}]}}
    before = planned(OLD, {}, **spread)
    after = planned(replace(OLD), stored(before), **spread)
    assert after.objects == before.objects


ONE, TWO = replace(OLD, gateways=1), replace(NEW, gateways=2)


def gateways(made: Plan) -> tuple[int, bool]:
    """Return the number of gateways, and whether they have a server of shared state."""
    found = stored(made)
    return (
        found[Key("Deployment", "ns", "p-gateway")]["spec"]["replicas"],
        Key("Deployment", "ns", "p-state") in found,
    )


def test_a_pool_that_names_no_number_of_gateways_keeps_its_own_until_it_follows() -> None:
    before = planned(ONE, {})
    after = planned(TWO, stored(before))
    assert stored(after) == stored(before)
    assert gateways(after) == (1, False)
    assert after.status.available_revision == TWO.revision
    again = planned(TWO, stored(after))
    assert gateways(again) == (1, False)
    assert again.status.available_revision == TWO.revision
    asked = planned(TWO, stored(again), rollout={"revision": "latest"}, is_turn=False)
    assert (gateways(asked), asked.waits) == ((1, False), True)
    asked = planned(TWO, stored(asked), rollout={"revision": "latest"})
    assert (gateways(asked), asked.upgrades) == ((2, True), True)
    assert gateways(planned(TWO, stored(asked))) == (2, True), "it stays when the word is taken out"


def test_only_the_charts_number_of_gateways_changes() -> None:
    before = planned(replace(OLD, gateways=1), {})
    after = planned(replace(OLD, gateways=2), stored(before))
    assert (gateways(after), after.status.available_revision is None) == ((1, False), False)


def test_a_number_that_the_spec_took_out_is_the_default_at_once() -> None:
    before = planned(ONE, {}, gateway={"replicas": 3})
    assert gateways(planned(ONE, stored(before))) == (1, False)
    assert gateways(planned(TWO, stored(before))) == (2, True)


def test_a_pool_of_an_operator_that_remembered_less_keeps_its_gateways() -> None:
    before = stored(planned(ONE, {}))
    rendered = before[Key("ConfigMap", "ns", "p-rendered")]
    less = {name: text for name, text in rendered["data"].items() if name != "gateways.json"}
    assert gateways(planned(TWO, {**before, key(rendered): {**rendered, "data": less}})) == (1, False)
    nothing = {k: obj for k, obj in before.items() if k != key(rendered)}
    assert gateways(planned(TWO, nothing)) == (1, False)


def test_the_gateways_of_an_autoscaler_are_not_of_an_earlier_revision() -> None:
    before = planned(ONE, {}, gateway={"minReplicas": 2, "maxReplicas": 4})
    after = planned(replace(ONE, gateways=2), stored(before), gateway={"minReplicas": 2, "maxReplicas": 4})
    assert after.status.available_revision is None
