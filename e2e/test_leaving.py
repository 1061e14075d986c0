"""Engines that hand KV over and have to go: sessions leave first with their KV, however an engine is removed.

ENGINES says how many engines the pool has; without it nothing runs (`make e2e-long`: 8). Simulated engines,
four times slower than an H20, so that what is computed again would show in spite of a busy machine's noise.
"""

import os
import time
from collections import Counter

import pytest

from perilune_api import names
from testbed import perilune
from testbed.http import eventually
from testbed.pool import LivePool
from testbed.turns import agents, p90, share

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.skipif("ENGINES" not in os.environ, reason="takes minutes: make e2e-long"),
]
ENGINES = int(os.environ.get("ENGINES", "4"))
AGENTS = 2 * ENGINES
SLOWDOWN = 4
LATE = 1.3
"""A turn is late that takes so many times longer than the 90th percentile of an undisturbed run."""


@pytest.fixture(scope="module")
def moving(kube, edge, operator):
    pool = LivePool(kube, edge, "moving")
    pool.apply(
        replicas=ENGINES,
        engine={
            "kind": "simulated",
            "imagePullPolicy": "Never",
            "prefillScale": SLOWDOWN,
            "args": [f"--slowdown={SLOWDOWN}"],
        },
        mooncake={"transfer": "handoff"},
        routing={"decisionHeader": "address"},
    )
    pool.becomes(ENGINES, timeout_s=180)
    eventually(pool.answers)
    eventually(lambda: can_hand_over(pool, ENGINES))
    yield pool
    pool.delete()


def can_hand_over(pool, count):
    assert len(pool.admin("/api/moves")["connectors"]) == count


@pytest.fixture(scope="module")
def undisturbed(moving):
    """Seconds of the 90th percentile of turns while nothing happens."""
    with agents(moving.client, AGENTS, "undisturbed") as turns:
        turns.goes_on(10 * AGENTS)
        at = time.monotonic()
        turns.goes_on(15 * AGENTS)
    assert turns.failures == []
    usual = p90(turns.since(at))
    within = share([turn.seconds <= LATE * usual for turn in turns.since(at)])
    print(f"undisturbed: p90 {usual:.2f} s, {within:.1%} of the turns within {LATE} times that")
    return usual


def left_with_their_kv(name, turns, since, undisturbed):
    """Say what became of the turns; none failed, and nearly none computed again what its session had."""
    later = turns.since(since)
    moved = [turn for turn in later if turn.moved]
    lost = [turn for turn in later if not turn.found]
    late = [turn.seconds > LATE * undisturbed for turn in later]
    print(
        f"{name}: {len(later)} turns, {len(turns.failures)} failed,"
        f" {len(moved)} on another engine than before,"
        f" {share([t.found for t in moved]) if moved else 1:.1%} of these with their KV;"
        f" {len(lost)} computed again; {1 - share(late):.1%} within {LATE} x {undisturbed:.2f} s,"
        f" slowest {max(turn.seconds for turn in later):.2f} s"
    )
    for turn in lost:
        print(f"  {turn.session} turn {turn.number} after {turn.began - since:.1f} s: {turn}")
    assert turns.failures == []
    assert moved
    assert share([turn.found for turn in later]) >= 0.99


def handoffs(pool):
    """Return how many hand-offs ended how, by the gateway."""
    ended = (one["handoff"] for one in pool.admin("/api/moves")["ended"])
    return Counter(" ".join(filter(None, (one["outcome"], one["cause"]))) for one in ended if one)


def with_most_sessions(turns, among):
    """One of these engines: the one that had the most of the latest turns."""
    latest = Counter(turn.engine for turn in turns.done[-AGENTS:])
    return max(among, key=lambda address: latest[address])


def all_are_new(pool, before):
    assert not {pod["metadata"]["uid"] for pod in pool.all_pods()} & before


def test_a_rolling_update_takes_sessions_and_their_kv_along(moving, undisturbed, kube):
    """Another argument for every engine, under load; the operators are killed in the middle."""
    before = {pod["metadata"]["uid"] for pod in moving.pods()}
    with agents(moving.client, AGENTS, "rolling") as turns:
        turns.goes_on(4 * AGENTS)
        since = time.monotonic()
        moving.patch(engine={"args": [f"--slowdown={SLOWDOWN}", "--log-level=info"]})
        eventually(lambda: is_rolling(moving))
        kube.ctl("delete", "pod", "--all", "-n", perilune.NAMESPACE, "--grace-period=0", "--force")
        eventually(lambda: waits_for_sessions(moving))
        eventually(lambda: all_are_new(moving, before), timeout_s=800)
        moving.settles(ENGINES)
        took = time.monotonic() - since
        turns.goes_on(AGENTS)
    print(f"{ENGINES} engines in {took:.0f} s; hand-offs {dict(handoffs(moving))}")
    left_with_their_kv("rolling update", turns, since, undisturbed)


def waits_for_sessions(pool):
    assert pool.conditions()["Draining"] == ("True", "SessionsLeaving")


def is_rolling(pool):
    assert pool.conditions()["Reconciling"] == ("True", "RollingOut")
    assert f"of {ENGINES} are new" in pool.message("Reconciling")


@pytest.fixture
def settled(moving):
    """Whatever a scenario did, the next one finds all engines."""
    yield moving
    moving.scale(ENGINES)
    moving.settles(ENGINES)
    eventually(lambda: can_hand_over(moving, ENGINES))


def test_a_scale_down_takes_sessions_and_their_kv_along(settled, undisturbed):
    """Half of the engines go, so that some have sessions."""
    with agents(settled.client, AGENTS, "scale-down") as turns:
        turns.goes_on(4 * AGENTS)
        since = time.monotonic()
        settled.scale(ENGINES // 2)
        settled.settles(ENGINES // 2)
        turns.goes_on(AGENTS)
    left_with_their_kv("scale-down", turns, since, undisturbed)


def test_a_drained_node_takes_sessions_and_their_kv_along(settled, undisturbed, kube):
    """`kubectl drain`: cordoned, so marked; then evicted."""
    gateways = {pod["spec"]["nodeName"] for pod in settled.pods("gateway")}
    with agents(settled.client, AGENTS, "drained") as turns:
        turns.goes_on(4 * AGENTS)
        engines = settled.engines()
        node = engines[with_most_sessions(turns, [a for a, n in engines.items() if n not in gateways])]
        since = time.monotonic()
        try:
            drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=170s")
            kube.ctl(*drain, "--pod-selector", f"{names.POOL_LABEL}=moving", timeout_s=180)
            settled.settles(ENGINES)
            turns.goes_on(AGENTS)
        finally:
            kube.ctl("uncordon", node)
    left_with_their_kv("drained node", turns, since, undisturbed)


def test_a_deleted_engine_takes_sessions_and_their_kv_along(settled, undisturbed, kube):
    """As an autoscaler deletes the pods of a spot node that is taken away: with their own grace period and
    without a word before."""
    with agents(settled.client, AGENTS, "deleted") as turns:
        turns.goes_on(4 * AGENTS)
        busiest = with_most_sessions(turns, settled.engines())
        pod = next(pod for pod in settled.pods() if pod["status"]["podIP"] == busiest.rpartition(":")[0])
        since = time.monotonic()
        kube.ctl("delete", "pod", pod["metadata"]["name"], "-n", "default", "--wait=false")
        eventually(lambda: all_are_new(settled, {pod["metadata"]["uid"]}), timeout_s=120)
        settled.settles(ENGINES)
        turns.goes_on(AGENTS)
    left_with_their_kv("deleted engine", turns, since, undisturbed)


def test_two_gateways_are_updated_while_an_engine_leaves(settled, undisturbed, kube, state_image):
    """The gateway that hands sessions over is replaced meanwhile, and another one goes on."""
    settled.patch(gateway={"replicas": 2})
    eventually(lambda: settled.has_gateways(2), timeout_s=180)
    eventually(lambda: can_hand_over(settled, ENGINES))
    with agents(settled.client, AGENTS, "two gateways") as turns:
        turns.goes_on(4 * AGENTS)
        busiest = with_most_sessions(turns, settled.engines())
        pod = next(pod for pod in settled.pods() if pod["status"]["podIP"] == busiest.rpartition(":")[0])
        since = time.monotonic()
        kube.ctl("rollout", "restart", "deployment/moving-gateway", "-n", "default")
        kube.ctl("delete", "pod", pod["metadata"]["name"], "-n", "default", "--wait=false")
        kube.ctl("rollout", "status", "deployment/moving-gateway", "-n", "default", timeout_s=180)
        eventually(lambda: all_are_new(settled, {pod["metadata"]["uid"]}), timeout_s=120)
        settled.settles(ENGINES)
        turns.goes_on(AGENTS)
    left_with_their_kv("two gateways updated while an engine leaves", turns, since, undisturbed)
