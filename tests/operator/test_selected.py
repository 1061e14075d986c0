"""Pools whose engines others run (engine.selector): what the operator makes, refuses and says."""

from typing import Any

import pytest
from plans import made

from perilune_api.inference_pool.checks import convert
from perilune_api.pool import SpecError
from perilune_operator.observe.facts import GatewayStats, Key, Observed

Object = dict[str, Any]
SELECTED: Object = {"engine": {"selector": {"labels": {"app": "vllm"}}}}


def at_port(port: int | str) -> Object:
    selector = {"labels": {"app": "vllm"}, "port": port}
    return {"engine": {"selector": selector}, "gateway": {"parent": {"name": "g"}}}


ENVOY = frozenset({"gateway.networking.k8s.io/HTTPRoute", "gateway.envoyproxy.io/EnvoyExtensionPolicy"})
EXTENSION = frozenset({"gateway.networking.k8s.io/HTTPRoute", "inference.networking.k8s.io/InferencePool"})


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        pytest.param({"replicas": 2}, "replicas", id="replicas"),
        pytest.param({"prefillReplicas": 1}, "prefillReplicas", id="prefillReplicas"),
        pytest.param({"mooncake": {"transfer": "handoff"}}, "mooncake", id="mooncake"),
        pytest.param({"rollout": {"drainSeconds": 5}}, "rollout", id="rollout"),
        pytest.param({"scaling": {"minReplicas": 1, "maxReplicas": 2}}, "scaling", id="scaling"),
        pytest.param({"model": {"source": "org/m"}}, "model.source", id="model.source"),
        pytest.param({"model": {"cache": {"claim": "c"}}}, "model.cache", id="model.cache"),
        pytest.param({"engine": {"image": "v"}}, "engine.image", id="engine.image"),
        pytest.param({"engine": {"kind": "simulated"}}, "engine.kind", id="engine.kind"),
        pytest.param({"engine": {"args": ["--seed=1"]}}, "engine.args", id="engine.args"),
        pytest.param(
            {"engine": {"resources": {"limits": {"cpu": "1"}}}}, "engine.resources", id="engine.resources"
        ),
        pytest.param({"engine": {"tensorParallel": 2}}, "engine.tensorParallel", id="engine.tensorParallel"),
        pytest.param(
            {"engine": {"podTemplate": {"spec": {}}}}, "engine.podTemplate", id="engine.podTemplate"
        ),
        pytest.param({"gateway": {"servedBy": "q"}}, "gateway.servedBy", id="gateway.servedBy"),
        pytest.param(
            {"topology": {"placement": [{"level": "rack", "mode": "pack"}]}},
            "topology.placement",
            id="topology.placement",
        ),
    ],
)
def test_what_makes_no_sense_with_a_selector_is_refused_by_name(changed: Object, field: str) -> None:
    engine = SELECTED["engine"] | changed.get("engine", {})
    with pytest.raises(SpecError, match=rf"^{field} has no effect.*leave it out.* - at `\$.spec.{field}`$"):
        convert(SELECTED | changed | {"engine": engine})


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        pytest.param({"port": 0}, "0 is neither the number of a port nor", id="port 0"),
        pytest.param({"port": "8000"}, "'8000' is neither the number of a port nor", id="digits in quotes"),
        pytest.param({"port": "a-name-that-is-too-long"}, "'a-name.* is neither", id="long name"),
        pytest.param({"furtherPorts": ["Not-A-Name"]}, "'Not-A-Name' is neither", id="wrong further port"),
        pytest.param({"furtherPorts": [8000]}, "furtherPorts has port 8000", id="one port twice"),
        pytest.param({"replayPort": 5558}, "replayPort needs eventsPort", id="replay without events"),
    ],
)
def test_a_wrong_selector_is_refused(selector: Object, words: str) -> None:
    with pytest.raises(SpecError, match=rf"^{words}.* - at `\$.spec.engine.selector"):
        convert({"engine": {"selector": {"labels": {"app": "vllm"}} | selector}})


def test_a_pool_of_its_own_engines_names_its_model() -> None:
    with pytest.raises(SpecError, match=r"^Name the model.* - at `\$.spec.model.name`$"):
        convert({"replicas": 1})


def test_an_implementation_of_the_extension_gets_the_owners_labels_and_port() -> None:
    objects = made(at_port(9000), Observed(uid="u", generation=1, kinds=EXTENSION)).objects or ()
    (extension,) = [o["spec"] for o in objects if o["kind"] == "InferencePool"]
    assert extension["selector"] == {"matchLabels": {"app": "vllm"}}
    assert extension["targetPorts"] == [{"number": 9000}]


def test_several_ports_are_several_backends_of_one_service() -> None:
    pool = at_port(9000)
    pool["engine"]["selector"]["furtherPorts"] = [9001, "rank-2"]
    objects = made(pool, Observed(uid="u", generation=1, kinds=ENVOY)).objects or ()
    (service,) = [o["spec"] for o in objects if (o["kind"], o["metadata"]["name"]) == ("Service", "p")]
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [
        (8000, 9000),
        (8001, 9001),
        (8002, "rank-2"),
    ]
    (route,) = [o["spec"] for o in objects if o["kind"] == "HTTPRoute"]
    assert route["rules"][0]["backendRefs"] == [{"name": "p", "port": port} for port in (8000, 8001, 8002)]


def test_the_extension_gets_all_ports() -> None:
    pool = at_port(9000)
    pool["engine"]["selector"]["furtherPorts"] = [9001]
    objects = made(pool, Observed(uid="u", generation=1, kinds=EXTENSION)).objects or ()
    (extension,) = [o["spec"] for o in objects if o["kind"] == "InferencePool"]
    assert extension["targetPorts"] == [{"number": 9000}, {"number": 9001}]


def test_the_extension_needs_the_number_of_a_port() -> None:
    plan = made(at_port("http"), Observed(uid="u", generation=1, kinds=EXTENSION))
    assert plan.objects is None
    (accepted,) = [c for c in plan.status.conditions if c.type == "Accepted"]
    assert "at `$.spec.engine.selector.port`" in accepted.message


def said(stats: GatewayStats | None, **more: Any) -> dict[str, tuple[str, str, str]]:
    status = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}
    gateway = {
        "kind": "Deployment",
        "metadata": {"name": "p-gateway", "namespace": "ns", "generation": 1},
        "spec": {"replicas": 1},
        "status": status,
    }
    children = {Key("Deployment", "ns", "p-gateway"): gateway}
    spec = SELECTED | {"gateway": {"mode": "none"}}
    plan = made(spec, Observed(uid="u", generation=1, gateway=stats, children=children, **more))
    return {c.type: (c.status, c.reason, c.message) for c in plan.status.conditions}


def test_before_a_gateway_tells_nothing_is_known() -> None:
    told = said(None)
    assert told["EnginesReady"][:2] == ("False", "WaitingForEngines")
    assert "`perilune doctor -n ns p`" in told["EnginesReady"][2]
    assert "RoutingExact" not in told


def test_a_pool_is_ready_with_any_engine_and_says_what_is_missing() -> None:
    stats = GatewayStats(
        sessions=0,
        hit_ratio=None,
        ready_at={"10.0.0.1": 1.0, "10.0.0.2": 0.0},
        findings={"no_transfer": 2, "no_events": 1},
    )
    told = said(stats)
    assert told["EnginesReady"] == ("True", "Available", "1 of 2 selected engines are ready.")
    assert told["Ready"][0] == "True"
    assert told["Reconciling"][0] == "False"
    truth, reason, words = told["RoutingExact"]
    assert (truth, reason) == ("False", "EnginesLack")
    assert words.index("1: no_events") < words.index("--kv-events-config") < words.index("2: no_transfer")
    assert words.endswith("`perilune doctor -n ns p` tells which engines.")


def test_routing_is_exact_where_only_a_transfer_is_missing() -> None:
    told = said(
        GatewayStats(sessions=0, hit_ratio=None, ready_at={"10.0.0.1": 1.0}, findings={"no_transfer": 1})
    )
    assert told["RoutingExact"][:2] == ("True", "EnginesTellAll")
    assert "mooncake.transfer" in told["RoutingExact"][2]


def test_no_engine_and_no_ready_engine_differ() -> None:
    assert (
        "No started pod has the labels" in said(GatewayStats(sessions=0, hit_ratio=None))["EnginesReady"][2]
    )
    none = said(GatewayStats(sessions=0, hit_ratio=None, ready_at={"10.0.0.1": 0.0}))
    assert none["EnginesReady"] == ("False", "WaitingForEngines", "0 of 1 selected engines are ready.")
    assert none["Ready"][0] == "False"
