"""Engines that are to go: a scale-down lets sessions leave first, an emptied node fails no request."""

import pytest

from perilune_api import names
from testbed.http import eventually, under_load
from testbed.pool import LivePool, address

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def patient(kube, edge, operator):
    """Its engines wait ten minutes for their sessions, if they have any."""
    pool = LivePool(kube, edge, "patient")
    pool.apply(replicas=2, rollout={"sessionSeconds": 600, "drainSeconds": 20})
    pool.becomes(2)
    eventually(pool.answers)
    yield pool
    pool.delete()


def marked(pool):
    """Addresses of engines that the operator has marked."""
    return {address(p) for p in pool.pods() if names.DRAINING in p["metadata"].get("annotations", {})}


def test_a_scale_down_waits_for_sessions_and_can_be_taken_back(patient):
    """Marked, an engine gets no new session and is not stopped while it has one; taken back, all is as it
    was."""
    homes = {}
    while set(homes.values()) != set(patient.engines()):
        session = f"home-{len(homes)}"
        homes[session] = patient.client.complete("I live here", session=session).decided
    pods = {pod["metadata"]["uid"] for pod in patient.pods()}
    patient.scale(1)

    def draining():
        assert patient.conditions()["Draining"] == ("True", "SessionsLeaving")
        assert len(marked(patient)) == 1

    eventually(draining)
    (leaving,) = marked(patient)
    eventually(lambda: assert_refuses_new(patient, leaving))
    for number in range(20):
        answer = patient.client.complete("somebody new", session=f"new-{number}")
        assert answer.decided != leaving
    assert {pod["metadata"]["uid"] for pod in patient.pods()} == pods

    patient.scale(2)
    eventually(lambda: assert_nothing_leaves(patient))
    patient.settles(2)
    assert {pod["metadata"]["uid"] for pod in patient.pods()} == pods
    for session in homes:
        assert patient.client.complete("still here", session=session).status == 200


def assert_refuses_new(pool, leaving):
    """Assert that the gateway has seen the mark."""
    answer = pool.client.complete("anybody")
    record = pool.admin(f"/api/decisions/{answer.request_id}")
    assert leaving not in {c["address"] for c in record["candidates"] if not c["draining"]}


def assert_nothing_leaves(pool):
    assert marked(pool) == set()
    assert pool.conditions()["Draining"] == ("False", "NothingLeaving")


def test_an_engine_without_sessions_goes_at_once(patient):
    """It does not wait the ten minutes that `sessionSeconds` allows. It may wait a minute, because a gateway
    that has just started does not know of earlier turns, and says of no engine that it is free."""
    patient.scale(3)
    patient.becomes(3)
    before = set(patient.engines())
    patient.scale(2)
    patient.settles(2, timeout_s=180)
    assert len(set(patient.engines()) & before) == 2


def test_a_drained_node_fails_no_request(pool, kube):
    """`kubectl drain` under load: the node's engine is marked, evicted and made again elsewhere; its requests
    end where they run."""
    pool.settles(2)
    gateway = {pod["spec"]["nodeName"] for pod in pool.pods("gateway")}
    leaving, node = next((e, n) for e, n in pool.engines().items() if n not in gateway)
    with under_load(pool.client, sessions=6) as load:
        load.goes_on()
        try:
            drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
            kube.ctl(*drain, "--pod-selector", f"{names.POOL_LABEL}=sim", timeout_s=130)
            pool.settles(2)
            assert node not in pool.engines().values()
            load.goes_on()
        finally:
            kube.ctl("uncordon", node)
    assert load.failures == []
    after = [s for s in load.samples[-30:] if s.decided == leaving]
    assert after == []
