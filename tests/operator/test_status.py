from dataclasses import replace
from typing import Any

import msgspec
import pytest
from plans import LWS

from perilune_api.conditions import Condition, Reason
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.status import InferencePoolStatus
from perilune_api.pool import SpecError
from perilune_operator import status
from perilune_operator.observe import readers
from perilune_operator.observe.facts import (
    Behind,
    GatewayStats,
    Key,
    NodeFacts,
    Observed,
    ParentFacts,
    PodFacts,
    Rival,
    key,
)
from perilune_operator.plan import plan
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
NOW = 1_760_000_000.0
ENVOY = frozenset({"gateway.networking.k8s.io/HTTPRoute", "gateway.envoyproxy.io/EnvoyExtensionPolicy"})
RACK = {"topology.kubernetes.io/rack": "r1"}


def pod(name: str, *, ready: bool = True, leaving: bool = False) -> PodFacts:
    return PodFacts(name=name, component="engine", role="both", node="n1", ready=ready, terminating=leaving)


def deployment(name: str, replicas: int = 1, **state: int) -> tuple[Key, Object]:
    told = {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas} | {
        "availableReplicas": replicas
    }
    body = {
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "ns", "generation": 1},
        "spec": {"replicas": replicas},
        "status": told | state,
    }
    return Key("Deployment", "ns", name), body


def verdict(
    kind: str, accepted: str = "True", where: str = "ancestors", of: int | None = 2, name: str = "p"
) -> tuple[Key, Object]:
    """`of`: generation that it was said of; the object's is 2."""
    said: Object = {"type": "Accepted", "status": accepted, "reason": "Because", "message": "words"}
    said |= {} if of is None else {"observedGeneration": of}
    meta = {"name": name, "namespace": "ns", "generation": 2}
    report = {"parentRef": {"name": "g"}, "conditions": [said]}
    return Key(kind, "ns", name), {"kind": kind, "metadata": meta, "status": {where: [report]}}


def gateway(
    programmed: str = "True", of: int = 1, listeners: tuple[tuple[str, str], ...] = ()
) -> ParentFacts:
    """Return a Gateway of generation 1."""

    def said(status: str) -> list[Object]:
        words = {"reason": "AddressNotAssigned", "message": "No addresses."}
        return [{"type": "Programmed", "status": status, "observedGeneration": of, **words}]

    told = [{"name": name, "conditions": said(status)} for name, status in listeners]
    status = {"conditions": said(programmed) if programmed else [], "listeners": told}
    return readers.parent({"metadata": {"name": "g", "generation": 1}, "status": status})


SPEC: Object = {"model": {"name": "m"}, "replicas": 2, "gateway": {"replicas": 1, "parent": {"name": "g"}}}
WHOLE = [
    deployment("p-engine", 2),
    deployment("p-gateway"),
    verdict("HTTPRoute", where="parents"),
    verdict("BackendTrafficPolicy"),
    verdict("EnvoyExtensionPolicy"),
]


def seen(
    *children: tuple[Key, Object], pods: tuple[PodFacts, ...] = (pod("a"), pod("b")), **more: Any
) -> Observed:
    facts: Object = {"nodes": (NodeFacts("n1", RACK),), "kinds": ENVOY} | more
    return Observed(uid="u", generation=3, pods=pods, children=dict([*WHOLE, *children]), **facts)


def of(observed: Observed, spec: Object = SPEC, now: float = NOW) -> InferencePoolStatus:
    return plan("p", "ns", convert(spec), observed, now, Defaults()).status


def conditions(made: InferencePoolStatus) -> dict[str, tuple[str, str]]:
    return {c.type.value: (c.status, c.reason) for c in made.conditions}


def test_a_pool_that_serves() -> None:
    made = of(seen(gateway=GatewayStats(sessions=12, hit_ratio=0.875)))
    assert conditions(made) == {
        "Accepted": ("True", "Valid"),
        "TopologyResolved": ("True", "Resolved"),
        "EnginesReady": ("True", "Available"),
        "GatewayReady": ("True", "Available"),
        "RouteProgrammed": ("True", "Programmed"),
        "Reconciling": ("False", "UpToDate"),
        "Draining": ("False", "NothingLeaving"),
        "Ready": ("True", "Serving"),
    }
    assert (made.ready, made.replicas, made.ready_replicas) == ("2/2", 2, 2)
    assert (made.sessions, made.hit_ratio, made.observed_generation) == (12, "0.88", 3)
    assert {c.observed_generation for c in made.conditions} == {3}


@pytest.mark.parametrize(
    ("observed", "condition", "truth", "reason", "ready"),
    [
        pytest.param(
            seen(gateway=GatewayStats(sessions=12, hit_ratio=None, behind={"p-gateway-1": Behind(6, 9)})),
            Condition.EVENTS_BEHIND,
            "True",
            Reason.TOO_MANY_EVENTS,
            "True",
            id="the pool is too large for its gateway",
        ),
        pytest.param(
            seen(pods=(pod("a"), pod("b", ready=False))),
            Condition.ENGINES_READY,
            "False",
            Reason.WAITING_FOR_ENGINES,
            "False",
            id="an engine is not ready",
        ),
        pytest.param(
            seen(pods=(pod("a"), pod("b"), pod("c", leaving=True))),
            Condition.DRAINING,
            "True",
            Reason.ENDPOINTS_LEAVING,
            "True",
            id="one more is leaving",
        ),
        pytest.param(
            seen(deployment("p-gateway", availableReplicas=0)),
            Condition.GATEWAY_READY,
            "False",
            Reason.WAITING_FOR_GATEWAY,
            "False",
            id="no gateway",
        ),
        pytest.param(
            seen(deployment("p-engine", 2, updatedReplicas=1)),
            Condition.RECONCILING,
            "True",
            Reason.ROLLING_OUT,
            "True",
            id="a rollout, with all there",
        ),
        pytest.param(
            seen(deployment("p-engine", 2, observedGeneration=0)),
            Condition.RECONCILING,
            "True",
            Reason.ROLLING_OUT,
            "True",
            id="a change not yet seen by its controller",
        ),
        pytest.param(
            seen(verdict("EnvoyExtensionPolicy", "False")),
            Condition.ROUTE_PROGRAMMED,
            "False",
            Reason.ROUTE_REFUSED,
            "False",
            id="Envoy Gateway refuses a policy",
        ),
        pytest.param(
            seen((Key("HTTPRoute", "ns", "p"), {"kind": "HTTPRoute"})),
            Condition.ROUTE_PROGRAMMED,
            "False",
            Reason.WAITING_FOR_ROUTE,
            "False",
            id="nobody has looked at the route",
        ),
        pytest.param(
            seen(kinds=frozenset()),
            Condition.ROUTE_PROGRAMMED,
            "False",
            Reason.NO_ROUTE_API,
            "False",
            id="no CRDs of a gateway",
        ),
        pytest.param(
            seen(nodes=(NodeFacts("n1", {}),)),
            Condition.TOPOLOGY_RESOLVED,
            "False",
            Reason.UNLABELLED_NODES,
            "True",
            id="a node without labels works, and is named",
        ),
    ],
)
def test_what_is_wrong_has_a_reason(
    observed: Observed, condition: Condition, truth: str, reason: Reason, ready: str
) -> None:
    made = conditions(of(observed))
    assert made[condition] == (truth, reason)
    assert made["Ready"][0] == ready


@pytest.mark.parametrize(
    ("observed", "section", "reason", "words"),
    [
        pytest.param(seen(parent=gateway()), "", Reason.PROGRAMMED, "Envoy asks", id="programmed"),
        pytest.param(
            seen(verdict("BackendTrafficPolicy", of=None)),
            "",
            Reason.PROGRAMMED,
            "Envoy asks",
            id="a controller that says nothing of generations",
        ),
        pytest.param(
            seen(verdict("BackendTrafficPolicy", of=1)),
            "",
            Reason.WAITING_FOR_ROUTE,
            "The report on the BackendTrafficPolicy is undecided, or about an earlier version of it.",
            id="an old yes",
        ),
        pytest.param(
            seen(verdict("HTTPRoute", "False", "parents", of=1)),
            "",
            Reason.WAITING_FOR_ROUTE,
            "The report on the HTTPRoute is undecided",
            id="an old no",
        ),
        pytest.param(
            seen(verdict("EnvoyExtensionPolicy", "Unknown")),
            "",
            Reason.WAITING_FOR_ROUTE,
            "The report on the EnvoyExtensionPolicy is undecided",
            id="neither yes nor no",
        ),
        pytest.param(
            seen(verdict("BackendTLSPolicy", "False", name="p-gateway")),
            "",
            Reason.ROUTE_REFUSED,
            "BackendTLSPolicy p-gateway: Because: words",
            id="Envoy cannot ask over TLS",
        ),
        pytest.param(
            seen(verdict("BackendTLSPolicy", "False", name="p")),
            "",
            Reason.ROUTE_REFUSED,
            "BackendTLSPolicy p: Because: words",
            id="Envoy cannot reach engines over TLS",
        ),
        pytest.param(
            seen(verdict("HTTPRoute", "False", "parents", name="p-refused")),
            "",
            Reason.ROUTE_REFUSED,
            "HTTPRoute p-refused: Because: words",
            id="Envoy cannot refuse by itself",
        ),
        pytest.param(
            seen(rival=Rival(("other", "q"), ())),
            "",
            Reason.ROUTE_SHADOWED,
            "Requests at Gateway g go to pool other/q, whose route is older. Give each pool its own hosts"
            " (gateway.hostnames) or listener (gateway.parent.sectionName).",
            id="an older pool has it all",
        ),
        pytest.param(
            seen(rival=Rival(("ns", "q"), ("a.test", "b.test"))),
            "",
            Reason.ROUTE_SHADOWED,
            "Requests for a.test, b.test at Gateway g go to pool ns/q",
            id="an older pool has some hosts",
        ),
        pytest.param(
            seen(verdict("HTTPRoute", "False", "parents"), rival=Rival(("ns", "q"), ())),
            "",
            Reason.ROUTE_REFUSED,
            "HTTPRoute: Because: words",
            id="refused, and an older one besides",
        ),
        pytest.param(
            seen(parent=ParentFacts()),
            "",
            Reason.GATEWAY_NOT_PROGRAMMED,
            "Gateway g does not exist.",
            id="none",
        ),
        pytest.param(
            seen(parent=gateway("False")),
            "",
            Reason.GATEWAY_NOT_PROGRAMMED,
            "Gateway g is not programmed: AddressNotAssigned: No addresses.",
            id="without an address",
        ),
        pytest.param(
            seen(parent=gateway("")),
            "",
            Reason.WAITING_FOR_ROUTE,
            "No controller has reported yet whether Gateway g is programmed.",
            id="nobody has said",
        ),
        pytest.param(
            seen(parent=gateway(of=0)), "", Reason.PROGRAMMED, "Envoy asks", id="of no generation at all"
        ),
        pytest.param(
            seen(parent=gateway(listeners=(("https", "False"),))),
            "https",
            Reason.GATEWAY_NOT_PROGRAMMED,
            "Listener https of Gateway g is not programmed",
            id="the listener that is ours",
        ),
        pytest.param(
            seen(parent=gateway(listeners=(("https", "False"), ("http", "True")))),
            "http",
            Reason.PROGRAMMED,
            "Envoy asks",
            id="another listener",
        ),
    ],
)
def test_the_route_is_as_good_as_its_gateway(
    observed: Observed, section: str, reason: Reason, words: str
) -> None:
    made = of(observed, SPEC | {"gateway": {"parent": {"name": "g", "sectionName": section}}})
    (told,) = [c for c in made.conditions if c.type is Condition.ROUTE_PROGRAMMED]
    truth = "True" if reason is Reason.PROGRAMMED else "False"
    assert (told.status, told.reason) == (truth, reason)
    assert told.message.startswith(words)
    assert conditions(made)["Ready"][0] == truth


GIE = frozenset({"gateway.networking.k8s.io/HTTPRoute", "inference.networking.k8s.io/InferencePool"})


def pool_verdict(accepted: str, of: str = "g", type_: str = "Accepted", namespace: str = "ns") -> Object:
    """Return what the controller of one Gateway says of an InferencePool."""
    said = {"type": type_, "status": accepted, "reason": "Because", "message": "words"}
    said |= {"observedGeneration": 1}
    gateway = {"name": of} | ({"namespace": namespace} if namespace else {})
    return {"parentRef": gateway, "conditions": [said]}


@pytest.mark.parametrize(
    ("reports", "truth", "reason", "words"),
    [
        pytest.param([pool_verdict("True")], "True", Reason.PROGRAMMED, "Envoy asks", id="accepted"),
        pytest.param(
            [],
            "False",
            Reason.WAITING_FOR_ROUTE,
            "No controller has reported on the InferencePool",
            id="none",
        ),
        pytest.param(
            [pool_verdict("True", of="another")],
            "False",
            Reason.WAITING_FOR_ROUTE,
            "No controller has reported on the InferencePool",
            id="another Gateway's",
        ),
        pytest.param(
            [pool_verdict("True", namespace="other")],
            "False",
            Reason.WAITING_FOR_ROUTE,
            "No controller has reported on the InferencePool",
            id="a Gateway of the same name elsewhere",
        ),
        pytest.param(
            [pool_verdict("True", namespace="")],
            "True",
            Reason.PROGRAMMED,
            "Envoy asks",
            id="no namespace said",
        ),
        pytest.param(
            [pool_verdict("True"), pool_verdict("False", of="another")],
            "True",
            Reason.PROGRAMMED,
            "Envoy asks",
            id="another Gateway's no",
        ),
        pytest.param(
            [pool_verdict("Unknown")],
            "False",
            Reason.WAITING_FOR_ROUTE,
            "The report on the InferencePool is undecided",
            id="undecided",
        ),
        pytest.param(
            [pool_verdict("False")],
            "False",
            Reason.ROUTE_REFUSED,
            "InferencePool: Because: words",
            id="refused",
        ),
        pytest.param(
            [pool_verdict("True"), pool_verdict("False", type_="ResolvedRefs")],
            "False",
            Reason.ROUTE_REFUSED,
            "InferencePool: Because: words",
            id="its picker cannot be found",
        ),
    ],
)
def test_a_gateway_of_the_inference_extension_has_to_take_up_the_pool(
    reports: list[Object], truth: str, reason: Reason, words: str
) -> None:
    meta = {"name": "p", "namespace": "ns", "generation": 1}
    theirs = {"kind": "InferencePool", "metadata": meta, "status": {"parents": reports}}
    made = of(seen((Key("InferencePool", "ns", "p"), theirs), kinds=GIE))
    (told,) = [c for c in made.conditions if c.type is Condition.ROUTE_PROGRAMMED]
    assert (told.status, told.reason) == (truth, reason)
    assert told.message.startswith(words)


def test_a_gateway_whose_owner_has_a_policy_of_his_own_is_told_what_it_has_to_do() -> None:
    said = {"type": "Accepted", "status": "False", "reason": "Conflicted", "message": "another one"}
    shared = {"kind": "ClientTrafficPolicy", "status": {"ancestors": [{"conditions": [said]}]}}
    made = of(seen((Key("ClientTrafficPolicy", "ns", "g-perilune"), shared)))
    (told,) = [c for c in made.conditions if c.type is Condition.ROUTE_PROGRAMMED]
    assert (told.status, told.reason) == ("True", "Programmed")
    assert (
        "ClientTrafficPolicy g-perilune: Conflicted: the one in force has to remove x-gateway" in told.message
    )
    assert conditions(made)["Ready"] == ("True", "Serving")


@pytest.mark.parametrize(
    ("change", "ready"),
    [
        pytest.param({"replicas": 0}, ("False", "NoEnginesWanted"), id="no engines"),
        pytest.param({"gateway": {"replicas": 0}}, ("True", "Serving"), id="nobody decides, requests pass"),
        pytest.param(
            {"gateway": {"replicas": 0, "failOpen": False}},
            ("False", "NoGatewayWanted"),
            id="nobody decides, requests do not pass",
        ),
        pytest.param(
            {"replicas": 0, "scaling": {"signal": "queueSeconds", "minReplicas": 0, "maxReplicas": 2}},
            ("True", "ZeroEndpoints"),
            id="the next prompt starts an engine",
        ),
    ],
)
def test_a_pool_that_is_as_wanted_may_still_answer_nobody(change: Object, ready: tuple[str, str]) -> None:
    change["gateway"] = {**change.get("gateway", {}), "parent": {"name": "g"}}
    pods = () if change.get("replicas") == 0 else (pod("a"), pod("b"))
    made = conditions(of(seen(pods=pods), SPEC | change))
    assert made["EnginesReady"][0] == made["GatewayReady"][0] == "True"
    assert made["Ready"] == ready


def test_an_endpoint_that_does_not_come_says_why() -> None:
    stuck = replace(pod("b", ready=False), trouble="ImagePullBackOff (vllm:none)")
    (said,) = [c for c in of(seen(pods=(pod("a"), stuck))).conditions if c.type is Condition.ENGINES_READY]
    assert said.message == "1 of 2 endpoints are ready. b: ImagePullBackOff (vllm:none)"


def test_a_pool_with_roles_is_ready_when_both_are_served() -> None:
    spec = SPEC | {"prefillReplicas": 1, "mooncake": {"transfer": "handoff"}}
    prefill = deployment("p-prefill")
    without = of(seen(prefill), spec)
    words = "2 of 2 endpoints are ready. 0 of 1 that prefill are ready."
    assert conditions(without)["Ready"] == ("False", "WaitingForEngines")
    assert words in [c.message for c in without.conditions if c.type == "Ready"]
    served = (pod("a"), pod("b"), replace(pod("c"), component="prefill"))
    made = of(seen(prefill, pods=served), spec)
    assert conditions(made)["Ready"] == ("True", "Serving")
    assert made.ready == "2/2", "it counts those that get requests"
    trouble = replace(pod("c", ready=False), component="prefill", trouble=IMAGE)
    assert f"c: {IMAGE}" in of(seen(prefill, pods=(*served[:2], trouble)), spec).conditions[2].message


def test_pods_that_are_not_made_say_why() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    key, body = deployment("p-engine", 2)
    body["status"]["conditions"] = [failure]
    (said,) = [c for c in of(seen((key, body), pods=())).conditions if c.type is Condition.ENGINES_READY]
    assert said.message == "0 of 2 endpoints are ready. exceeded quota: gpus"


def test_an_endpoint_that_spans_nodes_needs_leader_worker_set() -> None:
    spec = SPEC | {"engine": {"tensorParallel": 16}}
    made = plan("p", "ns", convert(spec), seen(), NOW, Defaults())
    assert conditions(made.status)["EnginesReady"] == ("False", "NoWorkloadApi")
    assert "LeaderWorkerSet" not in {o["kind"] for o in made.objects or ()}


def test_engines_that_are_made_room_for_do_not_pass_for_those_that_come() -> None:
    """Without GPUs to spare, a Deployment goes at once for a LeaderWorkerSet of the same name."""
    spec = SPEC | {"engine": {"tensorParallel": 16}, "rollout": {"maxSurge": 0, "maxUnavailable": 1}}
    made = of(seen(kinds=ENVOY | {LWS}), spec)
    assert conditions(made)["Reconciling"] == ("True", "RollingOut")


def test_a_pool_that_is_too_large_says_how_many_endpoints_its_gateways_follow() -> None:
    behind = {"g0": Behind(9, 9), "g1": Behind(6, 9)}
    made = of(seen(gateway=GatewayStats(sessions=1, hit_ratio=None, behind=behind)))
    (said,) = [c.message for c in made.conditions if c.type is Condition.EVENTS_BEHIND]
    assert "g0, g1" in said
    assert "Half of a core follows about 6 of the pool's 9 endpoints." in said


def test_a_store_is_waited_for() -> None:
    made = of(seen(pods=(pod("a"), pod("b"))), SPEC | {"mooncake": {"store": {"enabled": True}}})
    assert conditions(made)["StoreReady"] == ("False", "WaitingForStore")
    assert conditions(made)["Ready"] == ("False", "WaitingForStore")
    assert (made.ready, made.replicas) == ("2/2", 2)


def test_a_time_changes_only_with_the_status() -> None:
    first = msgspec.to_builtins(of(seen()))
    later = of(seen(pods=(pod("a"), pod("b", ready=False)), status=first), now=NOW + 60)
    times = {c.type.value: c.last_transition_time for c in later.conditions}
    assert times["Accepted"] == "2025-10-09T08:53:20Z"
    assert times["EnginesReady"] == times["Ready"] == "2025-10-09T08:54:20Z"


def test_an_event_is_due_for_another_status_or_reason_only() -> None:
    old = msgspec.to_builtins(of(seen()))
    assert status.changed(old, of(seen(status=old), now=NOW + 60)) == []
    worse = of(seen(pods=(pod("a"),), status=old))
    assert [c.type.value for c in status.changed(old, worse)] == ["EnginesReady", "Ready"]


def test_a_write_that_is_refused_for_good_stalls_the_pool() -> None:
    made = status.with_failure(of(seen()), "Deployment p-engine: denied", seen(), NOW)
    told = conditions(made)
    assert told["Stalled"] == ("True", "ApplyFailed")
    assert told["Reconciling"] == ("False", "ApplyFailed")
    assert "denied" in next(c.message for c in made.conditions if c.type is Condition.STALLED)


def stored(made: InferencePoolStatus) -> Object:
    return dict(msgspec.to_builtins(made))


def generation(made: InferencePoolStatus, kind: Condition = Condition.READY) -> int:
    return next(c.observed_generation for c in made.conditions if c.type is kind)


IMAGE = "ImagePullBackOff (vllm:none)"
LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "Late."}
QUOTA = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}


def told_by_controller(name: str, said: Object, replicas: int = 1, **state: int) -> tuple[Key, Object]:
    key, body = deployment(name, replicas, **state)
    body["status"]["conditions"] = [said]
    return key, body


@pytest.mark.parametrize(
    ("observed", "reason", "words"),
    [
        pytest.param(
            seen(pods=(pod("a"), replace(pod("b", ready=False), trouble=IMAGE, stuck=True))),
            "PodCannotStart",
            f"b: {IMAGE}",
            id="an engine's image cannot be pulled",
        ),
        pytest.param(
            seen(
                pods=(
                    pod("a"),
                    pod("b"),
                    replace(pod("g", ready=False), component="gateway", trouble=IMAGE, stuck=True),
                )
            ),
            "PodCannotStart",
            f"g: {IMAGE}",
            id="a gateway's",
        ),
        pytest.param(
            seen(told_by_controller("p-engine", QUOTA, 2, updatedReplicas=1)),
            "PodsRefused",
            "p-engine: exceeded quota: gpus",
            id="a quota",
        ),
        pytest.param(
            seen(
                told_by_controller("p-engine", LATE, 2, updatedReplicas=1),
                pods=(pod("a"), replace(pod("b", ready=False), trouble="Unschedulable: 0/3 nodes")),
            ),
            "DeadlineExceeded",
            "Late. b: Unschedulable: 0/3 nodes",
            id="the deadline",
        ),
        pytest.param(
            seen(told_by_controller("p-gateway", LATE)),
            "DeadlineExceeded",
            "Late.",
            id="a gateway's deadline",
        ),
    ],
)
def test_a_rollout_that_cannot_go_on_is_stalled(observed: Observed, reason: str, words: str) -> None:
    """kstatus takes Reconciling for progress before it looks at Stalled, so they are never both true."""
    made = of(replace(observed, status=stored(of(seen())), generation=4))
    told = conditions(made)
    assert (told["Stalled"], told["Reconciling"]) == (("True", reason), ("False", reason))
    assert next(c.message for c in made.conditions if c.type is Condition.STALLED) == words
    assert generation(made) == 3  # what answers, if anything, is of the generation before


@pytest.mark.parametrize(
    "observed",
    [
        pytest.param(seen(), id="it serves"),
        pytest.param(seen(deployment("p-engine", 2, updatedReplicas=1)), id="a rollout that goes on"),
        pytest.param(
            seen(pods=(pod("a"), replace(pod("b", ready=False), trouble="Unschedulable: 0/3 nodes"))),
            id="a pod that waits for a node: an autoscaler may bring one",
        ),
        pytest.param(
            seen(
                pods=(
                    pod("a"),
                    pod("b"),
                    replace(pod("s", ready=False), component="state", trouble=IMAGE, stuck=True),
                )
            ),
            id="gateways go on alone without the server of their shared state",
        ),
        pytest.param(
            seen(pods=(pod("a"), pod("b"), replace(pod("c", leaving=True), trouble=IMAGE, stuck=True))),
            id="a pod that is deleted",
        ),
    ],
)
def test_what_goes_on_is_not_stalled(observed: Observed) -> None:
    assert "Stalled" not in conditions(of(observed))


def test_ready_is_of_the_generation_that_answers_until_the_next_is_in_force() -> None:
    first = of(seen())
    rolling = of(
        replace(seen(deployment("p-engine", 2, updatedReplicas=1)), status=stored(first), generation=4)
    )
    done = of(replace(seen(), status=stored(rolling), generation=4))
    assert [(conditions(made)["Ready"][0], generation(made)) for made in (first, rolling, done)] == [
        ("True", 3),
        ("True", 3),
        ("True", 4),
    ]
    assert rolling.observed_generation == 4
    assert generation(rolling, Condition.ENGINES_READY) == 4


def test_ready_waits_for_a_change_that_was_just_written() -> None:
    """The objects that the watch shows are those of before."""
    before = of(seen())
    planned = of(replace(seen(), status=stored(before), generation=4))
    now = replace(seen(), status=stored(before), generation=4)
    made = status.with_more_to_do(planned, "Rolling out p-engine.", Reason.ROLLING_OUT, now, NOW)
    assert conditions(made)["Reconciling"] == ("True", "RollingOut")
    assert (conditions(made)["Ready"][0], generation(made)) == ("True", 3)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        pytest.param({"updatedReplicas": 3}, "Rolling out p-engine (3 of 8 are new).", id="on its way"),
        pytest.param({"observedGeneration": 0}, "Rolling out p-engine.", id="not seen by its controller yet"),
    ],
)
def test_a_rollout_says_how_far_it_is(state: dict[str, int], said: str) -> None:
    made = of(seen(deployment("p-engine", 8, **state)))
    (told,) = (c for c in made.conditions if c.type == Condition.RECONCILING)
    assert told.message == said


@pytest.mark.parametrize(
    ("state", "told", "said"),
    [
        pytest.param({}, "False", "Everything is as the spec says.", id="all groups are new"),
        pytest.param(
            {"updatedReplicas": 1}, "True", "Rolling out p-engine (1 of 2 are new).", id="on its way"
        ),
        pytest.param({"replicas": 3}, "True", "Rolling out p-engine (2 of 2 are new).", id="one in surplus"),
        pytest.param(None, "True", "Rolling out p-engine.", id="not seen by its controller yet"),
    ],
)
def test_a_leader_worker_set_tells_no_generation(state: dict[str, int] | None, told: str, said: str) -> None:
    """The status as LeaderWorkerSet 0.8 writes it."""
    groups = Key("LeaderWorkerSet", "ns", "p-engine")
    meta = {"name": "p-engine", "namespace": "ns", "generation": 4}
    body: Object = {"kind": "LeaderWorkerSet", "metadata": meta, "spec": {"replicas": 2}}
    if state is not None:
        body["status"] = {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2} | state
    made = of(seen((groups, body), kinds=ENVOY | {LWS}), SPEC | {"engine": {"tensorParallel": 16}})
    (shown,) = (c for c in made.conditions if c.type == Condition.RECONCILING)
    assert (shown.status, shown.message) == (told, said)


def refusal(**more: Any) -> InferencePoolStatus:
    return plan("p", "ns", SpecError("no - at `$.spec.x`"), seen(**more), NOW, Defaults()).status


def test_a_refused_new_pool_is_stalled_and_not_ready() -> None:
    told = conditions(refusal())
    assert told["Accepted"] == told["Ready"] == ("False", "Invalid")
    assert told["Stalled"] == ("True", "Invalid")


def test_a_refused_change_leaves_ready_to_the_generation_that_answers() -> None:
    planned = plan("p", "ns", convert(SPEC), seen(), NOW, Defaults())
    kept = {key(o): o for o in planned.objects or () if o["metadata"]["name"] == "p-rendered"}
    children = dict([*WHOLE, *kept.items()])
    now = replace(seen(), children=children, generation=4, status=stored(planned.status))
    bad = SpecError("no - at `$.spec.x`")

    first = plan("p", "ns", bad, now, NOW, Defaults()).status
    told = conditions(first)
    assert (told["Accepted"], told["Stalled"]) == (("False", "Invalid"), ("True", "Invalid"))
    assert (told["Ready"][0], generation(first), first.observed_generation) == ("True", 3, 4)

    gone = replace(now, pods=(pod("a"), pod("b", ready=False)), status=stored(first))
    later = plan("p", "ns", bad, gone, NOW, Defaults()).status
    assert conditions(later)["Ready"] == (
        "False",
        "WaitingForEngines",
    )  # the status goes on telling the truth
    assert (generation(later), later.ready) == (3, "1/2")
