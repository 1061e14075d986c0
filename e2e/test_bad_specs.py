"""Mistakes of users on a pool that serves: each is refused with its field's path; what runs is not touched.

Most are the API server's to refuse, before anything is stored. What a schema cannot know is stored, and the
operator says Accepted=False, of some because the API server told it so when asked about the pods: what runs
goes on as it was.
"""

import json

import pytest

from testbed.http import eventually
from testbed.pool import LivePool, document
from testbed.shell import ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

REFUSED = {
    "not a number": ({"replicas": "two"}, "spec.replicas"),
    "negative": ({"replicas": -1}, "spec.replicas"),
    "no room for a prompt": ({"model": {"contextTokens": -1}}, "spec.model.contextTokens"),
    "no model": ({"model": None}, "spec.model"),
    "another model": (
        {"model": {"name": "other"}},
        "spec.model.name: Invalid value: the model's name cannot",
    ),
    "no such policy": ({"routing": {"policy": {"name": "nonsense"}}}, "spec.routing.policy.name"),
    "block of nothing": ({"engine": {"blockSize": 0}}, "spec.engine.blockSize"),
    "another block size": ({"engine": {"blockSize": 32}}, "spec.engine.blockSize"),
    "another kind of engine": ({"engine": {"kind": "vllm"}}, "spec.engine.kind"),
    "tensors over one and a half nodes": ({"engine": {"tensorParallel": 12}}, "spec.engine.tensorParallel"),
    "hash without seed": ({"engine": {"hashing": {"algorithm": "xxhash"}}}, "spec.engine.hashing"),
    "a store without Mooncake": ({"mooncake": {"store": {"enabled": True}}}, "spec.mooncake"),
    "levels in disorder": (
        {"topology": {"levels": [{"name": "spine", "labels": ["a"]}, {"name": "rack", "labels": ["b"]}]}},
        "levels go from narrow to wide",
    ),
    "fewest above most": ({"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "spec.scaling.minReplicas"),
    "a rollout that cannot move": (
        {"rollout": {"maxUnavailable": 0, "maxSurge": 0}},
        "spec.rollout.maxUnavailable",
    ),
}
NOT_ACCEPTED = {
    "a route to nowhere": (
        {"gateway": {"mode": "envoyGateway", "parent": None}},
        "$.spec.gateway.parent",
    ),
    "a variable with two values": (
        {"engine": {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]}},
        "$.spec.engine.env[0]",
    ),
    "no quantity": (
        {"engine": {"resources": {"requests": {"cpu": "many"}}}},
        "$.spec.engine.resources.requests.cpu",
    ),
    "a pod that nobody could read": (
        {"engine": {"podTemplate": {"spec": {"containers": [{"name": "engine", "stdin": "yes"}]}}}},
        "$.spec.engine.podTemplate.spec.containers[0].stdin",
    ),
    "a mount of no volume": (
        {
            "engine": {
                "podTemplate": {
                    "spec": {
                        "containers": [
                            {"name": "engine", "volumeMounts": [{"name": "none", "mountPath": "/none"}]}
                        ]
                    }
                }
            }
        },
        "$.spec.engine.podTemplate.spec.containers[0].volumeMounts[0].name",
    ),
    "one name twice": ({"model": {"aliases": ["same", "same"]}}, "$.spec.model"),
}


@pytest.fixture
def unharmed(pool):
    """Afterwards the same pods serve, and the pool is as it was."""
    pool.settles(2)
    spec, before = pool.get()["spec"], pool.uids()
    yield
    assert pool.uids() == before
    pool.answers()
    pool.kube.ctl("replace", "-f", "-", stdin=json.dumps({**pool.get(), "spec": spec}))
    eventually(lambda: accepted(pool))
    assert pool.uids() == before


def accepted(pool):
    assert pool.conditions()["Accepted"] == ("True", "Valid")
    pool.has_engines(2)


def test_the_api_server_refuses(pool, unharmed):
    generation = pool.get()["metadata"]["generation"]
    for name, (change, path) in REFUSED.items():
        with pytest.raises(ClusterError) as said:
            pool.patch(**change)
        assert path in str(said.value), name
        assert pool.get()["metadata"]["generation"] == generation, name


@pytest.mark.parametrize("name", NOT_ACCEPTED)
def test_the_operator_does_not_accept(pool, unharmed, name):
    change, path = NOT_ACCEPTED[name]
    pool.patch(**change)

    def refused():
        assert pool.conditions()["Accepted"] == ("False", "Invalid")
        assert path in pool.message("Accepted")
        assert pool.conditions()["Ready"] == ("True", "Serving")
        said = pool.get()
        assert said["status"]["observedGeneration"] == said["metadata"]["generation"]

    eventually(refused)


def test_a_pool_that_is_wrong_from_the_beginning_makes_nothing(kube, edge, operator):
    wrong = LivePool(kube, edge, "wrong")
    kube.apply(document("wrong", engine={"args": ["--port=9000"]}))
    try:

        def refused():
            assert wrong.conditions() == {
                "Accepted": ("False", "Invalid"),
                "Ready": ("False", "Invalid"),
                "Reconciling": ("False", "Invalid"),
                "Stalled": ("True", "Invalid"),
            }
            assert wrong.message("Accepted") == (
                "The operator sets --port itself, from the spec - at `$.spec.engine.args[0]`"
            )

        eventually(refused)
        assert wrong.objects() == []
    finally:
        wrong.delete()


def test_one_bad_pool_holds_up_no_other(pool, kube, edge, operator):
    """A wrong change together with a right one: the right one is carried out."""
    wrong = LivePool(kube, edge, "wrong")
    kube.apply(document("wrong", engine={"args": ["--port=9000"]}))
    try:
        pool.scale(3)
        pool.becomes(3)
        pool.scale(2)
        pool.settles(2)
    finally:
        wrong.delete()
