"""Pools with prefill endpoints: endpoints change between serving and only prefilling, by the gateway's page,
and prefill endpoints that are no longer wanted are drained."""

import time
from typing import Any

import pytest

from perilune_api import names
from testbed.http import NewPrompts, eventually
from testbed.pool import LivePool, address, is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

GAIN = 1.2
"""How many times as many prompts per second two prefill endpoints do as one, at least; 1.75 measured."""
GENERATED = "vllm:generation_tokens_total{"
DECODE_GAIN = 1.2
"""How many times as many tokens per second three endpoints generate as two, at least."""
KNOWN_S = 35.0
"""Seconds within which the operator knows what the gateways count; it reads their pages every 30 s."""


@pytest.fixture(scope="module")
def flexible(kube, edge, operator):
    """Three endpoints that serve and one that prefills. Its queue is long enough for all clients, and
    nothing is prefilled elsewhere. The five prompts under way take a sixth of one KV cache; the long answers
    grow to most of one."""
    pool = LivePool(kube, edge, "flexible")
    pool.apply(
        replicas=3,
        prefillReplicas=1,
        mooncake={"transfer": "handoff"},
        routing={"disaggregation": {"localTokens": 500, "comingRequests": 1000}, "decisionHeader": "address"},
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


def test_answers_that_wait_for_room_gain_by_a_prefill_endpoint_that_serves(kube, edge, operator):
    """Default thresholds. A hundred answers of 2,000 tokens need twice the KV caches of two endpoints."""
    pool = LivePool(kube, edge, "decoding")
    pool.apply(
        replicas=2,
        prefillReplicas=2,
        mooncake={"transfer": "handoff"},
        engine={"kind": "simulated", "imagePullPolicy": "Never", "kvPoolTokens": 30_000},
        roleSwitching={},
    )
    try:
        eventually(lambda: roles_are(pool, serve=2, prefill=2), timeout_s=180)
        eventually(pool.answers, timeout_s=60)
        answers, read = NewPrompts(pool.client, words=50, tokens=2_000), []

        def three_serve() -> None:
            read.append(generated(pool))
            roles_are(pool, serve=3, prefill=1)

        with answers.at_once(100):
            eventually(three_serve, timeout_s=200, every_s=2)
            switched = len(read)
            settled = time.monotonic() + 30
            eventually(lambda: later(settled), timeout_s=60)
            read += [generated(pool)]
            eventually(lambda: later(settled + 40), timeout_s=60)
            read += [generated(pool)]
        before, after = rate(before_the_switch(read[:switched])), rate(read[-2:])
        print(f"tokens/s {before:.0f} → {after:.0f}, {len(answers.ended)} answers")
        assert answers.failures == []
        assert after >= DECODE_GAIN * before
    finally:
        pool.delete()


def test_prefill_endpoints_that_leave_finish_their_prompts_and_the_one_with_used_kv_stays(
    kube, edge, operator
):
    """Three prefill endpoints become one under load: no request fails, and no prefill that one of them was
    given is broken off. Few last longer than the gateway waits for them, which depends on the machine. A
    prefill takes seconds, so that they are seen to drain."""
    pool = LivePool(kube, edge, "fewer")
    pool.apply(
        replicas=1,
        prefillReplicas=3,
        rollout={"sessionSeconds": 60, "drainSeconds": 20},
        mooncake={"transfer": "handoff"},
        routing={"disaggregation": {"localTokens": 500, "comingRequests": 1000}, "decisionHeader": "address"},
    )
    try:
        eventually(lambda: are_ready(pool, serve=1, prefill=3), timeout_s=180)
        eventually(pool.answers, timeout_s=60)
        for number in range(6):
            ask = "a manual " * 2_000 + f"{number} " * 1_000
            assert pool.client.complete(ask, max_tokens=4).status == 200
        eventually(lambda: used(pool), timeout_s=60)
        known = time.monotonic() + KNOWN_S
        most_used = used(pool)
        kept = next(p["metadata"]["uid"] for p in pool.pods("prefill") if address(p) == most_used)
        prompts = NewPrompts(pool.client, words=20_000, tokens=4)
        with prompts.at_once(6):
            eventually(lambda: later(known), timeout_s=60)
            began = pool.gateways_count("perilune_handoffs_total", "outcome", reason="prefill")
            pool.patch(prefillReplicas=1)
            eventually(lambda: others_are_marked(pool, kept), timeout_s=60, every_s=0.05)
            eventually(lambda: are_ready(pool, serve=1, prefill=1), timeout_s=120)
            prompts.go_on(6)
        now = pool.gateways_count("perilune_handoffs_total", "outcome", reason="prefill")
        ended = {outcome: count - began.get(outcome, 0) for outcome, count in now.items()}
        print(f"{len(prompts.ended)} prompts, hand-offs since the change: {ended}")
        assert prompts.failures == []
        assert ended["copied"] > 2 * ended["expired"], ended
        assert ended["failed"] == ended["unseen"] == 0, ended
        assert [pod["metadata"]["uid"] for pod in pool.all_pods("prefill")] == [kept]
    finally:
        pool.delete()


def are_ready(pool: LivePool, serve: int, prefill: int) -> None:
    assert [is_ready(pod) for pod in pool.all_pods("engine")] == [True] * serve
    assert [is_ready(pod) for pod in pool.all_pods("prefill")] == [True] * prefill


def used(pool: LivePool) -> str:
    """Return the address of the prefill endpoint whose cached tokens were used the most lately."""
    hits = pool.gateways_count("perilune_endpoint_recent_hits_tokens", "endpoint")
    addresses = {address(pod) for pod in pool.pods("prefill")}
    most = max(addresses, key=lambda there: hits.get(there, 0.0))
    assert hits.get(most, 0.0) > 0, hits
    return most


def others_are_marked(pool: LivePool, kept: str) -> None:
    pods = pool.all_pods("prefill")
    marked = {pod["metadata"]["uid"] for pod in pods if is_marked(pod)}
    assert len(pods) == 3
    assert marked == {pod["metadata"]["uid"] for pod in pods} - {kept}


def is_marked(pod: Any) -> bool:
    return names.DRAINING in pod["metadata"].get("annotations", {})


def later(than: float) -> None:
    assert time.monotonic() >= than


def generated(pool: LivePool) -> tuple[float, float]:
    """Return the time, and the tokens that all engines have generated."""
    pods = [pod["metadata"]["name"] for part in ("engine", "prefill") for pod in pool.pods(part)]
    pages = [pool.kube.page(f"pod/{pod}", pool.namespace, "/metrics", names.ENGINE_PORT) for pod in pods]
    lines = [line for page in pages for line in page.splitlines()]
    return time.monotonic(), sum(float(line.split()[-1]) for line in lines if line.startswith(GENERATED))


def before_the_switch(read: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return those of the last 30 s, in which the caches were full."""
    return [(at, tokens) for at, tokens in read if at >= read[-1][0] - 30]


def rate(read: list[tuple[float, float]]) -> float:
    (began, first), (ended, last) = read[0], read[-1]
    return (last - first) / (ended - began)


def is_behind_the_service(pool: LivePool, pods: set[str]) -> None:
    """Assert that just these are what Envoy uses while no gateway runs."""
    labels = f"kubernetes.io/service-name={pool.name}"
    slices = pool.kube.get("endpointslice", "-n", pool.namespace, "-l", labels)
    assert {e["targetRef"]["name"] for made in slices for e in made["endpoints"] or ()} == pods
