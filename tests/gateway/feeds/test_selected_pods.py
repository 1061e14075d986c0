"""Pods that others run, as endpoints: by their arguments, annotations and labels."""

from typing import Any

import pytest
from msgspec.structs import replace

from perilune_api.findings import EVENTS_FLAG
from perilune_api.pool import (
    EndpointSpec,
    Engine,
    HashAlgorithm,
    Lora,
    Metadata,
    Model,
    Pool,
    Role,
    Selector,
    Spec,
    SpecError,
)
from perilune_gateway.feeds.selected_pods import Published, completed, endpoints, published, told_by
from perilune_gateway.model.engine_facts import EngineFacts, ServedModel

Object = dict[str, Any]
SELECTOR = Selector(labels={"app": "vllm"})
EVENTS = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5600"}'
REPLAYED = '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5558", "topic": "kv@$(POD_IP)@m"}'


def pod(*args: str, command: tuple[str, ...] = (), ready: bool = True, **meta: Any) -> Object:
    engine = {"name": "vllm", "command": list(command), "args": list(args)}
    engine["ports"] = [{"name": "api", "containerPort": 8200}]
    return {
        "metadata": {"name": "a", "uid": "u", "labels": {"app": "vllm"}, **meta},
        "spec": {"nodeName": "n1", "containers": [{"name": "sidecar"}, engine]},
        "status": {
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "vllm", "started": True}],
        },
    }


def with_env(pod: Object, **values: str) -> Object:
    """Return a pod whose engine has these variables, and one whose value another object has."""
    elsewhere = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    pod["spec"]["containers"][1]["env"] = [
        elsewhere,
        *({"name": name, "value": value} for name, value in values.items()),
    ]
    return pod


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param(pod("--model", "m"), Published(), id="nothing said"),
        pytest.param(pod("--kv-events-config", EVENTS), Published(port=5600), id="argument"),
        pytest.param(
            pod("--speculative-config", '{"model":"a/sglang-EAGLE3"}', "--kv-events-config", EVENTS),
            Published(port=5600),
            id="a model called after SGLang",
        ),
        pytest.param(pod(f"--kv-events-config={EVENTS}"), Published(port=5600), id="argument with ="),
        pytest.param(
            pod("--kv-events-config", REPLAYED), Published(port=5557, replay_port=5558), id="vLLM's defaults"
        ),
        pytest.param(
            pod(f"vllm serve m --port 8000 {EVENTS_FLAG} --seed 1", command=("sh", "-c")),
            Published(port=5557, replay_port=5558),
            id="a shell's line",
        ),
        pytest.param(
            pod('exec vllm serve m --kv_events_config "{\\"enable_kv_cache_events\\":true}"'),
            Published(port=5557),
            id="a shell's line with escaped quotes",
        ),
        pytest.param(
            with_env(pod('eval "vllm serve m ${VLLM_ADDITIONAL_ARGS}"'), VLLM_ADDITIONAL_ARGS=EVENTS_FLAG),
            Published(port=5557, replay_port=5558),
            id="a variable of a shell's line, as KServe has it",
        ),
        pytest.param(
            with_env(pod("--kv-events-config=$(EVENTS)", "-dp", "$RANKS"), EVENTS=EVENTS, RANKS="2"),
            Published(port=5600, ranks=2),
            id="variables of arguments",
        ),
        pytest.param(
            with_env(pod("$X" * 5_000, "--kv-events-config=$Y"), X="x" * 10_000, Y=EVENTS + " " * 20_000),
            Published(),
            id="variables without end",
        ),
        pytest.param(
            pod(
                "--kv-events-config.enable_kv_cache_events",
                "True",
                "--kv-events-config.endpoint=tcp://*:5570",
            ),
            Published(port=5570),
            id="dotted",
        ),
        pytest.param(
            pod("--kv-events-config", '{"enable_kv_cache_events":true,"endpoint":"tcp://epp:5557"}'),
            Published(elsewhere="tcp://epp:5557"),
            id="sent elsewhere",
        ),
        pytest.param(pod("--kv-events-config", '{"endpoint":"tcp://*:5557"}'), Published(), id="not enabled"),
        pytest.param(pod("--kv-events-config", "{broken"), Published(), id="no JSON"),
        pytest.param(
            pod("--kv-events-config", f'{{"a":{"[" * 5_000}{"]" * 5_000}}}'), Published(), id="nested deeply"
        ),
        pytest.param(
            pod("--kv-events-config", EVENTS, "--data-parallel-size", "8", "--data-parallel-size-local=2"),
            Published(port=5600, ranks=8, per_pod=2),
            id="ranks, of which this pod runs two",
        ),
        pytest.param(
            pod("--kv-events-config", EVENTS, "-dp", "8", "-dpl=2", "--data-parallel-start-rank", "4"),
            Published(port=5600, ranks=2, first_rank=4),
            id="its own ranks from the fifth on",
        ),
        pytest.param(
            pod("--kv-events-config", EVENTS, "-dp", "8", "-dpl=2", "--data-parallel-hybrid-lb"),
            Published(port=5600, ranks=2),
            id="its own ranks, the first ones",
        ),
        pytest.param(
            pod(
                *("--kv-events-config", EVENTS, "-dp", "8", "-dpl=2"),
                "--data-parallel-start-rank=$((LWS_WORKER_INDEX * 2))",
                labels={"leaderworkerset.sigs.k8s.io/worker-index": "3"},
            ),
            Published(port=5600, ranks=2, first_rank=6),
            id="its own ranks, as its group numbers it",
        ),
        pytest.param(
            pod("--kv-events-config", EVENTS, "-dp=8", "-dpl=$LOCAL", "-dpr=$START"),
            Published(),
            id="its own ranks, computed by a shell",
        ),
        pytest.param(
            pod("--kv-events-config", EVENTS, "-dp", "8", "--data-parallel-rank=3"),
            Published(port=5600, first_rank=3),
            id="one rank",
        ),
        pytest.param(
            pod(
                *("--kv-events-config", EVENTS, "-dp", "8", "--data-parallel-external-lb", "--nnodes=8"),
                labels={"leaderworkerset.sigs.k8s.io/worker-index": "5"},
            ),
            Published(port=5600, first_rank=5),
            id="one rank, by its number in the group",
        ),
        pytest.param(pod("-dp", "2"), Published(ranks=2), id="ranks, short"),
        pytest.param(
            pod(labels={"model.aibrix.ai/kv-events-enabled": "true"}),
            Published(port=5557, replay_port=5558),
            id="AIBrix",
        ),
        pytest.param(
            pod(annotations={"perilune.dev/kv-events-port": "5557", "perilune.dev/ranks": "2"}),
            Published(port=5557, replay_port=5559, ranks=2),
            id="our annotations",
        ),
    ],
)
def test_where_a_pod_publishes_its_events(given: Object, told: Published) -> None:
    assert published(given, SELECTOR) == told


def test_the_selector_itself_has_the_last_word_on_events() -> None:
    selector = Selector(labels={"app": "vllm"}, events_port=5700, replay_port=5800)
    assert published(pod("--kv-events-config", EVENTS), selector) == Published(port=5700, replay_port=5800)


@pytest.mark.parametrize(
    ("given", "port", "expected"),
    [
        pytest.param(
            pod(), 8000, EndpointSpec(address="10.0.0.1:8000", node="n1", instance="u"), id="number"
        ),
        pytest.param(pod(), "api", EndpointSpec(address="10.0.0.1:8200", node="n1", instance="u"), id="name"),
        pytest.param(pod(), "http", None, id="no such port"),
        pytest.param(
            pod("--kv-events-config", REPLAYED, "-dp=2"),
            8000,
            EndpointSpec(
                address="10.0.0.1:8000",
                node="n1",
                instance="u",
                events=("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
                replay=("tcp://10.0.0.1:5558", "tcp://10.0.0.1:5559"),
            ),
            id="events of two ranks",
        ),
        pytest.param(
            pod("--kv-events-config", REPLAYED, "-dp=6", "-dpl=2", "-dpr=4"),
            8000,
            EndpointSpec(
                address="10.0.0.1:8000",
                node="n1",
                instance="u",
                events=("tcp://10.0.0.1:5561", "tcp://10.0.0.1:5562"),
                replay=("tcp://10.0.0.1:5562", "tcp://10.0.0.1:5563"),
                first_rank=4,
            ),
            id="the last two of six ranks",
        ),
        pytest.param(
            pod("--kv-events-config", REPLAYED, "-dp=4", "-dpl=2", "--headless", "-dpr=2"),
            8000,
            None,
            id="ranks of another pod's server",
        ),
        pytest.param(
            pod(
                "-dp=2",
                "--kv-events-config",
                '{"enable_kv_cache_events":true,"endpoint":"tcp://*:65535","replay_endpoint":"tcp://*:5558"}',
            ),
            8000,
            EndpointSpec(address="10.0.0.1:8000", node="n1", instance="u"),
            id="events above the last port",
        ),
        pytest.param(
            pod(labels={"llm-d.ai/role": "decode"}),
            8000,
            EndpointSpec(address="10.0.0.1:8000", node="n1", instance="u", role=Role.DECODE),
            id="llm-d's decode",
        ),
        pytest.param(
            pod(labels={"llm-d.ai/role": "both"}),
            8000,
            EndpointSpec(address="10.0.0.1:8000", node="n1", instance="u"),
            id="KServe's both",
        ),
        pytest.param(
            pod(ready=False),
            8000,
            EndpointSpec(address="10.0.0.1:8000", node="n1", instance="u", ready=False),
            id="not ready any more",
        ),
    ],
)
def test_a_selected_pod_is_an_endpoint(given: Object, port: int | str, expected: EndpointSpec | None) -> None:
    found = () if expected is None else (expected,)
    assert endpoints(given, Selector(labels={"app": "vllm"}, port=port)) == found


@pytest.mark.parametrize("role", ["prefill", "encode", "encode-prefill"])
def test_a_pod_that_answers_no_client_is_no_endpoint(role: str) -> None:
    assert endpoints(pod(labels={"llm-d.ai/role": role}), SELECTOR) == ()


@pytest.mark.parametrize("role", ["both", "prefill-decode", "encode-prefill-decode"])
def test_a_pod_that_does_everything_is_one(role: str) -> None:
    (found,) = endpoints(pod(labels={"llm-d.ai/role": role}), SELECTOR)
    assert found.role is Role.BOTH


def test_each_http_port_of_a_pod_is_an_engine_with_an_events_port_of_its_own() -> None:
    selector = Selector(labels={"app": "vllm"}, port="api", further_ports=(8201, 8202))
    found = endpoints(pod("--kv-events-config", REPLAYED, "--data-parallel-size", "3"), selector)
    assert [(e.address, e.events, e.replay) for e in found] == [
        ("10.0.0.1:8200", ("tcp://10.0.0.1:5557",), ("tcp://10.0.0.1:5558",)),
        ("10.0.0.1:8201", ("tcp://10.0.0.1:5558",), ("tcp://10.0.0.1:5559",)),
        ("10.0.0.1:8202", ("tcp://10.0.0.1:5559",), ("tcp://10.0.0.1:5560",)),
    ]
    assert {e.instance for e in found} == {"u"}


def test_a_port_whose_name_a_pod_lacks_is_no_engine() -> None:
    found = endpoints(pod(), Selector(labels={"app": "vllm"}, port=8000, further_ports=("http", "api")))
    assert [e.address for e in found] == ["10.0.0.1:8000", "10.0.0.1:8200"]


TOLD = EngineFacts(
    models=(
        ServedModel("m", root="/models/m", context_tokens=4096),
        ServedModel("chat", root="/models/m", context_tokens=4096),
        ServedModel("tuned", parent="m", root="/loras/tuned"),
    ),
    block_size=64,
    kv_tokens=6400,
    hash_algorithm="sha256_cbor",
)


def document(**model: Any) -> Pool:
    return Pool(Metadata("p"), Spec(Model(**model), Engine(selector=SELECTOR)))


AT = EndpointSpec(address="10.0.0.1:8000")
PUBLISHES = EngineFacts(events=("tcp://*:5557", "tcp://*:5558"), replay=("tcp://*:5560", "tcp://*:5561"))


@pytest.mark.parametrize(
    ("known", "told", "events", "replay"),
    [
        pytest.param(AT, PUBLISHES, (5557, 5558), (5560, 5561), id="each rank"),
        pytest.param(AT, EngineFacts(events=("tcp://*:7",)), (7,), (), id="no replay"),
        pytest.param(AT, EngineFacts(events=("tcp://10.0.0.1:7",)), (7,), (), id="its own address"),
        pytest.param(AT, EngineFacts(events=("tcp://collector:5557",)), (), (), id="it sends them elsewhere"),
        pytest.param(AT, EngineFacts(events=("tcp://*:x",)), (), (), id="no port"),
        pytest.param(AT, EngineFacts(events=()), (), (), id="none"),
        pytest.param(AT, EngineFacts(), (), (), id="not told"),
        pytest.param(replace(AT, events=("tcp://10.0.0.1:1",)), PUBLISHES, (1,), (), id="known before"),
    ],
)
def test_an_engine_says_where_it_publishes_events(
    known: EndpointSpec, told: EngineFacts, events: tuple[int, ...], replay: tuple[int, ...]
) -> None:
    made = told_by(known, told)
    assert made.events == tuple(f"tcp://10.0.0.1:{port}" for port in events)
    assert made.replay == tuple(f"tcp://10.0.0.1:{port}" for port in replay)


def test_what_the_engines_tell_completes_the_document() -> None:
    spec = completed(document(), TOLD).spec
    assert (spec.model.name, spec.model.aliases) == ("m", ("chat",))
    assert spec.model.loras == (Lora("tuned", "/loras/tuned"),)
    assert (spec.model.context_tokens, spec.engine.block_size, spec.engine.kv_pool_tokens) == (4096, 64, 6400)
    assert spec.engine.hashing.algorithm is HashAlgorithm.SHA256_CBOR


def test_what_the_document_says_itself_stays() -> None:
    spec = completed(document(name="chat", context_tokens=1000, loras=(Lora("tuned", "/mine"),)), TOLD).spec
    assert (spec.model.name, spec.model.aliases, spec.model.context_tokens) == ("chat", ("m",), 1000)
    assert spec.model.loras == (Lora("tuned", "/mine"),)


@pytest.mark.parametrize(
    ("model", "told", "words"),
    [
        pytest.param({"name": "other"}, TOLD, "The engines serve chat, m, not other", id="another model"),
        pytest.param(
            {}, EngineFacts(trouble="/v1/models answers 401"), "/v1/models answers 401", id="silent"
        ),
    ],
)
def test_an_engine_that_does_not_fit_completes_nothing(model: Object, told: EngineFacts, words: str) -> None:
    with pytest.raises(SpecError, match=f"^{words}.* - at `\\$.spec.model.name`$"):
        completed(document(**model), told)
