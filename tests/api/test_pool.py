from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from perilune_api import pool
from perilune_api.pool import EndpointSpec, Metadata, Model, Pool, Role, Spec, SpecError
from perilune_api.topology import Bandwidth, Level, Place

EXAMPLE = Path(__file__).parents[2] / "examples/local/pool.yaml"


def document(**spec: object) -> str:
    return yaml.safe_dump({"metadata": {"name": "p"}, "spec": {"model": {"name": "m"}, **spec}})


def test_the_example_loads_and_is_short() -> None:
    loaded = pool.load(EXAMPLE)
    assert loaded.spec.model.name == "qwen3-coder-30b"
    assert loaded.spec.topology.place("node-b") == Place("node-b", "r2", "s1")
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_the_example_of_roles_loads() -> None:
    loaded = pool.load(EXAMPLE.with_name("split.yaml"))
    assert [e.role for e in loaded.spec.endpoints] == [Role.PREFILL, Role.DECODE, Role.DECODE]


def test_the_smallest_document() -> None:
    assert pool.parse("metadata: {name: p}\nspec: {model: {name: m}}").spec.routing.policy.name == "perilune"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[", "", id="no YAML"),
        pytest.param("{}", "missing required field `metadata`", id="no metadata"),
        pytest.param(document(engine={"blockSize": 0}), ">= 1 - at `$.spec.engine.blockSize`", id="range"),
        pytest.param(document(engine={"blockSiz": 1}), "unknown field `blockSiz`", id="typo"),
        *(
            pytest.param(
                f"metadata: {{name: p}}\nspec: {{model: {{name: m}}, engine: {{hashing: {{seed: {seed}}}}}}}",
                "put a text into quotes - at `$.spec.engine.hashing.seed`",
                id=f"seed {seed[:12]}",
            )
            for seed in ("2026-13-01", "!!int abc", "9" * 5_000, "!!timestamp x")
        ),
        pytest.param(
            "metadata: {name: p}\nspec: {model: {name: m, path: 2026-13-01}}\nself: &self {again: *self}",
            "put a text into quotes - at `$.spec.model.path`",
            id="an alias of what it is a part of",
        ),
        pytest.param("[" * 100_000, "nested too deeply - in line 1", id="nested too deeply"),
        pytest.param(document(engine={"blockSize": "x"}), "at `$.spec.engine.blockSize`", id="type"),
        *(
            pytest.param(
                document(**{field: {}}),
                f"a list of endpoints, such as examples/local/pool.yaml - at `$.spec.{field}`",
                id=f"an InferencePool with {field}",
            )
            for field in ("gateway", "mooncake", "rollout", "scaling")
        ),
        pytest.param(
            document(engine={"hashing": {"algorithm": "md5"}}),
            "at `$.spec.engine.hashing.algorithm`",
            id="enum",
        ),
        pytest.param(
            document(endpoints=[{"address": "localhost:1"}]), "at `$.spec.endpoints[0].address`", id="no ip"
        ),
        *(
            pytest.param(
                document(endpoints=[{"address": address}]), "at `$.spec.endpoints[0].address`", id=address
            )
            for address in (
                "127.0.0.1:８０００",
                "１27.0.0.1:8000",
                "127.0.0.1:65536",
                "127.0.0.1:0",
                "127.0.0.256:1",
                "[::1::2]:1",
            )
        ),
        pytest.param(
            document(endpoints=[{"address": "127.0.0.1:1", "events": ["foo"]}]),
            "at `$.spec.endpoints[0].events[",
            id="no ZMQ address",
        ),
        pytest.param(
            document(endpoints=[{"address": "127.0.0.1:1", "role": "prefill"}, {"address": "127.0.0.1:2"}]),
            "needs the address of its connector's bootstrap page - at `$.spec.endpoints[0].bootstrap`",
            id="a prefill endpoint that cannot hand KV over",
        ),
        pytest.param(
            document(
                endpoints=[{"address": "127.0.0.1:1", "role": "prefill", "bootstrap": "127.0.0.1:8998"}]
            ),
            "All endpoints have the role prefill: give one the role decode or both - at `$.spec.endpoints`",
            id="nobody decodes",
        ),
        pytest.param(
            document(
                endpoints=[
                    {"address": "127.0.0.1:1", "bootstrap": "127.0.0.1:8998"},
                    {"address": "127.0.0.1:2", "peer": "127.0.0.1:5710"},
                ]
            ),
            "A pool's KV goes in one way: give bootstrap or peer - at `$.spec.endpoints[1].peer`",
            id="two ways of KV",
        ),
        pytest.param(
            document(endpoints=[{"address": "127.0.0.1:1", "peer": "127.0.0.1:99999"}]),
            "127.0.0.1:99999 is not a valid IP address and port - at `$.spec.endpoints[0].peer`",
            id="no port of a peer",
        ),
        pytest.param(
            document(endpoints=[{"address": "127.0.0.1:1"}] * 2),
            "listed twice - at `$.spec.endpoints[1].address`",
            id="double address",
        ),
        pytest.param(
            document(
                endpoints=[{"address": "127.0.0.1:1", "node": "x"}], topology={"nodes": {"a": {"rack": "r"}}}
            ),
            "Node 'x' is not one of ['a'] - at `$.spec.endpoints[0].node`",
            id="unknown node",
        ),
        pytest.param(
            document(endpoints=[{"address": "127.0.0.1:1", "replay": ["tcp://127.0.0.1:2"]}]),
            "at `$.spec.endpoints[0].replay`",
            id="replay without events",
        ),
        pytest.param(
            "spec:\n  model: {name: m\n",
            "Not YAML: did not find expected ',' or '}' - in line 3, column 1",
            id="no YAML",
        ),
        pytest.param(document(model={"name": "m", "aliases": ["m"]}), "'m' is given twice", id="alias"),
        pytest.param(
            document(routing={"policy": {"name": "static_pd"}}),
            "Unknown policy 'static_pd', Perilune's are conductor, dynamo",
            id="a policy of the simulator",
        ),
        pytest.param(
            document(routing={"policy": {"name": "least_bussy", "outside": {"least_busy": {}}}}),
            "outside: {least_bussy: {}} - at `$.spec.routing.policy.name`",
            id="a misspelt policy beside the block of another",
        ),
        pytest.param(
            document(
                routing={
                    "policy": {"name": "ear", "ear": {"cooldownSeconds": 30}},
                    "canary": {"policy": {"name": "ear", "outside": {"mine": {}}}},
                }
            ),
            "The canary is the pool's policy with the same parameters: remove it, or change one of them"
            " - at `$.spec.routing.canary.policy`",
            id="a canary that is the pool's policy",
        ),
        pytest.param(
            document(routing={"shadow": {"policies": ["ear", "sticky", "ear"]}}),
            "ear is listed twice: leave one out - at `$.spec.routing.shadow.policies[2]`",
            id="a shadow policy twice",
        ),
        pytest.param(
            document(routing={"policy": "ear"}),
            "Write `policy: {name: ear}`: a policy is an object - at `$.spec.routing.policy`",
            id="a policy as it was written before",
        ),
        pytest.param(
            document(routing={"params": {"leastGainSeconds": 1, "migrationLinkBytes": 1}}),
            "leastGainSeconds is now policy.perilune.leastGainSeconds; migrationLinkBytes is gone, since no"
            " gateway acted on it - at `$.spec.routing.params`",
            id="parameters as they were written before",
        ),
        *(
            pytest.param(
                document(routing={"policy": {"perilune": {"interferenceWeight": weight}}}),
                "at `$.spec.routing.policy.perilune.interferenceWeight`",
                id=f"weight {weight}",
            )
            for weight in (-1.0, float("inf"), float("nan"), 1e308)
        ),
    ],
)
def test_errors_name_the_field(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        pool.parse(text)
    assert message in str(error.value)


@given(st.builds(Model, name=st.text(min_size=1, max_size=9)), st.integers(1, 65535))
def test_dump_reads_back(model: Model, port: int) -> None:
    made = Pool(Metadata("p"), Spec(model, endpoints=(EndpointSpec(address=f"10.0.0.1:{port}"),)))
    assert pool.parse(pool.dump(made)) == made


def test_link_speed_follows_the_narrowest_common_level() -> None:
    topology = pool.load(EXAMPLE).spec.topology
    link = topology.link(topology.place("node-a"), topology.place("node-b"))
    assert (link.distance, link.bandwidth_bytes_per_s) == (Level.SPINE, Bandwidth().spine)
