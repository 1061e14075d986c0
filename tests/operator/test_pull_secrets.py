"""Every pod of a pool can pull its image from a private registry."""

from typing import Any

import pytest

from perilune_api.inference_pool.checks import convert
from perilune_operator.main import arguments
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render.objects import Defaults

WIDE = {"tensorParallel": 8, "pipelineParallel": 2}
LWS = frozenset({"leaderworkerset.x-k8s.io/LeaderWorkerSet"})


def pods(spec: dict[str, Any], ours: list[str]) -> dict[str, dict[str, Any]]:
    given = {"model": {"name": "m"}, "mooncake": {"store": {"enabled": True}}, **spec}
    made = plan(
        "p",
        "ns",
        convert(given),
        Observed(uid="u", generation=1, kinds=LWS),
        0.0,
        Defaults(pull_secrets=ours),
    )
    found = {}
    for obj in made.objects or ():
        if obj["kind"] == "Deployment":
            found[obj["metadata"]["name"]] = obj["spec"]["template"]["spec"]
        if obj["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                found[part] = obj["spec"]["leaderWorkerTemplate"][part]["spec"]
    return found


@pytest.mark.parametrize(
    ("given", "ours", "expected"),
    [
        pytest.param({}, [], None, id="nobody names any"),
        pytest.param({}, ["a"], ["a"], id="the operator's, for all pools"),
        pytest.param({"imagePullSecrets": ["b"]}, [], ["b"], id="the pool's"),
        pytest.param({"imagePullSecrets": ["b", "a"]}, ["a"], ["a", "b"], id="both, each once"),
    ],
)
@pytest.mark.parametrize("engine", [{}, WIDE], ids=["one node", "two nodes"])
def test_all_pods_pull_with_the_same_secrets(
    given: dict[str, Any], ours: list[str], expected: list[str] | None, engine: dict[str, Any]
) -> None:
    made = pods({**given, "engine": engine}, ours)
    assert len(made) == (5 if engine else 4)
    for name, pod in made.items():
        told = pod.get("imagePullSecrets")
        assert (told and [secret["name"] for secret in told]) == expected, name


def test_the_operator_is_told_on_its_command_line() -> None:
    assert arguments(["--pull-secret=a", "--pull-secret=b"]).pull_secret == ["a", "b"]


def test_other_secrets_for_all_pools_are_another_revision_and_roll_nothing_by_themselves() -> None:
    assert Defaults(pull_secrets=["a"]).revision != Defaults().revision
