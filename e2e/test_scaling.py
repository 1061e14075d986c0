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

LEAST = 2
CHANGES = 6
"""The most changes of a pool's replicas while a load comes and goes."""
SLOWDOWN = 4
"""The engines are so many times slower than an H20: then two of them are too few even for the few prompts
that clients on a busy machine send."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((4, 10), id="to 4"),
        pytest.param((6, 60), marks=pytest.mark.long, id="to 6"),
    ],
)
def elastic(request, kube, edge, operator):
    """Return a pool, and how many engines it may have at most. A new engine loads its model by an init
    container, for so many seconds."""
    most, loads_s = request.param
    pool = LivePool(kube, edge, "elastic")
    loading = {
        "name": "loads-the-model",
        "image": ENGINE_NAME,
        "imagePullPolicy": "Never",
        "command": ["sleep", str(loads_s)],
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
            "maxReplicas": most,
            "upSeconds": 5,
            "downSeconds": 20,
        },
    )
    pool.becomes(LEAST, timeout_s=180)
    eventually(pool.answers)
    yield pool, most
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


def goes_up_and_down(seen: list[int], most: int) -> None:
    """Assert that it went up to `most`, then down, each without turning back, and in few steps."""
    up = seen.index(most)
    assert seen[: up + 1] == sorted(seen[: up + 1])
    assert seen[up:] == sorted(seen[up:], reverse=True)
    assert len(seen) - 1 <= CHANGES


def test_a_load_that_rises_and_falls_takes_the_pool_up_and_down_without_flapping(elastic):
    pool, most = elastic
    many = NewPrompts(pool.client, words=4_000)
    one = NewPrompts(pool.client, words=20, tokens=100)  # who waits for answers leaves engines time to spare
    with watched(pool) as seen:
        with many.at_once(24):
            pool.becomes(most, timeout_s=300)
        with one.at_once(1):
            pool.becomes(LEAST, timeout_s=360)
    print(f"{len(many.ended)} and {len(one.ended)} requests")
    assert many.failures + one.failures == []
    goes_up_and_down(seen, most)


def rests(pool: LivePool) -> None:
    assert pool.get()["spec"]["replicas"] == 0
    assert pool.all_pods() == []
    assert pool.conditions()["Ready"] == ("True", "ZeroEndpoints")


def test_a_pool_that_rests_is_woken_by_a_prompt_and_rests_again(elastic):
    """Envoy asks the gateway although there is no engine, so clients learn when to come back."""
    pool, _ = elastic
    pool.patch(scaling={"minReplicas": 0})
    eventually(lambda: rests(pool), timeout_s=120)
    refused = pool.client.complete()
    assert (refused.status, refused.headers["x-perilune-refused"]) == (429, "starting")
    assert 5 <= int(refused.headers["retry-after"]) <= 60
    eventually(pool.answers, timeout_s=120)
    assert pool.get()["spec"]["replicas"] == 1
    eventually(lambda: rests(pool), timeout_s=120)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_load_takes_a_resting_pool_up_and_back_to_zero(elastic):
    """Clients that are refused while the first engine starts come back when they were told to."""
    pool, most = elastic
    # All clients are refused at first, and come back a minute later. The pool must not rest before.
    pool.patch(scaling={"minReplicas": 0, "downSeconds": 90})
    eventually(lambda: rests(pool), timeout_s=200)
    many = NewPrompts(pool.client, words=4_000, comes_back=True)
    with watched(pool) as seen:
        with many.at_once(12):  # one endpoint takes a minute and a half for them
            pool.becomes(most, timeout_s=600)  # one after the other, each loads its model
            many.go_on(100)
        eventually(lambda: rests(pool), timeout_s=360)
    print(f"{len(many.ended)} requests, {many.refusals} times told to come back")
    assert many.failures == []
    assert many.refusals > 0
    goes_up_and_down(seen, most)
