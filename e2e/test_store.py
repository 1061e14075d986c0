"""A pool with Mooncake's store: the real master, and one real segment per engine.

Engines are simulated; next to each runs Mooncake's own client (CPU, TCP), configured by the file that the
operator writes (images/vllm). No KV goes through the store here: what is shown is the store's life.
"""

import json
from collections import Counter

import pytest

from testbed import network
from testbed.cluster import NODES
from testbed.http import Client, eventually, under_load
from testbed.perilune_image import STORE_NAME, store_archive
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SITES = {site.node: site for site in network.sites(NODES)}
SEGMENT_BYTES = 64 << 20
ENGINES = 4


@pytest.fixture(scope="module")
def image(cluster):
    """On every node."""
    cluster.ensure(STORE_NAME, store_archive)
    return STORE_NAME


@pytest.fixture(scope="module")
def stored(kube, edge, operator, image):
    """One engine in each rack, as far as the scheduler can, and a store over all of them."""
    pool = LivePool(kube, edge, "stored")
    pool.apply(
        replicas=ENGINES,
        model={"name": "stored-30b", "weightsSize": "1Mi", "source": "/none"},
        engine={
            "kind": "vllm",
            "image": image,
            "imagePullPolicy": "Never",
            "hashing": {"seed": "0"},
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        },
        mooncake={
            "store": {"enabled": True, "segmentSize": "64Mi", "localBufferSize": "16Mi"},
            "master": {"image": image, "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}},
        },
        topology={"placement": [{"level": "rack", "mode": "spread", "required": True}]},
        rollout={"sessionSeconds": 0, "drainSeconds": 5},
    )
    pool.becomes(ENGINES, timeout_s=180)
    eventually(pool.answers)
    yield pool
    pool.delete()


def master(pool, path):
    """Return a page of the master's own server."""
    service = pool.kube.get("service", "stored-master", "-n", "default")
    answer = Client(f"{service['spec']['clusterIP']}:9003", "master").request("GET", path)
    assert answer.status == 200, answer.body
    return answer.body.decode()


def metric(pool, name):
    lines = [line for line in master(pool, "/metrics").splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].split()[1])


def test_engines_wait_for_the_master_and_then_serve(stored):
    """The pool is Ready only with its store; every engine has passed its wait for it."""
    assert stored.conditions()["StoreReady"] == ("True", "Available")
    assert json.loads(master(stored, "/health"))["service_ready"] is True
    for pod in stored.pods():
        (waited,) = pod["status"]["initContainerStatuses"]
        assert (waited["name"], waited["state"]["terminated"]["reason"]) == ("wait-for-store", "Completed")


def test_each_engine_gives_its_segment_where_the_placement_says(stored):
    """One segment in each rack, at just the addresses of the engines."""
    engines = {address.split(":")[0]: node for address, node in stored.engines().items()}

    def given():
        segments = [word for word in master(stored, "/get_all_segments").split() if ":" in word]
        assert {segment.split(":")[0] for segment in segments} == set(engines)
        assert len(segments) == ENGINES

    eventually(given)
    assert Counter(SITES[node].rack for node in engines.values()) == dict.fromkeys(
        {site.rack for site in SITES.values()}, 1
    )
    assert metric(stored, "master_total_capacity_bytes") == ENGINES * SEGMENT_BYTES


def test_the_masters_metrics_are_where_the_monitor_looks(stored):
    """A pod port called http serves Prometheus' format."""
    (pod,) = stored.pods("master")
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    at = f"{pod['status']['podIP']}:{ports['http']}"
    text = Client(at, "master").request("GET", "/metrics").body.decode()
    assert "# TYPE master_active_clients gauge" in text


def test_a_killed_master_is_told_and_costs_no_request(stored, cluster, kube):
    """kill -9 of its process, under load: StoreReady goes and comes back, engines answer all the time and
    give their segments again. What was stored is lost: Mooncake keeps it nowhere else."""
    with under_load(stored.client, sessions=4) as load:
        load.goes_on()
        before = told(kube)
        cluster.kill("mooncake_master")
        eventually(lambda: assert_new(kube, before, "StoreReady=False"), timeout_s=60)
        eventually(lambda: assert_new(kube, before, "StoreReady=True"), timeout_s=60)
        eventually(lambda: assert_all_segments(stored), timeout_s=60)
        load.goes_on()
    assert load.failures == []
    stored.has_engines(ENGINES)
    (pod,) = stored.pods("master")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 1


def told(kube):
    """Events of the pool; the operator sends one per changed condition."""
    involved = "involvedObject.name=stored,involvedObject.kind=InferencePool"
    events = kube.get("event", "-n", "default", "--field-selector", involved)
    return {event["metadata"]["uid"]: event["message"] for event in events}


def assert_new(kube, before, words):
    assert any(words in message for uid, message in told(kube).items() if uid not in before)


def assert_all_segments(pool):
    assert metric(pool, "master_total_capacity_bytes") == ENGINES * SEGMENT_BYTES
