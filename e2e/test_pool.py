"""A pool as a user has it: chart, `kubectl apply`, requests answered; scaled, rolled, broken, deleted."""

import json

import pytest

from testbed import perilune
from testbed.http import Client, eventually, under_load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pool(kube, edge):
    perilune.install(kube)
    perilune.apply_pool(kube)
    client = Client(edge, "sim.test")
    eventually(lambda: answers(client))
    yield client
    kube.ctl("delete", "ipool", "sim", "-n", "default", "--ignore-not-found", "--timeout=120s", timeout_s=130)


def answers(client):
    answer = client.complete()
    assert answer.status == 200, answer.body
    assert answer.decided, "the gateway was not asked"


def engines(kube):
    """Addresses of engines that serve and are not leaving."""
    pods = kube.get("pod", "-n", "default", "-l", "perilune.dev/pool=sim,perilune.dev/component=engine")
    return {
        f"{pod['status']['podIP']}:8000"
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
    }


def status(kube):
    found = kube.get("ipool", "sim", "-n", "default")["status"]
    return {c["type"]: c["status"] for c in found["conditions"]}


def patch(kube, **spec):
    kube.ctl("patch", "ipool", "sim", "-n", "default", "--type=merge", "-p", json.dumps({"spec": spec}))


def has_engines(kube, count):
    assert len(engines(kube)) == count
    assert kube.get("ipool", "sim", "-n", "default")["status"]["readyReplicas"] == count
    assert status(kube)["Ready"] == "True"


def served_at_least(load, requests):
    assert load.succeeded >= requests


def test_a_pool_answers_by_our_picks(pool, kube):
    wanted = engines(kube)
    assert len(wanted) == 2
    picked = {pool.complete(f"new {i}", session=f"new-{i}").decided for i in range(20)}
    assert picked == wanted


def test_status_tells_the_truth(pool, kube):
    assert status(kube)["Ready"] == "True"
    row = kube.ctl("get", "ipool", "sim", "-n", "default").splitlines()[1].split()
    assert row[:3] == ["sim", "sim-30b", "2/2"]
    assert "Serving" in row


def test_scaling_under_load_fails_no_request(pool, kube):
    with under_load(pool, sessions=6) as load:
        eventually(lambda: served_at_least(load, 30))
        kube.ctl("scale", "ipool", "sim", "-n", "default", "--replicas=4")
        eventually(lambda: has_engines(kube, 4), timeout_s=60)
        eventually(lambda: spread_over(pool, engines(kube)))
        kube.ctl("scale", "ipool", "sim", "-n", "default", "--replicas=2")
        eventually(lambda: has_engines(kube, 2), timeout_s=60)
        eventually(lambda: gone(kube, 2), timeout_s=180)
        before = load.succeeded
        eventually(lambda: served_at_least(load, before + 30))
    assert load.failures == []


def spread_over(client, wanted):
    assert {client.complete(f"spread {i}").decided for i in range(30)} == wanted


def gone(kube, left):
    pods = kube.get("pod", "-n", "default", "-l", "perilune.dev/pool=sim,perilune.dev/component=engine")
    assert len(pods) == left


def test_a_changed_engine_under_load_fails_no_request(pool, kube):
    before = engines(kube)
    with under_load(pool, sessions=6) as load:
        eventually(lambda: served_at_least(load, 20))
        patch(kube, engine={"env": [{"name": "CHANGED", "value": "yes"}]})

        def all_new():
            has_engines(kube, 2)
            assert not engines(kube) & before
            gone(kube, 2)

        eventually(all_new, timeout_s=240)
        done = load.succeeded
        eventually(lambda: served_at_least(load, done + 30))
    assert load.failures == []


def test_a_bad_change_is_refused_with_its_path_and_touches_nothing(pool, kube):
    before = engines(kube)
    said = refusal(kube, {"engine": {"blockSize": 0}})
    assert "spec.engine.blockSize" in said
    said = refusal(kube, {"routing": {"policy": "nonsense"}})
    assert "spec.routing.policy" in said
    assert engines(kube) == before
    answers(pool)


def refusal(kube, spec):
    with pytest.raises(Exception, match="exit status 1") as caught:
        patch(kube, **spec)
    return str(caught.value)


def test_a_killed_operator_is_replaced(pool, kube):
    """kill -9 of every operator at once: the new one carries on where they stopped."""
    kube.ctl("delete", "pod", "--all", "-n", perilune.NAMESPACE, "--grace-period=0", "--force")
    kube.ctl("scale", "ipool", "sim", "-n", "default", "--replicas=3")
    eventually(lambda: has_engines(kube, 3), timeout_s=90)
    kube.ctl("scale", "ipool", "sim", "-n", "default", "--replicas=2")
    eventually(lambda: has_engines(kube, 2), timeout_s=90)


def test_a_restarted_api_server_disturbs_no_request(pool, kube, cluster):
    with under_load(pool, sessions=4) as load:
        eventually(lambda: served_at_least(load, 20))
        cluster.restart_api_server()
        done = load.succeeded
        eventually(lambda: served_at_least(load, done + 50))
        kube.ctl("scale", "ipool", "sim", "-n", "default", "--replicas=3")
        eventually(lambda: has_engines(kube, 3), timeout_s=90)
        kube.ctl("scale", "ipool", "sim", "-n", "default", "--replicas=2")
        eventually(lambda: has_engines(kube, 2), timeout_s=90)
    assert load.failures == []


def test_a_lost_node_costs_no_request_and_its_engine_comes_back_elsewhere(pool, kube, cluster):
    kube.ctl("scale", "ipool", "sim", "-n", "default", "--replicas=4")
    eventually(lambda: has_engines(kube, 4), timeout_s=60)
    pods = kube.get("pod", "-A", "-o", "wide")
    used = {"node-0", *(p["spec"]["nodeName"] for p in pods if p["metadata"]["namespace"] != "default")}
    ours = [p for p in pods if p["metadata"]["namespace"] == "default"]
    used |= {p["spec"]["nodeName"] for p in ours if "gateway" in p["metadata"]["name"]}
    free = [p["spec"]["nodeName"] for p in ours if p["spec"]["nodeName"] not in used]
    assert free, "every engine shares its node with something that the test needs"
    before = engines(kube)
    with under_load(pool, sessions=6) as load:
        eventually(lambda: served_at_least(load, 30))
        cluster.set_link(free[0], up=False)
        try:
            eventually(lambda: not_ready(kube), timeout_s=40)
            eventually(lambda: has_engines(kube, 4), timeout_s=90)
            assert engines(kube) != before
        finally:
            cluster.set_link(free[0], up=True)
            kube.wait("condition=Ready", f"node/{free[0]}", timeout_s=60)
        done = load.succeeded
        eventually(lambda: served_at_least(load, done + 30))
    assert load.failures == []
    assert load.slowest_s < 6
    kube.ctl("scale", "ipool", "sim", "-n", "default", "--replicas=2")


def not_ready(kube):
    assert kube.get("ipool", "sim", "-n", "default")["status"]["readyReplicas"] < 4


def test_two_pools_share_a_gateway(pool, kube, edge):
    """Each host's requests go to its own pool, and are decided by its own gateway."""
    document = (
        perilune.POOL.read_text().replace("name: sim,", "name: other,").replace("sim.test", "other.test")
    )
    kube.ctl("apply", "-f", "-", stdin=document.replace("sim-30b", "other-30b"))
    try:
        kube.wait("condition=Ready", "ipool/other", "-n", "default", timeout_s=120)
        other = Client(edge, "other.test", "other-30b")
        eventually(lambda: answers(other))
        theirs = {other.complete(f"other {i}", session=f"other-{i}").decided for i in range(10)}
        mine = {pool.complete(f"mine {i}", session=f"mine-{i}").decided for i in range(10)}
        assert not theirs & mine
        assert pool.complete(model="other-30b").status == 404
    finally:
        kube.ctl("delete", "ipool", "other", "-n", "default", "--timeout=60s", timeout_s=70)


def test_a_deleted_pool_leaves_nothing(pool, kube):
    kube.ctl("delete", "ipool", "sim", "-n", "default", "--timeout=60s", timeout_s=70)

    def nothing():
        kinds = (
            "deployment,replicaset,pod,service,configmap,serviceaccount,role,rolebinding,networkpolicy,pdb"
        )
        policies = "httproute,backendtrafficpolicy,envoyextensionpolicy"
        left = kube.get(f"{kinds},{policies}", "-n", "default", "-l", "perilune.dev/pool=sim")
        assert [f"{o['kind']}/{o['metadata']['name']}" for o in left] == []

    eventually(nothing, timeout_s=180)
