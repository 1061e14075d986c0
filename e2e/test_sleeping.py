"""Endpoints that sleep instead of leaving: their pods stay, their engines sleep, and they wake before a pod
is started. The engines are simulated; vLLM's sleep mode needs a GPU."""

import json
import time
from typing import Any

import pytest

from perilune_api import names
from testbed.http import eventually, under_load
from testbed.pool import LivePool, address

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SCALING = {"signal": "queueSeconds", "sleeping": 1, "upSeconds": 5, "downSeconds": 20}


@pytest.fixture(scope="module")
def sleepy(kube, edge, operator):
    pool = LivePool(kube, edge, "sleepy")
    pool.apply(replicas=3, scaling=bounds(3))
    pool.becomes(3, timeout_s=180)
    eventually(pool.answers)
    yield pool
    pool.delete()


def bounds(replicas: int) -> dict[str, Any]:
    """Return a scaling that has just so many endpoints."""
    return {**SCALING, "minReplicas": replicas, "maxReplicas": replicas}


def uids(pool: LivePool) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pool.all_pods()}


def restarts(pool: LivePool) -> int:
    return sum(c["restartCount"] for pod in pool.all_pods() for c in pod["status"]["containerStatuses"])


def asleep(pool: LivePool, engine: str) -> bool:
    """Return whether the engine of that address says that it sleeps."""
    (pod,) = [pod["metadata"]["name"] for pod in pool.pods() if address(pod) == engine]
    said = pool.kube.page(f"pod/{pod}", pool.namespace, "/is_sleeping", names.ENGINE_PORT)
    return bool(json.loads(said)["is_sleeping"])


def sleep(pool: LivePool, count: int) -> None:
    """Assert that just so many sleep, in the operator's words and the engines' own."""
    marked = {
        address(pod)
        for pod in pool.pods()
        if pod["metadata"].get("annotations", {}).get(names.ASLEEP) == "true"
    }
    assert {engine for engine in pool.engines() if asleep(pool, engine)} == marked
    assert len(marked) == count
    said = pool.message("EnginesReady")
    assert (f"{count} more sleep" in said) is bool(count), said


def test_an_endpoint_that_is_not_wanted_sleeps_and_wakes_instead_of_a_new_pod(sleepy):
    """No request fails, no pod is started or ends, and no gateway asks the engine that sleeps."""
    before = uids(sleepy)
    with under_load(sleepy.client) as load:
        load.goes_on()
        sleepy.patch(scaling=bounds(2))
        eventually(lambda: sleep(sleepy, 1), timeout_s=180)
        began = time.monotonic()
        load.goes_on(60)
        awake = {engine for engine in sleepy.engines() if not asleep(sleepy, engine)}
        assert {s.decided for s in load.samples if s.began > began} <= awake
        sleepy.patch(scaling=bounds(3))
        eventually(lambda: sleep(sleepy, 0), timeout_s=120)
        eventually(lambda: sleepy.has_engines(3), timeout_s=60)
        load.goes_on(60)
    assert load.failures == []
    assert uids(sleepy) == before
    assert restarts(sleepy) == 0


def test_one_that_may_sleep_no_longer_leaves(sleepy):
    sleepy.patch(scaling=bounds(2))
    eventually(lambda: sleep(sleepy, 1), timeout_s=180)
    sleepy.patch(scaling={"sleeping": 0})
    sleepy.settles(2)
