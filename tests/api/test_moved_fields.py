"""Every field of the former routing.params is named with the place where it is now, and that place exists."""

import msgspec
import pytest

from perilune_api import pool
from perilune_api.inference_pool.checks import convert
from perilune_api.moved_fields import GONE, PARAMS, explain

STORED_BY_0_1_0 = {
    "engine": {
        "blockSize": 16,
        "dataParallel": 1,
        "gpuResource": "nvidia.com/gpu",
        "gpusPerNode": 8,
        "kind": "vllm",
        "kvPoolTokens": 281600,
        "pipelineParallel": 1,
        "prefillScale": 1,
        "rdmaDevices": 1,
        "startupSeconds": 1800,
        "tensorParallel": 1,
    },
    "gateway": {
        "clientTrafficPolicy": "create",
        "failOpen": True,
        "logLevel": "info",
        "mode": "auto",
        "parent": {"name": "edge"},
        "replicas": 1,
        "resources": {"limits": {"memory": "4Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}},
    },
    "model": {"bytesPerToken": 4, "kvBytesPerToken": 98304, "name": "m", "tokenize": "auto"},
    "mooncake": {"offloadSize": "64Gi", "protocol": "tcp", "transfer": "none"},
    "prefillReplicas": 0,
    "replicas": 2,
    "secrets": {},
    "topology": {},
    "rollout": {"drainSeconds": 120, "maxSurge": 1, "maxUnavailable": 0, "sessionSeconds": 30},
    "routing": {"cacheSalt": "client", "fallbacks": 2, "policy": "ear"},
}
"""A pool with a model's name and a parent, as the API server stored it with the CRD of 0.1.0, which wrote
defaults."""


def test_a_pool_with_the_defaults_of_0_1_0_keeps_its_policy() -> None:
    assert convert(STORED_BY_0_1_0).routing.policy.name == "ear"


@pytest.mark.parametrize("former", PARAMS)
def test_a_former_field_is_told_its_new_place(former: str) -> None:
    said = explain({"routing": {"params": {former: 1}}})
    assert said == f"{former} is now {PARAMS[former]} - at `$.spec.routing.params`"
    routing = msgspec.to_builtins(pool.Routing())
    for place in PARAMS[former].split(" and "):
        value = routing
        for name in place.split("."):
            value = value[name]
        assert not isinstance(value, dict)


@pytest.mark.parametrize("former", sorted(GONE))
def test_a_field_that_nothing_used_is_said_to_be_gone(former: str) -> None:
    assert explain({"routing": {"params": {former: 1}}}).startswith(f"{former} is gone")


@pytest.mark.parametrize("spec", [None, {}, {"routing": None}, {"routing": {"policy": {"name": "ear"}}}])
def test_nothing_is_said_of_a_spec_without_former_fields(spec: object) -> None:
    assert explain(spec) == ""
