import re
from pathlib import Path
from typing import Any

import fast_yaml
import pytest

from perilune_api import pool
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.document import pool_document
from perilune_api.inference_pool.mooncake import Transfer
from perilune_api.policies import PolicyName
from perilune_api.pool import SpecError
from perilune_gateway.policy import POLICIES

ROOT = Path(__file__).parents[2]
EXAMPLES = ["smallest", "store", "topology"]


def spec(**fields: object) -> dict[str, Any]:
    return {"model": {"name": "m"}, **fields}


def test_the_smallest_pool_is_ten_lines() -> None:
    lines = (ROOT / "examples/smallest.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= 10
    made = convert(fast_yaml.load("\n".join(lines))["spec"])
    assert made.gateway.replicas == 1, "and one gateway, though two are the default"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_accepted(name: str) -> None:
    body = fast_yaml.load((ROOT / f"examples/{name}.yaml").read_text())
    made = convert(body["spec"])
    assert made.gateway.parent is not None


@pytest.mark.parametrize(
    "hidden",
    [pytest.param(False, id="as it is"), pytest.param(True, id="with all that is commented out")],
)
def test_the_example_of_a_pool_without_kubernetes_is_one(hidden: bool) -> None:
    text = (ROOT / "examples/local/pool.yaml").read_text()
    if hidden:
        text, number = re.subn(r"^( +)# (\w+: )", r"\1\2", text, flags=re.MULTILINE)
        assert number > 8
    made = pool.parse(text)
    assert len(made.spec.endpoints) == 2
    assert bool(made.spec.model.loras) is hidden


def test_every_policy_that_a_gateway_can_carry_out_may_be_named() -> None:
    assert sorted(PolicyName) == sorted(POLICIES)


def test_the_gateways_document_says_what_the_spec_says() -> None:
    made = convert(
        spec(
            engine={"blockSize": 32, "tensorParallel": 2},
            routing={"policy": {"name": "sticky"}},
            mooncake={"store": {"enabled": True}},
        )
    )
    document = pool_document("p", "ns", made, pool.Topology(nodes={"a": pool.NodePlace("r1")}))
    assert pool.parse(pool.dump(document)) == document
    assert document.metadata == pool.Metadata("p", "ns")
    assert (document.spec.engine.block_size, document.spec.engine.store) == (32, True)
    assert document.spec.routing.policy.name == "sticky"
    assert document.spec.topology.nodes == {"a": pool.NodePlace("r1")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({}, "Name the model, as requests do", id="no model"),
        pytest.param(spec(replicas=-1), ">= 0 - at `$.spec.replicas`", id="range"),
        pytest.param(
            spec(mooncake={"transfer": "handoff"}, gateway={"replicas": 0}),
            "gateway.replicas is 0 - at `$.spec.mooncake.transfer`",
            id="nobody who says which KV goes where",
        ),
        pytest.param(
            spec(engine={"startupSeconds": 86_401}), "<= 86400", id="more seconds than Kubernetes counts"
        ),
        pytest.param(
            spec(engine={"rdmaResource": "my nic"}),
            "at `$.spec.engine.rdmaResource`",
            id="no resource's name",
        ),
        pytest.param(
            spec(engine={"args": ["--seed=1", "--block-size=32"]}),
            "The operator sets --block-size itself, from the spec - at `$.spec.engine.args[1]`",
            id="an argument that the spec already says",
        ),
        pytest.param(
            spec(engine={"args": ["--kv_events_config.topic=x"]}),
            "The operator sets --kv-events-config itself",
            id="an argument as vLLM also spells it",
        ),
        pytest.param(
            spec(engine={"args": ["-dp", "2"]}), "engine.dataParallel sets", id="ranks by an argument"
        ),
        pytest.param(
            spec(engine={"args": ["--no-enable-prefix-caching"]}),
            "The operator sets --enable-prefix-caching itself",
            id="an argument's contrary",
        ),
        pytest.param(
            spec(engine={"args": ["--no-enable-prefix", "--seed=1"]}),
            "The operator sets --enable-prefix-caching itself",
            id="its abbreviation",
        ),
        pytest.param(
            spec(engine={"args": ["--seed", "-1", "--disable_log-stat"]}),
            "--disable-log-stats is not possible: without metrics gateways know no engine's load, and engines"
            " never drain - at `$.spec.engine.args[2]`",
            id="an abbreviation",
        ),
        pytest.param(
            spec(engine={"args": ["-n2"]}),
            "-n is not possible: the operator makes",
            id="a letter and its number",
        ),
        pytest.param(
            spec(gateway={"args": ["--adm=0.0.0.0:1"]}),
            "The operator sets --admin itself, from the spec - at `$.spec.gateway.args[0]`",
            id="a gateway's argument, abbreviated",
        ),
        pytest.param(
            spec(engine={"args": ["--data-parallel-size-local=2"]}),
            "engine.dataParallel sets",
            id="engines within an engine, otherwise",
        ),
        pytest.param(
            spec(engine={"dataParallel": 2, "tensorParallel": 8, "pipelineParallel": 2}),
            "A data-parallel rank of 16 GPUs spans nodes, which have 8: make each rank an endpoint,"
            " by replicas - at `$.spec.engine.dataParallel`",
            id="ranks that span nodes",
        ),
        pytest.param(
            spec(engine={"dataParallel": 4, "tensorParallel": 4, "args": ["--api-server-count=2"]}),
            "An endpoint that spans nodes has one API server",
            id="an argument that pods without a server do not start with",
        ),
        pytest.param(
            spec(mooncake={"master": {"replicas": 2}}),
            "Masters elect their leader in etcd: name its addresses in mooncake.master.etcd, or have one"
            " - at `$.spec.mooncake.master.replicas`",
            id="masters that cannot elect a leader",
        ),
        pytest.param(
            spec(mooncake={"master": {"args": ["--ha_backend_type=k8s"]}}),
            "Mooncake's packages (0.3.13) answer UNAVAILABLE_IN_CURRENT_MODE to k8s, and elect in etcd alone:"
            " set mooncake.master.etcd - at `$.spec.mooncake.master.args[0]`",
            id="a leader elected elsewhere than in etcd",
        ),
        pytest.param(
            spec(mooncake={"master": {"args": ["-v=1", "-enable_ha"]}}),
            "mooncake.master.etcd sets --enable_ha: leave it out - at `$.spec.mooncake.master.args[1]`",
            id="a leader that engines do not know of",
        ),
        pytest.param(
            spec(engine={"args": ["--seed=1", "--disable-log-stats"]}),
            "--disable-log-stats is not possible: without metrics gateways know no engine's load, and engines"
            " never drain - at `$.spec.engine.args[1]`",
            id="no metrics",
        ),
        pytest.param(
            spec(engine={"args": ["--ssl_keyfile=/k"]}),
            "--ssl-keyfile is not possible: set engine.tls, of which Envoy, gateways and probes know too"
            " - at `$.spec.engine.args[0]`",
            id="TLS",
        ),
        pytest.param(
            spec(engine={"args": ["-pcp", "2"]}),
            "more contexts need more of them",
            id="more GPUs than it gets",
        ),
        pytest.param(
            spec(engine={"args": ["--nnodes=2"]}),
            "set engine.pipelineParallel - at `$.spec.engine.args[0]`",
            id="a group of its own",
        ),
        pytest.param(
            spec(model={"name": "m", "aliases": ["a", "--port=1"]}),
            "vLLM would take '--port=1' for a flag - at `$.spec.model.aliases[1]`",
            id="a name like a flag",
        ),
        pytest.param(
            spec(model={"name": "m", "loras": [{"name": "a=b", "path": "/a"}]}),
            "vLLM cannot tell 'a=b' from a path - at `$.spec.model.loras[0].name`",
            id="a name and a path",
        ),
        pytest.param(
            spec(engine={"pipelineParallel": 9, "args": ["--api-server-count=2"]}),
            "An endpoint that spans nodes has one API server - at `$.spec.engine.args[0]`",
            id="servers of a group",
        ),
        *(
            pytest.param(
                spec(mooncake={"store": {"enabled": True, field: size}}),
                f"at `$.spec.mooncake.store.{field}`",
                id=f"{field} {size}",
            )
            for field, size in (("segmentSize", "100m"), ("localBufferSize", "4000m"), ("segmentSize", "0.5"))
        ),
        pytest.param(
            spec(mooncake={"offloadSize": "64m"}), "at `$.spec.mooncake.offloadSize`", id="a tier of no bytes"
        ),
        pytest.param(
            spec(engine={"resources": {"limits": {"memory": "512m"}}}),
            "'512m' is a fraction of a byte; M and Mi stand for millions"
            " - at `$.spec.engine.resources.limits.memory`",
            id="memory of no bytes",
        ),
        pytest.param(
            spec(
                gateway={
                    "podTemplate": {"spec": {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "64m"}}]}}
                }
            ),
            "at `$.spec.gateway.podTemplate.spec.volumes[0].emptyDir.sizeLimit`",
            id="a volume of no bytes",
        ),
        pytest.param(
            spec(gateway={"args": ["--seed=1", "--admin=0.0.0.0:1"]}),
            "The operator sets --admin itself, from the spec - at `$.spec.gateway.args[1]`",
            id="a gateway's argument",
        ),
        pytest.param(
            spec(engine={"env": [{"name": "A"}, {"name": "A"}]}),
            "A is given twice - at `$.spec.engine.env[1]`",
            id="a variable twice",
        ),
        pytest.param(
            spec(engine={"env": [{"name": "PYTHONHASHSEED", "value": "1"}]}),
            "engine.hashing.seed instead - at `$.spec.engine.env[0]`",
            id="the hash seed as a variable",
        ),
        pytest.param(
            spec(engine={"hashing": {"seed": "blue"}}),
            "'blue' is no seed: Python takes 0 to 4294967295 - at `$.spec.engine.hashing.seed`",
            id="a seed with which Python does not start",
        ),
        pytest.param(
            spec(model={"name": "m", "loras": [{"name": "a", "path": "/a"}, {"name": "b"}]}),
            "vLLM needs the path of b - at `$.spec.model.loras[1].path`",
            id="an adapter from nowhere",
        ),
        pytest.param(
            spec(engine={"resources": {"limits": {"nvidia.com/gpu": 4}}}),
            "An engine gets tensorParallel x pipelineParallel GPUs, none are given here"
            " - at `$.spec.engine.resources.limits.nvidia.com/gpu`",
            id="GPUs beside those that follow from the spec",
        ),
        pytest.param(
            spec(engine={"podTemplate": {"metadata": {"labels": {"perilune.dev/component": "x"}}}}),
            "The operator sets perilune.dev/component itself"
            " - at `$.spec.engine.podTemplate.metadata.labels.perilune.dev/component`",
            id="a label by which pods are known",
        ),
        pytest.param(
            spec(engine={"resources": {"requests": {"memory": "80 GB"}}}),
            "'80 GB' is not a quantity, such as 500m, 2 or 80Gi"
            " - at `$.spec.engine.resources.requests.memory`",
            id="no quantity",
        ),
        pytest.param(
            spec(gateway={"resources": {"limits": {"cpu": -1}}}),
            "-1 is below 0 - at `$.spec.gateway.resources.limits.cpu`",
            id="a negative one",
        ),
        pytest.param(
            spec(mooncake={"master": {"resources": {"limits": {"my gpu": 1}}}}),
            "'my gpu' is not a resource name - at `$.spec.mooncake.master.resources.limits.my gpu`",
            id="no resource",
        ),
        pytest.param(
            spec(engine={"podTemplate": {"metadata": {"labels": {"team": "a b"}}}}),
            "'a b' is not a label value: at most 63 of letters, digits, - _ . - at "
            "`$.spec.engine.podTemplate.metadata.labels.team`",
            id="no label",
        ),
        pytest.param(
            spec(gateway={"podTemplate": {"metadata": {"annotations": {"a/b/c": "x"}}}}),
            "at `$.spec.gateway.podTemplate.metadata.annotations.a/b/c`",
            id="no annotation",
        ),
        pytest.param(
            spec(gateway={"podTemplate": {"metadata": {"annotations": {"inject": True}}}}),
            "True is not text: put it in quotes"
            " - at `$.spec.gateway.podTemplate.metadata.annotations.inject`",
            id="an annotation that is no text",
        ),
        pytest.param(
            spec(
                engine={
                    "podTemplate": {"spec": {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "big"}}]}}
                }
            ),
            "at `$.spec.engine.podTemplate.spec.volumes[0].emptyDir.sizeLimit`",
            id="a volume of no size",
        ),
        pytest.param(
            spec(
                engine={
                    "podTemplate": {
                        "spec": {"containers": [{"name": "s", "resources": {"limits": {"cpu": "x"}}}]}
                    }
                }
            ),
            "at `$.spec.engine.podTemplate.spec.containers[0].resources.limits.cpu`",
            id="a container of no size",
        ),
        pytest.param(spec(model={"name": "m", "aliases": ["m"]}), "'m' is given twice", id="alias"),
        pytest.param(
            spec(gateway={"mode": "envoyGateway"}), "at `$.spec.gateway.parent`", id="route to nowhere"
        ),
        pytest.param(
            spec(routing={"limits": {"decisionSeconds": 2}}),
            "Envoy waits 2 s for a decision, and limits.decisionSeconds are 2 s: make them less"
            " - at `$.spec.routing.limits.decisionSeconds`",
            id="a decision that Envoy does not wait for",
        ),
        pytest.param(
            spec(
                prefillReplicas=1,
                mooncake={"transfer": "handoff"},
                routing={"disaggregation": {"acceptSeconds": 0.75}},
            ),
            "limits.decisionSeconds + disaggregation.acceptSeconds are 2.25 s: make them less"
            " - at `$.spec.routing.disaggregation.acceptSeconds`",
            id="a prefill that Envoy does not wait for",
        ),
        pytest.param(
            spec(engine={"env": [{"name": "A", "value": "1", "valueFrom": {}}]}),
            "Either value or valueFrom - at `$.spec.engine.env[0]`",
            id="value from two places",
        ),
    ],
)
def test_errors_name_the_field(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        convert(given)
    assert message in str(error.value)


def test_a_field_of_a_newer_crd_is_ignored() -> None:
    """A typo never gets here: the API server refuses it (tests/operator/test_crd_server.py)."""
    newer = {"engine": {"pedals": 3, "hashing": {"seed": "1", "salt": "x"}}, "wings": {"number": 2}}
    assert convert(spec(**newer)) == convert(spec(engine={"hashing": {"seed": "1"}}))


def test_other_arguments_of_vllm_are_its_own_business() -> None:
    args = [
        "--max-num-seqs=64",
        "-q",
        "fp8",
        "-O3",
        "-ep",
        "--seed",
        "-1",
        "--no-async-scheduling",
        "--disable-cascade-attn",
    ]
    assert list(convert(spec(engine={"args": args})).engine.args) == args


def test_a_simulated_engine_has_flags_of_its_own() -> None:
    args = ["--time-scale=4", "--disable-log-stats"]
    assert convert(spec(engine={"kind": "simulated", "args": args})).mooncake.transfer is Transfer.NONE
    with pytest.raises(SpecError, match="The operator sets --block-size itself"):
        convert(spec(engine={"kind": "simulated", "args": ["--block-size=32"]}))


def test_a_server_of_shared_state_may_have_a_user() -> None:
    state = {"server": "rediss://gateway@state:6379/1", "passwordSecret": "state"}
    assert (
        convert({"model": {"name": "m"}, "gateway": {"state": state}}).gateway.state.server == state["server"]
    )


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"server": "state:6379"}, "$.spec.gateway.state.server"),
        ({"server": "redis://:password@state:6379"}, "$.spec.gateway.state.server"),
        ({"server": "redis://user:password@state:6379"}, "$.spec.gateway.state.server"),
        ({"server": "redis://state", "caSecret": "ca"}, "$.spec.gateway.state.caSecret"),
        ({"passwordSecret": "state"}, "$.spec.gateway.state.passwordSecret"),
        ({"caSecret": "ca"}, "$.spec.gateway.state.caSecret"),
    ],
)
def test_a_wrong_server_of_shared_state_is_named(state: dict[str, Any], says: str) -> None:
    """A password in the address would be readable by everyone who may read the pool."""
    with pytest.raises(SpecError) as error:
        convert({"model": {"name": "m"}, "gateway": {"state": state}})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tracing": {}}, "$.spec.gateway.tracing"),
        ({"tracing": {"endpoint": "collector:4318"}}, "$.spec.gateway.tracing.endpoint"),
        ({"tracing": {"endpoint": "http://user:secret@collector"}}, "$.spec.gateway.tracing.endpoint"),
        (
            {"tracing": {"endpoint": "http://collector:99999"}},
            "give http://HOST:PORT or https://HOST:PORT - at `$.spec.gateway.tracing.endpoint`",
        ),
        ({"tracing": {"endpoint": "http://[::"}}, "$.spec.gateway.tracing.endpoint"),
        ({"tracing": {"endpoint": "http://collector", "share": 1.5}}, "$.spec.gateway.tracing.share"),
        (
            {"tracing": {"endpoint": "http://collector"}, "args": ["--log-x", "--traces-share=1"]},
            "gateway.tracing sets --traces-share: leave it out - at `$.spec.gateway.args[1]`",
        ),
    ],
)
def test_wrong_tracing_is_named(given: dict[str, Any], says: str) -> None:
    """Gateways would not start with such arguments."""
    with pytest.raises(SpecError) as error:
        convert({"model": {"name": "m"}, "gateway": given})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param(
            {"gateway": {"serves": ["b"]}}, "failOpen to false - at `$.spec.gateway.failOpen`", id="open"
        ),
        pytest.param(
            {"gateway": {"serves": ["b"], "failOpen": False, "servedBy": "c"}},
            "$.spec.gateway.serves",
            id="both",
        ),
        pytest.param(
            {
                "gateway": {
                    "serves": ["b"],
                    "failOpen": False,
                    "mode": "inferenceExtension",
                    "parent": {"name": "g"},
                }
            },
            "$.spec.gateway.serves",
            id="the inference extension",
        ),
        pytest.param(
            {"gateway": {"servedBy": "c"}, "mooncake": {"transfer": "handoff"}},
            "$.spec.mooncake.transfer",
            id="hand-offs",
        ),
        pytest.param(
            {
                "gateway": {"servedBy": "c"},
                "scaling": {"minReplicas": 1, "maxReplicas": 2, "signal": "queueSeconds", "target": "1"},
            },
            "servedBy leaves none: use metric - at `$.spec.scaling.signal`",
            id="scaling by what the own gateway says",
        ),
    ],
)
def test_pools_that_share_a_gateway_cannot_have_everything(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as error:
        convert({"model": {"name": "m"}, **given})
    assert says in str(error.value)


def test_a_pool_that_is_served_by_another_has_no_gateway_of_its_own() -> None:
    gateway = {"servedBy": "c", "replicas": 3, "hostnames": ["a.example"], "parent": {"name": "g"}}
    made = convert({"model": {"name": "m"}, "gateway": gateway}).gateway
    assert (made.replicas, made.hostnames, made.parent and made.parent.name) == (0, (), "g")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"apiKey": {}}, "$.spec.engine.apiKey"),
        ({"apiKey": {"secret": ""}}, "$.spec.engine.apiKey.secret"),
        ({"apiKey": {"secret": "s", "key": "a/b"}}, "$.spec.engine.apiKey.key"),
        (
            {"apiKey": {"secret": "s"}, "env": [{"name": "VLLM_API_KEY", "value": "k"}]},
            "engine.apiKey sets VLLM_API_KEY: leave it out - at `$.spec.engine.env[0]`",
        ),
        ({"args": ["--api-key=k"]}, "The operator sets --api-key itself, from the spec"),
        ({"kind": "simulated", "args": ["--api-key=k"]}, "The operator sets --api-key itself, from the spec"),
    ],
)
def test_a_wrong_key_of_engines_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as error:
        convert({"model": {"name": "m"}, "engine": given})
    assert says in str(error.value)


def start_seconds(**fields: object) -> float:
    made = convert(spec(**fields))
    return pool_document("p", "ns", made, pool.Topology()).spec.routing.limits.start_seconds


def test_clients_of_a_pool_that_starts_on_demand_are_told_when_to_come_back() -> None:
    scaling = {"signal": "queueSeconds", "minReplicas": 0, "maxReplicas": 2}
    known = {"limits": {"startSeconds": 300}}
    assert start_seconds() == start_seconds(scaling={**scaling, "minReplicas": 1}) == 0.0
    assert start_seconds(scaling=scaling) == 60.0
    assert start_seconds(scaling=scaling, routing=known) == start_seconds(routing=known) == 300.0
