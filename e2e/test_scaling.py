"""A pool that scales itself: the operator follows the gateway's page, without an adapter or a person."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from testbed.http import NewPrompts, eventually
from testbed.perilune_image import ENGINE_NAME
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

LEAST, MOST = 2, 6
SLOWDOWN = 4
"""The engines are so many times slower than an H20: then two of them are too few even for the few prompts
that clients on a busy machine send."""
LOADS_S = 30
"""How long a new engine loads its model: by an init container, as long as the fastest real ones."""


@pytest.fixture(scope="module")
def elastic(kube, edge, operator):
    pool = LivePool(kube, edge, "elastic")
    loading = {
        "name": "loads-the-model",
        "image": ENGINE_NAME,
        "imagePullPolicy": "Never",
        "command": ["sleep", str(LOADS_S)],
    }
    pool.apply(
        replicas=LEAST,
        engine={
            "kind": "simulated",
            "imagePullPolicy": "Never",
            "args": [f"--slowdown={SLOWDOWN}"],
            "podTemplate": {"spec": {"initContainers": [loading]}},
        },
        scaling={
            "signal": "queueSeconds",
            "target": "3",
            "minReplicas": LEAST,
            "maxReplicas": MOST,
            "upSeconds": 5,
            "downSeconds": 20,
        },
    )
    pool.becomes(LEAST, timeout_s=180)
    eventually(pool.answers)
    yield pool
    pool.delete()


@contextmanager
def watched(pool: LivePool) -> Iterator[list[int]]:
    """Yield the numbers of replicas that its spec has had, in order."""
    seen, stop = [pool.get()["spec"]["replicas"]], threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            if (now := pool.get()["spec"]["replicas"]) != seen[-1]:
                seen.append(now)

    with ThreadPoolExecutor(1) as beside:
        watching = beside.submit(watch)
        try:
            yield seen
        finally:
            stop.set()
            watching.result()
            print(f"replicas {seen}")


def test_a_load_that_rises_and_falls_takes_the_pool_up_and_down_without_flapping(elastic):
    many = NewPrompts(elastic.client, words=4_000)
    one = NewPrompts(
        elastic.client, words=20, tokens=100
    )  # who waits for answers leaves engines time to spare
    with watched(elastic) as seen:
        with many.at_once(24):
            elastic.becomes(MOST, timeout_s=240)
        with one.at_once(1):
            elastic.becomes(LEAST, timeout_s=360)
    print(f"{len(many.ended)} and {len(one.ended)} requests")
    assert many.failures + one.failures == []
    up = seen.index(MOST)
    assert seen[: up + 1] == sorted(seen[: up + 1])
    assert seen[up:] == sorted(seen[up:], reverse=True)
    assert len(seen) - 1 <= 6


def rests(pool: LivePool) -> None:
    assert pool.get()["spec"]["replicas"] == 0
    assert pool.all_pods() == []
    assert pool.conditions()["Ready"] == ("True", "ZeroEndpoints")


def test_a_pool_that_rests_is_woken_by_a_prompt_and_rests_again(elastic):
    """Envoy asks the gateway although there is no engine, so clients learn when to come back."""
    elastic.patch(scaling={"minReplicas": 0})
    eventually(lambda: rests(elastic), timeout_s=120)
    refused = elastic.client.complete()
    assert (refused.status, refused.headers["x-perilune-refused"]) == (429, "starting")
    assert 5 <= int(refused.headers["retry-after"]) <= 60
    eventually(elastic.answers, timeout_s=120)
    assert elastic.get()["spec"]["replicas"] == 1
    eventually(lambda: rests(elastic), timeout_s=120)
