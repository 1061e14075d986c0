from typing import Any

import pytest

from perilune_operator.observe import facts, readers
from perilune_operator.observe.facts import Drained, GatewayStats

Object = dict[str, Any]


def pod(meta: Object | None = None, status: Object | None = None) -> facts.PodFacts:
    return readers.pod({"metadata": {"name": "a", **(meta or {})}, "status": status or {}})


@pytest.mark.parametrize(
    ("spec", "leaving"),
    [
        pytest.param({}, False, id="nothing"),
        pytest.param({"unschedulable": True}, True, id="cordoned"),
        pytest.param(
            {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}, True, id="Karpenter"
        ),
        pytest.param({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, False, id="GPU taint"),
    ],
)
def test_a_node_that_is_being_emptied(spec: Object, leaving: bool) -> None:
    assert readers.node({"metadata": {"name": "n"}, "spec": spec}).leaving is leaving


@pytest.mark.parametrize(
    ("room", "gpus"),
    [
        pytest.param({"cpu": "8", "memory": "1Gi"}, 0, id="none"),
        pytest.param({"cpu": "8", "nvidia.com/gpu": "8"}, 8, id="NVIDIA"),
        pytest.param({"amd.com/gpu": "4"}, 4, id="AMD"),
    ],
)
def test_gpus_of_a_node(room: Object, gpus: int) -> None:
    assert readers.node({"metadata": {"name": "n"}, "status": {"allocatable": room}}).gpus == gpus


@pytest.mark.parametrize(
    ("annotations", "draining", "chosen"),
    [
        pytest.param({}, "", False, id="none"),
        pytest.param({"perilune.dev/draining": "t"}, "t", False, id="draining"),
        pytest.param({"controller.kubernetes.io/pod-deletion-cost": "-1"}, "", True, id="chosen"),
        pytest.param({"controller.kubernetes.io/pod-deletion-cost": "-5"}, "", False, id="a user's own cost"),
    ],
)
def test_what_a_pod_carries(annotations: Object, draining: str, chosen: bool) -> None:
    seen = pod({"annotations": annotations})
    assert (seen.draining, seen.chosen) == (draining, chosen)


@pytest.mark.parametrize(
    ("mark", "words", "answered"),
    [
        pytest.param("t", {Drained("g1", "p", "t"), Drained("g2", "p", "s")}, {"g1"}, id="an earlier mark"),
        pytest.param("t", {Drained("g1", "q", "t")}, set(), id="another pod"),
        pytest.param("", {Drained("g1", "p", "")}, set(), id="no mark"),
    ],
)
def test_which_gateways_have_answered_a_mark(mark: str, words: set[Drained], answered: set[str]) -> None:
    given = {"metadata": {"name": "p", "annotations": {"perilune.dev/draining": mark}}}
    assert (
        readers.pod(given, GatewayStats(sessions=0, hit_ratio=None, drained=frozenset(words))).drained_by
        == answered
    )


@pytest.mark.parametrize(
    ("said", "pending"), [(None, False), (1, True), (2, False)], ids=["of none", "of an earlier", "of this"]
)
def test_a_verdict_is_of_one_generation(said: int | None, pending: bool) -> None:
    condition: Object = {"type": "Programmed", "status": "True"}
    condition |= {} if said is None else {"observedGeneration": said}
    gateway = {"metadata": {"generation": 2}, "status": {"conditions": [condition]}}
    programmed = readers.parent(gateway).programmed
    assert programmed is not None
    assert (programmed.status, programmed.pending) == ("True", pending)


@pytest.mark.parametrize(
    ("status", "trouble", "stuck"),
    [
        pytest.param({}, "", False, id="nobody says"),
        pytest.param(
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "R", "message": "0/8 nodes"}
                ]
            },
            "R: 0/8 nodes",
            False,
            id="no node takes it, yet",
        ),
        pytest.param(
            {"containerStatuses": [{"image": "i:1", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "ImagePullBackOff (i:1)",
            True,
            id="no image",
        ),
        pytest.param(
            {"containerStatuses": [{"image": "i:1", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "ImagePullBackOff (i:1)",
            True,
            id="still no image: the same words",
        ),
        pytest.param(
            {"containerStatuses": [{"image": "i", "state": {"running": {}}, "restartCount": 3}]},
            "CrashLoopBackOff (i)",
            True,
            id="runs once more, after three ends",
        ),
        pytest.param(
            {"containerStatuses": [{"state": {"running": {}}, "restartCount": 9, "ready": True}]},
            "",
            False,
            id="ended often, and serves",
        ),
        pytest.param(
            {"initContainerStatuses": [{"image": "i", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            "CrashLoopBackOff (i)",
            True,
            id="crashes at once",
        ),
        pytest.param(
            {"containerStatuses": [{"image": "i", "state": {"waiting": {"reason": "ContainerCreating"}}}]},
            "",
            False,
            id="on its way",
        ),
        pytest.param({"containerStatuses": [{"state": {"running": {}}}]}, "", False, id="it runs"),
    ],
)
def test_why_a_pod_does_not_run_and_whether_somebody_has_to_act(
    status: Object, trouble: str, stuck: bool
) -> None:
    made = pod(status=status)
    assert (made.trouble, made.stuck) == (trouble, stuck)


NAME = "kubernetes.io/metadata.name"


@pytest.mark.parametrize(
    ("allowed", "namespaces"),
    [
        pytest.param(None, {"infra"}, id="nothing said"),
        pytest.param({"from": "Same"}, {"infra"}, id="its own"),
        pytest.param({"from": "All"}, None, id="all"),
        pytest.param({"from": "Selector", "selector": {"matchLabels": {NAME: "a"}}}, {"a"}, id="one by name"),
        pytest.param(
            {
                "from": "Selector",
                "selector": {"matchExpressions": [{"key": NAME, "operator": "In", "values": ["a", "b"]}]},
            },
            {"a", "b"},
            id="two by name",
        ),
        pytest.param(
            {"from": "Selector", "selector": {"matchLabels": {NAME: "a", "team": "x"}}},
            set(),
            id="by a label that is not seen",
        ),
        pytest.param({"from": "Selector", "selector": {}}, None, id="by no label: all"),
    ],
)
def test_whose_routes_a_listener_takes(
    allowed: dict[str, object] | None, namespaces: set[str] | None
) -> None:
    made: Object = {"name": "http", "protocol": "HTTPS", "hostname": "a.test"}
    made |= {"allowedRoutes": {"namespaces": allowed}} if allowed else {}
    other = {"name": "raw", "protocol": "TCP", "allowedRoutes": {"namespaces": {"from": "All"}}}
    parent = readers.parent({"metadata": {"namespace": "infra"}, "spec": {"listeners": [made, other]}})
    wanted = None if namespaces is None else frozenset(namespaces)
    assert parent.given == {"http": facts.Listener("a.test", wanted)}
