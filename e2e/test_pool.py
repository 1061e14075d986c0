"""A pool as a user has it: chart, `kubectl apply`, requests answered; scaled, rolled, robbed, deleted."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from testbed import envoy_gateway, perilune
from testbed.http import Client, eventually, under_load
from testbed.pool import LivePool, address, is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONNECT_S = 1.0
"""Envoy's connect timeout, as the operator sets it."""
GIVEN_UP_S = 3.0
"""After which Envoy gives up a connection that was there before, as manifests/gateway-class.yaml sets it."""
AROUND_S = 2.0
"""After the first failed connection, until nobody is sent to a lost node any more."""


def test_a_pool_answers_by_our_picks(pool):
    wanted = set(pool.engines())
    assert len(wanted) == 2
    with ThreadPoolExecutor(10) as clients:  # one after the other, all may go to the engine that seems faster
        answers = list(clients.map(lambda i: pool.client.complete(f"new {i}", session=f"new-{i}"), range(20)))
    assert {answer.decided for answer in answers} == wanted
    assert [answer.served for answer in answers] == [answer.decided for answer in answers]


def test_status_tells_the_truth(pool, kube):
    assert pool.conditions()["Ready"] == ("True", "Serving")
    row = kube.ctl("get", "ipool", "sim", "-n", "default").splitlines()[1].split()
    assert row[:3] == ["sim", "sim-30b", "2/2"]
    assert "Serving" in row


def test_the_list_of_pools_says_sessions_and_hits(pool, kube):
    """Within the half minute after which the operator asks the gateway again."""

    def shown():
        pool.client.complete("the same again", session="shown")
        model, _, sessions, hits, policy = (
            kube.ctl("get", "ipool", "sim", "-n", "default").splitlines()[1].split()[1:6]
        )
        assert (model, policy) == ("sim-30b", "perilune")
        assert int(sessions) > 0
        assert 0 <= float(hits) <= 1

    eventually(shown, timeout_s=90)


def test_explain_reads_like_documentation(pool, kube):
    assert "policy\t<Object>" in kube.ctl("explain", "ipool.spec.routing")
    text = " ".join(kube.ctl("explain", "ipool.spec.routing.policy.name").split())
    assert "ear: the endpoint that served the session last, until that endpoint is overloaded." in text


def test_scaling_under_load_fails_no_request(pool):
    pool.settles(2)
    with under_load(pool.client, sessions=6) as load:
        load.goes_on()
        pool.scale(4)
        pool.becomes(4)
        eventually(lambda: spread_over(pool))
        pool.scale(2)
        pool.settles(2)
        load.goes_on()
    assert load.failures == []


def spread_over(pool):
    assert {pool.client.complete(f"spread {i}").decided for i in range(30)} == set(pool.engines())


def test_changed_engines_under_load_fail_no_request(pool, other_image):
    """Another image and another environment: all engines are replaced, one by one."""
    before = set(pool.engines())
    with under_load(pool.client, sessions=6) as load:
        load.goes_on()
        pool.patch(engine={"image": other_image, "env": [{"name": "CHANGED", "value": "yes"}]})
        eventually(lambda: all_are_new(pool, before), timeout_s=240)
        pool.settles(2)
        load.goes_on()
    assert load.failures == []
    assert {pod["spec"]["containers"][0]["image"] for pod in pool.pods()} == {other_image}


def all_are_new(pool, before):
    assert not {address(pod) for pod in pool.all_pods()} & before


def test_a_terminating_engine_is_never_picked_and_ends_what_it_runs(pool):
    """Long answers keep it terminating; what is asked meanwhile goes elsewhere, and they come whole."""
    pool.settles(2)
    answers = [LongAnswer(pool, "one"), LongAnswer(pool, "two")]
    eventually(lambda: assert_equal({answer.engine for answer in answers}, set(pool.engines())))
    pool.scale(1)
    eventually(lambda: assert_equal(len(terminating(pool)), 1))
    (leaving,) = terminating(pool)
    slow = next(answer for answer in answers if answer.engine == leaving)
    picks = []
    while slow.running:
        answer = pool.client.complete(f"meanwhile {len(picks)}", session=f"meanwhile-{len(picks)}")
        assert answer.status == 200
        picks.append(answer.decided)
    print(f"{len(picks)} requests while {leaving} was terminating")
    assert len(picks) >= 20
    assert leaving not in picks
    for answer in answers:
        answer.thread.join()
        assert answer.got.status == 200
        assert answer.got.body.decode().strip().endswith("data: [DONE]")
    pool.settles(1)
    pool.scale(2)
    pool.settles(2)


class LongAnswer:
    """One answer of a quarter of a minute, in a thread of its own."""

    def __init__(self, pool, session):
        self.got = None
        self._pool, self._session = pool, session
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self):
        fields = {"stream": True, "max_tokens": 3000, "ignore_eos": True}
        self.got = self._pool.client.complete("a long story", session=self._session, **fields)

    @property
    def running(self):
        return self.thread.is_alive()

    @property
    def engine(self):
        """Where it runs, by the gateway's record."""
        decisions = self._pool.admin("/api/decisions")["decisions"]
        return next((d["target"] for d in decisions if d["session_id"] == self._session), "")


def terminating(pool):
    """Addresses of engines that have been told to go and are still there."""
    return {address(pod) for pod in pool.all_pods() if "deletionTimestamp" in pod["metadata"]}


def assert_equal(one, other):
    assert one == other


@pytest.mark.long
def test_a_killed_operator_is_replaced(pool, kube):
    """kill -9 of every operator at once: the new one carries on where they stopped."""
    kube.ctl("delete", "pod", "--all", "-n", perilune.NAMESPACE, "--grace-period=0", "--force")
    pool.scale(3)
    pool.becomes(3)
    pool.scale(2)
    pool.becomes(2)


def test_a_restarted_api_server_disturbs_no_request(pool, cluster):
    with under_load(pool.client, sessions=4) as load:
        load.goes_on()
        cluster.restart_api_server()
        load.goes_on(50)
        pool.scale(3)
        pool.becomes(3)
        pool.scale(2)
        pool.becomes(2)
    assert load.failures == []


def test_engines_that_are_all_said_to_be_unready_disturb_no_request(pool, kube, cluster):
    """As a control plane says that lost sight of its nodes; all of them serve."""
    unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    with under_load(pool.client, sessions=4) as load:
        load.goes_on()
        with cluster.paused("kubelet"):  # or it corrects that at once
            for pod in pool.pods():
                names = pod["metadata"]["name"], "-n", pod["metadata"]["namespace"]
                kube.ctl("patch", "pod", *names, "--subresource=status", "-p", json.dumps(unready))
            assert not any(map(is_ready, pool.pods()))
            load.goes_on(50)
        pool.becomes(2)
        load.goes_on()
    assert load.failures == []


def test_a_lost_node_is_routed_around_and_its_engine_comes_back_elsewhere(pool, kube, cluster):
    """Its link goes down under load: no request fails, and AROUND_S after the first failed connection to its
    engine nobody is sent there any more."""
    pool.scale(4)
    pool.settles(4)
    lost_node, lost = engine_on_a_node_of_its_own(pool, kube)
    with under_load(pool.client, sessions=6) as load:
        load.goes_on()
        eventually(lambda: is_used(load, lost))
        before = set(pool.engines())
        cut_at = time.monotonic()
        cluster.set_link(lost_node, up=False)
        try:
            eventually(lambda: says_that_one_is_missing(pool), timeout_s=60)
            pool.becomes(4)
            assert lost not in pool.engines()
            assert set(pool.engines()) != before
        finally:
            cluster.set_link(lost_node, up=True)
            kube.wait("condition=Ready", f"node/{lost_node}", timeout_s=60)
        load.goes_on()
    assert load.failures == []
    hit = [s for s in load.samples if s.decided == lost and s.ended > cut_at and s.served != lost]
    assert hit, "no request was sent to the lost engine"
    first_failed = min(failed_at(s, cut_at) for s in hit)
    last_sent = max(s.began for s in hit)
    print(
        f"first connection failed {first_failed - cut_at:.2f} s after the link went down; "
        f"the last request that was sent there began {last_sent - first_failed:+.2f} s after that; "
        f"{len(hit)} requests were answered elsewhere, the slowest after"
        f" {max(s.ended - s.began for s in hit):.2f} s"
    )
    assert last_sent - first_failed < AROUND_S
    pool.scale(2)
    pool.settles(2)


def failed_at(sample, cut_at):
    """Return when its connection failed: a new one soon, one that was there before later."""
    sent = max(sample.began, cut_at)
    return sent + (GIVEN_UP_S if sample.ended - sent >= GIVEN_UP_S else CONNECT_S)


def engine_on_a_node_of_its_own(pool, kube):
    """Return a node that runs an engine, but nothing else that a request, the operator or the test needs."""
    others = [
        pod
        for pod in kube.get("pod", "-A")
        if pod["metadata"]["namespace"] in (envoy_gateway.NAMESPACE, perilune.NAMESPACE)
        or "gateway" in pod["metadata"]["name"]
    ]
    needed = {"node-0", *(pod["spec"].get("nodeName") for pod in others)}
    for engine, node in pool.engines().items():
        if node not in needed:
            return node, engine
    pytest.fail("every engine shares its node with something that the test needs")


def is_used(load, engine):
    assert any(s.decided == engine for s in load.samples[-200:])


def says_that_one_is_missing(pool):
    assert pool.get()["status"]["readyReplicas"] < 4
    assert pool.conditions()["EnginesReady"] == ("False", "WaitingForEngines")


def test_two_pools_share_a_gateway(pool, kube, edge):
    """Each host's requests go to its own pool, and are decided by its own gateway."""
    other = LivePool(kube, edge, "other")
    other.apply(replicas=2)
    try:
        other.becomes(2)
        eventually(other.answers)
        theirs = {other.client.complete(f"other {i}", session=f"other-{i}").decided for i in range(10)}
        mine = {pool.client.complete(f"mine {i}", session=f"mine-{i}").decided for i in range(10)}
        assert not theirs & mine
        assert pool.client.complete(model="other-30b").status == 404
    finally:
        other.delete()


def test_the_operator_stands_still_when_nothing_changes(pool, kube):
    """Nothing is written without a reason: no object's version moves in five seconds."""

    def versions():
        return {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in pool.objects()}

    def still():
        before = versions()
        # Nothing to wait for: that nothing happens is the point. Looks that a test provokes are counted, and
        # find nothing to write, in tests/operator; here everything that wakes an operator is real.
        time.sleep(5)
        assert versions() == before

    eventually(still, timeout_s=60)


def test_a_deleted_pool_leaves_nothing(pool):
    pool.delete()

    def nothing():
        assert [f"{o['kind']}/{o['metadata']['name']}" for o in pool.objects()] == []

    eventually(nothing, timeout_s=120)


def test_envoy_answers_no_requests_of_a_pool_that_is_gone(pool, edge):
    def unknown():
        assert Client(edge, "sim.test").complete().status == 404

    eventually(unknown)
