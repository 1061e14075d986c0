"""Properties of every plan, and plans for engines of an earlier spec."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import LWS, NOW, SPANS, made
from property_examples import examples

from perilune_api import names
from perilune_api.inference_pool.arguments import GATEWAY_ARGS
from perilune_api.inference_pool.checks import convert
from perilune_api.pool import SpecError, parse
from perilune_gateway.config import arguments
from perilune_gateway.main import ENGINE_API_KEY
from perilune_operator.kinds import OPTIONAL, full_name, path
from perilune_operator.observe import facts, timestamps
from perilune_operator.observe.facts import NodeFacts, Observed, PodFacts
from perilune_operator.plan import Plan, plan
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
SPECS = st.builds(
    lambda *parts: {"model": {"name": "m"}, **{k: v for part in parts for k, v in part.items()}},
    st.sampled_from([{}, {"mooncake": {"transfer": "offload", "store": {"enabled": True}}}]),
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


@settings(max_examples=examples(60))
@given(SPECS, KINDS, NODES)
def test_planning_its_own_result_changes_nothing(spec: Object, kinds: frozenset[str], nodes: Any) -> None:
    first = made(spec, Observed(uid="u", generation=1, nodes=nodes, kinds=kinds))
    assert first.objects is not None
    stored = json.loads(msgspec.json.encode(first.status))
    children = {facts.key(o): o for o in first.objects}
    second = made(
        spec,
        Observed(uid="u", generation=1, status=stored, nodes=nodes, children=children, kinds=kinds),
        NOW + 60,
    )
    assert second.objects == first.objects
    third = made(
        spec,
        Observed(
            uid="u",
            generation=1,
            status=json.loads(msgspec.json.encode(second.status)),
            nodes=nodes,
            pods=(),
            children=children,
            kinds=kinds,
        ),
        NOW + 120,
    )
    assert third == second


@settings(max_examples=examples(60))
@given(SPECS, KINDS, NODES)
def test_every_object_is_whole(spec: Object, kinds: frozenset[str], nodes: Any) -> None:
    objects = made(spec, Observed(uid="u", generation=1, nodes=nodes, kinds=kinds)).objects or ()
    keys = [facts.key(o) for o in objects]
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
                assert mounts <= {volume["name"] for volume in pod.get("volumes", ())}


@settings(max_examples=examples(30))
@given(SPECS, NODES)
def test_the_gateways_document_can_be_read_back(spec: Object, nodes: Any) -> None:
    objects = made(spec, Observed(uid="u", generation=1, nodes=nodes)).objects or ()
    (found,) = (o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == "p-gateway")
    document = parse(found["data"][names.POOL_DOCUMENT])
    assert document.spec.model.name == "m"
    assert document.spec.endpoints == ()
    assert document.spec.engine.store == convert(spec).mooncake.store.enabled
    assert bool(document.spec.engine.store_master) == document.spec.engine.store


def test_a_refused_spec_plans_no_objects() -> None:
    refused = plan(
        "p", "ns", SpecError("why - at `$.spec.x`"), Observed(uid="u", generation=2), NOW, Defaults()
    )
    assert refused.objects is None
    words = "why - at `$.spec.x`"
    assert [(c.type.value, c.status, c.message) for c in refused.status.conditions] == [
        ("Accepted", "False", words),
        ("Reconciling", "False", words),
        ("Stalled", "True", words),
        ("Ready", "False", words),
    ]


def test_the_gateway_takes_the_arguments_that_are_rendered_for_it() -> None:
    """And a user may give all others."""
    state = {"server": "rediss://state:6379", "caSecret": "state-ca"}
    tracing = {"endpoint": "http://[fd00::1]:4318", "share": 0.25}
    given = {"args": ["--transport=grpc", "--decision-log=/data/d"], "state": state, "tracing": tracing}
    spec = {"model": {"name": "m"}, "gateway": given}
    objects = made(spec, Observed(uid="u", generation=1)).objects or ()
    (pod,) = (
        o["spec"]["template"]["spec"]
        for o in objects
        if o["metadata"]["name"] == "p-gateway" and o["kind"] == "Deployment"
    )
    args = pod["containers"][0]["args"]
    read = arguments(args)
    assert (read.kubernetes, read.listen, read.admin) == (("ns", "p"), "0.0.0.0:9002", "0.0.0.0:9003")
    assert (read.transport, str(read.decision_log)) == ("grpc", "/data/d")
    assert (read.traces, read.traces_share) == ("http://[fd00::1]:4318", 0.25)
    others = {"--transport", "--decision-log", "--traces", "--traces-share"}
    ours = {arg.split("=")[0] for arg in args} - others
    assert ours | {"--pool", "--drain-seconds"} == GATEWAY_ARGS


def test_gateways_read_the_key_of_engines_where_the_operator_writes_it() -> None:
    spec = {"model": {"name": "m"}, "engine": {"apiKey": {"secret": "s"}}}
    objects = made(spec, Observed(uid="u", generation=1)).objects or ()
    (gateway,) = (
        o["spec"]["template"]["spec"]["containers"][0]
        for o in objects
        if o["metadata"]["name"] == "p-gateway" and o["kind"] == "Deployment"
    )
    value = {"secretKeyRef": {"name": "s", "key": "api-key"}}
    assert {"name": ENGINE_API_KEY, "valueFrom": value} in gateway["env"]


OWN = {"server": "redis://mine:6379"}


@pytest.mark.parametrize(
    ("gateway", "server"),
    [
        pytest.param({}, "rediss://p-state.ns.svc:6379", id="two gateways, unless the pool says otherwise"),
        pytest.param({"replicas": 1}, None, id="one gateway needs none"),
        pytest.param({"replicas": 0}, None, id="no gateway"),
        pytest.param({"replicas": 2}, "rediss://p-state.ns.svc:6379", id="several share the operator's"),
        pytest.param({"replicas": 2, "state": {}}, "rediss://p-state.ns.svc:6379", id="by default"),
        pytest.param(
            {"minReplicas": 1, "maxReplicas": 2},
            "rediss://p-state.ns.svc:6379",
            id="an autoscaler may add one",
        ),
        pytest.param({"replicas": 2, "minReplicas": 1, "maxReplicas": 1}, None, id="an autoscaler adds none"),
        pytest.param({"replicas": 2, "state": {"managed": False}}, None, id="switched off"),
        pytest.param({"replicas": 2, "state": OWN}, "redis://mine:6379", id="the user's own"),
        pytest.param(
            {"replicas": 1, "state": OWN}, "redis://mine:6379", id="the user's own, for one gateway"
        ),
    ],
)
def test_which_server_gateways_share_their_state_through(gateway: Object, server: str | None) -> None:
    objects = (
        made({"model": {"name": "m"}, "gateway": gateway}, Observed(uid="u", generation=1)).objects or ()
    )
    deployments = {o["metadata"]["name"]: o for o in objects if o["kind"] == "Deployment"}
    (container,) = deployments["p-gateway"]["spec"]["template"]["spec"]["containers"]
    named = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--state-server=")]
    assert named == ([server] if server else [])
    of_state = {o["kind"] for o in objects if o["metadata"]["name"] == "p-state"}
    managed = server is not None and "p-state" in server
    assert of_state == ({"Deployment", "Service", "NetworkPolicy"} if managed else set())


def test_gateways_know_the_password_of_the_operators_server_and_other_pools_have_another() -> None:
    def passwords(uid: str) -> dict[str, Any]:
        objects = (
            made(
                {"model": {"name": "m"}, "gateway": {"replicas": 2}}, Observed(uid=uid, generation=1)
            ).objects
            or ()
        )
        deployments = [o for o in objects if o["metadata"]["name"] in ("p-gateway", "p-state")]
        containers = {
            o["metadata"]["name"]: o["spec"]["template"]["spec"]["containers"][0]
            for o in deployments
            if o["kind"] == "Deployment"
        }
        variable = "PERILUNE_STATE_PASSWORD"
        return {
            name: next(e["valueFrom"]["secretKeyRef"] for e in container["env"] if e["name"] == variable)
            for name, container in containers.items()
        }

    first, other = passwords("u"), passwords("v")
    assert first["p-gateway"] == first["p-state"]
    assert first["p-gateway"]["name"] != other["p-gateway"]["name"]


@pytest.mark.parametrize(
    ("args", "probe"),
    [
        pytest.param([], {"grpc": {"port": 9002, "service": "readiness"}}, id="plain"),
        pytest.param(
            ["--tls-cert=/tls/tls.crt"],
            {"httpGet": {"path": "/healthz?service=readiness", "port": "admin"}},
            id="TLS",
        ),
    ],
)
def test_kubelets_ask_a_gateway_that_does_tls_by_its_admin_server(args: list[str], probe: Object) -> None:
    objects = (
        made({"model": {"name": "m"}, "gateway": {"args": args}}, Observed(uid="u", generation=1)).objects
        or ()
    )
    (pod,) = (
        o["spec"]["template"]["spec"]
        for o in objects
        if o["metadata"]["name"] == "p-gateway" and o["kind"] == "Deployment"
    )
    asked = pod["containers"][0]["readinessProbe"]
    assert {name: asked[name] for name in ("grpc", "httpGet") if name in asked} == probe


def test_an_issuer_without_cert_manager_is_refused() -> None:
    spec = {"model": {"name": "m"}, "gateway": {"tls": {"issuer": "ca"}}}
    planned = made(spec, Observed(uid="u", generation=1))
    assert planned.objects is None
    words = "The cluster has no cert-manager: install it, or give a Secret"
    assert planned.status.conditions[0].message == f"{words} - at `$.spec.gateway.tls.issuer`"


def test_arguments_that_the_tls_field_sets_are_refused() -> None:
    given = {"model": {"name": "m"}, "gateway": {"tls": {"secret": "s"}, "args": ["--tls-key=/k"]}}
    with pytest.raises(
        SpecError, match=r"gateway\.tls sets --tls-key: leave it out - at `\$\.spec\.gateway\.args\[0\]`"
    ):
        convert(given)


@pytest.mark.parametrize(
    ("before", "after", "serving", "kept"),
    [
        pytest.param(SPANS, {}, [("both", 0)], ["p-engine"], id="fewer nodes: none serves"),
        pytest.param(SPANS, {}, [("both", -1)], [], id="fewer nodes: one serves"),
        pytest.param({}, SPANS, [("both", -1)], ["p-engine"], id="more nodes: none serves"),
        pytest.param({}, SPANS, [("both", 0)], [], id="more nodes: one serves"),
        pytest.param(
            {}, SPANS | {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}, [], [], id="no spare GPUs"
        ),
        pytest.param({}, {"replicas": 0} | SPANS, [], [], id="none wanted"),
    ],
)
def test_engines_of_an_earlier_spec_serve_until_there_are_others(
    before: Object, after: Object, serving: list[tuple[str, int]], kept: list[str]
) -> None:
    kinds = frozenset({LWS})
    children = {
        facts.key(o): o
        for o in made({"model": {"name": "m"}} | before, Observed(uid="u", generation=1, kinds=kinds)).objects
        or ()
    }
    pods = tuple(
        PodFacts(
            name=f"{role}{group}",
            component="engine",
            role=role,
            node="n",
            ready=True,
            terminating=False,
            group=group,
        )
        for role, group in serving
    )
    planned = made(
        {"model": {"name": "m"}} | after,
        Observed(uid="u", generation=1, pods=pods, children=children, kinds=kinds),
    )
    assert sorted(k.name for k in planned.kept) == kept
    progress = {c.type: c for c in planned.status.conditions}["Reconciling"]
    assert ("of an earlier spec" in progress.message) is bool(kept)


def former(*, since: float | None = None, answered: bool = False, leaving: bool = False) -> PodFacts:
    """Return an engine of one node that has been draining for so many seconds."""
    stamp = (
        datetime.fromtimestamp(NOW - since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if since is not None else ""
    )
    return PodFacts(
        name="old",
        component="engine",
        role="both",
        node="n",
        ready=True,
        terminating=leaving,
        uid="uid",
        draining=stamp,
        drained_by=frozenset({"gw"} if answered else ()),
        chosen=since is not None,
    )


@pytest.mark.parametrize(
    ("old", "serving", "kept", "marked", "draining"),
    [
        pytest.param(former(), 0, True, [], "NothingLeaving", id="it is needed"),
        pytest.param(
            former(since=5),
            0,
            True,
            [{names.DRAINING: None, names.DELETION_COST: None}],
            "NothingLeaving",
            id="it is needed again",
        ),
        pytest.param(
            former(),
            1,
            True,
            [{names.DRAINING: "2025-10-09T08:53:20Z", names.DELETION_COST: "-1"}],
            "SessionsLeaving",
            id="it is to go",
        ),
        pytest.param(former(since=5), 1, True, [], "SessionsLeaving", id="its sessions are leaving"),
        pytest.param(
            former(since=5, answered=True),
            1,
            False,
            [],
            "SessionsLeaving",
            id="they left",
        ),
        pytest.param(former(since=91), 1, False, [], "SessionsLeaving", id="long enough"),
        pytest.param(former(since=5, leaving=True), 1, False, [], "EndpointsLeaving", id="it goes"),
    ],
)
def test_engines_of_another_number_of_nodes_let_their_sessions_leave(
    old: PodFacts, serving: int, kept: bool, marked: list[Object], draining: str
) -> None:
    children = {
        facts.key(o): o for o in made({"model": {"name": "m"}}, Observed(uid="u", generation=1)).objects or ()
    }
    pods = [
        PodFacts(
            name=f"new{n}",
            component="engine",
            role="both",
            node="n",
            ready=True,
            terminating=False,
            uid=f"new{n}",
            group=n,
        )
        for n in range(serving)
    ]
    gateway = PodFacts(name="gw", component="gateway", role="", node="n", ready=True, terminating=False)
    kinds = frozenset({LWS})
    seen = Observed(uid="u", generation=1, pods=(old, gateway, *pods), children=children, kinds=kinds)
    planned = made(SPANS, seen)
    assert [k.name for k in planned.kept] == (["p-engine"] if kept else [])
    assert [dict(mark.annotations) for mark in planned.marks if mark.pod == "old"] == marked
    said = {c.type.value: c for c in planned.status.conditions}
    assert said["Draining"].reason == draining
    assert ("old" in said["Draining"].message) is (draining != "NothingLeaving")
    if kept and draining == "SessionsLeaving":
        assert (
            said["Reconciling"].message
            == "p-engine of an earlier spec is removed once its sessions have left."
        )
        assert planned.again_in <= 91


def test_an_endpoint_leaves_with_the_first_of_its_nodes() -> None:
    def pod(name: str, component: str, group: int, node: str) -> PodFacts:
        return PodFacts(
            name=name,
            component=component,
            role="both",
            node=node,
            ready=True,
            terminating=False,
            uid=name,
            group=group,
        )

    pods = tuple(
        pod(f"p-engine-{group}{worker}", f"engine{'-worker' if worker else ''}", group, f"n{group}{worker}")
        for group in (0, 1)
        for worker in ("", "-1")
    )
    nodes = tuple(NodeFacts(p.node, {}, 8, leaving=p.name == "p-engine-0-1") for p in pods)
    seen = Observed(uid="u", generation=1, nodes=nodes, pods=pods, kinds=frozenset({LWS}))
    marks = made(SPANS | {"replicas": 2}, seen).marks
    assert [(mark.pod, list(mark.annotations)) for mark in marks] == [("p-engine-0", [names.DRAINING])]


def test_of_the_endpoints_that_only_prefill_the_one_with_the_least_cached_work_leaves() -> None:
    """It gets no more prompts first; the Deployment cannot be told names."""
    spec: Object = {
        "model": {"name": "m"},
        "replicas": 1,
        "prefillReplicas": 2,
        "mooncake": {"transfer": "handoff"},
    }

    def pod(name: str, component: str = "prefill", **facts: Any) -> PodFacts:
        return PodFacts(
            name=name, component=component, role="both", node="n", ready=True, terminating=False, **facts
        )

    worth = pod("p-prefill-a", recent_hits_tokens=9_000.0)
    least = pod("p-prefill-b", recent_hits_tokens=10.0)
    others = (pod("gw", "gateway"),)
    first = made(spec | {"prefillReplicas": 2}, Observed(uid="u", generation=1))
    children = {facts.key(obj): obj for obj in first.objects or ()}

    def fewer(*pods: PodFacts) -> tuple[int, Plan]:
        seen = Observed(uid="u", generation=2, pods=(*pods, *others), children=children)
        planned = made(spec | {"prefillReplicas": 1}, seen)
        workloads = {o["metadata"]["name"]: o for o in planned.objects or () if o["kind"] == "Deployment"}
        return workloads["p-prefill"]["spec"]["replicas"], planned

    replicas, planned = fewer(worth, least)
    assert (replicas, [mark.pod for mark in planned.marks]) == (2, ["p-prefill-b"])
    assert {c.type.value: c.reason for c in planned.status.conditions}["Draining"] == "SessionsLeaving"
    marked = replace(least, draining=planned.marks[0].annotations[names.DRAINING] or "", chosen=True)
    assert fewer(worth, marked)[0] == 2, "a gateway has not answered yet"
    replicas, planned = fewer(worth, replace(marked, drained_by=frozenset({"gw"})))
    assert (replicas, planned.marks) == (1, ())


def test_monitors_bear_the_labels_that_a_prometheus_goes_by() -> None:
    """Never in the place of ours."""
    kinds = frozenset({full_name("PodMonitor"), full_name("ServiceMonitor")})
    defaults = Defaults(monitor_labels={"release": "kps", names.POOL_LABEL: "other"})
    spec = convert({"model": {"name": "m"}, "mooncake": {"store": {"enabled": True}}})
    objects = plan("p", "ns", spec, Observed(uid="u", generation=1, kinds=kinds), NOW, defaults).objects or ()
    monitors = {o["metadata"]["name"]: o for o in objects if o["kind"].endswith("Monitor")}
    assert sorted(monitors) == ["p-engine", "p-gateway"], "the master's port has more than metrics"
    for monitor in monitors.values():
        labels = monitor["metadata"]["labels"]
        assert (labels["release"], labels[names.POOL_LABEL]) == ("kps", "p")
    (scraped,) = monitors["p-gateway"]["spec"]["endpoints"]
    assert scraped["honorLabels"], "or Prometheus' own label `endpoint`, a port's name, hides the metrics'"


NO_ENDPOINTS = "ExtProc: no ready endpoints for the related Service ns/p-gateway."


@pytest.mark.parametrize(
    ("message", "for_s", "ready", "again"),
    [
        pytest.param(NO_ENDPOINTS, 11, True, True, id="long after a gateway is ready"),
        pytest.param(NO_ENDPOINTS, 9, True, False, id="it may still be about to report"),
        pytest.param(NO_ENDPOINTS, 11, False, False, id="no gateway is ready"),
        pytest.param("ExtProc: no such Service", 11, True, False, id="another refusal"),
    ],
)
def test_envoy_gateway_judges_a_policy_again_whose_report_has_become_wrong(
    message: str, for_s: float, ready: bool, again: bool
) -> None:
    spec = {"model": {"name": "m"}, "gateway": {"parent": {"name": "g"}}}
    kinds = frozenset(full_name(kind) for kind in ("HTTPRoute", "EnvoyExtensionPolicy"))
    pods = (
        PodFacts(name="p-gateway-1", component="gateway", role="", node="n", ready=ready, terminating=False),
    )
    said = {"type": "Accepted", "status": "False", "reason": "Invalid", "message": message}
    since = timestamps.timestamp(NOW - for_s)
    where = facts.Key("EnvoyExtensionPolicy", "ns", "p")

    def policy(*conditions: Object) -> Object:
        judged = {"kind": where.kind, "status": {"ancestors": [{"conditions": list(conditions)}]}}
        planned = made(
            spec, Observed(uid="u", generation=1, pods=pods, children={where: judged}, kinds=kinds)
        ).objects
        return next(o["spec"] for o in planned or () if o["kind"] == where.kind)

    accepted = policy({"type": "Accepted", "status": "True", "lastTransitionTime": since})
    refused = policy(said | {"lastTransitionTime": since})
    assert (refused != accepted) is again
    assert refused["extProc"][0].pop("messageTimeout").removeprefix("0h") == (
        accepted["extProc"][0].pop("messageTimeout")
    )
    assert refused == accepted


def test_uid_and_groups_can_be_left_to_the_platform() -> None:
    """As OpenShift wants: of every pod, and in pods that exist only once they are asked to follow."""
    spec = {
        "model": {"name": "m", "cache": {"hostPath": "/models"}},
        "gateway": {"replicas": 2},
        "mooncake": {"store": {"enabled": True}},
    }
    ours, theirs = Defaults(), Defaults(platform_user=True)
    assert ours.revision != theirs.revision
    for defaults, user in ((ours, 65_532), (theirs, None)):
        objects = plan("p", "ns", convert(spec), Observed(uid="u", generation=1), NOW, defaults).objects or ()
        pods = [o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment"]
        assert len(pods) == 4
        for context in (pod["securityContext"] for pod in pods):
            assert [context.get(name) for name in ("runAsUser", "runAsGroup", "fsGroup")] == [user] * 3
            assert context["runAsNonRoot"] is True
        assert ('"runAsUser": 0' in json.dumps(pods)) is (user is not None), "nothing runs as root either"
