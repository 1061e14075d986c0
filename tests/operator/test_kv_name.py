"""Which changes of a pool make its engines' KV mean something else, and where that is said."""

import json
from typing import Any

import pytest
from plans import made

from perilune_operator.observe.facts import Observed

Object = dict[str, Any]
BEFORE: Object = {
    "model": {"name": "m"},
    "engine": {"args": ["--seed=1", "--dtype", "bfloat16"]},
    "mooncake": {"transfer": "handoff", "store": {"enabled": True}},
}


def pod_of(spec: Object) -> Object:
    plan = made(spec, Observed(uid="uid", generation=1))
    (engine,) = [
        o for o in plan.objects or () if o["metadata"]["name"] == "p-engine" and "template" in o["spec"]
    ]
    return engine["spec"]["template"]


def name(spec: Object) -> str:
    return pod_of(spec)["metadata"]["annotations"]["perilune.dev/kv-name"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        pytest.param({"engine": {"args": ["--dtype=bfloat16", "--seed=2"]}}, True, id="spelt otherwise"),
        pytest.param({"engine": {"args": ["--dtype=bfloat16"], "image": "vllm:new"}}, True, id="an image"),
        pytest.param({"engine": {"args": ["--dtype", "float16"]}}, False, id="a data type"),
        pytest.param({"engine": {"args": ["--dtype=bfloat16", "--revision=v2"]}}, False, id="a revision"),
        pytest.param(
            {"engine": {"args": ["--dtype=bfloat16", "--kv_cache_dtype=fp8"]}}, False, id="KV's type"
        ),
        pytest.param(
            {"engine": {"args": ["--dtype=bfloat16", "--hf-overrides.rope=1"]}}, False, id="a part of a flag"
        ),
        pytest.param({"model": {"name": "m", "source": "org/other"}}, False, id="another model"),
        pytest.param({"model": {"name": "m", "cache": {"image": "weights:v2"}}}, False, id="its image"),
    ],
)
def test_what_makes_kv_mean_something_else(change: Object, same: bool) -> None:
    assert (name(BEFORE | change) == name(BEFORE)) is same


def test_each_name_has_keys_of_its_own_in_a_shared_store() -> None:
    (container,) = pod_of(BEFORE)["spec"]["containers"]
    (config,) = [arg for arg in container["args"] if arg.startswith("--kv-transfer-config")]
    text = config.partition("=")[2] or container["args"][container["args"].index(config) + 1]
    connectors = json.loads(text)["kv_connector_extra_config"]["connectors"]
    (store,) = [one for one in connectors if one["kv_connector"] == "MooncakeStoreConnector"]
    assert store["kv_connector_extra_config"]["cache_prefix"] == name(BEFORE)
