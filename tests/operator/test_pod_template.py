"""A user's podTemplate laid over ours."""

from typing import Any

import pytest
from plans import made

from perilune_api.conditions import Condition
from perilune_operator.observe.facts import Observed
from perilune_operator.render.pod_template import overlaid

Object = dict[str, Any]


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        pytest.param({}, {"a": 1, "l": [{"name": "x", "v": 1}], "n": [1]}, id="nothing"),
        pytest.param(
            {"a": 2, "b": 3}, {"a": 2, "l": [{"name": "x", "v": 1}], "n": [1], "b": 3}, id="maps by key"
        ),
        pytest.param(
            {"l": [{"name": "y"}, {"name": "x", "w": 2}]},
            {"a": 1, "l": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}], "n": [1]},
            id="named things by name",
        ),
        pytest.param({"n": [2]}, {"a": 1, "l": [{"name": "x", "v": 1}], "n": [2]}, id="other lists whole"),
    ],
)
def test_a_users_template_is_laid_over_the_operators(over: Object, expected: Object) -> None:
    assert overlaid({"a": 1, "l": [{"name": "x", "v": 1}], "n": [1]}, over) == expected


def test_a_volume_or_variable_laid_over_another_takes_its_place() -> None:
    base = {
        "volumes": [{"name": "home", "emptyDir": {}}],
        "env": [{"name": "POD_IP", "valueFrom": {}}, {"name": "HOME", "value": "/"}],
    }
    over = {
        "volumes": [{"name": "home", "persistentVolumeClaim": {}}],
        "env": [{"name": "POD_IP", "value": "1.2.3.4"}],
    }
    assert overlaid(base, over) == {**over, "env": [*over["env"], {"name": "HOME", "value": "/"}]}


def test_tolerations_are_added_to_ours() -> None:
    """One about a taint that ours is about takes its place: the shortest of two would hold."""
    gone = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    team = {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}
    ours = [gpu, gone | {"tolerationSeconds": 300}]
    assert overlaid({"tolerations": ours}, {"tolerations": [team]}) == {"tolerations": [team, *ours]}
    longer = gone | {"tolerationSeconds": 900}
    assert overlaid({"tolerations": ours}, {"tolerations": [longer]}) == {"tolerations": [longer, gpu]}


def test_mounts_are_told_by_their_paths() -> None:
    """Two of one volume, one of a volume of ours next to our own, one in the place of ours."""
    ours = [{"name": "home", "mountPath": "/home"}, {"name": "tmp", "mountPath": "/tmp"}]
    over = [
        {"name": "data", "mountPath": "/a", "subPath": "a"},
        {"name": "data", "mountPath": "/b", "subPath": "b"},
        {"name": "home", "mountPath": "/root"},
        {"name": "data", "mountPath": "/tmp", "readOnly": False},
    ]
    made = overlaid({"volumeMounts": ours}, {"volumeMounts": over})["volumeMounts"]
    assert made == [ours[0], over[3], *over[:3]]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        pytest.param({"spec": "x"}, "Expected fields - at `$.spec.gateway.podTemplate.spec`", id="a word"),
        pytest.param({"spec": None}, "Expected fields - at `$.spec.gateway.podTemplate.spec`", id="nothing"),
        pytest.param(
            {"spec": {"containers": {"name": "gateway"}}},
            "Expected a list - at `$.spec.gateway.podTemplate.spec.containers`",
            id="one thing for a list",
        ),
        pytest.param(
            {"spec": {"tolerations": ["team"]}},
            "Expected fields - at `$.spec.gateway.podTemplate.spec.tolerations[0]`",
            id="a toleration that is a word",
        ),
        pytest.param(
            {"spec": {"containers": [{"name": "a"}, {"image": "i"}]}},
            "Expected fields, of which `name` is one - at `$.spec.gateway.podTemplate.spec.containers[1]`",
            id="a container without a name would replace ours",
        ),
        pytest.param(
            {"spec": {"containers": [{"name": "gateway", "env": [{"name": "A"}, {"name": "A"}]}]}},
            "A is given twice - at `$.spec.gateway.podTemplate.spec.containers[0].env[1]`",
            id="one name twice",
        ),
        pytest.param(
            {"spec": {"containers": [{"name": "gateway", "volumeMounts": [{"name": "data"}]}]}},
            "Expected fields, of which `mountPath` is one"
            " - at `$.spec.gateway.podTemplate.spec.containers[0].volumeMounts[0]`",
            id="a mount without its path",
        ),
    ],
)
def test_a_template_that_cannot_be_laid_over_ours_is_refused(over: Object, words: str) -> None:
    refused = made(
        {"model": {"name": "m"}, "gateway": {"podTemplate": over}}, Observed(uid="u", generation=1)
    )
    assert refused.objects is None
    (told,) = [c for c in refused.status.conditions if c.type is Condition.ACCEPTED]
    assert (told.status, told.message) == ("False", words)
