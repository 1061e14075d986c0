"""Live Envoy Gateway in front of our gateway and engines, wired by hand: what the four objects promise.

No operator here: manifests/static-pool.yaml shows all that is needed, and what the operator renders for a
pool.
"""

import json
import time
from collections import Counter

import pytest

from testbed import envoy_gateway
from testbed.http import eventually, under_load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

DESTINATION = "x-gateway-destination-endpoint"


def conditions(thing):
    """Type → status of an object's conditions, of a route's or policy's first parent."""
    status = thing["status"]
    for parents in ("parents", "ancestors"):
        if parents in status:
            status = status[parents][0]
    return {c["type"]: c["status"] for c in status["conditions"]}


@pytest.mark.parametrize(
    ("kind", "name", "namespace"),
    [
        ("gateway", "edge", "edge"),
        ("clienttrafficpolicy", "edge", "edge"),
        ("httproute", "pool", "static"),
        ("backendtrafficpolicy", "pool", "static"),
        ("envoyextensionpolicy", "pool", "static"),
    ],
)
def test_envoy_gateway_accepts_each_object(static_pool, kube, kind, name, namespace):
    def accepted():
        found = conditions(kube.get(kind, name, "-n", namespace))
        assert found["Accepted"] == "True"
        assert set(found.values()) == {"True"}

    eventually(accepted)


def test_every_pick_is_obeyed_on_every_engine(static_pool):
    eventually(lambda: answers_by_pick(static_pool))
    engines = set(static_pool.engines())
    served = Counter()
    for i in range(40):
        answer = static_pool.client.complete(f"new session {i}", session=f"obeyed-{i}")
        assert (answer.status, answer.served) == (200, answer.decided)
        served[answer.served] += 1
    assert set(served) == engines


def answers_by_pick(pool):
    answer = pool.client.complete()
    assert answer.status == 200, answer.body
    assert answer.decided


def test_a_session_stays_and_finds_its_prefix(static_pool):
    """Three turns of one conversation: one engine, growing cache hits, all by the engine's own word."""
    text, answers = "", []
    for turn in range(3):
        text += " ".join(f"turn{turn}word{i}" for i in range(400)) + " "
        answers.append(static_pool.client.complete(text, session="talk"))
    assert len({a.served for a in answers}) == 1
    assert [a.reason for a in answers] == ["cold", "host", "host"]
    cached = [a.json["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] < cached[1] < cached[2]


def test_a_decision_is_explained(static_pool):
    answer = static_pool.client.complete("why there", session="explained")

    def explained():
        record = static_pool.admin(f"/api/decisions/{answer.request_id}")
        assert record["target"] == answer.served
        assert record["ending"]["served"] == answer.served
        assert {c["address"] for c in record["candidates"]} == set(static_pool.engines())

    eventually(explained)


def test_a_stream_of_30_s_is_not_cut(static_pool):
    """Envoy's own default would cut it after 15 s."""
    answer = static_pool.client.complete("a long story", stream=True, max_tokens=6000, ignore_eos=True)
    assert answer.status == 200
    assert answer.seconds > 30
    events = answer.body.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"


def test_a_body_of_6_mb_arrives_whole(static_pool):
    """The prompt comes after the padding, so the engine has read it to the end."""
    padding = "x" * 6_000_000
    answer = static_pool.client.complete("ba be bi", user=padding)
    assert (answer.status, answer.served) == (200, answer.decided)


def test_a_client_cannot_choose_its_engine(static_pool):
    wanted = sorted(static_pool.engines())[0]
    served = set()
    for i in range(8):
        answer = static_pool.client.complete(
            f"spoof {i}", session=f"spoof-{i}", headers={DESTINATION: wanted}
        )
        assert (answer.status, answer.served) == (200, answer.decided)
        served.add(answer.served)
    assert len(served) > 1


def test_without_a_gateway_the_pool_still_answers(static_pool, kube):
    """Fail-open: requests spread over all engines, a spoofed header is stripped; then picks rule again."""
    wanted = sorted(static_pool.engines())[0]
    kube.ctl("scale", "deployment/gateway", "-n", "static", "--replicas=0")
    kube.wait("delete", "pod", "-l", "app=gateway", "-n", "static", timeout_s=60)
    try:
        served = Counter()
        for i in range(24):
            answer = static_pool.client.complete(f"nobody picks {i}", headers={DESTINATION: wanted})
            assert (answer.status, answer.decided) == (200, "")
            served[answer.served] += 1
        assert set(served) == set(static_pool.engines())
    finally:
        kube.ctl("scale", "deployment/gateway", "-n", "static", "--replicas=1")
        static_pool.gateway_is_ready()
    eventually(lambda: answers_by_pick(static_pool))


def test_a_gateway_rollout_fails_no_request(static_pool, kube):
    with under_load(static_pool.client, sessions=4) as load:
        eventually(lambda: enough(load, 20))
        kube.ctl("rollout", "restart", "deployment/gateway", "-n", "static")
        static_pool.gateway_is_ready()
        before = load.succeeded
        eventually(lambda: enough(load, before + 40))
    assert load.failures == []


def enough(load, requests):
    assert load.succeeded >= requests


def test_a_node_whose_link_dies_is_routed_around(static_pool, cluster, kube):
    """A request sent into the dead link is retried elsewhere (after 3 s); then none waits for that node."""
    engines = static_pool.engines()
    for i in range(20):
        session = f"orphan-{i}"
        answer = static_pool.client.complete("where am I", session=session)
        node = engines[answer.served]
        if node not in ways_in(kube):
            break
    cluster.set_link(node, up=False)
    try:
        first = static_pool.client.complete("where am I now", session=session)
        assert first.status == 200
        assert first.served != answer.served
        assert first.seconds < 6
        began = time.monotonic()
        times = [static_pool.client.complete(f"others {i}", session=f"other-{i}").seconds for i in range(20)]
        assert time.monotonic() - began < 20
        assert sorted(times)[-3] < 1.0

        def replaced():
            engines = static_pool.engines()
            assert len(engines) == 4
            assert node not in engines.values()

        eventually(replaced, timeout_s=60)
    finally:
        cluster.set_link(node, up=True)
        kube.wait("condition=Ready", f"node/{node}", timeout_s=60)


def ways_in(kube):
    """Nodes that the test's own requests come through: node-0 (Services), Envoy's, the gateway's."""
    pods = kube.get("pod", "-n", "static", "-l", "app=gateway") + kube.get(
        "pod", "-n", envoy_gateway.NAMESPACE
    )
    return {"node-0", *(pod["spec"]["nodeName"] for pod in pods)}
