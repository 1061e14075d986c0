"""Four gateways of one pool: they share what they decide through the operator's Valkey, and the death of any
part costs no request and no session its engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from testbed.http import eventually, under_load
from testbed.perilune_image import STATE_NAME, state_archive
from testbed.pool import LivePool, is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

GATEWAYS, SESSIONS, TURNS = 4, 40, 5
AT_ONCE = 4
"""So few that no engine gets so busy that the policy moves sessions away from it."""


@pytest.fixture(scope="module")
def many(cluster, kube, edge, operator):
    """A client's request is answered only if a gateway decided."""
    names = (node.machine.run(["ctr", "-n", "k8s.io", "images", "list", "-q"]) for node in cluster.nodes)
    if any(STATE_NAME not in found.split() for found in names):
        cluster.load(state_archive())
    pool = LivePool(kube, edge, "many")
    small = {"requests": {"cpu": "100m", "memory": "128Mi"}}
    pool.apply(
        replicas=3,
        gateway={
            "parent": {"name": "edge", "namespace": "edge"},
            "hostnames": ["many.test"],
            "replicas": GATEWAYS,
            "resources": small,
        },
    )
    pool.becomes(3, timeout_s=180)
    eventually(lambda: has_gateways(pool, GATEWAYS), timeout_s=120)
    eventually(pool.answers)
    yield pool
    pool.delete()


def has_gateways(pool, count):
    """So many are ready, and each of them hears the others."""
    ready = [pod for pod in pool.pods("gateway") if is_ready(pod)]
    assert len(ready) == count
    assert all(is_ready(pod) for pod in pool.pods("state"))
    for health in pool.admins("/api/health").values():
        assert "shared_state" not in {problem["kind"] for problem in health["problems"]}


def play(pool, first_turn, turns=TURNS):
    """Session → the engines of its turns. A session's turns follow each other; its prompt grows."""

    def session(number):
        engines = []
        for turn in range(first_turn, first_turn + turns):
            prompt = " ".join(f"w{number}x{word}" for word in range(100 * (turn + 1)))
            answer = pool.client.complete(prompt, session=f"s{number}")
            assert answer.status == 200, answer.body
            engines.append(answer.served)
        return engines

    with ThreadPoolExecutor(AT_ONCE) as clients:
        return dict(enumerate(clients.map(session, range(SESSIONS))))


def moved(played, homes):
    """Sessions that were not served by their engine alone."""
    return {number: engines for number, engines in played.items() if set(engines) != {homes[number]}}


def kill(cluster, pod):
    """kill -9 of its only container, by its node."""
    (status,) = pod["status"]["containerStatuses"]
    container = status["containerID"].removeprefix("containerd://")
    (node,) = (node for node in cluster.nodes if node.site.node == pod["spec"]["nodeName"])
    node.machine.run(["ctr", "-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container])


def restarts(pool, part):
    return sum(pod["status"]["containerStatuses"][0]["restartCount"] for pod in pool.pods(part))


@pytest.fixture(scope="module")
def homes(many):
    """Session → its engine, after some turns."""
    played = play(many, 0)
    assert moved(played, {number: engines[0] for number, engines in played.items()}) == {}
    return {number: engines[0] for number, engines in played.items()}


def test_a_session_stays_on_one_engine_whichever_gateway_decides(many, homes):
    decided = {pod: page["kept"] for pod, page in many.admins("/api/decisions?n=1").items()}
    assert len(decided) == GATEWAYS
    assert min(decided.values()) > SESSIONS * TURNS / GATEWAYS / 4, decided
    assert len(set(homes.values())) == 3


def test_a_killed_gateway_fails_no_request_and_sessions_stay(cluster, many, homes):
    before = restarts(many, "gateway")
    with under_load(many.client, sessions=4) as load:
        load.goes_on()
        kill(cluster, many.pods("gateway")[0])
        assert moved(play(many, TURNS), homes) == {}
        load.goes_on()
    assert load.failures == []
    eventually(lambda: has_gateways(many, GATEWAYS), timeout_s=60)
    assert restarts(many, "gateway") == before + 1


def test_a_killed_server_of_shared_state_fails_no_request_and_sessions_stay(cluster, many, homes):
    with under_load(many.client, sessions=4) as load:
        load.goes_on()
        (server,) = many.pods("state")
        kill(cluster, server)
        assert moved(play(many, 2 * TURNS), homes) == {}
        eventually(lambda: has_gateways(many, GATEWAYS), timeout_s=60)
        assert moved(play(many, 3 * TURNS, 2), homes) == {}
    assert load.failures == []
    assert restarts(many, "state") == 1


def test_a_fifth_gateway_knows_all_sessions_when_it_is_ready(many, homes):
    many.patch(gateway={"replicas": GATEWAYS + 1})
    before = {pod["metadata"]["name"] for pod in many.pods("gateway")}
    eventually(lambda: has_gateways(many, GATEWAYS + 1), timeout_s=120)
    (fifth,) = {pod["metadata"]["name"] for pod in many.pods("gateway")} - before
    assert moved(play(many, 3 * TURNS + 2, 3), homes) == {}
    assert many.admins("/api/decisions?n=1")[fifth]["kept"] > 0
