"""What engines are rendered to: what they reserve, how they are started, what they are called."""

from typing import Any

import pytest
from plans import LWS, NOW, SPANS, made

from perilune_api import names
from perilune_api.inference_pool.arguments import FORBIDDEN_ARGS, SIMULATED_ARGS, VLLM_ARGS
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.types import Resources
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render.mooncake import host_bytes
from perilune_operator.render.objects import Defaults, with_memory

Object = dict[str, Any]


def template_of(spec: Object, name: str = "p-engine") -> Object:
    objects = made({"model": {"name": "m"}, **spec}, Observed(uid="u", generation=1)).objects or ()
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Deployment", name))
    template: Object = found["spec"]["template"]
    return template


@pytest.mark.parametrize(
    ("mooncake", "gpus", "of", "gib"),
    [
        pytest.param({}, 8, 8, 0, id="none"),
        pytest.param({"store": {"enabled": True}}, 8, 16, 8 * 84, id="a segment and a buffer for each GPU"),
        pytest.param({"transfer": "offload", "offloadSize": "64Gi"}, 8, 16, 32, id="one tier, on two nodes"),
        pytest.param({"transfer": "offload", "offloadSize": "66Gi"}, 4, 12, 22, id="a third of the GPUs"),
        pytest.param(
            {"transfer": "offload", "store": {"enabled": True, "segmentSize": "1Gi"}}, 1, 1, 69, id="both"
        ),
    ],
)
def test_memory_that_an_engine_lends(mooncake: Object, gpus: int, of: int, gib: int) -> None:
    made = convert({"model": {"name": "m"}, "mooncake": mooncake}).mooncake
    assert host_bytes(made, gpus, of) == gib * 2**30


@pytest.mark.parametrize(
    ("given", "requests", "limits"),
    [
        pytest.param({}, {"memory": "84Gi"}, {}, id="asked for where nobody asked"),
        pytest.param(
            {"requests": {"cpu": 8, "memory": "512Mi"}}, {"cpu": 8, "memory": "86528Mi"}, {}, id="added"
        ),
        pytest.param(
            {"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}},
            {"memory": "85Gi"},
            {"memory": "91194313216"},
            id="to the limit too",
        ),
        pytest.param(
            {"limits": {"memory": "16Gi"}},
            {"memory": "100Gi"},
            {"memory": "100Gi"},
            id="a limit alone is a request",
        ),
    ],
)
def test_lent_memory_is_added_to_what_the_engine_needs(
    given: Object, requests: Object, limits: Object
) -> None:
    made = with_memory(Resources(**given), 84 * 2**30)
    assert (made.requests, made.limits) == (requests, limits)
    assert with_memory(Resources(**given), 0) == Resources(**given)


def test_every_container_of_an_engine_asks_for_as_much() -> None:
    """Or a ResourceQuota refuses the pod, and none is ever Guaranteed."""
    given = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
    store = {"enabled": True, "segmentSize": "1Gi", "localBufferSize": "0"}
    pod = template_of({"engine": {"resources": given}, "mooncake": {"store": store}})["spec"]
    (waits,), (serves,) = pod["initContainers"], pod["containers"]
    both = {"cpu": "2", "memory": "2Gi"}
    assert waits["resources"] == {"requests": both | {"ephemeral-storage": "58Gi"}, "limits": both}
    device = {"nvidia.com/gpu": "1"}
    assert serves["resources"]["limits"] == waits["resources"]["limits"] | device


@pytest.mark.parametrize(
    ("mooncake", "rolls"),
    [
        pytest.param({"devices": "mlx5_0"}, True, id="what the store's clients read at their start"),
        pytest.param({"protocol": "rdma"}, True, id="likewise"),
        pytest.param({"master": {"allocation": "random"}}, False, id="what only the master reads"),
    ],
)
def test_another_client_configuration_takes_other_engines(mooncake: Object, rolls: bool) -> None:
    before: Object = {"store": {"enabled": True}}
    one, other = (template_of({"mooncake": given}) for given in (before, before | mooncake))
    assert (one != other) is rolls


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        pytest.param({"mooncake": {"store": {"enabled": True}}}, "3", id="store"),
        pytest.param(
            {"mooncake": {"transfer": "handoff", "store": {"enabled": True}}}, None, id="beside hand-offs"
        ),
        pytest.param({}, None, id="reads nobody's memory"),
        pytest.param(
            {
                "mooncake": {"store": {"enabled": True}},
                "engine": {"env": [{"name": "MC_TCP_STATUS_TIMEOUT_SEC", "value": "30"}]},
            },
            "30",
            id="the user's own",
        ),
    ],
)
def test_reads_from_a_node_without_a_network_give_up_soon(spec: Object, seconds: str | None) -> None:
    (serves,) = template_of(spec)["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in serves["env"]}
    assert env.get("MC_TCP_STATUS_TIMEOUT_SEC") == seconds


SEVERAL_TIMES = {"--middleware"}
"""Arguments of which vLLM takes the user's together with ours."""


def test_every_argument_that_is_rendered_for_an_engine_is_refused_from_users() -> None:
    model = {"name": "m", "aliases": ["n"], "loras": [{"name": "a", "path": "/a"}]}
    spec = {"model": model, "routing": {"enginePriority": {"ageingWeight": 1}}}
    seed = {"hashing": {"seed": "1"}}
    wide = {"tensorParallel": 8, "pipelineParallel": 2}
    store = {"transfer": "offload", "store": {"enabled": True}}
    for change, known in (
        ({"engine": {"kind": "simulated"} | seed}, SIMULATED_ARGS),
        ({"engine": wide | seed, "mooncake": store}, VLLM_ARGS | FORBIDDEN_ARGS.keys() | SEVERAL_TIMES),
    ):
        objects = made(spec | change, Observed(uid="u", generation=1, kinds=frozenset({LWS}))).objects or ()
        (engine,) = (
            o["spec"]
            for o in objects
            if o["kind"] in ("Deployment", "LeaderWorkerSet") and o["metadata"]["name"] == "p-engine"
        )
        pods = engine.get("leaderWorkerTemplate") or {"leaderTemplate": engine["template"]}
        given = [
            arg
            for name in pods.keys() & {"leaderTemplate", "workerTemplate"}
            for arg in pods[name]["spec"]["containers"][0]["args"]
        ]
        flags = {arg.split("=")[0] for arg in given if arg.startswith("-")}
        assert len(flags) > 10
        assert flags <= known


@pytest.mark.parametrize(
    ("tensors", "stages", "a_node", "pods"),
    [
        pytest.param(4, 2, 8, [8], id="one node"),
        pytest.param(8, 2, 8, [8, 8], id="a stage is a node"),
        pytest.param(16, 2, 8, [8, 8, 8, 8], id="a stage is two nodes"),
        pytest.param(4, 3, 8, [4, 4, 4], id="three stages cannot be shared by two nodes"),
        pytest.param(4, 4, 8, [8, 8], id="two stages to a node"),
        pytest.param(3, 4, 8, [6, 6], id="nodes that no stages fill"),
        pytest.param(5, 2, 8, [5, 5], id="a stage to a node"),
        pytest.param(1, 10, 4, [2, 2, 2, 2, 2], id="ten by as few as can share them"),
        pytest.param(2, 9, 8, [6, 6, 6], id="evenly"),
    ],
)
def test_an_endpoint_reserves_the_gpus_that_it_uses(
    tensors: int, stages: int, a_node: int, pods: list[int]
) -> None:
    engine = {"tensorParallel": tensors, "pipelineParallel": stages, "gpusPerNode": a_node}
    spec = {"model": {"name": "m"}, "engine": engine}
    objects = made(spec, Observed(uid="u", generation=1, kinds=frozenset({LWS}))).objects or ()
    workloads = {o["kind"]: o["spec"] for o in objects if o["metadata"]["name"] == "p-engine"}
    if "Deployment" in workloads:
        templates = [workloads["Deployment"]["template"]]
    else:
        group = workloads["LeaderWorkerSet"]["leaderWorkerTemplate"]
        templates = [group["leaderTemplate"], *[group["workerTemplate"]] * (group["size"] - 1)]
    asked = [t["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for t in templates]
    assert [int(number) for number in asked] == pods
    assert sum(pods) == tensors * stages
    args = [t["spec"]["containers"][0]["args"] for t in templates]
    if len(pods) > 1:
        assert all(f"--nnodes={len(pods)}" in given for given in args)
        assert ["--headless" in given for given in args] == [False, *[True] * (len(pods) - 1)]
        of_group = ("--node-rank", "--headless")
        shared = [[arg for arg in given if not arg.startswith(of_group)] for given in args]
        assert all(given == shared[0] for given in shared), "one engine, one configuration"


def test_endpoints_that_only_prefill_are_protected_like_the_others() -> None:
    """By a budget of their own, since two budgets over one pod forbid its eviction."""
    split: Object = {"prefillReplicas": 2, "mooncake": {"transfer": "handoff"}, "gateway": {"replicas": 1}}
    spec = {"model": {"name": "m"}, **split}
    objects = made(spec, Observed(uid="u", generation=1)).objects or ()
    pods = {
        o["metadata"]["name"]: o["spec"]["template"]["metadata"]["labels"]
        for o in objects
        if "template" in o.get("spec", {})
    }
    budgets = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "PodDisruptionBudget"}
    assert budgets.keys() == {"p-engine", "p-prefill"}
    for name, budget in budgets.items():
        chosen = budget["selector"]["matchLabels"].items()
        assert [pod for pod, labels in pods.items() if chosen <= labels.items()] == [name]
        assert budget["maxUnavailable"] == "10%"


def test_workers_of_an_endpoint_are_protected_like_its_leader() -> None:
    objects = made(SPANS, Observed(uid="u", generation=1, kinds=frozenset({LWS}))).objects or ()
    by_name = {(o["kind"], o["metadata"]["name"]): o["spec"] for o in objects if "spec" in o}
    budget = by_name["PodDisruptionBudget", "p-engine"]["selector"]
    assert budget["matchExpressions"][0]["values"] == ["engine", "engine-worker"]
    policy = by_name["NetworkPolicy", "p-engine-worker"]
    assert policy["podSelector"]["matchLabels"][names.COMPONENT_LABEL] == "engine-worker"
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": {names.POOL_LABEL: "p"}}}]}]


@pytest.mark.parametrize(
    ("letters", "words"),
    [
        pytest.param(41, None, id="as long as it may be"),
        pytest.param(42, "of at most 41 letters - at `$.metadata.name`", id="longer"),
    ],
)
def test_a_name_too_long_for_a_groups_pods_is_refused(letters: int, words: str | None) -> None:
    observed = Observed(uid="u", generation=1, kinds=frozenset({LWS}))
    planned = plan("p" * letters, "ns", convert(SPANS), observed, NOW, Defaults())
    accepted = planned.status.conditions[0]
    assert (planned.objects is None, accepted.status) == ((True, "False") if words else (False, "True"))
    assert accepted.message.endswith(words or "")
