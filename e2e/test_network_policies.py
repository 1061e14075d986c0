"""NetworkPolicies, enforced: who connects to which port of three pools, from pods with forged labels too.

An agent on every node enforces them (`testbed/policies.py`). First, without it, everybody connects to
everything, so what is refused later is refused by a policy. `split` has endpoints that prefill and two
gateways with their server of shared state, `stored` has a store, and its gateway serves `guest`.
"""

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from perilune_api import names
from testbed import policies
from testbed.http import eventually, under_load
from testbed.perilune_image import ENGINE_NAME, STORE_NAME, store_archive
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAMESPACE, OPERATORS, ENVOYS = "fenced", "perilune-system", "envoy-gateway-system"
EDGE = {"name": "edge", "namespace": "edge"}
SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}}


def envoy(gateway):
    """Labels of an Envoy that Envoy Gateway runs for a Gateway."""
    return {
        "app.kubernetes.io/name": "envoy",
        "app.kubernetes.io/component": "proxy",
        "app.kubernetes.io/managed-by": "envoy-gateway",
        "gateway.envoyproxy.io/owning-gateway-name": gateway,
        "gateway.envoyproxy.io/owning-gateway-namespace": "edge",
    }


def part_of(pool, component):
    return {names.POOL_LABEL: pool, names.COMPONENT_LABEL: component}


PROBES = {
    "envoy-of-another": (ENVOYS, envoy("other")),
    "operator": (OPERATORS, {}),
    "prometheus": ("fenced-metrics", {}),
    "batch": (NAMESPACE, {"app": "batch"}),
    "neighbour": (NAMESPACE, {}),
    "forged-envoy": ("fenced-web", envoy("edge")),
    "forged-gateway": ("fenced-web", part_of("split", "gateway")),
    "forged-gateway-of-stored": ("fenced-web", part_of("stored", "gateway")),
    "forged-engine": ("fenced-web", part_of("split", "engine")),
    "forged-batch": ("fenced-web", {"app": "batch"}),
}
"""Pods that only try to connect: name → namespace and labels."""
MADE = {"fenced": {}, "fenced-web": {}, "fenced-metrics": {"perilune.dev/metrics": "true"}}
"""Namespaces with their labels. Anybody may write labels of pods, but only administrators those."""
PARTS = (
    *(("split", "engine"), ("split", "prefill"), ("split", "gateway"), ("split", "state")),
    *(("stored", "engine"), ("stored", "gateway"), ("stored", "master"), ("guest", "engine")),
)
SPLIT = {"split engine", "split prefill", "split gateway"}
STORED = {"stored engine", "stored gateway"}
ENVOY, SCRAPERS = {"envoy"}, {"prometheus"}
ALLOWED = {
    ("split", "engine", 8000): SPLIT | ENVOY | {"batch"},
    ("split", "engine", 8001): SPLIT | SCRAPERS,
    ("split", "engine", 5557): SPLIT,
    ("split", "engine", 5558): SPLIT,
    ("split", "prefill", 8000): SPLIT,
    ("split", "prefill", 8001): SPLIT | SCRAPERS,
    ("split", "prefill", 5557): SPLIT,
    ("split", "gateway", 9002): ENVOY | {"batch"},
    ("split", "gateway", 9003): SPLIT | SCRAPERS | {"operator"},
    ("split", "state", 6379): {"split gateway"},
    ("stored", "engine", 8000): STORED | ENVOY,
    ("stored", "engine", 5557): STORED,
    ("stored", "gateway", 9002): ENVOY,
    ("stored", "gateway", 9003): STORED | SCRAPERS | {"operator"},
    ("stored", "master", 50051): STORED,
    ("stored", "master", 9003): STORED,
    ("guest", "engine", 8000): {"guest engine", "stored gateway"} | ENVOY,
    ("guest", "engine", 8001): {"guest engine", "stored gateway"} | SCRAPERS,
    ("guest", "engine", 5557): {"guest engine", "stored gateway"},
}
"""Who may connect, as docs/security.md says: pool, component and port → pods."""
EVERYBODY = {*PROBES, *SPLIT, *STORED, *ENVOY, "guest engine"}
CONNECT_S = 3.0


@pytest.fixture(scope="module")
def pools(cluster, kube, edge, operator, state_image):
    """Yield the three pools, by name; all of them answer, and the probes run."""
    cluster.ensure(STORE_NAME, store_archive)
    for name, labels in MADE.items():
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    kube.apply(*(probe(name) for name in PROBES))
    pools = {name: LivePool(kube, edge, name, NAMESPACE) for name in ("split", "stored", "guest")}
    pools["split"].apply(**split())
    pools["stored"].apply(**stored())
    pools["guest"].apply(gateway={"parent": EDGE, "servedBy": "stored"})
    pools["guest"].client.host = "stored.test"
    try:
        for pool in pools.values():
            pool.becomes(1, timeout_s=180)
        eventually(lambda: pools["split"].has_gateways(2), timeout_s=120)
        for pool in pools.values():
            eventually(pool.answers, timeout_s=60)
        for name, (namespace, _) in PROBES.items():
            kube.wait("condition=Ready", f"pod/{name}", "-n", namespace)
        yield pools
    finally:
        for name, (namespace, _) in PROBES.items():
            kube.ctl("delete", "pod", name, "-n", namespace, "--ignore-not-found")
        for pool in pools.values():
            pool.delete()
        kube.ctl("delete", "namespace", *MADE, "--timeout=120s", timeout_s=130)


def split():
    gateway = {
        "parent": EDGE,
        "hostnames": ["split.test"],
        "failOpen": False,
        "replicas": 2,
        "resources": SMALL,
    }
    return {
        "prefillReplicas": 1,
        "mooncake": {"transfer": "handoff"},
        "gateway": {**gateway, "clients": [{"podSelector": {"matchLabels": {"app": "batch"}}}]},
        "routing": {
            "disaggregation": {"localTokens": 200, "comingRequests": 1000},
            "decisionHeader": "address",
        },
    }


def stored():
    return {
        "model": {"name": "stored-30b", "weightsSize": "1Mi", "source": "/none"},
        "engine": {"kind": "vllm", "image": STORE_NAME, "imagePullPolicy": "Never", "hashing": {"seed": "0"}}
        | {"resources": SMALL},
        "mooncake": {
            "store": {"enabled": True, "segmentSize": "64Mi", "localBufferSize": "16Mi"},
            "master": {"image": STORE_NAME, "resources": SMALL},
        },
        "gateway": {"parent": EDGE, "hostnames": ["stored.test"], "failOpen": False, "serves": ["guest"]},
    }


def probe(name):
    namespace, labels = PROBES[name]
    container = {
        "name": "probe",
        "image": ENGINE_NAME,
        "imagePullPolicy": "Never",
        "command": ["sleep", "infinity"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }


class Attempt(NamedTuple):
    """A pod tries to connect to another one."""

    who: str
    target: tuple[str, str, int]
    connected: bool


def connects(address, port):
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError:
        return False
    return True


def attempts(kube, pools):
    """Have everybody try everything, from inside the pods' networks. A pod always reaches itself, so that is
    not tried."""
    pods = {(pool, part): pools[pool].pods(part) for pool, part in PARTS}
    assert all(pods.values()), {of: len(found) for of, found in pods.items()}
    targets = [(target, pod["status"]["podIP"]) for target in ALLOWED for pod in pods[target[:2]]]
    (real,) = kube.get("pod", "-n", ENVOYS, "-l", "gateway.envoyproxy.io/owning-gateway-name=edge")
    actors = [("envoy", real)]
    actors += [(name, kube.get("pod", name, "-n", namespace)) for name, (namespace, _) in PROBES.items()]
    for (pool, part), found in pods.items():
        if f"{pool} {part}" in EVERYBODY:
            actors += [(f"{pool} {part}", pod) for pod in found]

    def tried(actor):
        who, pod = actor
        others = [(target, address) for target, address in targets if address != pod["status"]["podIP"]]
        with kube.inside(pod), ThreadPoolExecutor(len(others)) as threads:
            connected = threads.map(lambda other: connects(other[1], other[0][2]), others)
            return [Attempt(who, target, did) for (target, _), did in zip(others, connected, strict=True)]

    with ThreadPoolExecutor(4) as threads:
        return list(itertools.chain.from_iterable(threads.map(tried, actors)))


def obey(kube, pools, allowed=ALLOWED):
    made = attempts(kube, pools)
    assert [a for a in made if a.connected != (a.who in allowed[a.target])] == []
    assert {(a.who, a.target) for a in made} >= {(who, target) for target in ALLOWED for who in PROBES}


def prefilled_elsewhere(pool):
    """Return how many prompts another endpoint has prefilled, as the pool's gateways say."""
    pages = [
        pool.kube.page(f"pod/{pod['metadata']['name']}", NAMESPACE, "/metrics")
        for pod in pool.pods("gateway")
    ]
    lines = [line for page in pages for line in page.splitlines()]
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("perilune_prefills") and "remote" in line
    )


@pytest.fixture(scope="module")
def enforced(cluster, kube, pools):
    """Everybody connects to everything; then policies are enforced."""
    everything = dict.fromkeys(ALLOWED, EVERYBODY)
    eventually(lambda: obey(kube, pools, everything), timeout_s=60)
    with policies.enforced(cluster):
        yield


def test_who_may_connect_does_and_nobody_else(kube, pools, enforced):
    eventually(lambda: obey(kube, pools), timeout_s=120)


def test_requests_are_decided_and_prompts_prefilled_elsewhere(pools, enforced):
    """Envoy, gateways, engines and the server of shared state need no other path than those."""
    for pool in pools.values():
        eventually(pool.answers, timeout_s=60)
    before = prefilled_elsewhere(pools["split"])
    for number in range(10):
        answer = pools["split"].client.complete(f"{number} " + "word " * 2_000, session=f"long-{number}")
        assert (answer.status, answer.served) == (200, answer.decided), answer.body
    assert prefilled_elsewhere(pools["split"]) > before
    eventually(lambda: pools["split"].has_gateways(2), timeout_s=120)


def test_new_engines_and_gateways_are_fenced_too_and_no_request_fails(kube, pools, enforced):
    """Enforced all the time: a pool is scaled, and its gateways are replaced, under load."""
    pool = pools["split"]
    with under_load(pool.client, sessions=4) as load:
        load.goes_on()
        pool.scale(2)
        pool.becomes(2, timeout_s=180)
        kube.ctl("rollout", "restart", f"deployment/{names.gateway_name('split')}", "-n", NAMESPACE)
        kube.ctl(
            *("rollout", "status", f"deployment/{names.gateway_name('split')}", "-n", NAMESPACE),
            "--timeout=180s",
            timeout_s=190,
        )
        eventually(lambda: pool.has_gateways(2), timeout_s=120)
        load.goes_on()
    assert load.failures == []
    eventually(lambda: obey(kube, pools), timeout_s=120)
    assert pool.conditions()["Ready"][0] == "True"
