"""A pool that switches roles: endpoints change between serving and only prefilling, by the gateway's page."""

import time

import pytest

from perilune_api import names
from testbed.http import NewPrompts, eventually
from testbed.pool import LivePool, is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

GAIN = 1.2
"""How many times as many prompts per second two prefill endpoints do as one, at least; 1.75 measured."""


@pytest.fixture(scope="module")
def flexible(kube, edge, operator):
    """Three endpoints that serve and one that prefills. Its queue is long enough for all clients, so that
    nothing is prefilled elsewhere. The five prompts under way take a sixth of one KV cache; the long answers
    grow to most of one."""
    pool = LivePool(kube, edge, "flexible")
    pool.apply(
        replicas=3,
        prefillReplicas=1,
        mooncake={"transfer": "handoff"},
        routing={"disaggregation": {"localTokens": 500, "queue": 8}, "decisionHeader": "address"},
        roleSwitching={"queueSeconds": 0.02, "kvUsage": 0.2, "afterSeconds": 10},
    )
    eventually(lambda: roles_are(pool, serve=3, prefill=1), timeout_s=180)
    eventually(pool.answers, timeout_s=60)
    yield pool
    pool.delete()


def roles(pool: LivePool) -> dict[str, set[str]]:
    """Return the ready engines' pods by their duty."""
    pods = [pod for part in ("engine", "prefill") for pod in pool.pods(part) if is_ready(pod)]
    return {
        duty: {p["metadata"]["name"] for p in pods if p["metadata"]["labels"].get(names.DUTY_LABEL) == duty}
        for duty in ("serve", "prefill")
    }


def roles_are(pool: LivePool, **counts: int) -> None:
    assert {duty: len(pods) for duty, pods in roles(pool).items()} == counts
    said = pool.message("EnginesReady")
    assert f"{counts['serve']} serve and {counts['prefill']} only prefill" in said


def test_a_load_heavy_on_prefill_then_on_decode_switches_a_role_each_way(flexible):
    """No request fails, no pod restarts, and prefill endpoints are no fail-open targets meanwhile."""
    uids = {pod["metadata"]["uid"] for part in ("engine", "prefill") for pod in flexible.pods(part)}
    prefills = NewPrompts(flexible.client, words=3_000, tokens=4)
    with prefills.at_once(5):
        prefills.go_on(5)
        began = time.monotonic()
        eventually(lambda: roles_are(flexible, serve=2, prefill=2), timeout_s=200)
        switched = time.monotonic()
        eventually(lambda: is_behind_the_service(flexible, roles(flexible)["serve"]))
        prefills.go_on(20)
        ended = time.monotonic()
    before, after = prefills.rate(began, switched), prefills.rate(switched, ended)
    print(f"prefills/s {before:.1f} → {after:.1f}")
    assert prefills.failures == []
    assert after >= GAIN * before

    decodes = NewPrompts(flexible.client, words=50, tokens=6_000)
    with decodes.at_once(40):
        eventually(lambda: roles_are(flexible, serve=3, prefill=1), timeout_s=200)
    print(f"{len(prefills.ended)} prompts, {len(decodes.ended)} long answers")
    assert decodes.failures == []
    events = flexible.kube.get("event", "-n", flexible.namespace)
    said = [e["message"] for e in events if e["reason"] == "RoleSwitched"]
    assert any("only prefills now" in words for words in said), said
    assert any("serves now" in words for words in said), said
    assert uids == {pod["metadata"]["uid"] for part in ("engine", "prefill") for pod in flexible.pods(part)}


def is_behind_the_service(pool: LivePool, pods: set[str]) -> None:
    """Assert that just these are what Envoy uses while no gateway runs."""
    labels = f"kubernetes.io/service-name={pool.name}"
    slices = pool.kube.get("endpointslice", "-n", pool.namespace, "-l", labels)
    assert {e["targetRef"]["name"] for made in slices for e in made["endpoints"] or ()} == pods
