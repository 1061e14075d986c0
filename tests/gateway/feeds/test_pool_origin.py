"""A standard InferencePool and the InferenceObjectives beside it, as the document of a pool."""

from typing import Any

import pytest

from perilune_api.pool import EngineTls, Selector, SpecError, parse
from perilune_gateway.feeds.pool_origin import document, inference_pool, pickers_routing, priorities

Object = dict[str, Any]


def pool(**spec: Any) -> Object:
    usual = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 9000}]}
    return {"metadata": {"name": "qwen", "namespace": "ns"}, "spec": usual | spec}


def objective(name: str, pool: str = "qwen", priority: int | None = None) -> Object:
    given = {} if priority is None else {"priority": priority}
    return {"metadata": {"name": name}, "spec": {"poolRef": {"name": pool}, **given}}


def test_an_inference_pool_selects_its_pods_and_names_no_model() -> None:
    made = document(pool(), [objective("chat", priority=2), objective("other", "another", 5)])
    assert (made.metadata.name, made.metadata.namespace, made.spec.model.name) == ("qwen", "ns", "")
    assert made.spec.engine.selector == Selector(labels={"app": "vllm"}, port=9000)
    assert made.spec.routing.limits.objectives == {"chat": 2}
    assert made.spec.routing.fallbacks == 0


def test_several_target_ports_are_several_engines_of_each_pod() -> None:
    made = document(pool(targetPorts=[{"number": 8000}, {"number": 8001}, {"number": 8002}]), [])
    assert made.spec.engine.selector == Selector(
        labels={"app": "vllm"}, port=8000, further_ports=(8001, 8002)
    )


def test_priorities_of_any_scale_become_levels() -> None:
    given = [objective("urgent", priority=100), objective("batch", priority=-100), objective("plain")]
    assert priorities("qwen", given) == {"urgent": 8, "batch": -8, "plain": 0}


def test_a_picker_routes_as_it_is_told_and_objectives_of_the_cluster_count_before() -> None:
    given = pickers_routing(
        "routing:\n  policy: {name: llm_d}\n  limits: {objectives: {chat: 1, own: 3}, maxPendingSeconds: 9}\n"
    )
    routing = document(pool(), [objective("chat", priority=2)], given).spec.routing
    assert (routing.policy.name, routing.fallbacks, routing.limits.max_pending_seconds) == ("llm_d", 0, 9)
    assert routing.limits.objectives == {"chat": 2, "own": 3}


@pytest.mark.parametrize(("text", "fallbacks"), [("", 0), ("routing: {}", 0), ("routing: {fallbacks: 3}", 3)])
def test_a_picker_names_one_endpoint_unless_told_otherwise(text: str, fallbacks: int) -> None:
    assert pickers_routing(text).fallbacks == fallbacks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("routing: {polcy: {}}", r"polcy.*\$\.spec\.routing", id="typo"),
        pytest.param("model: {name: m}", "Only the field routing counts", id="another field"),
        pytest.param("endpoints: []\nrouting: [", "Not YAML", id="no YAML"),
    ],
)
def test_a_wrong_routing_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        pickers_routing(text)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        pytest.param({"selector": {}}, "$.spec", id="no labels"),
        pytest.param({"targetPorts": []}, "$.spec", id="no port"),
        pytest.param({"appProtocol": "kubernetes.io/h2c"}, "$.spec.appProtocol", id="HTTP/2 alone"),
    ],
)
def test_one_that_cannot_be_served_is_refused_by_name(spec: Object, field: str) -> None:
    with pytest.raises(SpecError, match=field.replace("$", r"\$")):
        document(pool(**spec), [])


def test_one_that_says_that_its_engines_speak_http_1_is_served() -> None:
    assert document(pool(appProtocol="http"), []) == document(pool(), [])


def test_engines_that_speak_https_are_asked_so() -> None:
    tls = EngineTls("/engine-ca/ca.crt", "vllm.example")
    origin = inference_pool("ns", "qwen", tls=tls)
    assert parse(origin.text([[pool()], [], []])).spec.engine.tls == tls


def test_the_document_is_made_of_the_pool_and_both_kinds_of_objectives() -> None:
    origin = inference_pool("ns", "qwen")
    assert [c.path for c in origin.collections if not c.optional] == [
        "/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools"
    ]
    assert origin.text([[], [], []]) == ""
    text = origin.text([[pool()], [objective("a", priority=1)], [objective("b", priority=-1)]])
    assert parse(text).spec.routing.limits.objectives == {"a": 1, "b": -1}
