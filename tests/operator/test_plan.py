"""Properties of every plan."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune_api import names
from perilune_api.inference_pool.arguments import FORBIDDEN_ARGS, GATEWAY_ARGS, SIMULATED_ARGS, VLLM_ARGS
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.types import Resources
from perilune_api.pool import Role, SpecError, parse
from perilune_gateway.arguments import arguments
from perilune_operator import observe
from perilune_operator.kinds import OPTIONAL, full_name, path
from perilune_operator.observe import NodeFacts, Observed, PodFacts
from perilune_operator.plan import Plan, plan
from perilune_operator.render.mooncake import host_bytes
from perilune_operator.render.objects import Defaults, overlaid, with_memory

Object = dict[str, Any]
NOW = 1_760_000_000.0

PD: Object = {"roles": {"prefill": {"replicas": 2}, "decode": {}}, "mooncake": {"transfer": "connector"}}
SPECS = st.builds(
    lambda *parts: {"model": {"name": "m"}, **{k: v for part in parts for k, v in part.items()}},
    st.sampled_from([{}, PD, {"mooncake": {"transfer": "offload", "store": {"enabled": True}}}]),
    st.sampled_from(
        [{}, {"engine": {"tensorParallel": 8, "pipelineParallel": 2}}, {"engine": {"kind": "simulated"}}]
    ),
    st.sampled_from(
        [{}, {"gateway": {"parent": {"name": "g"}}}, {"gateway": {"minReplicas": 1, "maxReplicas": 3}}]
    ),
    st.sampled_from([{}, {"topology": {"placement": [{"level": "rack", "mode": "pack"}]}}]),
    st.fixed_dictionaries({"replicas": st.integers(0, 9)}),
)
KINDS = st.frozensets(st.sampled_from([full_name(kind) for kinds in OPTIONAL.values() for kind in kinds]))
NODES = st.lists(
    st.builds(
        NodeFacts,
        st.sampled_from("abcd"),
        st.dictionaries(st.sampled_from(["rack", "spine"]), st.sampled_from(["x", "y"])),
        st.integers(0, 8),
    ),
    max_size=4,
    unique_by=lambda n: n.name,
).map(tuple)


def made(spec: Object, observed: Observed, now: float = NOW) -> Plan:
    return plan("p", "ns", convert(spec), observed, now, Defaults())


@settings(deadline=None, derandomize=True, max_examples=60)
@given(SPECS, KINDS, NODES)
def test_planning_its_own_result_changes_nothing(spec: Object, kinds: frozenset[str], nodes: Any) -> None:
    first = made(spec, Observed("u", 1, nodes=nodes, kinds=kinds))
    assert first.objects is not None
    stored = json.loads(msgspec.json.encode(first.status))
    children = {observe.key(o): o for o in first.objects}
    second = made(spec, Observed("u", 1, stored, nodes, children=children, kinds=kinds), NOW + 60)
    assert second.objects == first.objects
    third = made(
        spec,
        Observed("u", 1, json.loads(msgspec.json.encode(second.status)), nodes, (), children, kinds),
        NOW + 120,
    )
    assert third == second


@settings(deadline=None, derandomize=True, max_examples=60)
@given(SPECS, KINDS, NODES)
def test_every_object_is_whole(spec: Object, kinds: frozenset[str], nodes: Any) -> None:
    objects = made(spec, Observed("u", 1, nodes=nodes, kinds=kinds)).objects or ()
    keys = [observe.key(o) for o in objects]
    assert len(keys) == len(set(keys))
    for obj in objects:
        assert path(obj).startswith("/api")
        assert json.loads(msgspec.json.encode(obj)) == json.loads(json.dumps(obj))
        template = obj.get("spec", {}).get("template")
        if obj["kind"] == "Deployment":
            selected = obj["spec"]["selector"]["matchLabels"].items()
            assert selected <= template["metadata"]["labels"].items()
            pod = template["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            for container in pod["containers"] + pod.get("initContainers", []):
                assert container["securityContext"]["readOnlyRootFilesystem"]
                mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
                assert mounts <= {volume["name"] for volume in pod["volumes"]}


@settings(deadline=None, derandomize=True, max_examples=30)
@given(SPECS, NODES)
def test_the_gateways_document_can_be_read_back(spec: Object, nodes: Any) -> None:
    objects = made(spec, Observed("u", 1, nodes=nodes)).objects or ()
    (found,) = (o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == "p-gateway")
    document = parse(found["data"][names.POOL_DOCUMENT])
    assert document.spec.model.name == "m"
    assert document.spec.endpoints == ()
    assert document.spec.engine.store == convert(spec).mooncake.store.enabled


def test_a_refused_spec_plans_no_objects() -> None:
    refused = plan("p", "ns", SpecError("why - at `$.spec.x`"), Observed("u", 2), NOW, Defaults())
    assert refused.objects is None
    assert [(c.type.value, c.status, c.message) for c in refused.status.conditions] == [
        ("Accepted", "False", "why - at `$.spec.x`")
    ]


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
def test_laying_over(over: Object, expected: Object) -> None:
    assert overlaid({"a": 1, "l": [{"name": "x", "v": 1}], "n": [1]}, over) == expected


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
    refused = made({"model": {"name": "m"}, "gateway": {"podTemplate": over}}, Observed("u", 1))
    assert refused.objects is None
    assert [(c.type.value, c.status, c.message) for c in refused.status.conditions] == [
        ("Accepted", "False", words)
    ]


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


def test_mounts_are_told_by_their_paths() -> None:
    """Two of one volume, one of a volume of ours beside our own, one in the place of ours."""
    ours = [{"name": "home", "mountPath": "/home"}, {"name": "tmp", "mountPath": "/tmp"}]
    over = [
        {"name": "data", "mountPath": "/a", "subPath": "a"},
        {"name": "data", "mountPath": "/b", "subPath": "b"},
        {"name": "home", "mountPath": "/root"},
        {"name": "data", "mountPath": "/tmp", "readOnly": False},
    ]
    made = overlaid({"volumeMounts": ours}, {"volumeMounts": over})["volumeMounts"]
    assert made == [ours[0], over[3], *over[:3]]


def test_the_gateway_takes_the_arguments_that_are_rendered_for_it() -> None:
    """And a user may give all others."""
    spec = {"model": {"name": "m"}, "gateway": {"args": ["--transport=grpc", "--decision-log=/data/d"]}}
    objects = made(spec, Observed("u", 1)).objects or ()
    (pod,) = (
        o["spec"]["template"]["spec"]
        for o in objects
        if o["metadata"]["name"] == "p-gateway" and o["kind"] == "Deployment"
    )
    args = pod["containers"][0]["args"]
    read = arguments(args)
    assert (read.kubernetes, read.listen, read.admin) == (("ns", "p"), "0.0.0.0:9002", "0.0.0.0:9003")
    assert (read.transport, str(read.decision_log)) == ("grpc", "/data/d")
    ours = {arg.split("=")[0] for arg in args} - {"--transport", "--decision-log"}
    assert ours | {"--pool", "--drain-seconds"} == GATEWAY_ARGS


@pytest.mark.parametrize(
    ("args", "probe"),
    [
        pytest.param([], {"grpc": {"port": 9002, "service": "readiness"}}, id="plain"),
        pytest.param(
            ["--tls-cert=/tls/tls.crt"], {"httpGet": {"path": "/readyz", "port": "admin"}}, id="TLS"
        ),
    ],
)
def test_kubelets_ask_a_gateway_that_does_tls_by_its_admin_server(args: list[str], probe: Object) -> None:
    objects = made({"model": {"name": "m"}, "gateway": {"args": args}}, Observed("u", 1)).objects or ()
    (pod,) = (
        o["spec"]["template"]["spec"]
        for o in objects
        if o["metadata"]["name"] == "p-gateway" and o["kind"] == "Deployment"
    )
    asked = pod["containers"][0]["readinessProbe"]
    assert {name: asked[name] for name in ("grpc", "httpGet") if name in asked} == probe


def test_every_argument_that_is_rendered_for_an_engine_is_refused_from_users() -> None:
    model = {"name": "m", "aliases": ["n"], "loras": [{"name": "a", "path": "/a"}]}
    spec = {"model": model, "routing": {"params": {"ageingWeight": 1}}}
    seed = {"hashing": {"seed": "1"}}
    wide = {"tensorParallel": 8, "pipelineParallel": 2}
    store = {"transfer": "connector", "store": {"enabled": True}}
    for change, known in (
        ({"engine": {"kind": "simulated"} | seed}, SIMULATED_ARGS),
        ({"engine": wide | seed, "mooncake": store}, VLLM_ARGS | FORBIDDEN_ARGS.keys()),
    ):
        objects = made(spec | change, Observed("u", 1, kinds=frozenset({LWS}))).objects or ()
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


def template_of(spec: Object, name: str = "p-engine") -> Object:
    objects = made({"model": {"name": "m"}, **spec}, Observed("u", 1)).objects or ()
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Deployment", name))
    template: Object = found["spec"]["template"]
    return template


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


def test_every_container_of_an_engine_asks_for_as_much() -> None:
    """Or a ResourceQuota refuses the pod, and none is ever Guaranteed."""
    given = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
    store = {"enabled": True, "segmentSize": "1Gi", "localBufferSize": "0"}
    pod = template_of({"engine": {"resources": given}, "mooncake": {"store": store}})["spec"]
    (waits,), (serves,) = pod["initContainers"], pod["containers"]
    assert waits["resources"]["limits"] == waits["resources"]["requests"] == {"cpu": "2", "memory": "2Gi"}
    device = {"nvidia.com/gpu": "1"}
    assert serves["resources"]["limits"] == waits["resources"]["limits"] | device


SPANS: Object = {"model": {"name": "m"}, "engine": {"tensorParallel": 8, "pipelineParallel": 2}}
LWS = "leaderworkerset.x-k8s.io/LeaderWorkerSet"


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
    objects = made(spec, Observed("u", 1, kinds=frozenset({LWS}))).objects or ()
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


def test_workers_of_an_endpoint_are_protected_like_its_leader() -> None:
    objects = made(SPANS, Observed("u", 1, kinds=frozenset({LWS}))).objects or ()
    by_name = {(o["kind"], o["metadata"]["name"]): o["spec"] for o in objects if "spec" in o}
    budget = by_name["PodDisruptionBudget", "p-engine"]["selector"]
    assert budget["matchExpressions"][0]["values"] == ["engine", "engine-worker"]
    policy = by_name["NetworkPolicy", "p-engine-worker"]
    assert policy["podSelector"]["matchLabels"][names.COMPONENT_LABEL] == "engine-worker"
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": {names.POOL_LABEL: "p"}}}]}]


@pytest.mark.parametrize(
    ("letters", "roles", "words"),
    [
        pytest.param(41, {}, None, id="as long as it may be"),
        pytest.param(42, {}, "of at most 41 letters - at `$.metadata.name`", id="longer"),
        pytest.param(41, PD, "of at most 40 letters - at `$.metadata.name`", id="with prefill"),
    ],
)
def test_a_name_too_long_for_a_groups_pods_is_refused(letters: int, roles: Object, words: str | None) -> None:
    observed = Observed("u", 1, kinds=frozenset({LWS}))
    planned = plan("p" * letters, "ns", convert(SPANS | roles), observed, NOW, Defaults())
    accepted = planned.status.conditions[0]
    assert (planned.objects is None, accepted.status) == ((True, "False") if words else (False, "True"))
    assert accepted.message.endswith(words or "")


@pytest.mark.parametrize(
    ("before", "after", "serving", "kept"),
    [
        pytest.param({}, PD, [("both", -1)], ["p-engine"], id="roles: none serves"),
        pytest.param({}, PD, [("both", -1), ("prefill", -1)], ["p-engine"], id="roles: one serves"),
        pytest.param({}, PD, [("prefill", -1), ("decode", -1)], [], id="roles: each serves"),
        pytest.param(
            PD, {}, [("prefill", -1), ("decode", -1)], ["p-decode", "p-prefill"], id="no roles more"
        ),
        pytest.param({}, SPANS, [("both", -1)], ["p-engine"], id="more nodes: none serves"),
        pytest.param({}, SPANS, [("both", 0)], [], id="more nodes: one serves"),
        pytest.param({}, PD | {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}, [], [], id="no spare GPUs"),
        pytest.param({}, {"replicas": 0} | SPANS, [], [], id="none wanted"),
    ],
)
def test_engines_of_the_spec_before_serve_until_there_are_others(
    before: Object, after: Object, serving: list[tuple[str, int]], kept: list[str]
) -> None:
    kinds = frozenset({LWS})
    children = {
        observe.key(o): o for o in made({"model": {"name": "m"}} | before, Observed("u", 1)).objects or ()
    }
    pods = tuple(
        PodFacts(f"{role}{group}", "engine", role, "n", True, False, group=group) for role, group in serving
    )
    planned = made(
        {"model": {"name": "m"}} | after, Observed("u", 1, pods=pods, children=children, kinds=kinds)
    )
    assert sorted(k.name for k in planned.kept) == kept
    progress = {c.type: c for c in planned.status.conditions}["Progressing"]
    assert ("of the spec before" in progress.message) is bool(kept)


def former(*, since: float | None = None, answered: bool = False, leaving: bool = False) -> PodFacts:
    """An engine without a role, that has been draining for so many seconds."""
    stamp = (
        datetime.fromtimestamp(NOW - since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if since is not None else ""
    )
    return PodFacts(
        "old",
        "engine",
        "both",
        "n",
        True,
        leaving,
        "uid",
        draining=stamp,
        drained_by=frozenset({"gw"} if answered else ()),
        chosen=since is not None,
    )


@pytest.mark.parametrize(
    ("old", "serving", "kept", "marked", "draining"),
    [
        pytest.param(former(), ["prefill"], True, [], "NothingLeaving", id="it is needed"),
        pytest.param(
            former(since=5),
            ["prefill"],
            True,
            [{names.DRAINING: None, names.DELETION_COST: None}],
            "NothingLeaving",
            id="it is needed again",
        ),
        pytest.param(
            former(),
            ["prefill", "decode"],
            True,
            [{names.DRAINING: "2025-10-09T08:53:20Z", names.DELETION_COST: "-1"}],
            "SessionsLeaving",
            id="it is to go",
        ),
        pytest.param(
            former(since=5), ["prefill", "decode"], True, [], "SessionsLeaving", id="its sessions are leaving"
        ),
        pytest.param(
            former(since=5, answered=True),
            ["prefill", "decode"],
            False,
            [],
            "SessionsLeaving",
            id="they left",
        ),
        pytest.param(former(since=31), ["prefill", "decode"], False, [], "SessionsLeaving", id="long enough"),
        pytest.param(
            former(since=5, leaving=True), ["prefill", "decode"], False, [], "EndpointsLeaving", id="it goes"
        ),
    ],
)
def test_engines_of_other_roles_let_their_sessions_leave(
    old: PodFacts, serving: list[str], kept: bool, marked: list[Object], draining: str
) -> None:
    children = {observe.key(o): o for o in made({"model": {"name": "m"}}, Observed("u", 1)).objects or ()}
    pods = [PodFacts(role, "engine", role, "n", True, False, role) for role in serving]
    gateway = PodFacts("gw", "gateway", "", "n", True, False)
    seen = Observed("u", 1, pods=(old, gateway, *pods), children=children)
    planned = made({"model": {"name": "m"}} | PD, seen)
    assert [k.name for k in planned.kept] == (["p-engine"] if kept else [])
    assert [dict(mark.annotations) for mark in planned.marks if mark.pod == "old"] == marked
    said = {c.type.value: c for c in planned.status.conditions}
    assert said["Draining"].reason == draining
    assert ("old" in said["Draining"].message) is (draining != "NothingLeaving")
    if kept and draining == "SessionsLeaving":
        assert said["Progressing"].message == "p-engine of the spec before goes once its sessions have left."
        assert planned.again_in <= 31


def test_an_endpoint_leaves_with_the_first_of_its_nodes() -> None:
    def pod(name: str, component: str, group: int, node: str) -> PodFacts:
        return PodFacts(name, component, "both", node, True, False, name, group=group)

    pods = tuple(
        pod(f"p-engine-{group}{worker}", f"engine{'-worker' if worker else ''}", group, f"n{group}{worker}")
        for group in (0, 1)
        for worker in ("", "-1")
    )
    nodes = tuple(NodeFacts(p.node, {}, 8, leaving=p.name == "p-engine-0-1") for p in pods)
    seen = Observed("u", 1, nodes=nodes, pods=pods, kinds=frozenset({LWS}))
    marks = made(SPANS | {"replicas": 2}, seen).marks
    assert [(mark.pod, list(mark.annotations)) for mark in marks] == [("p-engine-0", [names.DRAINING])]


def test_monitors_bear_the_labels_that_a_prometheus_goes_by() -> None:
    """Never in the place of ours."""
    kinds = frozenset({full_name("PodMonitor"), full_name("ServiceMonitor")})
    defaults = Defaults(monitor_labels={"release": "kps", names.POOL_LABEL: "other"})
    spec = convert({"model": {"name": "m"}, "mooncake": {"store": {"enabled": True}}})
    objects = plan("p", "ns", spec, Observed("u", 1, kinds=kinds), NOW, defaults).objects or ()
    monitors = {o["metadata"]["name"]: o for o in objects if o["kind"].endswith("Monitor")}
    assert sorted(monitors) == ["p-engine", "p-gateway", "p-master"]
    for monitor in monitors.values():
        labels = monitor["metadata"]["labels"]
        assert (labels["release"], labels[names.POOL_LABEL]) == ("kps", "p")
    (scraped,) = monitors["p-gateway"]["spec"]["endpoints"]
    assert scraped["honorLabels"], "or Prometheus' own label `endpoint`, a port's name, hides the metrics'"


def test_roles_have_names_of_their_own() -> None:
    objects = made({"model": {"name": "m"}, **PD}, Observed("u", 1)).objects or ()
    engines = {o["metadata"]["name"]: o["spec"]["template"] for o in objects if o["kind"] == "Deployment"}
    assert sorted(engines) == ["p-decode", "p-gateway", "p-prefill"]
    for name, role in (("p-prefill", Role.PREFILL), ("p-decode", Role.DECODE)):
        assert engines[name]["metadata"]["labels"][names.ROLE_LABEL] == role
